"""The journal of a run, and the claims on it.

Object stores cannot append.  A segment is one create-only object, ``<run>/journal/<first record>.jsonl``: a snapshot of all that
was known before, the records of at most five seconds, and the digest of both.  So reading may begin at any segment.  A segment also ends
after 256 records, once these are as long as its snapshot: however much is known, at most half of the journal are snapshots.
Records are numbered without gaps, by one writer; a writer that finds its next segment written by somebody else has been deposed.

A record is in a local file before ``append`` returns, and on the disk when it must be durable.  The local folder has one file a segment.
These files are also the queue to the bucket, which a thread of its own works off: a store that is slow or down delays nothing and costs no
memory.  When a segment begins, the files of those that are in the bucket are removed: the disk holds what the bucket lacks, and little
more.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from storage.documents import digest_of, seal, unseal
from storage.errors import Damaged, Deposed, Exists, StorageError
from storage.objects import ObjectStore

SEGMENT_RECORDS = 256
"""Number of records after which a segment may end before its time is over."""
CLOSE_S = 10.0
"""Seconds for the bucket to take what is left when the journal is closed."""

Json = Mapping[str, Any]


@dataclass
class _Segment:
    """A local file: bytes ``[begin, end)`` of all that this journal has written, the snapshot before ``records_begin``."""

    first: int
    path: Path
    begin: int
    began_s: float
    records_begin: int = 0
    end: int = 0
    records: int = 0

    def read(self, at: int) -> bytes:
        """Returns the bytes from ``at`` on, or from the beginning."""
        with open(self.path, "rb") as file:
            file.seek(max(at - self.begin, 0))
            return file.read(self.end - max(at, self.begin))


class Journal:
    """One process writes it, from any thread, to the bucket and to the folder ``local``.

    ``first`` is the number of its first record; ``snapshot`` is what was known before.
    """

    def __init__(
        self, store: ObjectStore, run: str, local: Path, first: int, snapshot: Json, segment_s: float = 5.0, retry_s: float = 1.0
    ) -> None:
        self.store, self.run, self.next = store, run, first
        self.deposed = ""
        """Name of the object that another writer wrote, or "" as long as none was found."""
        self.behind = ""
        """The reason why the bucket lacks records, or "" if the store takes them."""
        self._known: Callable[[], Json] = lambda: snapshot
        self._segment_s, self._retry_s = segment_s, retry_s
        local.mkdir(parents=True, exist_ok=True)
        self._local = local
        self._file: BinaryIO | None = None
        self._size = max((int(path.stem) + path.stat().st_size for path in local.glob("*.jsonl")), default=0)
        self._open: _Segment | None = None
        self._queue: deque[_Segment] = deque()
        self._shipped: list[_Segment] = []
        """Segments that are in the bucket and are still on the disk."""
        self._changed = threading.Condition()
        self._closed_s = float("inf")
        self._thread = threading.Thread(target=self._copy, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Json, after: Callable[[], Json], *, durable: bool) -> None:
        """Add ``record``, whose "n" is :attr:`next`; ``after`` makes the snapshot that holds then.  Raises :class:`Deposed`."""
        with self._changed:
            if self.deposed:
                raise Deposed(self.deposed)
            if record["n"] != self.next:
                raise ValueError(f"record {record['n']} was appended where {self.next} comes next")
            if self._open is None:
                self._open = self._begin()
            segment = self._open
            self._write(record)
            if durable and self._file is not None:
                os.fsync(self._file.fileno())
            self.next += 1
            self._known = after
            segment.end, segment.records = self._size, segment.records + 1
            if segment.records >= SEGMENT_RECORDS and segment.end - segment.records_begin >= segment.records_begin - segment.begin:
                self._cut(segment)
            self._changed.notify_all()

    def ship(self, timeout_s: float) -> bool:
        """Have all that was appended in the bucket now, not in a while.  False where it was not within ``timeout_s``.  Raises
        :class:`Deposed`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._open is not None:
                self._cut(self._open)
            last = self._queue[-1] if self._queue else None
            self._changed.notify_all()
            while last in self._queue and not self.deposed and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if self.deposed:
                raise Deposed(self.deposed)
            return last not in self._queue

    @property
    def end(self) -> int:
        """The number of bytes that were written."""
        return self._size

    def tail(self, at: int) -> tuple[int, int, bytes]:
        """Returns where that begins what the bucket does not have yet, and the bytes from ``at`` on, or from there, with their place."""
        with self._changed:
            if self.deposed:
                raise Deposed(self.deposed)
            oldest = self._queue[0] if self._queue else self._open
            begin = oldest.begin if oldest is not None else self._size
            at = max(at, begin)
            there = [*self._queue, *([self._open] if self._open is not None else [])]
            return begin, at, b"".join(each.read(at) for each in there if each.end > at)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is left to the bucket and end; after ``timeout_s`` it stays in the local files, and :attr:`behind` says why."""
        with self._changed:
            self._closed_s = time.monotonic() + timeout_s
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.behind = self.behind or "the store does not answer"

    def _begin(self) -> _Segment:
        """Begins a file with what is known, and removes those that the bucket has."""
        for each in self._shipped:
            each.path.unlink(missing_ok=True)
        self._shipped.clear()
        segment = _Segment(self.next, self._local / f"{self._size:015d}.jsonl", self._size, time.monotonic())
        self._file = open(segment.path, "wb")  # noqa: SIM115 (closed when the segment is cut)
        _sync_folder(self._local)
        self._write(self._known())
        segment.records_begin = segment.end = self._size
        return segment

    def _write(self, value: Json) -> None:
        assert self._file is not None
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._size += len(line)

    def _cut(self, segment: _Segment) -> None:
        self._queue.append(segment)
        self._open = None
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- the copying thread

    def _copy(self) -> None:
        while (segment := self._oldest()) is not None:
            if self._ship(segment):
                with self._changed:
                    self._shipped.append(self._queue.popleft())
                    self._changed.notify_all()
            elif self.deposed or not self._retry():
                break
        with self._changed:
            self._close_file()
            self._changed.notify_all()

    def _oldest(self) -> _Segment | None:
        """The segment to be copied next, once there is one; None when the journal is closed and all is copied."""
        with self._changed:
            while not self._queue:
                closed, left_s = self._closed_s != float("inf"), None
                if self._open is not None:
                    left_s = self._open.began_s + self._segment_s - time.monotonic()
                    if closed or left_s <= 0:
                        self._cut(self._open)
                        continue
                elif closed:
                    return None
                self._changed.wait(left_s)
            return self._queue[0]

    def _ship(self, segment: _Segment) -> bool:
        """Create the object; False when the store cannot, or has another in its place."""
        key = f"{self.run}/journal/{segment.first:012d}.jsonl"
        data = _sealed(segment.read(segment.begin))
        try:
            try:
                self.store.put_if_absent(key, data)
            except Exists:  # ours, when the answer to an earlier try was lost
                if self.store.get(key) != data:
                    self.deposed = self.store.full_name(key)
                    return False
        except (StorageError, OSError) as error:
            self.behind = str(error)
            return False
        self.behind = ""
        return True

    def _retry(self) -> bool:
        """Give the store a moment; False when there is no time left for another try."""
        time.sleep(max(0.0, min(self._retry_s, self._closed_s - time.monotonic())))
        return time.monotonic() < self._closed_s


def _sync_folder(folder: Path) -> None:
    """The name of a new file must be on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(store: ObjectStore, run: str) -> list[tuple[Json, list[Json]]]:
    """Every segment in the bucket, oldest first: snapshot and records.  Raises :class:`Damaged` on a gap or a record twice."""
    segments: list[tuple[Json, list[Json]]] = []
    expected: int | None = None
    for key in store.list(f"{run}/journal/"):
        segments.append(_segment(store, key, expected))
        expected = segments[-1][1][-1]["n"] + 1
    return segments


