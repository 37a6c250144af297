"""A region is the memory of one worker's copies: a few slots, each of which holds one complete version of the
worker's shard, or nothing.

A region is an anonymous file (memfd) that the worker makes and its keeper opens too, as
``/proc/<pid>/fd/<n>``: the bytes outlive the worker, and nothing is left on the node when both are gone.  A
slot counts as empty while it is written: its header says so before the first byte is written, and says
"complete" after the last.  Each block of a slot has a digest, so that torn or corrupted bytes are never taken
for state.

With ``offload_folder`` a region is instead a file without a name on a disk, so all of this holds for it too.
Every process maps the file as it maps memory; :meth:`Region.let_go` limits how much of the file is in a
process's memory.

The file is as long as the copies of the largest permitted shard, but that costs nothing: a slot takes memory
when it is written, as much as its copy needs, and gives back what a larger copy once needed.  On CUDA a slot
is pinned in one piece, which may be longer than its copy: ``snapshot.py`` says when.  While the worker lives
it owns the memory of its slots; after that its keeper does.

The alternative is a pool that the keeper owns and lends out extent by extent.  A new worker would not have to
take memory anew (four gigabytes a second, beside the steps).  But it would have to pin it anew, every reader
of a copy would need a list of extents, and tensors would be cut at the borders of extents, over which CUDA
refuses to copy.

    header, a header for each slot | which tensors there are | digests of each slot | slots, page by page
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

from elastic.errors import StateMissing
from elastic.ids import Cell
from elastic.plan.placement import CELL_BYTES, held
from elastic.protocol.copy_schedule import Copy
from storage.slices import Tensor, Version, nbytes

NAME = "elastic-copies"
"""Name of the anonymous file."""
MAGIC = 0x656C617374696337
"""First word of every region of this version."""
PAGE = mmap.PAGESIZE
ALIGNED = 64
"""Each tensor in a slot begins at a multiple of this number of bytes."""
COPIES = ("send", "safe", "save")
"""``send`` is the copy that the keeper is to bring to its buddy.  ``safe`` is this worker's part of the
version that is complete at every member's buddy.  ``save`` is the newest save that this worker has named
(:meth:`Region.begin_save`).
"""
BLOCK = 2**18
"""Bytes that one digest covers."""
WORD = 8
CELL = tuple(f"cell{word}" for word in range(CELL_BYTES // WORD))
"""Names of the header words that hold the text of a cell, filled up with zeros."""
HEADER = (
    "magic",
    "slots",
    "slot_bytes",
    "slot_blocks",
    "tensors_bytes",
    "keeper",
    "brought_us",
    "asked",
    "brought",
    "generation",
    "saves",
    "saves_over",
    "save_failed",
    "lacking",
    "wanted",
    *(f"{name}_{part}" for name in COPIES for part in ("step", "generation", *CELL)),
)
"""Words of a region's header.

``keeper`` is the process that has the region open too, 0 before there is one: until then nothing outlives the
worker.

``brought_us`` is the time in microseconds for which the node's link is busy when a copy of every worker of
the node is brought to the buddy; 0 before it is measured.

``asked`` counts how often the worker has said which copy is to be sent.  ``brought``, which the keeper
writes, is the last of these numbers whose copy is at the present buddy.

``generation`` is the latest world whose first copy the worker has ended or does not make; the worker has
ended every copy of earlier worlds.

``saves`` counts the saves that the worker has named; the newest may not be copied yet.  ``saves_over``, which
the keeper writes, is the last of these numbers whose save is in the bucket or given up.  ``save_failed`` is 1
if the worker could not copy the newest save.

``lacking`` is the size in bytes of the copy for which the worker found no memory, 0 while there is room.

``wanted`` is the number of bytes that all slots together take in the present world once they are written;
before the first world, in the world with the smallest parts.
"""
TAKEN = 2**26
"""Bytes that one call of ``madvise`` takes from the system.  A call lasts 20 ms, and meanwhile no other
thread of this process can map or unmap memory.
"""
TAKERS = 4
"""Number of threads that take memory at the same time.  On a machine with two H200 one thread took 1.8 GiB/s,
two took 2.5, four 4.9, and eight 4.6.
"""
POPULATE_WRITE = 23
"""Advice for ``madvise`` that takes memory for writing, since Linux 5.14
(include/uapi/asm-generic/mman-common.h).
"""
REMOVE = mmap.MADV_REMOVE
"""Advice for ``madvise`` that gives memory of a file back: from then on, every process that has the file open
reads zeros there.
"""
PIECE = 2**24
"""Bytes after which a process that reads or writes a whole slot in a file lets go of them
(:meth:`Region.let_go`).
"""
SLOT = ("complete", "step", "generation", "bytes", "save", *CELL)
"""Words of a slot's header.

