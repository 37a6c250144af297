"""The worker's side: after an update its shard is copied into a slot while the next step computes.

On an accelerator the copies run on a stream of their own; the header that says "complete" is the last thing on that stream, and the main
stream waits for it before anything that another member may rely on is sent, so the host waits for nothing.  On a CPU they run on a
thread.  Source for slots that outlive their writer: DESIGN section 5, step 6.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from elastic.control.commit import Outcome
from elastic.control.saving import copy_due
from elastic.copies.digest import digests
from elastic.copies.region import SLOT, Frame, Held, Region, frame
from elastic.ids import Version
from elastic.plan.plan import Plan
from elastic.train.state import Shard
from storage.slices import Tensor

NEVER = -1


class Copier:
    """Of one worker, for all its worlds.  For the training thread."""

    def __init__(self, region: Region, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        self.region, self.tensors, self.device = region, tensors, device
        self.memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        self.protected: tuple[Version, int] | None = None
        """(version, shard count) of what is complete on all keepers, the newest known: no slot that holds it is written."""
        self.began: Version | None = None
        """The newest version of the present world whose copy was begun: complete in stream order once ``settle`` was called."""
        self.seconds = 0.0
        """What the latest copy took, from its first byte to its header."""
        self._plan: Plan | None = None
        self._frame = Frame({}, 0, 0)
        self._way: _Streamed | _Threaded = _Streamed(self) if device.type == "cuda" else _Threaded(self)

    # ---- worlds

    def enter(self, plan: Plan, shard: Shard) -> None:
        """``shard``: this member's, as the world begins with it."""
        self._plan, self.began = plan, None
        self._frame = frame(self.tensors, shard.count, shard.index)
        match plan.tier:
            case "init" | "bucket":
                self.protected = None
            case "host":
                self.protected = (plan.version, plan.holders[0].shard_count)
        if plan.copy_every:
            self.copy(shard)

    def leave(self) -> None:
        """The world is over: what is under way ends, before the memory that it reads goes."""
        self._way.wait()
        self._plan = None

    def committed(self, outcome: Outcome, shard: Shard) -> None:
        """A step was applied: learn what is complete everywhere, and copy if it is due."""
        assert self._plan is not None
        if outcome.copied_through >= 0:
            self.protected = (self._version(outcome.copied_through), shard.count)
        if outcome.buddied_through >= 0:
            self.region.set_version("safe", self._version(outcome.buddied_through))
        if copy_due(outcome.step, self._plan.copy_every):
            self.copy(shard)

    def _version(self, step: int) -> Version:
        """That of ``step`` in the present world, which began with the version of an earlier one."""
        assert self._plan is not None
        return self._plan.version if step == self._plan.version.step else Version(step, self._plan.generation)

    # ---- copies

    def copy(self, shard: Shard) -> bool:
        """Begin to copy ``shard``, whose update is done; False when no slot may be written."""
        slot = self._slot()
        if slot is None:
            return False
        self.region.begin(slot)
        held = Held(shard.version, shard.count, shard.index, self._frame.bytes)
        self._way.begin(slot, held, shard)
        self.began = shard.version
        return True

    def settle(self) -> tuple[int, int]:
        """(copied, buddied) through which step; whatever is launched from now on comes after the copy that says so."""
        self._way.settle()
        buddied = self.region.version("buddied")
        of_this_world = self._plan is not None and buddied is not None and self._version(buddied.step) == buddied
        return self.began.step if self.began else NEVER, buddied.step if buddied is not None and of_this_world else NEVER

    def _slot(self) -> int | None:
        """An empty slot, or the one with the oldest version that need not be kept."""
        kept = {self.region["sending"] - 1}
        free = []
        for slot in sorted(self._way.usable):
            held = self.region.held(slot)
            if held is None:
                return slot
            if slot not in kept and (held.version, held.count) != self.protected and held.version != self.region.version("safe"):
                free.append((held.version, slot))
        return min(free)[1] if free else None

    def parts(self, slot: int, shard: Shard) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each tensor: its memory, where it goes, where its digests go."""
        data, words = self.region.data_at(slot), torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        found = []
        for tensor, place in self._frame.places.items():
            value = shard.values[tensor.kind, tensor.name]
            room = self.memory[data + place.offset : data + place.offset + place.bytes].view(value.dtype).view(value.shape)
            found.append((value, room, words[place.first_block : place.first_block + place.blocks]))
        return found


class _Threaded:
    """Copies on a thread."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self.usable = frozenset(range(copier.region.slots))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._under_way: Future[None] | None = None

    def begin(self, slot: int, held: Held, shard: Shard) -> None:
        self._under_way = self._pool.submit(self._copy, slot, held, self.copier.parts(slot, shard))

    def _copy(self, slot: int, held: Held, parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        began = time.monotonic()
        with torch.no_grad():
            for value, room, words in parts:
                room.copy_(value)
                words.copy_(digests(value))
        self.copier.region.finish(slot, held)
        self.copier.seconds = time.monotonic() - began

    def settle(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    wait = settle


class _Streamed:
    """Copies on a stream of their own."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._stream = torch.cuda.Stream(copier.device)  # type: ignore[no-untyped-call]
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._header = torch.zeros(len(SLOT), dtype=torch.int64, device=copier.device)
        self._under_way = False
        self.usable: frozenset[int] = frozenset()
        """Slots that are pinned: a copy to memory that is not would hold up the host."""
        threading.Thread(target=self._pin, name="pin", daemon=True).start()

    def _pin(self) -> None:
        """Once, in the background, slot by slot; before them the headers and digests."""
        began, region, start = time.monotonic(), self.copier.region, 0
        for slot in range(region.slots):
            end = region.data_at(slot) + region.slot_bytes
            code = torch.cuda.cudart().cudaHostRegister(self.copier.memory[start:end].data_ptr(), end - start, 0)  # type: ignore[no-untyped-call]
            if int(code):
                print(f"only {slot} slots of host copies are pinned: cudaHostRegister of {end - start} bytes said {code}", flush=True)
                return
            start, self.usable = region.data_at(slot + 1), self.usable | {slot}
        print(f"host copies: {start / 2**30:.2f} GiB pinned in {time.monotonic() - began:.1f} s", flush=True)

    def begin(self, slot: int, held: Held, shard: Shard) -> None:
        self._measure()
        words = torch.frombuffer(self.copier.region.header(slot), dtype=torch.int64)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._first.record()
            for value, room, sums in self.copier.parts(slot, shard):
                room.copy_(value, non_blocking=True)
                sums.copy_(digests(value), non_blocking=True)
            fields = (0, held.version.step, held.version.generation, held.count, held.index, held.bytes)
            for field, number in enumerate(fields):
                self._header[field].fill_(number)
            words.copy_(self._header, non_blocking=True)
            self._header[0].fill_(1)
            words[:1].copy_(self._header[:1], non_blocking=True)
            self._last.record()
        self._under_way = True

    def settle(self) -> None:
        if self._under_way:
            torch.cuda.current_stream(self.copier.device).wait_event(self._last)

    def wait(self) -> None:
        if self._under_way:
            self._last.synchronize()
            self._measure()
            self._under_way = False

    def _measure(self) -> None:
        if self._under_way and self._last.query():  # type: ignore[no-untyped-call]
            self.copier.seconds = self._first.elapsed_time(self._last) / 1e3
