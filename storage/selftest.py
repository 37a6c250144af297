"""Does a bucket keep its promises?  A dozen small requests before a run begins, for a store that does not fails a month later, silently.

Checked is what checkpoints, journal and claims rest on: a create-only write is refused where something is (by one PUT and by an
upload in parts, which stores implement apart), bytes come back as they were sent, and a range is that range.
"""

from __future__ import annotations

import uuid
from contextlib import suppress

from storage.errors import Exists, StorageError, Unavailable
from storage.objects import ObjectStore

BYTES = bytes(range(256))
FIRST, LAST = 100, 150


def check(store: ObjectStore, run: str) -> None:
    """Raises :class:`Unavailable` naming the bucket, what it does wrong, and what to do; leaves nothing in it.

    A folder is believed: this release wrote the code that makes one a store.
    """
    if store.local:
        return
    key = f"{run}/.selftest-{uuid.uuid4().hex}"
    parts = store.in_parts()
    ways = [("", store)] + ([("-parts", parts)] if parts is not None else [])
    try:
        for suffix, way in ways:
            _check(way, key + suffix, "a create-only upload in parts" if suffix else "a create-only PUT")
    finally:
        for suffix, _ in ways:
            with suppress(StorageError):
                store.delete(key + suffix)


def _check(store: ObjectStore, key: str, what: str) -> None:
    store.put_if_absent(key, BYTES)
    found = store.get(key)
    if found != BYTES:
        framing = "; it saves the frame of a checksum trailer inside the object" if BYTES in found else ""
        raise _broken(store, f"{len(BYTES)} bytes were written and {len(found)} others came back{framing}", "upgrade it, or use another")
    if store.get(key, FIRST, LAST) != BYTES[FIRST:LAST]:
        raise _broken(store, f"asked for bytes {FIRST} to {LAST} it answers with others", "use one that honours Range")
    try:
        store.put_if_absent(key, BYTES[::-1])
    except Exists:
        return
    raise _broken(
        store, f"{what} (If-None-Match: *) replaced what was there", "two writers would overwrite each other: use a store that honours it"
    )


def _broken(store: ObjectStore, wrong: str, advice: str) -> Unavailable:
    return Unavailable(store.url, f"the bucket does not keep what a run relies on: {wrong}; {advice}")
