"""The reader of a checkpoint fetches only the bytes that are wanted, and hands out none that it has not
checked.

A digest covers a stored slice, so the reader fetches a stored slice whole even if only a part of it is
wanted.  With tensors cut along one dimension, that is at most one slice too many at each edge, and none if
the layout is the one that was saved.  Slices that are neighbours in a file come in one request of up to
``FETCH_BYTES``.  Several requests are under way while the caller uses the bytes of earlier ones.

The index says in which files the wanted slices are; the headers of these files, and of no others, say where.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from storage.background import in_background
from storage.checkpoints.cover import describe
from storage.checkpoints.index import Index
from storage.checkpoints.manifest import Manifest, Stored
from storage.checkpoints.shards import ITEM_BYTES, Place, places_in
from storage.documents import File, digest_of
from storage.errors import Damaged, Incomplete, Missing, StorageError
from storage.objects import ObjectStore
from storage.slices import Slice, Tensor, Version, nbytes

if TYPE_CHECKING:
    import numpy as np

FETCH_BYTES = 16 * 2**20
AHEAD_BYTES = 2**29
"""Largest number of bytes of all requests under way.  Several are needed: one connection is slower than the
device that waits for it.
"""


class Reader:
    """Reads one checkpoint.  ``bytes_read`` counts the bytes of slices that were fetched.  Every method may
    raise :class:`Damaged`.
    """

    def __init__(self, store: ObjectStore, folder: str, manifest: Manifest) -> None:
        self.store, self.folder, self.manifest = store, folder, manifest
        self.bytes_read = 0
        self._sizes = {file.name: file.size for file in manifest.files}
        self._places: dict[str, dict[str, Place]] = {}
        """Maps each file whose header was read to the places of its slices."""
        self.index = self._index()
        named = {*self.index.headers, *(file for group in self.index.groups for file, _ in group.boxes)}
        for file in sorted(named - self._sizes.keys()):
            raise Damaged(
                self.name_of(file), "a file that the manifest lists", "a file that the manifest does not list"
            )

    def _index(self) -> Index:
        file = self.manifest.index
        name, raw = self.name_of(file.name), self._get(file.name, 0, file.size)
        check_digest(name, raw, file.blake3)
        return Index.from_bytes(raw, name)

    @property
    def rows(self) -> tuple[Stored, ...]:
        """All slices in their places, sorted.  It reads the headers of all files."""
        files = [file.name for file in self.manifest.files if file != self.manifest.index]
        self._read_headers(files)
        return tuple(
            sorted(
                self._row(file, tensor, part) for file in files for tensor, part in self.index.slices_in(file)
            )
        )

    def tensors(self) -> list[Tensor]:
        """Returns every tensor of the state, sorted."""
        return list(self.index.tensors.values())

    def read(self, wanted: Iterable[Slice]) -> Iterator[tuple[Slice, bytearray | memoryview]]:
        """Yields each wanted slice with its bytes, which the caller must not change, in the order in which
        they lie in the files.

        Raises :class:`Incomplete`, before it fetches any slice, if the checkpoint lacks a part of one.
        """
        slices = list(wanted)
        parts = [self.index.covering(each) for each in slices]
        self._read_headers({file for each in parts for file, _, _ in each})
        users: dict[Stored, list[tuple[int, Slice]]] = defaultdict(list)
        missing = [len(each) for each in parts]
        for number, those in enumerate(parts):
            for file, stored, part in those:
                users[self._row(file, self.index.tensors[stored.name, stored.kind], stored)].append(
                    (number, part)
                )
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

    def whole(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, bytearray | memoryview]]:
        """Yields each tensor with its bytes, in this order.

        Tensors that have at most ``FETCH_BYTES`` together are read together: each by itself, a small one would
        cost a request.  No more than that, or one larger tensor, is held.
        """
        for batch in batches(tensors):
            found = dict(self.read(batch))
            for each, tensor in batch.items():
                yield tensor, found.pop(each)

    def fetch(self, rows: Sequence[Stored]) -> memoryview:
        """Returns the bytes of rows that lie next to each other in one file; they are not checked yet."""
        return memoryview(self._get(rows[0].file, rows[0].first, rows[-1].last))

    def check(self, row: Stored, data: memoryview) -> None:
        """Raises :class:`Damaged` if the bytes of the row are not those that were written."""
        check_digest(
            f"{self.name_of(row.file)} ({describe(row.slice)}, bytes {row.first}-{row.last})",
            data,
            row.blake3,
        )

    def name_of(self, file: str) -> str:
        """Returns the file's name for messages."""
        return self.store.full_name(f"{self.folder}/{file}")

    def places_of(self, file: str, raw: bytes) -> dict[str, Place]:
        """Returns where the slices of ``file`` lie.  Raises :class:`Damaged` unless ``raw`` is the header
        that was written.

        ``verify`` and every reader judge a header by this function.
        """
        name = self.name_of(file)
        check_digest(f"{name} (its header)", raw, self.index.headers[file].blake3)
        return places_in(raw, self.index.slices_in(file), name)

    def _read_headers(self, files: Iterable[str]) -> None:
        """Reads the headers of these files, unless they were read."""

        def read(file: str) -> dict[str, Place]:
            return self.places_of(file, self._get(file, 0, self.index.headers[file].size))

        todo = sorted(set(files) - self._places.keys())
        with ThreadPoolExecutor(self.store.at_once, "headers") as pool:
            self._places.update(zip(todo, pool.map(read, todo), strict=True))

    def _row(self, file: str, tensor: Tensor, stored: Slice) -> Stored:
        return Stored(tensor, stored, file, *self._places[file][describe(stored)])

    def _fetch(self, rows: Iterable[Stored]) -> Iterator[tuple[Stored, memoryview]]:
        """Yields each row with its checked bytes, in the order of ``rows``."""
        waiting: deque[tuple[list[Stored], Future[memoryview]]] = deque()
        ahead = 0
        for group in (*neighbours(rows), None):
            while waiting and (
                group is None or len(waiting) == self.store.at_once or ahead + _bytes(group) > AHEAD_BYTES
            ):
                done, future = waiting.popleft()
                data = future.result()
                ahead -= _bytes(done)
                self.bytes_read += len(data)
                yield from ((row, data[row.first - done[0].first : row.last - done[0].first]) for row in done)
            if group is not None:
                waiting.append((group, in_background(partial(self._checked, group), "fetch")))
                ahead += _bytes(group)

    def _checked(self, group: Sequence[Stored]) -> memoryview:
        """Returns the bytes of the rows, each checked."""
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
            raise Damaged(
                self.name_of(file),
                f"{size} bytes",
                f"{'at least ' if last < size else ''}{first + len(data)} bytes",
            )
        return data


