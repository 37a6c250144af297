"""The pinned memory of a worker's slots: how much of each slot is pinned, and when that changes.

A device copies to pinned memory three times as fast as to other memory, and without holding up the step.  But
memory is slow to pin: new memory comes from the system at four gigabytes a second, and kernel launches wait
while it is pinned.  So a slot gets what its copy needs and, while the node has room, what a copy will need in
the next world.  A slot is pinned in one piece, because CUDA refuses a copy over the border of two pieces.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from elastic.plan.copy_budget import BUDDY_SLOTS, amount, slot_size
from elastic.state.node_memory import SPARE, alone, free_memory, take
from elastic.state.region import Region

AT_FIRST = 2
"""Slots for which a worker waits before it joins: one keeps the copy that is complete, and one gets the next,
without holding up a step.
"""
Register = Callable[[torch.Tensor], Callable[[], object] | None]
"""``register(memory)`` pins memory and returns a call that ends this; None if it could not."""


def register(memory: torch.Tensor) -> Callable[[], object] | None:
    """Pins ``memory`` for the devices of this process."""
    cuda, place = torch.cuda.cudart(), memory.data_ptr()
    if code := int(cuda.cudaHostRegister(place, len(memory), 0)):
        forget_error()
        print(
            (
                f"{amount(len(memory))} of host memory are not pinned, copies there are slow: "
                f"cudaHostRegister said {code}"
            ),
            flush=True,
        )
        return None

    def end() -> None:
        if int(cuda.cudaHostUnregister(place)):
            forget_error()

    return end


def forget_error() -> None:
    """Makes CUDA forget the error of this thread's last call.  Otherwise the next launch of this thread would
    be taken for the failure.

    torch has no call for that, but the library that it has loaded for all of the process has one.
    """
    with suppress(AttributeError):  # this build of torch hides it
        ctypes.CDLL(None).cudaGetLastError()


class Pins:
    """The pinned memory of one region, of which ``memory`` (uint8) is a view."""

    def __init__(self, region: Region, memory: torch.Tensor, register: Register = register) -> None:
        self.region, self._memory, self._register = region, memory, register
        self._locks = [threading.Lock() for _ in range(region.slots)]
        """Each is held while its slot gets or loses memory."""
        self._first, self._coming = threading.Event(), set[int]()
        """``_coming`` are the slots of :meth:`begin` that have not been seen to yet."""
        self._ends: dict[int, tuple[int, weakref.finalize[[], Pins] | None]] = {}
        """The slots that have memory: how many bytes of each, and a call that ends that they are pinned."""
        self.slots = 0
        """Number of slots that have memory or will have it soon."""
        region.take(0, region.data_at(0))
        self._pinned(0, region.data_at(0))

    def sizes(self) -> list[int]:
        """Returns how many bytes of each slot are pinned."""
        return [self._ends.get(slot, (0, None))[0] for slot in range(self.region.slots)]

    def ready(self) -> None:
        """Returns once as many slots of :meth:`begin` have been seen to as two worlds need that follow each
        other (``AT_FIRST``).
        """
        self._first.wait()

    def usable(self) -> int:
        """Returns the number of slots, from the first on, that have been seen to."""
        return min([*self._coming], default=self.slots)

    def begin(self, slots: int, size: int) -> None:
        """Begins to pin the first ``size`` bytes of the first ``slots`` slots, unless a slot is pinned
        already.
        """
        if slots > self.slots:
            pins = threading.Thread(
                target=self._pin, args=(range(self.slots, slots), size), name="pin", daemon=True
            )
            self._coming.update(range(self.slots, slots))
            self.slots = slots
            pins.start()

    def _pin(self, slots: range, size: int) -> None:
        began = time.monotonic()
        try:
            for slot in slots:
                with self._locks[slot]:
                    if slot not in self._ends and (why := self._fit(slot, size, 0)):
                        print(f"slot {slot} of {self.region.slots} is not pinned yet: {why}", flush=True)
                self._coming.discard(slot)
                if slot + 1 >= min(AT_FIRST, self.slots):
                    self._first.set()
        finally:  # a copy into a slot that is missing tries again, and says why if it cannot
            self._coming.difference_update(slots)
            self._first.set()
        print(
            f"host copies: {sum(self.sizes()) / 2**30:.2f} GiB pinned in {time.monotonic() - began:.1f} s",
            flush=True,
        )

    def fit(self, slot: int, size: int, foreseen: int) -> str:
        """Gives the slot, which holds no copy, pinned memory of at least ``size`` bytes.  Returns why there
        is too little, or "".
        """
        with self._locks[slot]:
            return self._fit(slot, size, min(foreseen, self.region.slot_bytes))

    def _fit(self, slot: int, size: int, foreseen: int) -> str:
        has, others = (
            self._ends[slot][0] if slot in self._ends else 0,
            SPARE + (self.slots + BUDDY_SLOTS) * size,
        )
        # as for most copies: they need not wait for other workers
        if slot_size(has, size, foreseen, free_memory()[0], others) == has:
            return ""
        # the workers of a node come here at the same time, and each must see what the others have taken
        with alone():
            best = slot_size(has, size, foreseen, free_memory()[0], others)
            if best == has:
                return ""
            self._end(slot)
            self.region.give_back(slot, best)
            why = take(self.region, slot, best)
        if not why:
            # kernel launches wait while memory is pinned: 24 ms a GiB, ten times that if the memory is new
            first = self.region.data_at(slot)
            self._ends[slot] = best, self._pinned(first, first + best)
        return why

    def empty(self, slot: int) -> None:
        """Gives back all memory of the slot, which holds no copy."""
        with self._locks[slot]:
            self._end(slot)
            self.region.give_back(slot)

    def _pinned(self, first: int, last: int) -> weakref.finalize[[], Pins] | None:
        end = self._register(self._memory[first:last])
        if end is None:
            return None
        ends = weakref.finalize(self, end)
        ends.atexit = False
        return ends

    def _end(self, slot: int) -> None:
        _, end = self._ends.pop(slot, (0, None))
        if end is not None:
            end()
