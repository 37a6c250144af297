"""Host memory at which a device arrives with the speed of the bus: pinned cell by cell, as copies come to need it.

What a process had pinned when it died is given back by the driver, 17 ms a GiB, and nobody beside it can abort meanwhile: so no more is
pinned than copies were made to.  The rest is only taken from the system, which is what takes long.  A device refuses what reaches over the
edge of what was pinned at once, so nothing here does.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Iterator

import torch

CELL = 2**28
"""Bytes that are pinned at once, between two addresses that are multiples of it."""
TAKEN = 2**26
"""Bytes that are taken from the system at once: who maps or unmaps memory waits meanwhile, 20 ms."""
POPULATE_WRITE = 23
"""For ``madvise``: Linux 5.14, include/uapi/asm-generic/mman-common.h."""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PinnedMemory:
    """``memory`` (uint8, flat, whole pages) and which of its cells are pinned.  For several threads."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._taken, self._known, self._refused, self._lock = set[int](), set[int](), False, threading.Lock()
        self.bytes = 0
        """That are pinned."""

    def pin(self, part: torch.Tensor) -> None:
        """All cells in which ``part`` of the memory lies.  Where that is refused copies are slow."""
        for cell in _cells(part):
            with self._lock:
                if cell in self._known or self._refused:
                    continue
                self._known.add(cell)
                self._take(cell)
                began = time.monotonic()
                self._pin(self._of(cell))
                took = time.monotonic() - began
            time.sleep(took)  # who launches a kernel waits for the same lock

    def take(self, part: torch.Tensor) -> None:
        """From the system: all cells in which ``part`` lies, so that pinning them will be quick."""
        for cell in _cells(part):
            self._take(cell)

    def _take(self, cell: int) -> None:
        """A system that cannot do it does it later: when it is pinned, or written to."""
        if cell not in self._taken:
            for piece in self._of(cell).split(TAKEN):
                _madvise(piece.data_ptr(), piece.nbytes, POPULATE_WRITE)
            self._taken.add(cell)

    def _pin(self, whole: torch.Tensor) -> None:
        code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
        if int(code):
            self._refused = True
            print(f"host copies: only {self.bytes / 2**30:.2f} GiB are pinned, more are slow: cudaHostRegister said {code}", flush=True)
            return
        self.bytes += whole.nbytes
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, whole.data_ptr()).atexit = False

    def _of(self, cell: int) -> torch.Tensor:
        first = cell * CELL - self.memory.data_ptr()
        return self.memory[max(first, 0) : first + CELL]


def cut(here: torch.Tensor, there: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of both, side by side, so that no part of ``there`` reaches over the edge of a cell.  Shapes and types alike."""
    here, there = here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8)
    start = there.data_ptr()
    for cell in _cells(there):
        part = slice(max(cell * CELL - start, 0), (cell + 1) * CELL - start)
        yield here[part], there[part]


def straight(part: torch.Tensor) -> bool:
    """Whether a device takes all of ``part`` as it is."""
    return part.is_pinned() and len(_cells(part)) == 1


def _cells(part: torch.Tensor) -> range:
    start = part.data_ptr()
    return range(start // CELL, -(-(start + part.nbytes) // CELL) if part.nbytes else start // CELL)
