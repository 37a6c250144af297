"""Host memory that is given back and taken again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


class HostMemory:
    """Free pieces of host memory by their size.  Each step and each world takes the same sizes, so nothing is
    allocated after the first step.

    Allocating pinned memory waits for the device, where a collective may hang: see
    :class:`elastic.engine.world.Staging`.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.free: dict[int, list[Tensor]] = defaultdict(list)
        self.making: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns a context in which a new piece is made."""

    def take(self, size: int) -> Tensor:
        free = self.free[size]
        if free:
            return free.pop()
        with self.making():
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)

    def give(self, host: Tensor) -> None:
        self.free[host.numel()].append(host)


@cache
def host_memory(*, pinned: bool) -> HostMemory:
    """Returns this process's host memory for tensors that leave the device for a while.  All worlds share
    it.
    """
    return HostMemory(pinned)
