"""The worker's side: after an update its shard is copied into a slot while the next step computes.

On an accelerator the copies run on a stream of their own; the header that says "complete" is the last thing on that stream, and the main
stream waits for it before anything that another member may rely on is sent, so the host waits for nothing.  On a CPU they run on a
thread.  Source for slots that outlive their writer: DESIGN section 5, step 6.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from elastic.control.commit import GO_ON, Copied, Outcome
from elastic.control.copying import Copies, Copy, version_at
from elastic.copies.digest import digests
from elastic.copies.region import SLOT, Frame, Region, fields_of, frame
from elastic.ids import Version, WorkerId
from elastic.plan.copies import CopyRule, Pace, slots_for
from elastic.plan.plan import Plan
from elastic.train.state import Shard
from storage.slices import Tensor

NEVER = -1


class Copier:
    """Of one worker, for all its worlds.  For the training thread."""

    def __init__(self, region: Region, tensors: tuple[Tensor, ...], device: torch.device, rule: CopyRule) -> None:
        self.region, self.tensors, self.pace = region, tensors, Pace(rule)
        self.memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        self.copies: Copies | None = None
        self.made: Version | None = None
        """The newest version of the present world that was begun here: complete, in the order of launches, once ``settle`` was called."""
        self._due: Shard | None = None
        """Is to be copied, and is not yet."""
        self._frame = Frame({}, 0, 0)
        self._stepped_at = 0.0
        self._way = _Streamed(self, device) if device.type == "cuda" else _Threaded(self)

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
        self._want(shard)
        self._stepped_at = time.monotonic()

    def leave(self) -> None:
        """The world is over: what is under way ends, before the memory that it reads goes."""
        self._way.wait()
        self.made = self._due = None

    def committed(self, outcome: Outcome, shard: Shard | None) -> None:
        """A step was applied; ``shard``: may be copied now."""
        if self.copies is None:
            return
        now = time.monotonic()
        took_s, held_up_s = self._way.measured()
        self.pace.stepped(max(now - self._stepped_at - held_up_s, 0.0))
        self._stepped_at = now
        if took_s is not None:
            self.pace.copied(took_s)
        before = self.copies.begun
        self.copies = self.copies.after(outcome)
        if shard is not None and self.copies.begun != before:
            self._want(shard)
            if outcome.boundary != GO_ON:
                self.launch()

    def _want(self, shard: Shard) -> None:
        assert self.copies is not None
        for name, copy in (("send", self.copies.sent), ("safe", self.copies.buddied)):
            if copy is not None:
                self.region.set_version(name, copy.version)
        self._due = shard
        if self._way.at_once:
            self.launch()

    def launch(self) -> None:
        """Begin what is due.  To be called when the device has work for a while: thousands of launches would keep it waiting."""
        shard, copies, self._due = self._due, self.copies, None
        if shard is None or copies is None or copies.begun is None:
            return
        slot = copies.slot(self.region.all_held()[: self._way.slots])
        if slot is None:
            return
        self._way.wait()
        self.region.begin(slot)
        self._way.begin(slot, copies.begun, shard)
        self.made = shard.version

    def settle(self) -> Copied:
        """How far it is; whatever is launched from now on comes after the copy that says so."""
        self.launch()
        self._way.settle()
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

    def parts(self, slot: int, shard: Shard) -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
        """For each tensor: its memory, where it goes, which digests are its."""
        data, found = self.region.data_at(slot), []
        for tensor, place in self._frame.places.items():
            value = shard.values[tensor.kind, tensor.name]
            room = self.memory[data + place.offset : data + place.offset + place.bytes].view(value.dtype).view(value.shape)
            found.append((value, room, slice(place.first_block, place.first_block + place.blocks)))
        return found


class _Threaded:
    """Copies on a thread."""

    at_once = True

    def __init__(self, copier: Copier) -> None:
        self.copier, self.slots = copier, copier.region.slots
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._under_way: Future[None] | None = None
        self._took_s: float | None = None
        self._held_up_s = 0.0

    def ready(self) -> None:
        """At once."""

    def pin(self, slots: int) -> None:
        """There is nothing to pin for."""

    def begin(self, slot: int, copy: Copy, shard: Shard) -> None:
        self._under_way = self._pool.submit(self._copy, slot, copy, self.copier.parts(slot, shard))

    def _copy(self, slot: int, copy: Copy, parts: list[tuple[torch.Tensor, torch.Tensor, slice]]) -> None:
        began, sums = time.monotonic(), torch.frombuffer(self.copier.region.digests(slot), dtype=torch.int64)
        with torch.no_grad():
            for value, room, blocks in parts:
                room.copy_(value)
                digests(value, sums[blocks])
        self.copier.region.finish(slot, copy, self.copier.bytes)
        self._took_s = time.monotonic() - began

    def settle(self) -> None:
        if self._under_way is None:
            return
        began = time.monotonic()
        try:
            self._under_way.result()
        except Exception:  # the end of a thread: the step needs no copy
            traceback.print_exc()
            self.copier.made = None
        self._under_way = None
        self._held_up_s += time.monotonic() - began

    wait = settle

    def measured(self) -> tuple[float | None, float]:
        """Since the last call: seconds of a copy that was done, and for how long the step was held up by one."""
        found = (self._took_s, self._held_up_s)
        self._took_s, self._held_up_s = None, 0.0
        return found


class _Streamed:
    """Copies on a stream of their own, to memory that is pinned."""

    at_once = False

    def __init__(self, copier: Copier, device: torch.device) -> None:
        self.copier, self.device = copier, device
        self._stream = torch.cuda.Stream(device)
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._held_up = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._to_tell = False
        self._header = torch.zeros(len(SLOT), dtype=torch.int64, device=device)
        self._sums = torch.zeros(copier.region.slot_blocks, dtype=torch.int64, device=device)
        self._under_way = False
        self.slots = 0
        """Those that are pinned, or will be soon: the others are not used."""
        self._pinning = threading.Thread()
        self.pin(slots_for(buddy_every=0))

    def pin(self, slots: int) -> None:
        """So many slots, in the background: once, for it takes a second for every five gigabytes."""
        if slots > self.slots:
            self._pinning = threading.Thread(target=self._pin, args=(self.slots, slots), name="pin", daemon=True)
            self.slots = slots
            self._pinning.start()

    def _pin(self, first: int, last: int) -> None:
        """Headers and digests with the first slot.  Copies to memory that is not pinned hold up the host."""
        began, region = time.monotonic(), self.copier.region
        start = region.data_at(first) if first else 0
        for slot in range(first, last):
            end = region.data_at(slot) + region.slot_bytes
            code = torch.cuda.cudart().cudaHostRegister(self.copier.memory[start:end].data_ptr(), end - start, 0)
            if int(code):
                print(
                    f"only {slot} of {region.slots} slots are pinned, copies to others are slow: cudaHostRegister said {code}",
                    flush=True,
                )
                return
            start = region.data_at(slot + 1)
        print(f"host copies: {start / 2**30:.2f} GiB pinned in {time.monotonic() - began:.1f} s", flush=True)

    def ready(self) -> None:
        self._pinning.join()

    def begin(self, slot: int, copy: Copy, shard: Shard) -> None:
        words = torch.frombuffer(self.copier.region.header(slot), dtype=torch.int64)
        sums = torch.frombuffer(self.copier.region.digests(slot), dtype=torch.int64)
        complete, *others = fields_of(copy, self.copier.bytes)
        with torch.no_grad(), torch.cuda.stream(self._stream), self._recorded():
            for value, room, blocks in self.copier.parts(slot, shard):
                room.copy_(value, non_blocking=True)
                if value.is_cuda:
                    digests(value, self._sums[blocks])
                else:  # of the host: its digests go with the launch, since a copy to the device may wait for the stream
                    for block, word in zip(range(blocks.start, blocks.stop), digests(value).tolist(), strict=True):
                        self._sums[block].fill_(word)
            sums.copy_(self._sums, non_blocking=True)
            for field, number in enumerate((0, *others)):
                self._header[field].fill_(number)
            words.copy_(self._header, non_blocking=True)
            self._header[0].fill_(complete)
            words[:1].copy_(self._header[:1], non_blocking=True)
        self._to_tell = True

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """From the first launch to the last there was, whatever happens: ``wait`` is for all of them."""
        self._first.record()
        self._under_way = True
        try:
            yield
        finally:
            self._last.record()

    def settle(self) -> None:
        if self._under_way:
            stream = torch.cuda.current_stream(self.device)
            self._held_up[0].record(stream)
            stream.wait_event(self._last)
            self._held_up[1].record(stream)

    def wait(self) -> None:
        if self._under_way:
            self._last.synchronize()
            self._under_way = self._to_tell = False

    def measured(self) -> tuple[float | None, float]:
        """Since the last call: seconds of a copy that was done, and for how long the device was held up by one."""
        if not self._to_tell or not self._held_up[1].query():
            return None, 0.0
        self._to_tell = False
        return self._first.elapsed_time(self._last) / 1e3, self._held_up[0].elapsed_time(self._held_up[1]) / 1e3