def newest(store: ObjectStore, run: str) -> tuple[Json, list[Json]] | None:
    """The last segment in the bucket: who takes over is not to read days of them."""
    keys = store.list(f"{run}/journal/")
    return _segment(store, keys[-1], None) if keys else None


def _segment(store: ObjectStore, key: str, expected: int | None) -> tuple[Json, list[Json]]:
    object, first = store.full_name(key), int(PurePosixPath(key).stem)
    snapshot, *records = (json.loads(line) for line in _unsealed(store.get(key), object).splitlines())
    numbers = [record["n"] for record in records]
    start = first if expected is None else expected
    if not numbers or numbers != list(range(start, start + len(numbers))) or first != start:
        raise Damaged(object, f"records from {start} on", f"records {numbers[:1]} to {numbers[-1:]} in the segment of {first}")
    return snapshot, records


def records(store: ObjectStore, run: str) -> list[Json]:
    """Returns all records in the bucket, in order."""
    return [record for _, segment in read(store, run) for record in segment]


def parse(lines: bytes) -> list[tuple[Json, list[Json]]]:
    """Returns the segments in a file: a coordinator's local one, a copy of an object, or several of either one after the other."""
    segments: list[tuple[Json, list[Json]]] = []
    for number, text in enumerate(lines.splitlines(), 1):
        try:
            line = json.loads(text)
            if "run" in line:
                segments.append((line, []))
            elif "n" in line:
                segments[-1][1].append(line)
        except (ValueError, TypeError, IndexError):
            raise Damaged(f"line {number}", "a snapshot, or a record after one", repr(text[:40])) from None
    return segments


def claim_owner(store: ObjectStore, run: str, information: Json) -> int:
    """Claims the next free incarnation by a create-only write, and returns it."""
    number = latest_claim(store, run) + 1
    while True:
        try:
            store.put_if_absent(_claim(run, number), seal({"format": 1, "incarnation": number, **information}))
        except Exists:
            number += 1
        else:
            return number


def owners(store: ObjectStore, run: str) -> dict[int, Json]:
    """Returns the information that each claimant of the run wrote, by incarnation."""
    found: dict[int, Json] = {}
    for number in _claims(store, run):
        key = _claim(run, number)
        found[number] = unseal(store.get(key), store.full_name(key), 1)
    return found


def latest_claim(store: ObjectStore, run: str) -> int:
    """Returns the highest incarnation that was claimed, or 0."""
    return max(_claims(store, run), default=0)


def _claims(store: ObjectStore, run: str) -> list[int]:
    return [int(PurePosixPath(key).stem) for key in store.list(f"{run}/owner/")]


def _claim(run: str, number: int) -> str:
    return f"{run}/owner/{number:06d}.json"


def _sealed(lines: bytes) -> bytes:
    return lines + json.dumps({"blake3": digest_of(lines)}).encode() + b"\n"


def _unsealed(raw: bytes, object: str) -> bytes:
    lines = raw[: -len(_sealed(b""))]
    if _sealed(lines) != raw:
        raise Damaged(object, "a segment that ends with its digest", f"{len(raw)} bytes that do not")
    return lines
