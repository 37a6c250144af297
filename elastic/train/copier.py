"""The worker's side: after an update its shard is copied into a slot while the next step computes.

A thread copies, on an accelerator over a stream of its own to memory that is pinned, and marks the slot complete at the end.  It launches
piece by piece: a world that breaks does not wait for the rest, for an abort has to wait for all that the device was told.  Source for slots
that outlive their writer: DESIGN section 5, step 6.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial

import torch

from elastic.control.commit import Copied, Outcome
from elastic.control.copying import Copies, Copy, version_at
from elastic.copies.digest import digests
from elastic.copies.region import Frame, Region, frame
from elastic.engine.streams import stream
from elastic.ids import Version, WorkerId
from elastic.plan.copies import CopyRule, Pace, slots_for
from elastic.plan.plan import Plan
from elastic.train.state import Shard
from storage.background import begin
from storage.slices import Tensor

NEVER = -1
PIECE = 2**28
"""Bytes: a device has at most two such pieces to copy, and the tensor that fills the second."""

Part = tuple[torch.Tensor, torch.Tensor, slice]
"""Memory of a tensor, where it goes, which digests of the slot are its."""


class Copier:
    """Of one worker, for all its worlds.  For the training thread, but ``give_up``."""

    def __init__(self, region: Region, tensors: tuple[Tensor, ...], device: torch.device, rule: CopyRule) -> None:
        self.region, self.tensors, self.pace = region, tensors, Pace(rule)
        self.memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        self.copies: Copies | None = None
        self.made: Version | None = None
        """The newest version of the present world that was begun here: complete once ``settle`` was called."""
        self._frame = Frame({}, 0, 0)
        self._stepped_at = self._held_up_s = 0.0
        self._took_s: float | None = None
        self._way = _Pinned(region, self.memory, device) if device.type == "cuda" else _Plain(region)
        self._under_way: Future[bool] | None = None
        self._given_up = threading.Event()

    def ready(self) -> None:
        """Wait until copies run at full speed."""
        self._way.ready()

    def enter(self, plan: Plan, worker: WorkerId, shard: Shard) -> None:
        """A world begins; ``shard``: this member's, at the plan's version."""
        self.made, self._frame = None, frame(self.tensors, shard.count, shard.index)
        self.copies = Copies.begin(plan, worker, self.copies, self.region.all_held())
        if self.copies.begun is not None and self.region.find(self.copies.begun) is not None:
            self.made = shard.version
        self._way.pin(slots_for(plan.buddy_every))
        self._given_up.clear()
        self._begin(shard)
        self._stepped_at = time.monotonic()

    def give_up(self) -> None:
        """What is under way need not end, since this member holds the same itself.  From any thread."""
        self._given_up.set()

    def leave(self) -> None:
        """The world is over: what is under way ends, before the memory that it reads goes."""
        self._wait()
        self.made = None

    def committed(self, outcome: Outcome, shard: Shard | None) -> None:
        """A step was applied; ``shard``: may be copied now."""
        if self.copies is None:
            return
        now = time.monotonic()
        self.pace.stepped(max(now - self._stepped_at - self._held_up_s, 0.0))
        self._stepped_at, self._held_up_s = now, 0.0
        if self._took_s is not None:
            self.pace.copied(self._took_s)
            self._took_s = None
        before = self.copies.begun
        self.copies = self.copies.after(outcome)
        if shard is not None and self.copies.begun != before:
            self._begin(shard)

    def _begin(self, shard: Shard) -> None:
        copies = self.copies
        assert copies is not None
        for name, copy in (("send", copies.sent), ("safe", copies.buddied)):
            if copy is not None:
                self.region.set_version(name, copy.version)
        slot = copies.slot(self.region.all_held()[: self._way.slots])
        if slot is not None and copies.begun is not None:
            self._wait()
            self.region.begin(slot)
            self._under_way = begin(partial(self._copy, slot, copies.begun, shard), "copies")
            self.made = shard.version

    def _copy(self, slot: int, copy: Copy, shard: Shard) -> bool:
        """On the thread.  Whether it is complete."""
        began = time.monotonic()
        with torch.no_grad():
            complete = self._way.fill(slot, self._parts(slot, shard))
        if complete:
            self.region.finish(slot, copy, self.bytes)
            self._took_s = time.monotonic() - began
        return complete

    def _parts(self, slot: int, shard: Shard) -> Iterator[Part | None]:
        """Of ``shard``, for ``slot``; ends with None where it was given up."""
        data = self.region.data_at(slot)
        for tensor, place in self._frame.places.items():
            if self._given_up.is_set():
                yield None
                return
            value = shard.values[tensor.kind, tensor.name]
            room = self.memory[data + place.offset : data + place.offset + place.bytes].view(value.dtype).view(value.shape)
            yield value, room, slice(place.first_block, place.first_block + place.blocks)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        began, complete = time.monotonic(), False
        try:
            complete = under_way.result()
        except Exception:  # the end of a thread: the step needs no copy
            traceback.print_exc()
        if not complete:
            self.made = None
        self._held_up_s += time.monotonic() - began

    def settle(self) -> Copied:
        """Wait until it has ended; how far it is."""
        self._wait()
        buddied = self.region.version("buddied")
        of_this_world = self.copies and buddied and version_at(self.copies.plan, buddied.step) == buddied
        return Copied(
            self.made.step if self.made and self.region["keeper"] else NEVER,
            buddied.step if buddied and of_this_world else NEVER,
            self.pace.copy_every(),
            self.pace.buddy_every(self.region["brought_us"] / 1e6),
        )

    @property
    def bytes(self) -> int:
        """Of one copy."""
        return self._frame.bytes


class _Plain:
    """Memory of the host into a slot."""

    def __init__(self, region: Region) -> None:
        self.region, self.slots = region, region.slots

    def ready(self) -> None:
        """At once."""

    def pin(self, slots: int) -> None:
        """There is nothing to pin for."""

    def fill(self, slot: int, parts: Iterable[Part | None]) -> bool:
        """Copy all and take their digests; False where they end with None."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        for part in parts:
            if part is None:
                return False
            value, room, blocks = part
            room.copy_(value)
            digests(value, sums[blocks])
        return True


