"""The reader of a checkpoint fetches only the bytes that are wanted, and hands out none that it has not checked.

A digest covers a stored slice, so the reader fetches a stored slice whole even if only a part of it is wanted.  With tensors cut along one
dimension, that is at most one slice too many at each edge, and none if the layout is the one that was saved.  Slices that are neighbours in
a file come in one request of up to ``FETCH_BYTES``.  Several requests are under way while the caller uses the bytes of earlier ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from blake3 import blake3

from storage.background import begin
from storage.checkpoints.cover import Key, check_exact_cover, covering, describe
from storage.checkpoints.index import from_block, from_parquet, groups_with
from storage.checkpoints.manifest import Block, Manifest, Stored
from storage.checkpoints.shards import ITEM_BYTES, check_header
from storage.documents import File, digest_of
from storage.errors import Damaged, Incomplete, Missing, StorageError
from storage.objects import ObjectStore
from storage.slices import Slice, Tensor, Version

FETCH_BYTES = 16 * 2**20
AHEAD_BYTES = 2**29
"""Largest number of bytes of all requests under way.  Several are needed: one connection is slower than the device that waits for it."""


class Reader:
    """Reads one checkpoint.  ``bytes_read`` counts the bytes of slices that were fetched.  Every method may raise :class:`Damaged`."""

    def __init__(self, store: ObjectStore, folder: str, manifest: Manifest) -> None:
        self.store, self.folder, self.manifest = store, folder, manifest
        self.bytes_read = 0
        self._footer = b""
        self._read: set[int] = set()
        """Numbers of the row groups of a large index that have been read."""
        self._held: dict[Key, dict[Slice, Stored]] = defaultdict(dict)
        self._in_file: dict[str, list[Stored]] = defaultdict(list)
        """The rows of each file in order of their bytes.  Filled when the whole index is read; from then on headers are checked too."""
        self._sizes = {file.name: file.size for file in manifest.files}
        self._begun: set[str] = set()
        """The files whose header has been checked or is being checked."""
        if manifest.blocks:
            self._footer = self._index_bytes(manifest.blocks[-1:])
        else:
            self._hold(self.rows)

    @cached_property
    def rows(self) -> tuple[Stored, ...]:
        """All rows of the index, sorted.  The first use reads the whole index."""
        index = self.manifest.index
        rows = from_parquet(self._index_bytes([Block(0, index.size, index.blake3, "")]), self.name_of(index.name))
        for row in sorted(rows, key=place):
            self._in_file[row.file].append(row)
        return rows

    def tensors(self) -> list[Tensor]:
        """Returns every tensor of the state, sorted."""
        return sorted({row.tensor for row in self.rows})

    def read(self, wanted: Iterable[Slice]) -> Iterator[tuple[Slice, bytearray | memoryview]]:
        """Yields each wanted slice with its bytes, which the caller must not change, in the order in which they lie in the files.

        Raises :class:`Incomplete`, before it fetches any slice, if the checkpoint lacks a part of one.
        """
        slices = list(wanted)
        self._find({each.name for each in slices})
        users: dict[Stored, list[tuple[int, Slice]]] = defaultdict(list)
        missing = [0] * len(slices)
        for number, each in enumerate(slices):
            held = self._held.get((each.name, each.kind), {})
            for stored, part in covering(held, each):
                users[held[stored]].append((number, part))
                missing[number] += 1
        yield from ((each, bytearray()) for number, each in enumerate(slices) if not missing[number])
        buffers: dict[int, bytearray] = {}
        for row, data in self._fetch(sorted(users, key=place)):
            item = ITEM_BYTES[row.tensor.dtype]
            for number, part in users[row]:
                each = slices[number]
                if each == row.slice:
                    yield each, data
                    continue
                buffer = buffers.setdefault(number, bytearray(each.count * item))
                _box(buffer, each, part, item)[...] = _box(data, row.slice, part, item)
                missing[number] -= 1
                if not missing[number]:
                    yield each, buffers.pop(number)

    def fetch(self, rows: Sequence[Stored]) -> memoryview:
        """Returns the bytes of rows that lie next to each other in one file; they are not checked yet."""
        return memoryview(self._get(rows[0].file, rows[0].first, rows[-1].last))

    def check(self, row: Stored, data: memoryview) -> None:
        """Raises :class:`Damaged` if the bytes of the row are not those that were written."""
        check_digest(f"{self.name_of(row.file)} ({describe(row.slice)}, bytes {row.first}-{row.last})", data, row.blake3)

    def name_of(self, file: str) -> str:
        """Returns the file's name for messages."""
        return self.store.full_name(f"{self.folder}/{file}")

    def _find(self, names: set[str]) -> None:
        """Reads the row groups of a large index that hold these tensors, unless they have been read.

        Neighbouring row groups come in one request.  So does the whole index, if half of it is wanted.
        """
        blocks = self.manifest.blocks
        missing = [number for number in groups_with(blocks, names) if number not in self._read] if blocks else []
        if missing and (self._in_file or 2 * len(missing) >= len(blocks) - 1):  # ``_in_file``: the rows have been read already
            self._hold(self.rows)
            self._read.update(range(len(blocks) - 1))
            return
        for run in runs(missing):
            first, raw = blocks[run[0]].first, self._index_bytes([blocks[number] for number in run])
            for number in run:
                part = raw[blocks[number].first - first : blocks[number].last - first]
                self._hold(from_block(self._footer, blocks[number], number, part, self.name_of(self.manifest.index.name)))
                self._read.add(number)

    def _hold(self, rows: Iterable[Stored]) -> None:
        for row in rows:
            self._held[row.tensor.name, row.tensor.kind][row.slice] = row

    def _index_bytes(self, blocks: Sequence[Block]) -> bytes:
        """Returns neighbouring blocks of the index, each checked.  At the end of the index it asks for one more, to notice added bytes."""
        index, first, last = self.manifest.index, blocks[0].first, blocks[-1].last
        name = self.name_of(index.name)
        try:
            raw = self.store.get(f"{self.folder}/{index.name}", first, last + (last == index.size))
        except Missing:
            raise Damaged(name, f"{index.size} bytes", "no object") from None
        for block in blocks:
            end = len(raw) if block.last == last else block.last - first
            check_digest(f"{name} (bytes {block.first}-{block.last})", raw[block.first - first : end], block.blake3)
        return raw

    def _fetch(self, rows: Iterable[Stored]) -> Iterator[tuple[Stored, memoryview]]:
        """Yields each row with its checked bytes, in the order of ``rows``."""
        waiting: deque[tuple[list[Stored], Future[memoryview]]] = deque()
        ahead = 0
        for group in (*neighbours(rows), None):
            while waiting and (group is None or len(waiting) == self.store.at_once or ahead + _bytes(group) > AHEAD_BYTES):
                done, future = waiting.popleft()
                data = future.result()
                ahead -= _bytes(done)
                self.bytes_read += len(data)
                yield from ((row, data[row.first - done[0].first : row.last - done[0].first]) for row in done)
            if group is not None:
                file = group[0].file
                checks_header = file in self._in_file and file not in self._begun
                self._begun.add(file)
                waiting.append((group, begin(partial(self._checked, group, checks_header), "fetch")))
                ahead += _bytes(group)

    def _checked(self, group: Sequence[Stored], checks_header: bool) -> memoryview:
        """Returns the bytes of the rows, each checked.  The header comes in the same request if the rows are the first of their file."""
        if checks_header:
            file, rows = group[0].file, self._in_file[group[0].file]
            together = rows[0] == group[0]
            raw = memoryview(self._get(file, 0, group[-1].last if together else rows[0].first))
            check_header(raw[: rows[0].first], rows, self.manifest.version, self.name_of(file))
            data = raw[rows[0].first :] if together else self.fetch(group)
        else:
            data = self.fetch(group)
        for row in group:
            self.check(row, data[row.first - group[0].first : row.last - group[0].first])
        return data

    def _get(self, file: str, first: int, last: int) -> bytes:
        """Returns these bytes of a file.  At the end of the file it asks for one more, to notice added bytes."""
        size = self._sizes.get(file, last)
        try:
            data = self.store.get(f"{self.folder}/{file}", first, last + (last == size))
        except Missing:
            raise Damaged(self.name_of(file), f"{size} bytes", "no object") from None
        if len(data) != last - first:
            raise Damaged(self.name_of(file), f"{size} bytes", f"{'at least ' if last < size else ''}{first + len(data)} bytes")
        return data


