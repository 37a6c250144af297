"""The memory of one worker's copies: a few slots, each of which holds one version of its shard complete, or nothing.

An anonymous file (memfd) that the worker makes and its keeper opens too, as ``/proc/<pid>/fd/<n>``: the bytes outlive the worker, and
nothing is left on the node when both are gone.  A slot is empty while it is written: its header is marked first and last.  Each block
of a slot has a digest, so that what is read back, torn by a death or bent on its way, is never taken for state.

    header | a header for each slot | digests of each slot | slots, page by page
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from elastic.errors import StateMissing
from elastic.ids import Cell
from elastic.plan.placement import CELL_BYTES, held
from elastic.protocol.copy_schedule import Copy
from storage.slices import Tensor, Version, nbytes

NAME = "elastic-copies"
"""Of the anonymous file."""
MAGIC = 0x656C617374696334
PAGE = mmap.PAGESIZE
ALIGNED = 64
COPIES = ("send", "safe")
"""``send``: what the keeper is to bring to its buddy; ``safe``: what is complete at every member's buddy, this worker's part of it."""
BLOCK = 2**18
"""Bytes of one digest."""
WORD = 8
CELL = tuple(f"cell{word}" for word in range(CELL_BYTES // WORD))
"""The words in which a header has the text of a cell, filled up with zeros."""
HEADER = (
    "magic",
    "slots",
    "slot_bytes",
    "slot_blocks",
    "keeper",
    "brought_us",
    "asked",
    "brought",
    *(f"{name}_{part}" for name in COPIES for part in ("step", "generation", *CELL)),
)
"""``keeper``: the process that has it open too, 0 before there is one: until then nothing outlives the worker.  ``brought_us``: how long
its node's link is busy when all workers there have a copy brought to the buddy, in microseconds; 0: that was never seen.  ``asked``: how
many times the worker has said what is to be sent; ``brought``: the last of those, as the keeper says, that its present buddy has."""
TAKEN = 2**26
"""Bytes that are taken from the system at once: who maps or unmaps memory in this process waits meanwhile, 20 ms."""
POPULATE_WRITE = 23
"""For ``madvise``, Linux 5.14 (include/uapi/asm-generic/mman-common.h)."""
SLOT = ("complete", "step", "generation", "bytes", *CELL)

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class Place:
    """Where a tensor's part of a shard lies in a slot, and which digests are its: one for every ``BLOCK`` bytes of it."""

    offset: int
    bytes: int
    first_block: int

    @property
    def blocks(self) -> int:
        return -(-self.bytes // BLOCK)


@dataclass(frozen=True)
class Frame:
    """How the part of the state that a cell names lies in a slot: the same for whoever works it out."""

    places: dict[Tensor, Place]
    bytes: int
    blocks: int


def frame(tensors: Iterable[Tensor], cell: Cell) -> Frame:
    """Lay out what ``cell`` has of each tensor, as it lies in the member's memory, in the order of ``tensors`` and aligned."""
    places, end, blocks = {}, 0, 0
    for tensor in tensors:
        place = Place(end, sum(nbytes(tensor, box.slice) for box in held(tensor, cell).boxes), blocks)
        places[tensor] = place
        blocks += place.blocks
        end += -(-place.bytes // ALIGNED) * ALIGNED
    return Frame(places, end, blocks)


class Region:
    """One worker's slots.  One writer a word, so nothing is locked; whoever reads a slot looks at its header before and after.

    Several threads may be at work in it: memory and descriptor go with the last who refers to it, never under somebody's hands.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor.  Raises :class:`StateMissing` for something else than a region."""
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        size = os.fstat(descriptor).st_size
        if size < PAGE:
            raise StateMissing("what should be a region of host copies is no memory of any")
        self.memory = memoryview(mmap.mmap(descriptor, size))
        self._words = self.memory[:PAGE].cast("q")
        if self["magic"] != MAGIC or size != _size(self["slots"], self["slot_bytes"], self["slot_blocks"]):
            raise StateMissing("this is no region of host copies, or one of another version of Elastic")
        self.slots, self.slot_bytes, self.slot_blocks = self["slots"], self["slot_bytes"], self["slot_blocks"]

    @classmethod
    def create(cls, slots: int, slot_bytes: int, slot_blocks: int) -> Region:
        """Slots for ``slot_bytes`` with ``slot_blocks`` digests each.  Memory is taken as it is written."""
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _size(slots, slot_bytes, slot_blocks))
        with mmap.mmap(descriptor, PAGE) as first:
            words = memoryview(first).cast("q")
            words[: len(HEADER)] = memoryview(_packed(MAGIC, slots, slot_bytes, slot_blocks, *[0] * 4, *[-1] * (len(HEADER) - 8))).cast("q")
            words.release()
        return cls(descriptor)

    @classmethod
    def of_process(cls, pid: int, descriptor: int) -> Region:
        """The region that process ``pid`` of this machine has open as ``descriptor``."""
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def __getitem__(self, field: str) -> int:
        return self._words[HEADER.index(field)]

    def __setitem__(self, field: str, value: int) -> None:
        self._words[HEADER.index(field)] = value

    def copy(self, field: str) -> Copy | None:
        """One of :data:`COPIES`."""
        step, generation, *cell = (self[f"{field}_{part}"] for part in ("step", "generation", *CELL))
        return Copy(Version(step, generation), _cell(cell)) if step >= 0 else None

    def set_copy(self, field: str, copy: Copy | None) -> None:
        """The step last: until then nobody takes the words for a copy."""
        self[f"{field}_step"] = -1
        if copy is not None:
            for part, word in zip(CELL, _words(copy.cell), strict=True):
                self[f"{field}_{part}"] = word
            self[f"{field}_generation"], self[f"{field}_step"] = copy.version.generation, copy.version.step

    def send(self, copy: Copy | None) -> None:
        """From now on the keeper is to see to it that its buddy has ``copy``, whatever it brought before."""
        self.set_copy("send", copy)
        self["asked"] += 1

    def header(self, slot: int) -> memoryview:
        """The words of :data:`SLOT`."""
        first = len(HEADER) + slot * len(SLOT)
        return self._words[first : first + len(SLOT)]

    def held(self, slot: int) -> Copy | None:
        """What the slot holds complete."""
        complete, step, generation, _, *cell = self.header(slot)
        return Copy(Version(step, generation), _cell(cell)) if complete else None

    def all_held(self) -> list[Copy | None]:
        """By slot."""
        return [self.held(slot) for slot in range(self.slots)]

    def find(self, copy: Copy) -> int | None:
        """The slot that holds it complete."""
        return next((slot for slot, held in enumerate(self.all_held()) if held == copy), None)

    def filled(self, slot: int) -> int:
        """Bytes of what it holds."""
        return self.header(slot)[SLOT.index("bytes")]

    def begin(self, slot: int) -> None:
        """From now on the slot holds nothing."""
        self.header(slot)[0] = 0

    def finish(self, slot: int, copy: Copy, size: int) -> None:
        """It holds ``copy``, ``size`` bytes."""
        words = self.header(slot)
        fields = (copy.version.step, copy.version.generation, size, *_words(copy.cell))
        words[1:] = memoryview(_packed(*fields)).cast("q")
        words[0] = 1

    def digests(self, slot: int) -> memoryview:
        """Of the blocks of its tensors, in the order of its frame."""
        first = PAGE + slot * _pages(self.slot_blocks * WORD)
        return self.memory[first : first + self.slot_blocks * WORD].cast("q")

    def data_at(self, slot: int) -> int:
        """Where the slot's bytes begin in ``memory``."""
        return PAGE + self.slots * _pages(self.slot_blocks * WORD) + slot * _pages(self.slot_bytes)

    def take(self, first: int, last: int) -> None:
        """From the system: the memory between these bytes, which would else come page by page as it is written.  What is in it stays.

        On a system that cannot do so nothing happens.
        """
        start, first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), first - first % PAGE
        for at in range(first, last, TAKEN):
            _madvise(start + at, min(TAKEN, last - at), POPULATE_WRITE)

    def data(self, slot: int) -> memoryview:
        first = self.data_at(slot)
        return self.memory[first : first + self.slot_bytes]


def _words(cell: Cell) -> tuple[int, ...]:
    """The text of a cell as words of a header."""
    text = cell.encode().ljust(CELL_BYTES, b"\0")
    return tuple(int.from_bytes(text[at : at + WORD], "little", signed=True) for at in range(0, CELL_BYTES, WORD))


def _cell(words: Iterable[int]) -> Cell:
    return Cell(_packed(*words).rstrip(b"\0").decode(errors="replace"))


def _packed(*words: int) -> bytes:
    return b"".join(word.to_bytes(WORD, "little", signed=True) for word in words)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _size(slots: int, slot_bytes: int, slot_blocks: int) -> int:
    return PAGE + slots * (_pages(slot_blocks * WORD) + _pages(slot_bytes))