def _bytes(group: Sequence[Stored]) -> int:
    return group[-1].last - group[0].first


def place(row: Stored) -> tuple[str, int, int]:
    """The sorting key that brings rows into the order of their bytes, with an empty slice before its
    neighbour.
    """
    return row.file, row.first, row.last


def batches(tensors: Iterable[Tensor]) -> Iterator[dict[Slice, Tensor]]:
    """Yields the tensors, each once in a batch, in batches of up to ``FETCH_BYTES`` or of one tensor."""
    batch, held = dict[Slice, Tensor](), 0
    for tensor in tensors:
        each = tensor.whole()
        size = nbytes(tensor, each)
        if batch and (each in batch or held + size > FETCH_BYTES):
            yield batch
            batch, held = {}, 0
        batch[each] = tensor
        held += size
    if batch:
        yield batch


def neighbours(rows: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Yields rows, which are sorted by place, in groups that one request fetches."""
    group: list[Stored] = []
    for row in rows:
        if (
            group
            and (row.file, row.first) == (group[-1].file, group[-1].last)
            and row.last - group[0].first <= FETCH_BYTES
        ):
            group.append(row)
        else:
            if group:
                yield group
            group = [row]
    if group:
        yield group


def check_digest(object: str, data: bytes | memoryview, expected: str) -> None:
    """Raises :class:`Damaged`, naming ``object``, if ``data`` has another digest than ``expected``."""
    found = digest_of(data)
    if found != expected:
        raise Damaged(object, f"blake3 {expected[:16]}…", f"{found[:16]}… over {len(data)} bytes")


def _box(buffer: bytearray | memoryview, holder: Slice, part: Slice, item: int) -> np.ndarray[Any, Any]:
    """Returns a view of ``part`` in ``buffer``, which holds ``holder``.  Elements are opaque bytes, since
    numpy does not know bfloat16.
    """
    import numpy as np  # imported here: listing checkpoints needs no numpy

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
        return (
            "\n  ".join((f"{head}; DAMAGED", *map(str, self.problems)))
            if self.problems
            else f"{head}, every digest as written"
        )


def verify(reader: Reader) -> Verified:
    """Reads every file once, in order, and compares manifest, index, headers and bytes with each other."""
    problems: list[StorageError] = []
    try:
        reader.index.check()
    except Incomplete as error:
        problems.append(error)
    files = reader.manifest.files
    for file in files:
        if file != reader.manifest.index:
            problems += _problems_of(reader, file)
    return Verified(
        reader.manifest.version,
        len(files),
        reader.index.slices,
        sum(file.size for file in files),
        tuple(problems),
    )


def _problems_of(reader: Reader, file: File) -> list[StorageError]:
    name, whole, problems = reader.name_of(file.name), blake3(), list[StorageError]()
    try:
        size = reader.store.size(f"{reader.folder}/{file.name}")
        if size != file.size:
            return [Damaged(name, f"{file.size} bytes", f"{size} bytes")]
        position = reader.index.headers[file.name].size
        header = reader.store.get(f"{reader.folder}/{file.name}", 0, position)
        whole.update(header)
        places = reader.places_of(file.name, header)
        slices = reader.index.slices_in(file.name)
        for row in sorted(
            (Stored(tensor, part, file.name, *places[describe(part)]) for tensor, part in slices), key=place
        ):
            if row.first != position:
                return [Damaged(name, f"a slice at byte {position}", f"{describe(row.slice)} at {row.first}")]
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
