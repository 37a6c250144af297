"""Writes the journal of a run.

Object stores cannot append.  So the journal is a sequence of create-only objects.  An object has a head, the
records of at most five seconds, and the digest of both.  The head is a snapshot of all that was known before,
or a reference to the object with the last snapshot. An object with a reference is a continuation.  A snapshot
and its continuations are one segment.

    <run>/journal/000/000/012/000000012345.jsonl.gz     the object whose first record has the number 12,345

Three folders have the leading digits of that number, so no folder has more than a thousand names, and the
newest object is found by four short listings however old the run is.  The lines are compressed (gzip); the
digest follows them.

A new snapshot is written once the records since the last snapshot have :data:`RECORDS` times as many bytes as
that snapshot, or after :data:`CONTINUATIONS` objects.  The first rule keeps snapshots at a third of the
journal at most, however long they are.  The second rule gives a run that records little a snapshot every few
minutes.  A reader needs only the last segment: at most ``1 + CONTINUATIONS`` objects. Without the last
object, their records have no more than twice the bytes of the snapshot.  An object with 256 or more records
ends before its time once a snapshot is due.

Records are numbered without gaps, by one writer; a writer that finds its next object written by another one
has been deposed.

A record is in a local file before ``append`` returns, and on the disk if it must be durable.  The local
folder has one file per object.  A thread copies these files to the bucket, in order: a store that is slow or
down delays nothing and costs no memory.  When a file begins, the files that are in the bucket already are
removed, so the disk holds what the bucket lacks, and little more.  If the first of these files is a
continuation, a reader takes its snapshot from the bucket (:class:`Newest`), which received it earlier.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from storage.documents import INFLATED_BYTES
from storage.errors import Deposed, Exists, StorageError
from storage.journal.stored_segment import CONTINUED, Json, key_of, line, packed
from storage.objects import ObjectStore
from storage.objects.folder import sync_folder

SEGMENT_RECORDS = 256
"""Number of records after which an object may end before its time is over."""
RECORDS = 2
"""A snapshot is due once the records since the last snapshot have this many times its bytes.  A takeover
reads all these records.
"""
OBJECT_BYTES = INFLATED_BYTES // 4
"""Size in bytes at which an object ends in any case: readers refuse more than ``INFLATED_BYTES``."""
CONTINUATIONS = 32
"""Largest number of continuations of a snapshot: a takeover reads them all.  With 5 s each, a snapshot is due
after 165 s at the latest.
"""
CLOSE_S = 10.0
"""Seconds for the bucket to take what is left when the journal is closed."""


@dataclass
class _Snapshot:
    """The last snapshot that was written: ``length`` bytes up to ``end``, in the object ``first``, with
    ``continued`` continuations.
    """

    first: int
    length: int
    end: int
    continued: int = 0


@dataclass
class _LocalPart:
    """A local file, which becomes an object: bytes ``[begin, end)`` of all that this journal has written."""

    first: int
    path: Path
    begin: int
    began_s: float
    end: int = 0
    records: int = 0

    def read(self, at: int) -> bytes:
        """Returns the bytes from ``at`` on, or all if the file begins later."""
        with open(self.path, "rb") as file:
            file.seek(max(at - self.begin, 0))
            return file.read(self.end - max(at, self.begin))


class Journal:
    """The writer of a journal.  One process writes, from any thread, to the bucket and to the folder
    ``local``.

    ``first`` is the number of its first record; ``snapshot`` is what was known before.  An object ends
    ``segment_s`` seconds after it began.  ``retry_s`` is the pause in seconds before the bucket is tried
    again.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        local: Path,
        first: int,
        snapshot: Json,
        segment_s: float = 5.0,
        retry_s: float = 1.0,
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
        self._file: FileIO | None = None
        self._size = max((int(path.stem) + path.stat().st_size for path in local.glob("*.jsonl")), default=0)
        self._open: _LocalPart | None = None
        self._snapshot: _Snapshot | None = None
        self._queue: deque[_LocalPart] = deque()
        self._shipped: list[_LocalPart] = []
        """Files that are in the bucket and are still on the disk."""
        self._changed = threading.Condition()
        self._closed_s = float("inf")
        self._thread = threading.Thread(target=self._copy, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Json, after: Callable[[], Json], *, durable: bool) -> None:
        """Adds ``record``, whose "n" must be :attr:`next`.  With ``durable`` it is on the disk when this
        returns.

        ``after()`` returns the snapshot of what is known after this record.  It is called only if a snapshot
        has to be written there. Raises :class:`Deposed` if another writer has taken over, :class:`ValueError`
        for another "n", and :class:`OSError` if the disk does not take the record.  Then the journal is as it
        was before, so the next record may have the same number.
        """
        with self._changed:
            if self.deposed:
                raise Deposed(self.deposed)
            if record["n"] != self.next:
                raise ValueError(
                    f"record {record['n']} was appended, but the next record must be {self.next}"
                )
            part, snapshot, lines = self._open, self._snapshot, line(record)
            if part is None:
                part = self._begin()
                snapshot, head = self._head()
                lines = head + lines
            self._write(part, lines, durable)
            self._open, self._snapshot = part, snapshot
            self.next += 1
            self._known = after
            part.end, part.records = self._size, part.records + 1
            is_long = self._size - part.begin >= OBJECT_BYTES
            if is_long or (part.records >= SEGMENT_RECORDS and self._snapshot_is_due()):
                self._cut(part)
            self._changed.notify_all()

    def ship(self, timeout_s: float) -> bool:
        """Copies all that was appended to the bucket without delay, and waits for it at most ``timeout_s``
        seconds.

        Returns whether the bucket has all of it.  Raises :class:`Deposed`.
        """
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

    def begin_anew(self) -> None:
        """Lets the next object begin with a snapshot: the bucket may have lost the objects before it."""
        with self._changed:
            if self._open is not None:
                self._cut(self._open)
            self._snapshot = None
            self._changed.notify_all()

    @property
    def end(self) -> int:
        """The number of bytes that were written."""
        return self._size

    def tail(self, at: int) -> tuple[int, int, bytes]:
        """Returns what was written from the byte ``at`` on, but only what the bucket does not have yet.

        The result is (first byte that the bucket lacks, first byte returned, the bytes).  Bytes are counted
        as in :attr:`end`.  Raises :class:`Deposed`.
        """
        with self._changed:
            if self.deposed:
                raise Deposed(self.deposed)
            oldest = self._queue[0] if self._queue else self._open
            begin = oldest.begin if oldest is not None else self._size
            at = max(at, begin)
            there = [*self._queue, *([self._open] if self._open is not None else [])]
            return begin, at, b"".join(each.read(at) for each in there if each.end > at)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Copies what is left to the bucket, and ends.

        What the bucket does not take within ``timeout_s`` seconds stays in the local files, and
        :attr:`behind` says why.
        """
        with self._changed:
            self._closed_s = time.monotonic() + timeout_s
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.behind = self.behind or "the store does not answer"

    def _begin(self) -> _LocalPart:
        """Begins an empty local file, and removes the files that the bucket has."""
        for each in self._shipped:
            each.path.unlink(missing_ok=True)
        self._shipped.clear()
        self._close_file()  # one is open if the disk did not take its first record
        part = _LocalPart(self.next, self._local / f"{self._size:015d}.jsonl", self._size, time.monotonic())
        self._file = open(part.path, "wb", buffering=0)  # noqa: SIM115 (closed when the part is cut)
        sync_folder(str(self._local))
        return part

    def _head(self) -> tuple[_Snapshot, bytes]:
        """Returns the head of a new object, and the snapshot to which it refers: the last one, or a new one
        if that is due.
        """
        if (last := self._snapshot) is not None and last.continued < CONTINUATIONS:
            reference = line({"format": CONTINUED, "continues": last.first})
            if not self._snapshot_is_due(len(reference)):
                return replace(last, continued=last.continued + 1), reference
        snapshot = line(self._known())
        return _Snapshot(self.next, len(snapshot), self._size + len(snapshot)), snapshot

    def _snapshot_is_due(self, more: int = 0) -> bool:
        """Returns whether what was written since the last snapshot, and ``more`` bytes, are ``RECORDS`` times
        as long as that snapshot.
        """
        return (
            self._snapshot is None
            or self._size + more - self._snapshot.end >= RECORDS * self._snapshot.length
        )

    def _write(self, part: _LocalPart, lines: bytes, durable: bool) -> None:
        """Adds ``lines`` to the file of ``part``, whole or not at all: a full disk takes a part of them,
        which is cut off again.
        """
        assert self._file is not None
        file, begin, written = self._file.fileno(), self._size - part.begin, 0
        try:
            while written < len(lines):
                written += os.pwrite(file, memoryview(lines)[written:], begin + written)
            if durable:
                os.fsync(file)
        except OSError:
            os.ftruncate(file, begin)
            raise
        self._size += len(lines)

    def _cut(self, part: _LocalPart) -> None:
        self._queue.append(part)
        self._open = None
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- the copying thread

    def _copy(self) -> None:
        while (part := self._oldest()) is not None:
            if self._ship(part):
                with self._changed:
                    self._shipped.append(self._queue.popleft())
                    self._changed.notify_all()
            elif self.deposed or not self._retry():
                break
        with self._changed:
            self._close_file()
            self._changed.notify_all()

    def _oldest(self) -> _LocalPart | None:
        """Waits for the next file to copy and returns it, or None when the journal is closed and all is
        copied.
        """
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

    def _ship(self, part: _LocalPart) -> bool:
        """Creates the object.  Returns False if the store cannot, or has another object in its place (then
        :attr:`deposed` is set).
        """
        key = key_of(self.run, part.first)
        data = packed(part.read(part.begin))
        try:
            try:
                self.store.put_if_absent(key, data)
            except Exists:  # it may be ours: then the answer to an earlier try was lost
                if self.store.get(key) != data:
                    self.deposed = self.store.full_name(key)
                    return False
        except (StorageError, OSError) as error:
            self.behind = str(error)
            return False
        self.behind = ""
        return True

    def _retry(self) -> bool:
        """Pauses, and returns whether there is time left for another try."""
        time.sleep(max(0.0, min(self._retry_s, self._closed_s - time.monotonic())))
        return time.monotonic() < self._closed_s