class _Pinned:
    """Memory of a device into a slot, on a stream of its own."""

    def __init__(self, region: Region, memory: torch.Tensor, device: torch.device) -> None:
        self.region, self.memory, self._stream = region, memory, stream("copies", device)
        self._sums = torch.zeros(region.slot_blocks, dtype=torch.int64, device=device)
        self._before, self._last = (torch.cuda.Event(blocking=True) for _ in range(2))
        self.slots = 0
        """Those that are pinned, or will be soon: the others are not used."""
        self._pinning = threading.Thread()
        self.pin(slots_for(buddy_every=0))

    def ready(self) -> None:
        self._pinning.join()

    def pin(self, slots: int) -> None:
        """So many slots, in the background: once, for it takes a second for every five gigabytes."""
        if slots > self.slots:
            self._pinning = threading.Thread(target=self._pin, args=(self.slots, slots), name="pin", daemon=True)
            self.slots = slots
            self._pinning.start()

    def _pin(self, first: int, last: int) -> None:
        """Headers and digests with the first slot.  Copies to memory that is not pinned are slow."""
        began, region = time.monotonic(), self.region
        start = region.data_at(first) if first else 0
        for slot in range(first, last):
            end = region.data_at(slot) + region.slot_bytes
            code = torch.cuda.cudart().cudaHostRegister(self.memory[start:end].data_ptr(), end - start, 0)
            if int(code):
                print(
                    f"only {slot} of {region.slots} slots are pinned, copies to others are slow: cudaHostRegister said {code}",
                    flush=True,
                )
                return
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self.memory[start:end].data_ptr()).atexit = False
            start = region.data_at(slot + 1)
        print(f"host copies: {start / 2**30:.2f} GiB pinned in {time.monotonic() - began:.1f} s", flush=True)

    def fill(self, slot: int, parts: Iterable[Part | None]) -> bool:
        """As ``_Plain``: nothing is under way any more when it ends."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        size, ours = 0, list[Part]()
        with torch.cuda.stream(self._stream):
            try:
                for part in parts:
                    if part is None:
                        return False
                    value, room, blocks = part
                    room.copy_(value, non_blocking=True)
                    if not value.is_cuda:
                        ours.append(part)
                        continue
                    digests(value, self._sums[blocks])
                    size += value.nbytes
                    if size >= PIECE:
                        size = 0
                        self._piece()
                sums.copy_(self._sums, non_blocking=True)
            finally:
                self._piece()
                self._last.synchronize()
        for value, _, blocks in ours:
            digests(value, sums[blocks])
        return True

    def _piece(self) -> None:
        """Of two that are launched the first is waited for."""
        self._before, self._last = self._last, self._before
        self._last.record()
        self._before.synchronize()
