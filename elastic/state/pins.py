"""The pinned memory of a worker's slots: how much of each slot is pinned, and when that changes.

A device copies to pinned memory three times as fast as to other memory, and without holding up the step.  But
memory is slow to pin: new memory comes from the system at four gigabytes a second, and kernel launches wait
while it is pinned (24 ms a GiB, ten times that if the memory is new).  So a slot gets what its copy needs
and, while the node has room and the world steps, what a copy will need in the next world: piece by piece, each
taken from the system before it is pinned.

CUDA refuses a copy over the border of two pieces, so copies are cut there (:meth:`Pins.cuts`).  A piece that
could not be pinned is used all the same; a copy from or to it is as slow as one of any other memory.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from elastic.plan.copy_budget import BUDDY_SLOTS, amount, slot_size
from elastic.state.node_memory import SPARE, alone, free_memory, take
from elastic.state.region import Region, pages

AT_FIRST = 2
"""Number of slots for which a worker waits before it joins: one keeps the complete copy, and one receives the
next copy without holding up a step.
"""
PIECE = 2**29
"""Bytes that are pinned at once beside the steps: kernel launches wait for 12 ms."""
Register = Callable[[torch.Tensor], Callable[[], object] | str]
"""``register(memory)`` pins memory and returns a call that ends this, or the reason why it could not."""


def register(memory: torch.Tensor) -> Callable[[], object] | str:
    """Pins ``memory`` for the devices of this process."""
    cuda, place = torch.cuda.cudart(), memory.data_ptr()
    if code := int(cuda.cudaHostRegister(place, len(memory), 0)):
        forget_error()
        return f"cudaHostRegister returned {code}"

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

    def __init__(
        self, region: Region, memory: torch.Tensor, register: Register = register, *, in_one: bool = False
    ) -> None:
        """``in_one`` says that each slot is pinned in one piece, because its memory is used without cuts."""
        self.region, self._memory, self._register, self._in_one = region, memory, register, in_one
        self._locks = [threading.Lock() for _ in range(region.slots)]
        """Each is held while its slot gets or loses memory."""
        self._first, self._coming = threading.Event(), set[int]()
        """``_coming`` are the slots that the thread of :meth:`begin` has not tried to pin yet."""
        self._pieces: dict[int, list[_Pin]] = {}
        """The pieces of each slot that has memory, in order, without gaps."""
        self._refused = False
        """True once a piece could not be pinned."""
        self._wished, self._grower = (0, 0), threading.Lock()
        """The sizes of :meth:`foresee`; and a lock that the thread has which sees to them."""
        self.slots = 0
        """Number of slots that have memory or will have it soon."""
        region.take(0, region.data_at(0))
        self._pinned(0, region.data_at(0))

    def sizes(self) -> list[int]:
        """Returns how many bytes of each slot are pinned."""
        return [
            sum(piece.end - piece.begin for piece in self._pieces.get(slot, ()) if piece.unpin is not None)
            for slot in range(self.region.slots)
        ]

    def _size(self, slot: int) -> int:
        """Returns how many bytes of memory the slot has; nearly always they are pinned."""
        pieces = self._pieces.get(slot)
        return pieces[-1].end if pieces else 0

    def cuts(self, room: torch.Tensor) -> list[int]:
        """Returns the bytes at which a copy from or to ``room``, memory of the region, must be cut."""
        slot, first = self._place(room)
        ends = [piece.end - first for piece in self._pieces.get(slot, ())[:-1]]
        return [end for end in ends if 0 < end < room.nbytes]

    def pinned(self, room: torch.Tensor) -> bool:
        """Returns whether ``room``, memory of a slot within one piece, is pinned: only then does a copy from
        or to it go on beside the thread that begins it.
        """
        if not self._refused:
            return True
        slot, first = self._place(room)
        return any(
            piece.begin <= first < piece.end and piece.unpin is not None
            for piece in self._pieces.get(slot, ())
        )

    def _place(self, room: torch.Tensor) -> tuple[int, int]:
        """Returns the slot of ``room`` and the byte of the slot at which it begins; memory before all slots
        begins before byte 0 of slot 0.
        """
        first = room.data_ptr() - self._memory.data_ptr() - self.region.data_at(0)
        return divmod(first, self.region.data_at(1) - self.region.data_at(0)) if first >= 0 else (0, first)

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
                    if slot not in self._pieces and (why := self._fit(slot, size, 0)):
                        print(f"slot {slot} of {self.region.slots} is not pinned yet: {why}", flush=True)
                self._coming.discard(slot)
                if slot + 1 >= min(AT_FIRST, self.slots):
                    self._first.set()
        finally:  # a copy into a slot that is not pinned tries again, and reports a failure
            self._coming.difference_update(slots)
            self._first.set()
        self._tell(began)

    def _tell(self, began: float) -> None:
        print(
            f"host copies: {sum(self.sizes()) / 2**30:.2f} GiB pinned in {time.monotonic() - began:.1f} s",
            flush=True,
        )

    def foresee(self, size: int, foreseen: int) -> None:
        """Begins to give each slot ``foreseen`` bytes, beside the steps, while the node has room for that.
        Copies have ``size`` bytes at present.
        """
        self._wished = size, min(foreseen, self.region.slot_bytes)
        threading.Thread(target=self._foresee, name="pin", daemon=True).start()

    def rest(self) -> None:
        """Ends what :meth:`foresee` began: a world that heals needs the memory's bandwidth."""
        self._wished = 0, 0

    def _foresee(self) -> None:
        with self._grower:
            began, before = time.monotonic(), self.sizes()
            while any([self._grows(slot) for slot in range(self.slots)]):
                pass
        if self.sizes() != before:
            self._tell(began)

    def _grows(self, slot: int) -> bool:
        """Gives the slot, which may hold a copy, one piece more if it shall have one.  Returns whether it did."""
        with self._locks[slot]:
            (size, foreseen), has = self._wished, self._size(slot)
            return (
                0 < has < foreseen
                and not self._fit(slot, size, min(has + PIECE, foreseen), holds=True)
                and self._size(slot) > has
            )

    def fit(self, slot: int, size: int, foreseen: int = 0) -> str:
        """Gives the slot, which holds no copy, pinned memory of at least ``size`` bytes, and of ``foreseen``
        bytes if the node has room.  Returns why there is too little, or "".
        """
        foreseen = min(foreseen, self.region.slot_bytes)
        # most copies fit already, and need not wait for the lock
        if self._best(slot, size, foreseen) == self._size(slot):
            return ""
        with self._locks[slot]:
            return self._fit(slot, size, foreseen)

    def _best(self, slot: int, size: int, foreseen: int) -> int:
        """Returns the bytes that the slot should have, in whole pages: pieces must not share a page."""
        others = SPARE + (self.slots + BUDDY_SLOTS) * size
        return pages(slot_size(self._size(slot), size, foreseen, free_memory()[0], others))

    def _fit(self, slot: int, size: int, foreseen: int, *, holds: bool = False) -> str:
        """``holds`` says that the slot may hold a copy, perhaps a larger one, so it gives nothing back."""
        # the workers of a node come here at the same time, and each must see what the others have taken
        with alone():
            has, best = self._size(slot), self._best(slot, size, foreseen)
            best = max(best, has) if holds else best
            if best < has:
                self._end(slot, best)
                self.region.give_back(slot, best)
            elif best > has and (why := take(self.region, slot, best)):
                return why
        if best > has and self._in_one:
            self._end(slot, 0)
        begin = self._size(slot)
        if best > begin:
            first = self.region.data_at(slot)
            piece = _Pin(begin, best, self._pinned(first + begin, first + best))
            self._pieces[slot] = [*self._pieces.get(slot, ()), piece]
        return ""

    def empty(self, slot: int) -> None:
        """Gives back all memory of the slot, which holds no copy."""
        with self._locks[slot]:
            self._end(slot, 0)
            self.region.give_back(slot)

    def _pinned(self, first: int, last: int) -> weakref.finalize[[], Pins] | None:
        end = self._register(self._memory[first:last])
        if isinstance(end, str):
            if not self._refused:
                print(
                    f"{amount(last - first)} of host memory could not be pinned, so copies to it, and to "
                    f"others like it, are slow: {end}",
                    flush=True,
                )
            self._refused = True
            return None
        ends = weakref.finalize(self, end)
        ends.atexit = False
        return ends

    def _end(self, slot: int, kept: int) -> None:
        """Ends the pieces of the slot that go beyond its first ``kept`` bytes."""
        pieces = self._pieces.pop(slot, [])
        for piece in pieces:
            if piece.end > kept and piece.unpin is not None:
                piece.unpin()
        if left := [piece for piece in pieces if piece.end <= kept]:
            self._pieces[slot] = left


@dataclass(frozen=True)
class _Pin:
    """Bytes ``begin`` to ``end`` of a slot, and a call that unpins them; None if they could not be pinned."""

    begin: int
    end: int
    unpin: weakref.finalize[[], Pins] | None
