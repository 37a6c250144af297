"""Copies a worker's shard into a slot after an update, while the next step computes.

A thread does it, on an accelerator over a stream of its own into pinned memory, and marks the slot complete at the end.  It launches the
copy piece by piece, because an abort has to wait for everything that the device was told before.  When a world ends, a copy goes on while
the next world forms: it reads the shard that is left, and what it writes outlives this process (``state/region.py``).

A save is such a copy.  Making it is all that a worker does for a save: the keeper uploads what the slot holds.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from elastic.engine.streams import finish, stream
from elastic.ids import Version, WorkerId
from elastic.plan.copy_budget import CopyRule, Pace, slots_for
from elastic.protocol.commit_record import NO_SAVE, Copied, Outcome
from elastic.protocol.copy_schedule import NO_SAVES, Copies, Copy, NoRoom, SaveRule
from elastic.protocol.plan import Plan
from elastic.state.digest import digests
from elastic.state.region import Frame, Region, frame
from elastic.state.shard import Shard
from storage.background import begin
from storage.slices import Tensor

NEVER = -1
PIECE = 2**28
"""Bytes of a piece: at most two are launched and not done.  Each ends with a tensor."""
POLL_S = 0.005
"""Seconds between two looks at what the keeper says of a save."""

Part = tuple[torch.Tensor, torch.Tensor, slice]
"""Memory of a tensor, where it goes, which digests of the slot are its."""
Strike = Callable[[Plan, int, int], None]
"""``strike(plan, world_rank, step)``: the copy of ``step``, which is a save, is under way; tests end the process here."""


def nothing(plan: Plan, world_rank: int, step: int) -> None:
    """No test ends this process in a save."""


class Snapshots:
    """The copies of one worker, in all its worlds.  Only the training thread calls its methods."""

    def __init__(
        self,
        region: Region,
        tensors: tuple[Tensor, ...],
        device: torch.device,
        rule: CopyRule,
        saves: SaveRule = NO_SAVES,
        patience_s: float = 0.0,
        strike: Strike = nothing,
    ) -> None:
        """``patience_s``: a save that is due waits so long for the one before, once; after that steps go on, and the save is owed."""
        self.saves, self.patience_s, self.strike = saves, patience_s, strike
        self._rank = self._awaited = 0
        """World rank in the present world; number of the newest save that was waited for."""
        self._homeless: Shard | None = None
        """The shard that is copied as soon as a slot is free."""
        self.region, self.tensors, self.pace = region, tensors, Pace(rule)
        self.memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        self.copies: Copies | None = None
        self.made: Version | None = None
        """The newest version of the present world whose copy was begun here.  It is complete once ``settle`` has returned."""
        self.buddied: Version | None = None
        """The newest version of the present world that the keeper's buddy has, as the keeper says."""
        self._frame = Frame({}, 0, 0)
        self._stepped_at = self._held_up_s = 0.0
        self._took_s: float | None = None
        self._way = _Pinned(region, self.memory, device) if device.type == "cuda" else _Plain(region)
        self._under_way: tuple[Future[None], Callable[[], None]] | None = None
        """The copy that is being made, and a call that makes it again."""

    def ready(self) -> None:
        """Returns once copies run at full speed."""
        self._way.ready()

    def enter(self, plan: Plan, worker: WorkerId, shard: Shard) -> None:
        """Begins a world, in which this member has ``shard`` at the plan's version."""
        self._wait()
        self.made, self.buddied, self._frame = None, None, frame(self.tensors, shard.cell)
        self._homeless, self._rank = None, plan.world_rank(worker)
        self.region["generation"] = plan.generation
        self.copies = Copies.begin(plan, worker, self.copies, self.region.all_held(), self.saves)
        if self.copies.begun is not None and self.region.find(self.copies.begun) is not None:
            self.made = shard.version
        self.region.set_copy("safe", self.copies.buddied)
        self.region.send(self.copies.sent)
        self._way.pin(min(slots_for(plan.copy_every, plan.buddy_every), self.region.slots))
        self._stepped_at, self._held_up_s, self._took_s = time.monotonic(), 0.0, None
        self._begin(shard)

    def committed(self, outcome: Outcome, shard: Shard | None) -> None:
        """Takes note that a step was applied, and begins the copy that is due now.  Without ``shard`` nothing may be copied."""
        if self.copies is None:
            return
        now = time.monotonic()
        self.pace.stepped(max(now - self._stepped_at - self._held_up_s, 0.0))
        self._stepped_at, self._held_up_s = now, 0.0
        if self._took_s is not None:
            self.pace.copied(self._took_s)
            self._took_s = None
        before, self.copies = self.copies, self.copies.after(outcome)
        if shard is not None and self.copies.begun != before.begun:
            if self.copies.sent != before.sent:
                self.region.send(self.copies.sent)
            self._begin(shard)

    def _begin(self, shard: Shard) -> None:
        copies = self.copies
        assert copies is not None
        if self.region.copy("safe") != copies.buddied:
            self.region.set_copy("safe", copies.buddied)
        try:
            slot = copies.slot(self.region.all_held()[: self._way.slots])
        except NoRoom:
            self._homeless = shard
            return
        if copies.begun is None:
            return
        if saves := copies.begun in copies.saving:
            self.region.begin_save(copies.begun)
        if slot is not None:
            self._wait()
            self.region.begin(slot)
            copying = partial(self._copy, slot, copies.begun, shard, saves)
            self._under_way = begin(copying, "copies"), copying
            self.made = shard.version

    def make_room(self, give_up: Callable[[], bool]) -> None:
        """Returns once the last save of this world is copied, or ``give_up()`` holds while there is no room for it."""
        while self._homeless is not None and not give_up():
            if self.region.saving:
                time.sleep(POLL_S)
                continue
            assert self.copies is not None and self.copies.begun is not None
            shard, self._homeless = self._homeless, None
            self.copies = replace(self.copies, saving=(self.copies.begun,))
            self._begin(shard)
        if self.copies is not None and self.copies.begun in self.copies.saving:
            self._wait()  # no step comes any more that would find out that it failed

    def _copy(self, slot: int, copy: Copy, shard: Shard, saves: bool) -> None:
        """Makes the copy, on the thread."""
        began = time.monotonic()
        with torch.no_grad():
            self._way.fill(slot, self._parts(slot, shard, saves))
        self.region.finish(slot, copy, self.bytes)
        self._took_s = time.monotonic() - began

    def _parts(self, slot: int, shard: Shard, saves: bool) -> Iterator[Part]:
        """Yields what is to be copied of ``shard``, and where it goes in ``slot``."""
        data = self.region.data_at(slot)
        for tensor, place in self._frame.places.items():
            if not place.bytes:  # this member has nothing of it, perhaps not even a tensor
                continue
            if saves and self.copies is not None:
                self.strike(self.copies.plan, self._rank, shard.version.step)
            value = shard.values[tensor.kind, tensor.name]
            room = self.memory[data + place.offset : data + place.offset + place.bytes].view(value.dtype).view(value.shape)
            yield value, room, slice(place.first_block, place.first_block + place.blocks)

    def _wait(self) -> None:
        """Returns once the copy under way has ended.  One that fails is made once more: without it nothing is copied in this world."""
        if self._under_way is None:
            return
        (future, again), self._under_way = self._under_way, None
        for attempt in (future.result, again):
            try:
                return attempt()
            except Exception:  # the step needs no copy
                traceback.print_exc()
        self.made = None
        if self.copies is not None and self.copies.begun in self.copies.saving:
            self.region["save_failed"] = 1

    def _patiently(self) -> bool:
        """Returns whether the save before is over, for which it waits a while, but only once a save."""
        until = time.monotonic() + (self.patience_s if self._awaited < self.region["saves"] else 0.0)
        while self.region.saving and time.monotonic() < until:
            time.sleep(POLL_S)
        self._awaited = self.region["saves"]
        return not self.region.saving

    def settle(self) -> Copied:
        """Returns what this member says of its copies, once the one under way has ended."""
        if self._under_way is not None and not self._under_way[0].done():
            self._way.computed()  # as long as the device computes, the copy holds up nobody
            began = time.monotonic()
            self._wait()
            self._held_up_s += time.monotonic() - began
        self._wait()
        sent, asks = (self.copies.sent, self.copies.asks) if self.copies else (None, NO_SAVE)
        over = self._patiently() if asks != NO_SAVE else not self.region.saving
        copied = self.copies is not None and bool(self.copies.plan.copy_every)  # where only saves are copied, none counts as a copy
        lacking = copied and self.made is None
        brought = self.region["brought"]
        if sent and brought in (0, self.region["asked"]):
            self.buddied = sent.version if brought else None
        return Copied(
            self.made.step if self.made and self.region["keeper"] and copied else NEVER,
            self.buddied.step if self.buddied else NEVER,
            self.pace.copy_every(),
            self.pace.buddy_every(self.region["brought_us"] / 1e6) if sent else 0,
            asks,
            int(lacking or not over),
        )

    @property
    def bytes(self) -> int:
        """The size of one copy."""
        return self._frame.bytes


