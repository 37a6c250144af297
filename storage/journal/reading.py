"""Reads a journal from the bucket, or from copies of its objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from storage.errors import Damaged, Missing
from storage.journal.stored_segment import PER_FOLDER, Json, Segment, first_of, key_of, object_at
from storage.objects import ObjectStore

NAME = r"\d+[.]jsonl[.]gz"
"""Matches the name of an object."""
READS = 8
"""Number of objects that are read at a time."""


def read(store: ObjectStore, run: str) -> list[Segment]:
    """Returns every segment in the bucket, oldest first.  Raises :class:`Damaged` if a record is missing or
    is there twice.

    If the oldest objects are gone, it begins with the first snapshot that is there.
    """
    return _joined(store, _with_unlisted(store, run, _listed(store, run)))


def since(store: ObjectStore, run: str, first: int) -> list[Segment]:
    """Returns the objects in the bucket from the one that begins with record ``first`` on, each as its head
    and its records.

    A head is a snapshot, or a reference ("continues") to the object with the last snapshot.  If the oldest
    objects are gone, it begins with those that are there.
    """
    if first == 0:  # the oldest may be gone
        keys = _listed(store, run)
    else:
        newest = _last(store, f"{run}/journal/")
        keys = (
            _between(store, run, first, first_of(newest) + 1)
            if newest is not None and first_of(newest) >= first
            else []
        )
    return [object for _, object in _with_unlisted(store, run, keys, first)]


def objects(store: ObjectStore, run: str) -> Iterator[Segment]:
    """Yields each object in the bucket, oldest first, as in :func:`since`, but holds only a few at a time and
    does not look for gaps.
    """
    return (object for _, object in _with_unlisted(store, run, _listed(store, run)))


class Newest:
    """Reads the end of a journal in the bucket.  It may read repeatedly, and parses no object twice."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self.store, self.run = store, run
        self._parsed: dict[str, Segment] = {}
        """The objects of the segment that was read last."""

    def segment(self) -> Segment | None:
        """Returns the last segment, or None.  A coordinator that takes over must not have to read days of
        segments.

        Raises :class:`Damaged` if its snapshot is gone.
        """
        try:
            key = self._last()
            if key is None:
                self._parsed = {}
                return None
            head, records = self._objects([key])[0]
        except Damaged as error:
            fix = (
                "put this object back from a copy, or remove it: the run then goes on from its newest "
                "checkpoint, with the records before this object"
            )
            raise Damaged(error.object, error.expected, error.found, fix) from None
        found = self.rejoined([(head, records)])[0]
        base = head.get("continues", first_of(key))
        self._parsed = {key: object for key, object in self._parsed.items() if first_of(key) >= base}
        return found

    def rejoined(self, segments: Sequence[Segment]) -> list[Segment]:
        """Returns ``segments``, the first of which may be a continuation, with the snapshot and the records
        that it continues.

        That snapshot and those records must be in the bucket, since a writer's objects reach it in order.
        Raises :class:`Damaged` if they are not.
        """
        if not segments or "continues" not in segments[0][0]:
            return list(segments)
        (head, records), *more = segments
        base, end = head["continues"], records[0]["n"]
        known = {key for key in self._parsed if base <= first_of(key) < end}
        keys = sorted(known.union(_between(self.store, self.run, base, end)), key=first_of)
        found = _joined(self.store, zip(keys, self._objects(keys), strict=True))
        numbers = [record["n"] for _, before in found for record in before]
        if len(found) != 1 or (numbers[0], numbers[-1]) != (base, end - 1):
            there = (
                f"records {numbers[0]} to {numbers[-1]} after {len(found)} snapshots"
                if numbers
                else "nothing"
            )
            wanted = f"a snapshot and records {base} to {end - 1}, which record {end} continues"
            raise Damaged(f"{self.store.url}: the journal", wanted, there)
        snapshot, before = found[0]
        return [(snapshot, [*before, *records]), *more]

    def _last(self) -> str | None:
        """Returns the key of the newest object, also if it is too new to be listed; None if there is none."""
        key = _last(self.store, f"{self.run}/journal/")
        following = key_of(self.run, 0) if key is None else self._after(key)
        while self.store.exists(following):
            key, following = following, self._after(following)
        return key

    def _after(self, key: str) -> str:
        """Returns the key of the object that follows another one."""
        return key_of(self.run, self._objects([key])[0][1][-1]["n"] + 1)

    def _objects(self, keys: Sequence[str]) -> list[Segment]:
        """Returns the objects, and remembers them: an object never changes."""
        todo = [key for key in keys if key not in self._parsed]
        self._parsed.update(zip(todo, _objects(self.store, todo), strict=True))
        return [self._parsed[key] for key in keys]


