"""The worker's side: after an update its shard is copied into a slot while the next step computes.

A thread copies, and marks the slot complete at the end.  When a world ends the copy goes on, beside the forming of the next one: it reads
the shard that is left.  Source for slots that outlive their writer: DESIGN section 5, step 6.

From an accelerator it goes piece by piece through a little pinned memory, by several threads.  The slots themselves are not pinned: what a
dead process had pinned the driver gives back at 17 ms a GiB, and nobody beside it can abort or launch anything meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial

import torch

from elastic.control.commit import Copied, Outcome
from elastic.control.copying import Copies, Copy
from elastic.copies.digest import digests
from elastic.copies.region import BLOCK, Frame, Region, frame
from elastic.engine.streams import finish, stream
from elastic.ids import Version, WorkerId
from elastic.plan.copies import CopyRule, Pace, slots_for
from elastic.plan.plan import Plan
from elastic.train.state import Shard
from storage.background import begin
from storage.slices import Tensor

NEVER = -1
PIECE = 2**26
"""Bytes, at most, that are copied at once by one thread; whole blocks."""
STAGES = 4
"""Threads that copy from a device, each through a piece of pinned memory: one alone writes 5 GB/s."""

Part = tuple[torch.Tensor, torch.Tensor, slice]
"""Memory of a tensor, where it goes, which digests of the slot are its."""


class Copier:
    """Of one worker, for all its worlds.  For the training thread."""

    def __init__(self, region: Region, tensors: tuple[Tensor, ...], device: torch.device, rule: CopyRule, shards: int = 1) -> None:
        """``shards``: into how many the state is cut when all workers are there; memory for such copies is there in advance."""
        self.region, self.tensors, self.pace = region, tensors, Pace(rule)
        self.memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        self.copies: Copies | None = None
        self.made: Version | None = None
        """The newest version of the present world that was begun here: complete once ``settle`` was called."""
        self.buddied: Version | None = None
        """The newest version of the present world that its keeper's buddy has, as the keeper says."""
        self._frame = Frame({}, 0, 0)
        self._stepped_at = self._held_up_s = 0.0
        self._took_s: float | None = None
        usual = frame(tensors, shards, 0).bytes
        self._way = _Staged(region, device, usual) if device.type == "cuda" else _Plain(region)
        self._under_way: tuple[Future[None], Callable[[], None]] | None = None
        """And how to do it again."""

    def ready(self) -> None:
        """Wait until copies run at full speed."""
        self._way.ready()

    def enter(self, plan: Plan, worker: WorkerId, shard: Shard) -> None:
        """A world begins; ``shard``: this member's, at the plan's version."""
        self._wait()
        self.made, self.buddied, self._frame = None, None, frame(self.tensors, shard.count, shard.index)
        self.copies = Copies.begin(plan, worker, self.copies, self.region.all_held())
        if self.copies.begun is not None and self.region.find(self.copies.begun) is not None:
            self.made = shard.version
        self.region.set_copy("safe", self.copies.buddied)
        self.region.send(self.copies.sent)
        self._way.take(slots_for(plan.buddy_every))
        self._stepped_at, self._held_up_s, self._took_s = time.monotonic(), 0.0, None
        self._begin(shard)

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
        slot = copies.slot(self.region.all_held()[: self._way.slots])
        if slot is not None and copies.begun is not None:
            self._wait()
            self.region.begin(slot)
            copying = partial(self._copy, slot, copies.begun, shard)
            self._under_way = begin(copying, "copies"), copying
            self.made = shard.version

    def _copy(self, slot: int, copy: Copy, shard: Shard) -> None:
        """On the thread."""
        began = time.monotonic()
        with torch.no_grad():
            self._way.fill(slot, self._parts(slot, shard))
        self.region.finish(slot, copy, self.bytes)
        self._took_s = time.monotonic() - began

    def _parts(self, slot: int, shard: Shard) -> Iterator[Part]:
        """Of ``shard``, for ``slot``."""
        data = self.region.data_at(slot)
        for tensor, place in self._frame.places.items():
            value = shard.values[tensor.kind, tensor.name]
            room = self.memory[data + place.offset : data + place.offset + place.bytes].view(value.dtype).view(value.shape)
            yield value, room, slice(place.first_block, place.first_block + place.blocks)

    def _wait(self) -> None:
        """Until what is under way has ended.  What fails is tried once more: without it nothing would be copied until the next world."""
        if self._under_way is None:
            return
        (future, again), self._under_way = self._under_way, None
        for attempt in (future.result, again):
            try:
                return attempt()
            except Exception:  # the step needs no copy
                traceback.print_exc()
        self.made = None

    def settle(self) -> Copied:
        """Wait until it has ended; how far it is."""
        if self._under_way is not None and not self._under_way[0].done():
            self._way.computed()  # as long as the device computes it holds up nobody
            began = time.monotonic()
            self._wait()
            self._held_up_s += time.monotonic() - began
        self._wait()
        sent = self.copies.sent if self.copies else None
        brought = self.region["brought"]
        if sent and brought in (0, self.region["asked"]):
            self.buddied = sent.version if brought else None
        return Copied(
            self.made.step if self.made and self.region["keeper"] else NEVER,
            self.buddied.step if self.buddied else NEVER,
            self.pace.copy_every(),
            self.pace.buddy_every(self.region["brought_us"] / 1e6) if sent else 0,
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

    def take(self, slots: int) -> None:
        """Memory comes as it is written."""

    def computed(self) -> None:
        """At once."""

    def fill(self, slot: int, parts: Iterable[Part]) -> None:
        """Copy all and take their digests."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        for value, room, blocks in parts:
            room.copy_(value)
            digests(value, sums[blocks])


class _Staged:
    """Memory of a device into a slot, several pieces at once, on streams of their own."""

    def __init__(self, region: Region, device: torch.device, usual: int) -> None:
        """``usual``: bytes of a copy for which memory is taken from the system before there is one."""
        self.region, self.usual, self.slots = region, usual, 0
        self._sums = torch.zeros(region.slot_blocks, dtype=torch.int64, device=device)
        self.stages = [_Stage(device, number) for number in range(STAGES)]
        self._taken = threading.Event()
        self.take(slots_for(buddy_every=0))

    def ready(self) -> None:
        self._taken.wait()

    def take(self, slots: int) -> None:
        """Use so many slots; their memory is taken in the background, once: a system finds four gigabytes a second."""
        if slots > self.slots:
            self._taken = threading.Event()
            threading.Thread(target=self._take, args=(range(self.slots, slots), self._taken), name="take", daemon=True).start()
            self.slots = slots

    def _take(self, slots: range, done: threading.Event) -> None:
        """First what is usual, then what smaller worlds need."""
        began, region = time.monotonic(), self.region
        places = [region.data_at(slot) for slot in slots]
        for place in places:
            region.take(place, place + self.usual)
        done.set()
        print(f"host copies: memory for {len(places)} of {self.usual / 1e9:.2f} GB after {time.monotonic() - began:.1f} s", flush=True)
        for place in places:
            region.take(place + self.usual, place + region.slot_bytes)

    def computed(self) -> None:
        """Wait for all that the present stream has to do."""
        finish()

    def fill(self, slot: int, parts: Iterable[Part]) -> None:
        """As ``_Plain``: nothing is under way any more when it ends, however it does."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        ours, pieces = list[Part](), deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        for value, room, blocks in parts:
            if value.is_cuda:
                raw, there, found = value.reshape(-1).view(torch.uint8), room.reshape(-1).view(torch.uint8), self._sums[blocks]
                pieces += zip(raw.split(PIECE), there.split(PIECE), found.split(PIECE // BLOCK), strict=True)
            else:
                ours.append((value, room, blocks))

        @torch.no_grad()
        def drain(stage: _Stage) -> None:
            with contextlib.suppress(IndexError):  # nothing is left
                while True:
                    raw, there, found = pieces.popleft()
                    stage.bring(raw, there, found)

        threads: list[Future[None]] = []
        try:
            for stage in self.stages:
                threads.append(begin(partial(drain, stage), "copies"))
        finally:
            wait(threads)
        for thread in threads:
            thread.result()
        self.stages[0].bring(self._sums.view(torch.uint8), sums.view(torch.uint8))
        for value, room, blocks in ours:
            room.copy_(value)
            digests(value, sums[blocks])


class _Stage:
    """A piece of pinned memory, for one thread at a time."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.stream, self._memory = stream(f"copies {number}", device), torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self._here = torch.cuda.Event(blocking=True)

    def bring(self, raw: torch.Tensor, room: torch.Tensor, sums: torch.Tensor | None = None) -> None:
        """``raw`` (uint8) of the device to ``room`` on the host, and its digests to ``sums`` on the device."""
        with torch.cuda.stream(self.stream):
            try:
                self._memory[: len(raw)].copy_(raw, non_blocking=True)
                if sums is not None:
                    digests(raw, sums)
            finally:
                self._here.record()
                self._here.synchronize()
        room.copy_(self._memory[: len(raw)])