class _Plain:
    """Copies memory of the host into a slot."""

    def __init__(self, region: Region) -> None:
        self.region, self.slots = region, region.slots

    def ready(self) -> None:
        """At once."""

    def pin(self, slots: int) -> None:
        """There is nothing to pin for."""

    def computed(self) -> None:
        """At once."""

    def fill(self, slot: int, parts: Iterable[Part]) -> None:
        """Copies all parts and takes their digests."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        for value, room, blocks in parts:
            room.copy_(value)
            digests(value, sums[blocks])


class _Pinned:
    """Copies memory of a device into a slot, on a stream of its own."""

    def __init__(self, region: Region, memory: torch.Tensor, device: torch.device) -> None:
        self.region, self.memory, self._stream = region, memory, stream("copies", device)
        self._sums = torch.zeros(region.slot_blocks, dtype=torch.int64, device=device)
        self._before, self._last = (torch.cuda.Event(blocking=True) for _ in range(2))
        self.slots = 0
        """Those that are pinned, or will be soon: the others are not used."""
        self._pinning = threading.Thread()
        self.pin(min(slots_for(1, 0), region.slots))

    def ready(self) -> None:
        self._pinning.join()

    def pin(self, slots: int) -> None:
        """So many slots, in the background: once, for a system finds four gigabytes of new memory a second."""
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
            region.take(start, end)  # who launches a kernel waits while memory is being pinned: 24 ms a GiB, ten times that if it is new
            place = self.memory[start:end].data_ptr()
            code = torch.cuda.cudart().cudaHostRegister(place, end - start, 0)
            if int(code):
                print(
                    f"only {slot} of {region.slots} slots are pinned, copies to others are slow: cudaHostRegister said {code}",
                    flush=True,
                )
                return
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, place).atexit = False
            start = region.data_at(slot + 1)
        print(f"host copies: {start / 2**30:.2f} GiB pinned in {time.monotonic() - began:.1f} s", flush=True)

    def computed(self) -> None:
        """Wait for all that the present stream has to do."""
        finish()

    def fill(self, slot: int, parts: Iterable[Part]) -> None:
        """As ``_Plain``: nothing is under way any more when it ends, however it does."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        size, ours = 0, list[Part]()
        with torch.cuda.stream(self._stream):
            try:
                for value, room, blocks in parts:
                    room.copy_(value, non_blocking=True)
                    if not value.is_cuda:
                        ours.append((value, room, blocks))
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

    def _piece(self) -> None:
        """Of two that are launched the first is waited for."""
        self._before, self._last = self._last, self._before
        self._last.record()
        self._before.synchronize()
