"""Host memory: what a worker copies into its slots, what outlives it with its node's keeper, what goes on to a buddy.

A copy takes its time and is torn if its writer dies meanwhile.  It ends where it began: the slot is one object, and what was begun in its
place is another.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.copy_budget import slots_for
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import NO_COPIES, Copied, Outcome
from elastic.protocol.copy_schedule import Copies, Copy, NoRoom, SaveRule
from elastic.protocol.plan import Plan
from elastic.sim.faults import Point

if TYPE_CHECKING:
    from elastic.sim.cluster import Cluster
    from elastic.sim.uploads import Uploads
    from elastic.sim.worker import Worker


@dataclass(eq=False)
class Slot:
    """``copy`` is what its header says once it is ``complete``."""

    copy: Copy
    complete: bool = False


Slots = list[Slot | None]


def whole(slots: Slots) -> list[Copy | None]:
    """What is complete in each."""
    return [slot.copy if slot is not None and slot.complete else None for slot in slots]


@dataclass
class Shelf:
    """A keeper's memory.  ``left``: the slots of workers that died on its node; ``guests``: those of other nodes' workers."""

    left: dict[WorkerId, Slots] = field(default_factory=dict)
    guests: dict[WorkerId, Slots] = field(default_factory=dict)

    def release(self, copied: Version, buddied: Version) -> int:
        """Free what is older; how much that was."""
        freed = 0
        for shelf, needed in ((self.left, copied), (self.guests, buddied)):
            for slots in shelf.values():
                for n, slot in enumerate(slots):
                    if slot is not None and slot.copy.age < (needed.generation, needed.step):
                        slots[n], freed = None, freed + 1
        return freed


class Memory:
    """The slots of one worker, and what it does with them."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.sim = worker, worker.sim
        self.slots: Slots = [None] * slots_for(worker.sim.rules.copy_every, worker.sim.rules.buddy_every)
        self.copies: Copies | None = None
        self.buddied: Copy | None = None
        """The newest of which the buddy has said that it is complete there."""
        self.generation = 0
        self.saving: Version | None = None
        """The newest save that was begun and is neither in the bucket nor given up, as far as the keeper says."""
        self.save_rule = SaveRule(worker.sim.rules.save_every, worker.sim.rules.target_step)

    # -- what the worker does -------------------------------------------------------------------------------------

    def enter(self, plan: Plan) -> None:
        before = self.copies if self.copies is None or self.saving is not None else replace(self.copies, saving=())
        self.copies, self.buddied = Copies.begin(plan, self.worker.name, before, whole(self.slots), self.save_rule), None
        self.generation = plan.generation
        self._go_on(None)

    def committed(self, outcome: Outcome, *, fenced: bool = False) -> None:
        """A step was applied.  Once fenced a worker begins no copy: what its keeper has said to hold stays there."""
        assert self.copies is not None
        before, self.copies = self.copies, self.copies.after(outcome)
        if not fenced:
            self._go_on(before)

    def _go_on(self, before: Copies | None) -> None:
        copies = self.copies
        if copies is None or copies.begun is None or (before is not None and before.begun == copies.begun):
            return
        try:
            place = copies.slot(whole(self.slots))
        except NoRoom:
            self.sim.clock.after(0.3, self.worker.receive, self._make_room, copies)
            return
        if copies.begun in copies.saving:
            self.saving = copies.begun.version
            self.sim.strikes.passes(self.worker, Point.SAVE)
        if not self.worker.alive:
            return
        if place is None:
            self._send(copies.begun)
            return
        old, slot = self.slots[place], Slot(copies.begun)
        self.slots[place] = slot
        if old is not None:
            self.sim.oracle.copies.overwritten(self.worker, old)
        work_s = 0.05 + (0.4 if self.sim.rng.random() < 0.8 else 2.5) * self.sim.rng.random()
        self.sim.clock.after(work_s, self.worker.receive, self._complete, slot)

    def _make_room(self, copies: Copies) -> None:
        """The last save of a world has no slot as long as the one before is on its way."""
        if self.copies is not copies or self.worker.world is None or copies.begun is None:
            return
        if self.saving is None:
            self.copies = replace(copies, saving=(copies.begun,))
        self._go_on(None)

    def heed(self, keeper: Uploads) -> None:
        """The keeper was told which saves are on their way."""
        if self.saving is not None and keeper.latest.is_over(self.worker.name, self.saving):
            self.saving = None

    def _complete(self, slot: Slot) -> None:
        slot.complete = True
        self._send(slot.copy)

    def through(self) -> Copied:
        """What it puts into a commit record: the newest steps of this generation that are complete here, and at its buddy."""
        copies, node = self.copies, self.sim.cluster.nodes.get(self.worker.node)
        if copies is None:
            return NO_COPIES
        if node is not None and node.keeper:
            self.heed(node.uploads)
        held = whole(self.slots)
        steps = [copy.version.step for copy in (copies.begun, copies.copied) if copy is not None and copy in held and self._now(copy)]
        at_buddy = self.buddied.version.step if self.buddied is not None and self._now(self.buddied) else -1
        behind = self.saving is not None or (bool(copies.plan.copy_every) and copies.begun not in held)
        through = max(steps, default=-1) if copies.plan.copy_every else -1
        return Copied(through, at_buddy, save=copies.asks, behind=int(behind))

    def _now(self, copy: Copy) -> bool:
        """Is it of this generation: cut as it is cut now, of what it began from or of a later step?"""
        assert self.copies is not None
        plan = self.copies.plan
        return copy.cell == self.copies.cell and (copy.version == plan.version or copy.version.generation == plan.generation)

    # -- to the buddy ---------------------------------------------------------------------------------------------

    def _send(self, copy: Copy) -> None:
        if self.copies is not None and copy == self.copies.sent:
            self.sim.clock.after(0.1 * self.sim.rng.random(), self._begin_sending, copy)

    def _begin_sending(self, copy: Copy) -> None:
        """The keeper does that, from the same memory; again until it has arrived or another is to go."""
        if not self.worker.alive or self.copies is None or copy != self.copies.sent:
            return
        cluster, node = self.sim.cluster, self.sim.cluster.nodes.get(self.worker.node)
        buddy = cluster.shelf(node.buddy) if node is not None and node.keeper and node.buddy else None
        if buddy is None or copy not in whole(self.slots):
            self.sim.clock.after(1.0, self._begin_sending, copy)
            return
        guest = buddy.guests.setdefault(self.worker.name, [None, None])
        if copy in whole(guest):
            return self._acknowledged(copy)
        free = [(held.age if held else (-1, -1), n) for n, held in enumerate(whole(guest)) if held is None or held != self.copies.buddied]
        slot = guest[min(free)[1]] = Slot(copy)
        self.sim.clock.after(0.1 + 0.9 * self.sim.rng.random(), self._sent, slot, node.buddy, buddy)  # type: ignore[union-attr]

    def _sent(self, slot: Slot, buddy: NodeId, shelf: object) -> None:
        """Whether the last byte was taken by the keeper that took the first one."""
        if not self.worker.alive or self.sim.cluster.shelf(buddy) is not shelf:
            return self._begin_sending(slot.copy)
        slot.complete = True
        self.worker.receive(self._acknowledged, slot.copy)

    def _acknowledged(self, copy: Copy) -> None:
        self.buddied = copy


# ---- the keeper's side


def held_at(cluster: Cluster, node: NodeId) -> tuple[Holding, ...]:
    """All that the keeper of ``node`` has complete: of its node's workers, dead or alive, and of those whose buddy it is."""
    shelf = cluster.shelf(node)
    if shelf is None:
        return ()
    places = [(worker.name, worker.memory.slots) for worker in cluster.on(node)]
    places += [*shelf.left.items(), *shelf.guests.items()]
    return tuple(Holding(name, *copy, keeper=node) for name, slots in places for copy in whole(slots) if copy is not None)
