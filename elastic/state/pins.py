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
"""Number of slots for which a worker waits before it joins: one keeps the complete copy, and one receives the
next copy without holding up a step.
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
                f"{amount(len(memory))} of host memory are not pinned, so copies to it are slow: "
                f"cudaHostRegister returned {code}"
            ),
            flush=True,
        )
        return None

    def end() -> None:
        if int(cuda.cudaHostUnregister(place)):
            forget_error()

    return end


def forget_error() -> None:
    """Clears CUDA's error of this thread's last call: otherwise this thread's next launch would report it.

    torch has no function for that, but the CUDA library that torch has loaded for the whole process has one.
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
        """``_coming`` are the slots that the thread of :meth:`begin` has not tried to pin yet."""
        self._ends: dict[int, tuple[int, weakref.finalize[[], Pins] | None]] = {}
        """Maps each slot that has memory to the number of bytes, and to a call that unpins them (None if they
        could not be pinned).
        """
        self.slots = 0
        """Number of slots that have memory or will have it soon."""
        region.take(0, region.data_at(0))
        self._pinned(0, region.data_at(0))

    def sizes(self) -> list[int]:
        """Returns how many bytes of each slot are pinned."""
        return [self._ends.get(slot, (0, None))[0] for slot in range(self.region.slots)]

    def ready(self) -> None:
        """Returns once the thread of :meth:`begin` has tried to pin the first ``AT_FIRST`` slots, or all
        slots if there are fewer.
        """
        self._first.wait()

    def usable(self) -> int:
        """Returns the number of slots before the first slot that :meth:`begin` has not tried to pin yet."""
        return min([*self._coming], default=self.slots)

    def begin(self, slots: int, size: int) -> None:
        """Begins to pin the first ``size`` bytes of each of the first ``slots`` slots, except those pinned
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
        finally:  # a copy into a slot that is not pinned tries again, and reports a failure
            self._coming.difference_update(slots)
            self._first.set()
        print(
            f"host copies: {sum(self.sizes()) / 2**30:.2f} GiB pinned in {time.monotonic() - began:.1f} s",
            flush=True,
        )

    def fit(self, slot: int, size: int, foreseen: int) -> str:
        """Gives the slot, which holds no copy, pinned memory of at least ``size`` bytes, and of ``foreseen``
        bytes if the node has room.  Returns why there is too little, or "".
        """
        with self._locks[slot]:
            return self._fit(slot, size, min(foreseen, self.region.slot_bytes))

    def _fit(self, slot: int, size: int, foreseen: int) -> str:
        has, others = (
            self._ends[slot][0] if slot in self._ends else 0,
            SPARE + (self.slots + BUDDY_SLOTS) * size,
        )
        # most copies fit already, and need not wait for the lock
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