``complete`` is 1 while the slot holds a whole copy, whose size is ``bytes``; otherwise it is 0.

``save`` is 1 if the worker has made the copy for a save, and does not overwrite it before that save is over.
No other copy may be uploaded.  A world that begins with the version of a save makes a copy of that version
too, but its members may not know of the save, and then overwrite the copy.
"""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class TensorPlace:
    """The place in a slot of a shard's part of a tensor, and of its digests: one for ``BLOCK`` bytes."""

    offset: int
    bytes: int
    first_block: int

    @property
    def blocks(self) -> int:
        return -(-self.bytes // BLOCK)


@dataclass(frozen=True)
class Frame:
    """The arrangement in a slot of a cell's part of the state; every process computes an equal one."""

    places: dict[Tensor, TensorPlace]
    bytes: int
    blocks: int


def frame(tensors: Iterable[Tensor], cell: Cell) -> Frame:
    """Lays out the part of each tensor that ``cell`` has, as it lies in the member's memory, in the order of
    ``tensors`` and aligned.
    """
    places, end, blocks = {}, 0, 0
    for tensor in tensors:
        place = TensorPlace(end, sum(nbytes(tensor, box.slice) for box in held(tensor, cell).boxes), blocks)
        places[tensor] = place
        blocks += place.blocks
        end += -(-place.bytes // ALIGNED) * ALIGNED
    return Frame(places, end, blocks)


def slot_sizes(tensors: Sequence[Tensor], cells: Iterable[Cell]) -> tuple[int, int]:
    """Returns the bytes and the blocks of a slot that fits any of ``cells``.  The two may come from different
    cells: the cell with most bytes may have fewer tensors, and fewer blocks.
    """
    frames = [frame(tensors, cell) for cell in cells]
    return max(each.bytes for each in frames), max(each.blocks for each in frames)


class Region:
    """Gives access to one worker's slots.

    Nothing is locked, because every word has one writer, except that the keeper also empties a damaged slot
    of a living worker.  A reader of a slot reads the slot's header before and after the bytes.  Several
    threads may use a region: its memory and descriptor are freed with the last reference.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor.  Raises :class:`StateMissing` if it is not a region's."""
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        size = os.fstat(descriptor).st_size
        if size < PAGE:
            raise StateMissing("the file is too small to be a region of host copies")
        self.memory = memoryview(mmap.mmap(descriptor, size))
        self._words = self.memory[:PAGE].cast("q")
        sizes = (self["slots"], self["slot_bytes"], self["slot_blocks"], self["tensors_bytes"])
        if self["magic"] != MAGIC or size != _size(*sizes):
            raise StateMissing(
                "this file is no region of host copies, or belongs to another version of Elastic"
            )
        self.slots, self.slot_bytes, self.slot_blocks, self._tensors_bytes = sizes
        self._digests_at = PAGE + pages(self._tensors_bytes)
        link = os.readlink(f"/proc/self/fd/{descriptor}")
        self.folder = "" if link.startswith(f"/memfd:{NAME}") else os.path.dirname(link)
        """Folder of the file, empty if it is in memory."""
        self._reserved = [0] * self.slots
        """Bytes from the beginning of each slot that this process has taken from the system: only a slot's
        writer takes memory.
        """

    @property
    def on_disk(self) -> bool:
        return bool(self.folder)

    @classmethod
    def create(
        cls, slots: int, slot_bytes: int, slot_blocks: int, tensors: Sequence[Tensor] = (), folder: str = ""
    ) -> Region:
        """Makes a region of ``slots`` slots, each of ``slot_bytes`` with ``slot_blocks`` digests.  Memory is
        given as it is written.

        The slots hold parts of ``tensors``, which the region describes for readers that outlive the worker.
        All slots count as wanted until ``wanted`` is set.  With ``folder`` the region is a file of that
        folder's disk.  Raises OSError if the system gives no region.
        """
        described = json.dumps([asdict(tensor) for tensor in tensors]).encode()
        descriptor = _nameless(folder) if folder else os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _size(slots, slot_bytes, slot_blocks, len(described)))
        with mmap.mmap(descriptor, PAGE + len(described)) as first:
            first[PAGE:] = described
            words = memoryview(first)[:PAGE].cast("q")
            given = _packed(MAGIC, slots, slot_bytes, slot_blocks, len(described))
            words[: len(HEADER)] = memoryview(given + bytes((len(HEADER) - len(given) // WORD) * WORD)).cast(
                "q"
            )
            for name in COPIES:
                words[HEADER.index(f"{name}_step")] = -1
            words[HEADER.index("wanted")] = slots * slot_bytes
            words.release()
        return cls(descriptor)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors of which the slots hold parts, in the order of a frame."""
        described = json.loads(bytes(self.memory[PAGE : PAGE + self._tensors_bytes]))
        tuples = ("shape", "split", "depth")
        return tuple(Tensor(**each | {name: tuple(each[name]) for name in tuples}) for each in described)

    @staticmethod
    def wanted(path: Path) -> int:
        """Returns the word ``wanted`` of the region at ``path``.

        Raises OSError if the file cannot be read, and ValueError if it is no region of this version.
        """
        with path.open("rb") as file:
            header = file.read(PAGE)
        words = memoryview(header.ljust(PAGE, b"\0")).cast("q")
        if words[HEADER.index("magic")] != MAGIC:
            raise ValueError(f"{path} is no region of this version of Elastic")
        return words[HEADER.index("wanted")]

    @classmethod
    def of_process(cls, pid: int, descriptor: int) -> Region:
        """Opens the region that process ``pid`` of this machine has open as ``descriptor``.

        Raises OSError if the process has no such descriptor, and :class:`StateMissing` if that is not a
        region's.
        """
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def __getitem__(self, field: str) -> int:
        return self._words[HEADER.index(field)]

    def __setitem__(self, field: str, value: int) -> None:
        self._words[HEADER.index(field)] = value

    def copy(self, field: str) -> Copy | None:
        """Returns the copy that ``field``, one of :data:`COPIES`, names, or None."""
        step, generation, *cell = (self[f"{field}_{part}"] for part in ("step", "generation", *CELL))
        return Copy(Version(step, generation), _cell(cell)) if step >= 0 else None

    def set_copy(self, field: str, copy: Copy | None) -> None:
        """Sets ``field``, one of :data:`COPIES`.  Writes the step last, because readers ignore the other
        words until there is a step.
        """
        self[f"{field}_step"] = -1
        if copy is not None:
            for part, word in zip(CELL, _words(copy.cell), strict=True):
                self[f"{field}_{part}"] = word
            self[f"{field}_generation"], self[f"{field}_step"] = copy.version.generation, copy.version.step

    def send(self, copy: Copy | None) -> None:
        """Asks the keeper to bring ``copy`` to its buddy, even if it has brought that copy before."""
        self.set_copy("send", copy)
        self["asked"] += 1

    def begin_save(self, copy: Copy) -> None:
        """Names ``copy`` as a save: the worker does not overwrite it before the keeper says that the save is
        over.

        The copy may be in a slot already, or not be made yet.
        """
        self["save_failed"] = 0
        self.set_copy("save", copy)
        self["saves"] += 1
        if (slot := self.find(copy)) is not None:
            self.header(slot)[SLOT.index("save")] = 1

    def failed(self, copy: Copy) -> bool:
        """Returns whether ``copy`` is the newest save and the worker could not make it.

        The worker clears the flag before it names another save, so the flag belongs to ``copy`` if the header
        names ``copy`` before and after the flag is read.
        """
        return self.copy("save") == copy and bool(self["save_failed"]) and self.copy("save") == copy

    @property
    def saving(self) -> bool:
        """Returns whether the newest save is neither in the bucket nor given up."""
        return self["saves"] != self["saves_over"]

    def header(self, slot: int) -> memoryview:
        """Returns the words of :data:`SLOT`."""
        first = len(HEADER) + slot * len(SLOT)
        return self._words[first : first + len(SLOT)]

    def held(self, slot: int) -> Copy | None:
        """Returns the complete copy in the slot, or None."""
        complete, step, generation, _, _, *cell = self.header(slot)
        return Copy(Version(step, generation), _cell(cell)) if complete else None

    def all_held(self) -> list[Copy | None]:
        """Returns for each slot its complete copy, or None."""
        return [self.held(slot) for slot in range(self.slots)]

    def find(self, copy: Copy) -> int | None:
        """Returns the slot that holds ``copy`` complete, or None."""
        return next((slot for slot, held in enumerate(self.all_held()) if held == copy), None)

    def find_save(self, copy: Copy) -> int | None:
        """Returns the slot that holds ``copy`` complete and for a save, or None."""
        slot = self.find(copy)
        return slot if slot is not None and self.header(slot)[SLOT.index("save")] else None

    def filled(self, slot: int) -> int:
        """Returns the size in bytes of the copy in the slot."""
        return self.header(slot)[SLOT.index("bytes")]

    def begin(self, slot: int) -> None:
        """Marks the slot as empty."""
        self.header(slot)[0] = 0

    def finish(self, slot: int, copy: Copy, size: int, *, save: bool = False) -> None:
        """Marks the slot as complete: it holds ``copy``, which has ``size`` bytes.  ``save`` says whether the
        copy was made for a save.
        """
        words = self.header(slot)
        fields = (copy.version.step, copy.version.generation, size, int(save), *_words(copy.cell))
        words[1:] = memoryview(_packed(*fields)).cast("q")
        words[0] = 1

    def digests(self, slot: int) -> memoryview:
        """Returns the digests of the slot's blocks, in the order of its frame."""
        first = self._digests_at + slot * pages(self.slot_blocks * WORD)
        return self.memory[first : first + self.slot_blocks * WORD].cast("q")

    def data_at(self, slot: int) -> int:
        """Returns where the slot's bytes begin in ``memory``."""
        return self._digests_at + self.slots * pages(self.slot_blocks * WORD) + slot * pages(self.slot_bytes)

    def take(self, first: int, last: int) -> None:
        """Takes the memory from byte ``first`` to byte ``last`` from the system, which would otherwise give
        it page by page when it is written.

        The content stays.  On a system without ``POPULATE_WRITE`` nothing happens.
        """
        start, first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), first - first % PAGE

        def piece(at: int) -> None:
            _madvise(start + at, min(TAKEN, last - at), POPULATE_WRITE)

        with ThreadPoolExecutor(TAKERS) as pool:
            deque(pool.map(piece, range(first, last, TAKEN)), 0)

    def lacks(self, slot: int, size: int) -> int:
        """Returns how many of the first ``size`` bytes of the slot its writer has not taken from the system
        yet.
        """
        return max(pages(size) - self._reserved[slot], 0)

    def reserve(self, slot: int, size: int) -> None:
        """Takes the memory of the first ``size`` bytes of the slot.  ``node_memory.reserve`` looks first
        whether there is room for it.

        Raises OSError if the disk of a region in a file is full.
        """
        first = self.data_at(slot)
        if self.on_disk:
            # otherwise a write to a full disk would end the process
            os.posix_fallocate(self.descriptor, first, max(pages(size), 1))
        else:
            self.take(first + self._reserved[slot], first + size)
        self._reserved[slot] = max(pages(size), self._reserved[slot])

    def give_back(self, slot: int, size: int = 0) -> None:
        """Gives the memory of the slot back to the system, except that of its first ``size`` bytes."""
        start, kept = (
            ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + self.data_at(slot),
            pages(size),
        )
        if (rest := pages(self.slot_bytes) - kept) > 0:
            _madvise(start + kept, rest, REMOVE)
        self._reserved[slot] = min(kept, self._reserved[slot])

    def let_go(self, first: int, last: int) -> None:
        """Removes the pages from byte ``first`` to byte ``last`` from this process's memory, if the region is
        in a file; the next use reads them again.

        Written bytes stay: the system brings them to the disk.  For a region in memory nothing happens.
        """
        if self.on_disk:
            start, first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), first - first % PAGE
            _madvise(start + first, last - first, mmap.MADV_DONTNEED)

    def pieces(self, slot: int, offset: int, size: int) -> Iterator[memoryview]:
        """Yields ``size`` bytes of the slot from ``offset`` on, in pieces.  Of a file, only one piece is in
        memory at a time.
        """
        first, last = self.data_at(slot) + offset, self.data_at(slot) + offset + size
        for at in range(first, last, PIECE if self.on_disk else max(size, 1)):
            end = min(at + PIECE, last) if self.on_disk else last
            yield self.memory[at:end]
            self.let_go(at, end)

    def data(self, slot: int) -> memoryview:
        """Returns all bytes of the slot, [slot_bytes], of which a copy may fill only the first."""
        first = self.data_at(slot)
        return self.memory[first : first + self.slot_bytes]


def _nameless(folder: str) -> int:
    """Returns the descriptor of a new file of ``folder`` that has no name there: it is gone as soon as no
    process has it open.
    """
    with TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _words(cell: Cell) -> tuple[int, ...]:
    """Returns the text of a cell as words of a header."""
    text = cell.encode().ljust(CELL_BYTES, b"\0")
    return tuple(
        int.from_bytes(text[at : at + WORD], "little", signed=True) for at in range(0, CELL_BYTES, WORD)
    )


def _cell(words: Iterable[int]) -> Cell:
    return Cell(_packed(*words).rstrip(b"\0").decode(errors="replace"))


def _packed(*words: int) -> bytes:
    return b"".join(word.to_bytes(WORD, "little", signed=True) for word in words)


def pages(size: int) -> int:
    """Returns ``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def _size(slots: int, slot_bytes: int, slot_blocks: int, tensors_bytes: int) -> int:
    return PAGE + pages(tensors_bytes) + slots * (pages(slot_blocks * WORD) + pages(slot_bytes))