def _last(store: ObjectStore, folder: str) -> str | None:
    """Returns the key of the newest object below ``folder``: it follows the last name of each folder, unless
    that is empty.
    """
    names = [name for name in store.children(folder) if re.fullmatch(rf"\d+/|{NAME}", name)]
    for name in sorted(names, key=lambda name: (name.endswith("/"), name), reverse=True):
        found = _last(store, folder + name) if name.endswith("/") else folder + name
        if found is not None:
            return found
    return None


def _between(store: ObjectStore, run: str, first: int, end: int) -> list[str]:
    """Returns the keys of the objects whose first record has a number from ``first`` on and below ``end``, in
    order.
    """
    there = set[str]()
    for folder in sorted(
        {key_of(run, number).rpartition("/")[0] for number in (*range(first, end, PER_FOLDER), end - 1)}
    ):
        there.update(f"{folder}/{name}" for name in store.children(f"{folder}/") if re.fullmatch(NAME, name))
    return sorted((key for key in there if first <= first_of(key) < end), key=first_of)


def _listed(store: ObjectStore, run: str) -> list[str]:
    """Returns the keys of all objects that the bucket lists, in order."""
    folder = f"{run}/journal/"
    return sorted(
        (f"{folder}{found[0]}" for found in store.matching(folder, rf"(\d+/)*{NAME}")), key=first_of
    )


def _with_unlisted(
    store: ObjectStore, run: str, keys: Sequence[str], first: int = 0
) -> Iterator[tuple[str, Segment]]:
    """Yields the objects ``keys`` and those after them, each with its key.  Without keys it begins with the
    one of record ``first``.

    Some buckets list new objects late.  So the newest objects are asked for by name: the last record of an
    object tells the name of the next object.
    """
    for place in range(0, len(keys), READS):
        batch = keys[place : place + READS]
        for key, object in zip(batch, _objects(store, batch), strict=True):
            first = object[1][-1]["n"] + 1
            yield key, object
    with suppress(Missing):
        while True:
            key = key_of(run, first)
            object = object_at(store, key)
            first = object[1][-1]["n"] + 1
            yield key, object


def _objects(store: ObjectStore, keys: Sequence[str]) -> Iterable[Segment]:
    """Yields each of the objects, several of which are read at a time."""
    with ThreadPoolExecutor(READS, "journal-read") as pool:
        yield from pool.map(lambda key: object_at(store, key), keys)


def _joined(store: ObjectStore, objects: Iterable[tuple[str, Segment]]) -> list[Segment]:
    """Returns the segments that objects, each with its key, make up from the first snapshot on."""
    segments: list[Segment] = []
    expected: int | None = None
    for key, (head, records) in objects:
        if expected not in (None, first_of(key)):
            raise Damaged(
                store.full_name(key),
                f"records from {expected} on",
                f"records {first_of(key)} to {records[-1]['n']}",
            )
        expected = records[-1]["n"] + 1
        if segments or "continues" not in head:
            _join(segments, head, records, store.full_name(key))
    return segments


def _join(segments: list[Segment], head: Json, records: list[Json], where: str) -> None:
    """Adds an object to ``segments``: as a new segment, or to the last one.  Raises :class:`Damaged` if the
    object continues another segment.
    """
    if "continues" not in head:
        return segments.append((head, list(records)))
    base = _base(*segments[-1]) if segments else None
    if base != head["continues"]:
        there = (
            "no snapshot before it" if base is None else f"the snapshot before it begins with record {base}"
        )
        raise Damaged(where, f"a snapshot before it that begins with record {head['continues']}", there)
    segments[-1][1].extend(records)
    return None


def _base(head: Json, records: Sequence[Json]) -> int | None:
    """Returns the number of the first record after a segment's snapshot."""
    return head["continues"] if "continues" in head else records[0]["n"] if records else None


def parse(lines: bytes, *, tail: bool = False) -> list[Segment]:
    """Returns the segments in ``lines``: a coordinator's local file, a copy of an object, or several of them
    in a row.

    With ``tail`` the first segment may be a continuation (:meth:`Newest.rejoined`).  Raises :class:`Damaged`.
    """
    segments: list[Segment] = []
    for number, (head, records) in _parts(lines):
        if tail and not segments:
            segments.append((head, records))
        else:
            _join(segments, head, records, f"line {number}")
    return segments


def _parts(lines: bytes) -> list[tuple[int, Segment]]:
    """Returns each head with the records after it, and the number of its line."""
    parts: list[tuple[int, Segment]] = []
    for number, text in enumerate(lines.splitlines(), 1):
        try:
            line = json.loads(text)
            if "run" in line or "continues" in line:
                parts.append((number, (line, [])))
            elif "n" in line:
                parts[-1][1][1].append(line)
        except (ValueError, TypeError, IndexError):
            raise Damaged(
                f"line {number}", "a snapshot, or a record after a snapshot", repr(text[:40])
            ) from None
    return parts
