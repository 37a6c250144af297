"""Copies a worker's shard into a slot after an update, while the next step computes.

A thread makes the copy, and marks the slot complete at the end.  On an accelerator the bytes go over a stream
of their own into pinned memory, piece by piece, because an abort has to wait for everything that was launched
before it.  When a world ends, a copy goes on while the next world forms: it reads the shard of the ended
world, and the slot that it writes outlives this process (``state/region.py``).

A save is such a copy.  Making it is all that a worker does for a save: the keeper uploads the copy from the
slot.

Where state is offloaded it lives in a slot itself (``state/streaming.py``).  Then nothing is copied: each
update fills another slot, which is the copy.  Slots in a file are never pinned: pinned pages would stay in
memory.

**Memory.** A slot has as much memory as its copy needs.  A pinned slot gets more if the node has it: as much
as a copy will need in the next world, if a node or a worker is lost.  Without that, the smaller world would
pin memory while it begins to train, which would hold up its first steps.  The memory comes beside the steps,
in small pieces.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from elastic.engine.streams import finish, stream
from elastic.errors import StateDamaged
from elastic.ids import Cell, Version, WorkerId
from elastic.plan.copy_budget import CopyRule, Pace, slots_for
from elastic.plan.placement import held
from elastic.protocol.commit_record import NO_SAVE, Copied, Outcome
from elastic.protocol.copy_schedule import NO_SAVES, Copy, CopySchedule, NoRoom, SaveRule
from elastic.protocol.plan import Plan
from elastic.state.digest import digests
from elastic.state.node_memory import SPARE, free_for, reserve
from elastic.state.pins import Pins
from elastic.state.region import Frame, Region, frame
from elastic.state.shard import DTYPES, Key, Shard, ShardHome
from storage.background import in_background
from storage.slices import Tensor

NEVER = -1
"""Step that a member reports while it has no copy of the present world."""
PIECE = 2**28
"""Bytes after which a piece ends, rounded up to a tensor.  At most two pieces are in flight, so that an abort
waits for little.
"""
POLL_S = 0.005
"""Seconds between two checks whether the keeper has finished a save."""

Part = tuple[torch.Tensor, torch.Tensor, slice]
"""The memory of a tensor, its place in the slot, and the range of its digests among those of the slot."""
Strike = Callable[[Plan, int, int], None]
"""``strike(plan, world_rank, step)`` is called while the copy of ``step``, which is a save, is under way;
tests end the process here.
"""
Foresee = Callable[[Plan], int]
"""``foresee(plan)`` returns the bytes of a copy in the world that follows if a part of the plan's members is
lost; 0 if no world can follow.
"""


class NoMemory(Exception):
    """The node has no memory for a copy."""


class Snapshots:
    """Makes the copies of one worker, in all its worlds.  Only the training thread calls its methods."""

    def __init__(
        self,
        region: Region,
        tensors: tuple[Tensor, ...],
        device: torch.device,
        rule: CopyRule,
        saves: SaveRule = NO_SAVES,
        patience_s: float = 0.0,
        strike: Strike = lambda plan, world_rank, step: None,
        foresee: Foresee = lambda plan: 0,
        *,
        lives: bool = False,
    ) -> None:
        """``lives`` says that the state itself lives in the slots.

        ``patience_s`` limits how long a due save waits for the previous save; after that, steps go on, and
        the due save is made later.  After a wait in vain no save waits, until one finds the previous save over.
        """
        self.saves, self.patience_s, self.strike, self.foresee = saves, patience_s, strike, foresee
        self._rank = self._awaited = 0
        """``_rank`` is the world rank in the present world; ``_awaited`` is the number of the newest save
        that was waited for.
        """
        self._in_vain = False
        """True if, when the last save became due, the save before it was not over even after the wait."""
        self._homeless: Shard | None = None
        """The shard that is copied as soon as a slot is free."""
        self.region, self.tensors, self.pace = region, tensors, Pace(rule)
        self.memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        self.copies: CopySchedule | None = None
        self.made: Version | None = None
        """The newest version of the present world whose copy was begun here.  It is complete once ``settle``
        has returned.
        """
        self.buddied: Version | None = None
        """The newest version of the present world that the buddy has, according to the keeper."""
        self._frame, self._foreseen = Frame({}, 0, 0), 0
        self._stepped_at = self._held_up_s = 0.0
        self._took_s: float | None = None
        self._lived_in: frozenset[int] = frozenset()
        """The slots in which shards live.  The copy schedule does not protect them."""
        self._way = (
            _Pinned(region, self.memory, device, lives=lives)
            if device.type == "cuda" and not region.on_disk
            else _HostCopy(region)
        )
        self._lives = lives
        self._under_way: tuple[Future[None], Callable[[], None]] | None = None
        """The copy that is being made, and a call that makes it again."""

    def ready(self) -> None:
        """Returns once the first copies run at full speed."""
        self._way.ready()

    def rest(self) -> None:
        """Takes no more memory for the next world until a world is entered: this one heals."""
        self._way.rest()

    def enter(self, plan: Plan, worker: WorkerId, shard: Shard) -> None:
        """Begins a world, in which this member has ``shard`` at the plan's version."""
        self._wait()
        self.made, self.buddied, self._frame = None, None, frame(self.tensors, shard.cell)
        self._homeless, self._rank = None, plan.world_rank(worker)
        before = self.copies if self.copies is None or self.region.saving else replace(self.copies, saving=())
        self.copies = CopySchedule.begin(
            plan, worker, before, self.region.all_held(), self.saves, lives=shard.home is not None
        )
        if self.copies.begun is not None and self.region.find(self.copies.begun) is not None:
            self.made = shard.version
        self.region.set_copy("safe", self.copies.buddied)
        self.region.send(self.copies.sent)
        slots, self._foreseen = (
            slots_for(plan.copy_every, plan.buddy_every, offload=shard.home is not None),
            self.foresee(plan),
        )
        slots = min(slots, self.region.slots)
        self._way.pin(slots, self.bytes)
        if not self._lives:
            self._way.foresee(self.bytes, self._foreseen)
        self.region["wanted"] = self._way.slots * self.bytes
        self._stepped_at, self._held_up_s, self._took_s = time.monotonic(), 0.0, None
        self._begin(shard)
        if self._under_way is None:
            self._name_world()

    def _name_world(self) -> None:
        """Tells the keeper the present generation, after the first copy of its world: a save of an earlier
        world may still lack that copy.
        """
        assert self.copies is not None
        self.region["generation"] = self.copies.plan.generation

    def committed(self, outcome: Outcome, shard: Shard | None) -> None:
        """Records that a step was applied, and begins the copy that is due now.  If ``shard`` is None,
        nothing is copied.
        """
        if self.copies is None:
            return
        now = time.monotonic()
        self.pace.stepped(max(now - self._stepped_at - self._held_up_s, 0.0))
        self._stepped_at, self._held_up_s = now, 0.0
        if self._took_s is not None:
            self.pace.copied(self._took_s)
            self._took_s = None
        before, self.copies = self.copies, self.copies.after(outcome)
        if shard is None:
            if save := self.copies.promised(before):
                self.region.begin_save(save)
        elif self.copies.begun != before.begun:
            if self.copies.sent != before.sent:
                self.region.send(self.copies.sent)
            self._begin(shard)

    def ended(self, shard: Shard) -> None:
        """Begins the last save of the run, at the version of ``shard``, unless the commit of that version has
        begun it.
        """
        if self.copies is not None and (ended := self.copies.ended()).saving != self.copies.saving:
            self._wait()
            self.copies = ended
            self._begin(shard)

    def _begin(self, shard: Shard) -> None:
        copies = self.copies
        assert copies is not None
        if self.region.copy("safe") != copies.buddied:
            self.region.set_copy("safe", copies.buddied)
        held = self.region.all_held()[: self._way.slots]
        try:
            ready = held[: self._way.usable()]  # a slot that is still being pinned would hold up the step
            slot = copies.slot(ready if copies.free(ready) else held) if shard.home is None else None
        except NoRoom:
            self._homeless = shard
            return
        if copies.begun is None:
            return
        if saves := copies.begun in copies.saving:
            self.region.begin_save(copies.begun)
        if shard.home is not None:  # the slot in which it lives is the copy
            self.made = shard.version
        elif slot is not None:
            self._wait()
            self.region.begin(slot)
            copying = partial(self._copy, slot, copies.begun, shard, saves)
            self._under_way = in_background(copying, "copies"), copying
            self.made = shard.version

    def verify(self, shard: Shard) -> None:
        """Raises :class:`StateDamaged` if ``shard`` has other bytes than the copy of its version had when it was
        made: nothing writes to it in between.  Does nothing if that version is not copied, or lives in a slot,
        where each update checks what it reads.

        It reads the shard once, at the speed of the device's memory, and waits for the result.
        """
        copy = Copy(shard.version, shard.cell)
        slot = self.region.find(copy) if self.made == shard.version and shard.home is None else None
        if slot is None:
            return
        parts = [*self._parts(slot, shard, saves=False)]
        found = torch.cat([digests(value).to(parts[0][0].device) for value, _, _ in parts]).cpu()
        copied = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        expected = torch.cat([copied[blocks] for _, _, blocks in parts])
        if torch.equal(found, expected):
            return
        ends = torch.tensor([blocks.stop - blocks.start for _, _, blocks in parts]).cumsum(0)
        first = int(torch.searchsorted(ends, int((found != expected).nonzero()[0]), right=True))
        tensor = [tensor for tensor, place in self._frame.places.items() if place.bytes][first]
        raise StateDamaged(
            f"{tensor.kind} {tensor.name!r} has changed in memory since step {shard.version.step}, and no update "
            "has written to it: a memory is faulty, or code of the job writes to weights"
        )

    def handed_over(self) -> None:
        """Returns once the copy of the newest version is complete, or has failed: this process may end then."""
        self._wait()

    def make_room(self, give_up: Callable[[], bool]) -> None:
        """Returns once the last save of this world is copied, or ``give_up()`` holds while there is no room
        for it.
        """
        while self._homeless is not None and not give_up():
            if self.region.saving:
                time.sleep(POLL_S)
                continue
            assert self.copies is not None and self.copies.begun is not None
            shard, self._homeless = self._homeless, None
            self.copies = replace(self.copies, saving=(self.copies.begun,))
            self._begin(shard)
        if self.copies is not None and self.copies.begun in self.copies.saving:
            self._wait()  # no later step would find out that it failed

    def _copy(self, slot: int, copy: Copy, shard: Shard, saves: bool) -> None:
        """Makes the copy.  It runs on the copying thread."""
        began = time.monotonic()
        self._make_fit(slot, self.bytes, self._free(self.region.all_held()))
        with torch.no_grad():
            self._way.fill(slot, self._parts(slot, shard, saves))
        self.region.finish(slot, copy, self.bytes, save=saves)
        self._took_s = time.monotonic() - began

    # ---- shards that live in slots

    def home(self, copy: Copy, held: Iterable[Shard], *, adopt: bool) -> ShardHome:
        """Returns a slot for a shard that becomes ``copy``; ``held`` are the shards that live in slots now.

        With ``adopt``, a slot that holds ``copy`` already is returned as it is.  Raises :class:`NoMemory`.
        """
        self._wait()
        self._lived_in = frozenset(shard.home.slot for shard in held if shard.home is not None)
        layout = frame(self.tensors, copy.cell)
        if adopt and (slot := self.region.find(copy)) is not None:
            return self._home(slot, copy.cell, layout, whole=True)
        self._way.pin(min(slots_for(1, 0, offload=True), self.region.slots), layout.bytes)
        return self._empty(copy.cell, layout, copy.version)

    def next_home(self, shard: Shard) -> ShardHome:
        """Returns a slot for the next version of ``shard``, which lives in another slot.  Raises
        :class:`NoMemory`.

        It is called before a step is prepared: after its commit, an update must not fail for want of memory.
        """
        assert shard.home is not None
        self._lived_in = frozenset((shard.home.slot,))
        return self._empty(shard.cell, frame(self.tensors, shard.cell))

    def moved_in(self, shard: Shard, version: Version) -> None:
        """Marks the slot in which ``shard`` lives as its copy at ``version``."""
        assert shard.home is not None
        self.region.finish(shard.home.slot, Copy(version, shard.cell), shard.home.bytes)

    def _empty(self, cell: Cell, layout: Frame, wanted: Version | None = None) -> ShardHome:
        """Empties a slot that nobody needs and gives it memory for ``layout``.  Raises :class:`NoMemory`.

        Slots with a copy of ``wanted`` are taken last.  Among the others, slots that have enough memory are
        taken first, and then empty slots and the oldest copies.
        """
        slots = self.region.all_held()[: self._way.slots]
        free = self._free(slots)
        if not free:
            raise NoMemory(f"every one of {len(slots)} slots holds state that is still needed")

        def worth(slot: int) -> tuple[bool, bool, tuple[int, int]]:
            copy, lacks = slots[slot], self.region.lacks(slot, layout.bytes) > 0
            return (copy.version == wanted, lacks, copy.age) if copy is not None else (False, lacks, (-1, -1))

        slot = min(free, key=worth)
        self.region.begin(slot)
        self._make_fit(slot, layout.bytes, [each for each in free if not worth(each)[0]])
        return self._home(slot, cell, layout)

    def _home(self, slot: int, cell: Cell, layout: Frame, *, whole: bool = False) -> ShardHome:
        data, values, blocks = self.region.data_at(slot), {}, {}
        for tensor, place in layout.places.items():
            key, room = (
                (tensor.kind, tensor.name),
                self.memory[data + place.offset : data + place.offset + place.bytes],
            )
            values[key] = room.view(DTYPES[tensor.dtype]).view(held(tensor, cell).shape)
            blocks[key] = slice(place.first_block, place.first_block + place.blocks)
        places = {(tensor.kind, tensor.name): place for tensor, place in layout.places.items()}

        def let_go(key: Key) -> None:
            first = data + places[key].offset
            self.region.let_go(first, first + places[key].bytes)

        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        return ShardHome(slot, layout.bytes, values, sums, blocks, whole, self.region.folder, let_go)

    def _free(self, slots: Collection[Copy | None]) -> list[int]:
        """Returns those of ``slots`` that hold neither a protected copy nor a living shard."""
        free = self.copies.free([*slots]) if self.copies is not None else range(len(slots))
        return [slot for slot in free if slot not in self._lived_in]

    def _make_fit(self, slot: int, size: int, free: Iterable[int]) -> None:
        """Gives the slot memory for a copy of ``size`` bytes.  If the node lacks memory, the other ``free``
        slots give theirs back first.

        Raises :class:`NoMemory` if there is still too little.
        """
        if self._way.fit(slot, size, self._foreseen if self._lives else 0):
            for other in free:
                if other != slot:
                    self.region.begin(other)
                    self._way.empty(other)
            if why := self._way.fit(slot, size, 0):
                self.region["lacking"] = size
                raise NoMemory(why)
        self.region["lacking"] = 0

    def _parts(self, slot: int, shard: Shard, saves: bool) -> Iterator[Part]:
        """Yields the parts of ``shard`` that are to be copied, and their places in ``slot``."""
        data = self.region.data_at(slot)
        for tensor, place in self._frame.places.items():
            if not place.bytes:  # this member has no part of it, perhaps not even a tensor
                continue
            if saves and self.copies is not None:
                self.strike(self.copies.plan, self._rank, shard.version.step)
            value = shard.values[tensor.kind, tensor.name]
            room = (
                self.memory[data + place.offset : data + place.offset + place.bytes]
                .view(value.dtype)
                .view(value.shape)
            )
            yield value, room, slice(place.first_block, place.first_block + place.blocks)

    def _wait(self) -> None:
        """Returns once the copy under way has ended."""
        if self._under_way is not None:
            self._end(*self._under_way)
            self._name_world()

    def _end(self, future: Future[None], again: Callable[[], None]) -> None:
        """Waits for the copy under way.  A copy that fails is made once more: without it no later copy begins
        in this world.
        """
        self._under_way = None
        for attempt in (future.result, again):
            try:
                return attempt()
            except NoMemory as error:
                print(
                    f"no memory for a copy of the state: {error}; training goes on without copies", flush=True
                )
                break
            except Exception:  # the step needs no copy
                traceback.print_exc()
        self.made = None
        if self.copies is not None and self.copies.begun in self.copies.saving:
            self.region["save_failed"] = 1

    def _patiently(self) -> bool:
        """Returns whether the previous save is over.

        It waits up to ``patience_s`` for that, but only once for each save, and not while a save takes longer
        than the time to the next save: then waiting costs steps and gains nothing.
        """
        if self._awaited < self.region["saves"]:
            self._awaited, until = (
                self.region["saves"],
                time.monotonic() + (0.0 if self._in_vain else self.patience_s),
            )
            while self.region.saving and time.monotonic() < until:
                time.sleep(POLL_S)
            self._in_vain = self.region.saving
        return not self.region.saving

    def settle(self) -> Copied:
        """Waits for the copy under way, and returns what this member reports about its copies in the commit."""
        if self._under_way is not None and not self._under_way[0].done():
            self._way.computed()  # while the device still computes, the copy delays nothing
            began = time.monotonic()
            self._wait()
            self._held_up_s += time.monotonic() - began
        self._wait()
        sent, asks = (self.copies.sent, self.copies.asks) if self.copies else (None, NO_SAVE)
        over = self._patiently() if asks != NO_SAVE else not self.region.saving
        # if only saves are copied, no save is reported as a copy
        copied = self.copies is not None and bool(self.copies.plan.copy_every)
        lacking = copied and self.made is None and not self._has_room_again()
        brought = self.region["brought"]
        if sent and brought in (0, self.region["asked"]):
            self.buddied = sent.version if brought else None
        return Copied(
            self.made.step if self.made and self.region["keeper"] and copied else NEVER,
            self.buddied.step if self.buddied else NEVER,
            self.pace.copy_every(able=self._way.usable() == self._way.slots),
            self.pace.buddy_every(self.region["brought_us"] / 1e6) if sent else 0,
            asks,
            int(lacking or not over),
        )

    def _has_room_again(self) -> bool:
        """Returns whether the node now has memory for the copy that found none.  If so, the next save begins,
        and copies go on after it.
        """
        lacking = self.region["lacking"]
        return lacking > 0 and free_for(self.region)[0] >= lacking + SPARE

    def cuts(self, room: torch.Tensor) -> list[int]:
        """Returns the bytes at which a copy from or to ``room``, memory of this worker's region, must be cut."""
        return self._way.cuts(room)

    @property
    def bytes(self) -> int:
        """The size of one copy."""
        return self._frame.bytes


