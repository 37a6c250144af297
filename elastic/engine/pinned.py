"""Host memory that a device copies from and to, registered chunk by chunk.

When a process dies the driver lets go of what it had pinned page by page, a second for 60 GiB.  Meanwhile nobody on that machine can map or
unmap device memory, as an abort does a hundred times, except between two registrations: so these are small (NVIDIA 580;
``tests/gpu/test_aborts.py``).
"""

from __future__ import annotations

import weakref
from itertools import pairwise

import torch

CHUNK = 2**25
"""Bytes, and where in the address space chunks begin: its multiples.  No copy may reach from one into the next: CUDA refuses that."""


def pin(memory: torch.Tensor, owner: object) -> int:
    """Register ``memory``, uint8 [n] from the beginning of a page, until ``owner`` is gone.  0, or CUDA's error for the first chunk that
    could not be: those before it are."""
    runtime, places = torch.cuda.cudart(), list[int]()
    weakref.finalize(owner, _unpin, places).atexit = False
    for chunk in memory.split(parts(memory)):
        if code := int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.nbytes, 0)):
            return code
        places.append(chunk.data_ptr())
    return 0


def _unpin(places: list[int]) -> None:
    for place in places:
        torch.cuda.cudart().cudaHostUnregister(place)


def parts(memory: torch.Tensor) -> list[int]:
    """Bytes of ``memory``, uint8 [n], in each chunk that it lies in."""
    first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    return [end - begin for begin, end in pairwise((first, *range(first - first % CHUNK + CHUNK, last, CHUNK), last))]


def transfer(target: torch.Tensor, source: torch.Tensor) -> None:
    """The bytes of ``source`` to ``target``, one of which is on a device and the other one pinned; on the present stream."""
    target, source = target.view(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8)
    sizes = parts(source if target.is_cuda else target)
    for room, value in zip(target.split(sizes), source.split(sizes), strict=True):
        room.copy_(value, non_blocking=True)