def _bytes(group: Sequence[Stored]) -> int:
    return group[-1].last - group[0].first


def place(row: Stored) -> tuple[str, int, int]:
    """The sorting key that brings rows into the order of their bytes, with an empty slice before its neighbour."""
    return row.file, row.first, row.last


def neighbours(rows: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Yields rows, which are sorted by place, in groups that one request fetches."""
    group: list[Stored] = []
    for row in rows:
        if group and (row.file, row.first) == (group[-1].file, group[-1].last) and row.last - group[0].first <= FETCH_BYTES:
            group.append(row)
        else:
            if group:
                yield group
            group = [row]
    if group:
        yield group


def runs(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yields ascending numbers in groups without a gap."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def check_digest(object: str, data: bytes | memoryview, expected: str) -> None:
    """Raises :class:`Damaged`, naming ``object``, if ``data`` has another digest than ``expected``."""
    found = digest_of(data)
    if found != expected:
        raise Damaged(object, f"blake3 {expected[:16]}…", f"{found[:16]}… over {len(data)} bytes")


def _box(buffer: bytearray | memoryview, holder: Slice, part: Slice, item: int) -> np.ndarray[Any, Any]:
    """Returns a view of ``part`` in ``buffer``, which holds ``holder``.  Elements are opaque bytes, since numpy does not know bfloat16."""
    whole = np.frombuffer(buffer, dtype=f"V{item}").reshape(holder.shape)
    ranges = (slice(a - at, b - at) for a, b, at in zip(part.start, part.stop, holder.start, strict=True))
    index: tuple[Any, ...] = (*ranges, ...)
    box: np.ndarray[Any, Any] = whole[index]
    return box


@dataclass(frozen=True)
class Verified:
    """The result of reading everything.  Each problem names its object."""

    version: Version
    files: int
    slices: int
    bytes: int
    problems: tuple[StorageError, ...]

    @property
    def good(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        head = f"checkpoint of {self.version}: {self.files} files, {self.slices} slices, {self.bytes:,} bytes"
        return "\n  ".join((f"{head}; DAMAGED", *map(str, self.problems))) if self.problems else f"{head}, every digest as written"


def verify(reader: Reader) -> Verified:
    """Reads every file once, in order, and compares manifest, index, headers and bytes with each other."""
    rows: dict[str, list[Stored]] = {file.name: [] for file in reader.manifest.files}
    problems: list[StorageError] = []
    for row in sorted(reader.rows, key=place):
        if row.file in rows:
            rows[row.file].append(row)
        else:
            problems.append(Damaged(reader.name_of(row.file), "a file that the manifest lists", "one that it does not"))
    try:
        check_exact_cover([(row.tensor, row.slice) for row in reader.rows])
    except Incomplete as error:
        problems.append(error)
    for file in reader.manifest.files:
        if file != reader.manifest.index:
            problems += _problems_of(reader, file, rows[file.name])
    files = reader.manifest.files
    return Verified(reader.manifest.version, len(files), len(reader.rows), sum(file.size for file in files), tuple(problems))


def _problems_of(reader: Reader, file: File, rows: list[Stored]) -> list[StorageError]:
    name, whole, problems = reader.name_of(file.name), blake3(), list[StorageError]()
    try:
        size = reader.store.size(f"{reader.folder}/{file.name}")
        if size != file.size:
            return [Damaged(name, f"{file.size} bytes", f"{size} bytes")]
        position = rows[0].first if rows else size
        header = reader.store.get(f"{reader.folder}/{file.name}", 0, position)
        whole.update(header)
        check_header(header, rows, reader.manifest.version, name)
        for row in rows:
            if row.first != position:
                return [Damaged(name, f"a slice at byte {position}", f"{describe(row.slice)} at {row.first} in the index")]
            data = reader.fetch([row])
            whole.update(data)
            position = row.last
            try:
                reader.check(row, data)
            except Damaged as error:
                problems.append(error)
        if not problems and (position != size or whole.hexdigest() != file.blake3):
            problems.append(Damaged(name, f"blake3 {file.blake3[:16]}…", f"{whole.hexdigest()[:16]}…"))
    except Missing:
        return [Damaged(name, f"{file.size} bytes", "no object")]
    except Damaged as error:
        problems.append(error)
    return problems