class _HostCopy:
    """Copies memory of the host into a slot."""

    def __init__(self, region: Region) -> None:
        self.region, self.slots = region, region.slots

    def ready(self) -> None:
        """Returns at once: copies always run at full speed here."""

    def usable(self) -> int:
        """Returns the number of slots: none waits to be pinned."""
        return self.slots

    def pin(self, slots: int, size: int) -> None:
        """Pins nothing: copies from host memory need no pinned memory."""

    def foresee(self, size: int, foreseen: int) -> None:
        """Takes nothing ahead: this memory comes quickly when it is written."""

    def rest(self) -> None:
        """Ends nothing."""

    def cuts(self, room: torch.Tensor) -> list[int]:
        """Returns no place: copies from and to host memory are never cut."""
        return []

    def fit(self, slot: int, size: int, foreseen: int) -> str:
        """Gives the slot, which holds no copy, memory of ``size`` bytes and no more.  Returns why there is
        too little, or "".
        """
        self.region.give_back(slot, size)
        return reserve(self.region, slot, size)

    def empty(self, slot: int) -> None:
        """Gives back all memory of the slot, which holds no copy."""
        self.region.give_back(slot)

    def computed(self) -> None:
        """Returns at once: no device has work left."""

    def fill(self, slot: int, parts: Iterable[Part]) -> None:
        """Copies all parts and takes their digests."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        for value, room, blocks in parts:
            room.copy_(value)
            digests(value, sums[blocks])


class _Pinned:
    """Copies memory of a device into a slot, on a stream of its own."""

    def __init__(
        self, region: Region, memory: torch.Tensor, device: torch.device, *, lives: bool = False
    ) -> None:
        self.region, self._stream = region, stream("copies", device)
        self._sums = torch.zeros(region.slot_blocks, dtype=torch.int64, device=device)
        self._before, self._last = (torch.cuda.Event(blocking=True) for _ in range(2))
        self.pins = Pins(region, memory, in_one=lives)
        self.pins.begin(min(slots_for(1, 0), region.slots), region["wanted"] // region.slots)
        self.ready, self.usable, self.pin = self.pins.ready, self.pins.usable, self.pins.begin
        self.fit, self.empty, self.cuts = self.pins.fit, self.pins.empty, self.pins.cuts
        self.foresee, self.rest = self.pins.foresee, self.pins.rest

    @property
    def slots(self) -> int:
        """Number of slots that are pinned or will be soon; the others are not used."""
        return self.pins.slots

    def computed(self) -> None:
        """Waits for all work on the present stream."""
        finish()

    def fill(self, slot: int, parts: Iterable[Part]) -> None:
        """Copies all parts and takes their digests.  Nothing is in flight when it returns or raises."""
        sums = torch.frombuffer(self.region.digests(slot), dtype=torch.int64)
        size, ours = 0, list[Part]()
        with torch.cuda.stream(self._stream):
            try:
                for value, room, blocks in parts:
                    if cuts := self.cuts(room):
                        for part, place in zip(_cut(value, cuts), _cut(room, cuts), strict=True):
                            place.copy_(part, non_blocking=self.pins.pinned(place))
                    else:
                        room.copy_(value, non_blocking=self.pins.pinned(room))
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
        """Ends a piece, and waits for the piece before it."""
        self._before, self._last = self._last, self._before
        self._last.record()
        self._before.synchronize()


def _cut(value: torch.Tensor, cuts: list[int]) -> Iterator[torch.Tensor]:
    """Yields the bytes of ``value``, cut at ``cuts``."""
    raw = value.contiguous().flatten().view(torch.uint8)
    for first, last in pairwise((0, *cuts, len(raw))):
        yield raw[first:last]
