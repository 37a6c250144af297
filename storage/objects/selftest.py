"""The self-test of a bucket: about thirty small requests before a run begins.  Otherwise a broken promise
would show only a month later.

It checks what checkpoints, the journal and claims rely on.  A create-only write is refused if there is an
object, both as one PUT and as an upload in parts, which stores implement separately.  Of several such writes
at the same time, one wins.  Bytes come back as they were sent, and a range is that range.

A listing may lag behind (:func:`check`).  While a run trains, claims, branches and the journal are found by
the numbers in their names, and a process knows the checkpoints that it has committed.  A start relies on the
listing for the newest checkpoint, so it waits here.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from storage.errors import Exists, StorageError, Unavailable
from storage.objects.port import ObjectStore

BYTES = bytes(range(256))
FIRST, LAST = 100, 150
RIVALS = 8
LISTED_S = 60.0
"""Longest time in seconds that a new object may be missing in the listing."""
LOOK_S = 0.1


def check(store: ObjectStore, run: str) -> float:
    """Raises :class:`Unavailable` if the bucket breaks a promise; the message says which, and what to do.
    Leaves nothing in the bucket.

    Returns how many seconds late the bucket lists a new object, 0 if it lists it at once.  What was written
    before the call is listed when it returns.  A folder is not tested here: its file system decides what it
    promises (``elastic/train/checks/bucket.py``).
    """
    if store.local:
        return 0.0
    key = f"{run}/.selftest-{uuid.uuid4().hex}"
    parts = store.in_parts()
    ways = [("", store)] + ([("-parts", parts)] if parts is not None else [])
    try:
        for suffix, way in ways:
            _check(way, key + suffix, "a create-only upload in parts" if suffix else "a create-only PUT")
        _race(store, f"{key}-race")
        return _listed_late_s(store, f"{key}-listed")
    finally:
        for suffix in ("", "-parts", "-race", "-listed"):
            with suppress(StorageError):
                store.delete(key + suffix)


def _check(store: ObjectStore, key: str, what: str) -> None:
    store.put_if_absent(key, BYTES)
    found = store.get(key)
    if found != BYTES:
        framing = (
            "; the store has saved the frame of a checksum trailer inside the object"
            if BYTES in found
            else ""
        )
        raise _broken(
            store,
            f"{len(BYTES)} bytes were written, but {len(found)} other bytes were read back{framing}",
            "upgrade the store, or use another store",
        )
    if store.get(key, FIRST, LAST) != BYTES[FIRST:LAST]:
        raise _broken(
            store,
            f"a read of bytes {FIRST} to {LAST} returned other bytes",
            "use a store that honours the Range header",
        )
    if _created(store, key):
        raise _broken(
            store,
            f"{what} (If-None-Match: *) replaced an object that existed",
            "use a store that honours If-None-Match, since writers would overwrite each other",
        )


def _race(store: ObjectStore, key: str) -> None:
    """Finds a store that looks first and writes then: it overwrites an object that was written in between,
    and tells nobody.
    """
    with ThreadPoolExecutor(RIVALS) as pool:
        winners = sum(pool.map(lambda _: _created(store, key), range(RIVALS)))
    if winners != 1:
        wrong = (
            f"of {RIVALS} create-only writes (If-None-Match: *) at the same time, {winners} succeeded, "
            "and exactly 1 may"
        )
        raise _broken(
            store,
            wrong,
            "use a store that lets exactly one succeed, since two coordinators would both own the same run",
        )


def _listed_late_s(store: ObjectStore, key: str) -> float:
    """Waits until a new object is listed, and returns the seconds until then; 0 if it is listed at once."""
    store.put(key, BYTES)
    written, looks = time.monotonic(), 1
    while key not in store.list(key):
        if time.monotonic() - written > LISTED_S:
            wrong = f"a new object is not listed {LISTED_S:g} s after it was written"
            raise _broken(
                store,
                wrong,
                "turn off every cache of listings between here and the store, or use another store",
            )
        looks += 1
        time.sleep(LOOK_S)
    return time.monotonic() - written if looks > 1 else 0.0


def _created(store: ObjectStore, key: str) -> bool:
    try:
        store.put_if_absent(key, BYTES)
    except Exists:
        return False
    return True


def _broken(store: ObjectStore, wrong: str, advice: str) -> Unavailable:
    return Unavailable(store.url, f"the bucket lacks a property that every run relies on: {wrong}; {advice}")
