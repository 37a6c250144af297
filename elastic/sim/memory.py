"""Models host memory: the slots of a worker, which its node's keeper has after the worker's death, and the
copies at the worker's buddy.

A copy takes time, and stays incomplete if its writer dies meanwhile.  A copy that replaces an older one is a
new :class:`Slot` object, so an older copy that completes late cannot mark the newer one as complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.copy_budget import slots_for
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import NO_COPIES, Copied, Outcome
from elastic.protocol.copy_schedule import Copy, CopySchedule, NoRoom, SaveRule
from elastic.protocol.faults import Point
from elastic.protocol.plan import Plan

if TYPE_CHECKING:
    from elastic.sim.cluster import Cluster
    from elastic.sim.uploads import Uploads
    from elastic.sim.worker import Worker


@dataclass(eq=False)
class Slot:
    """A place for one copy.  It holds ``copy`` once it is ``complete``.  ``save`` is True if the copy is
    protected for a save.
    """

    copy: Copy
    complete: bool = False
    save: bool = False
    bits: int = 0
    """The bits of the copy: see ``flips.py``."""


Slots = list[Slot | None]


def whole(slots: Slots) -> list[Copy | None]:
    """Returns the complete copy of each slot, or None for a slot without one."""
    return [slot.copy if slot is not None and slot.complete else None for slot in slots]


@dataclass
class Shelf:
    """A keeper's memory.

    ``left`` has the slots of workers that died on its node.  ``guests`` has the copies of workers on other
    nodes.
    """

    left: dict[WorkerId, Slots] = field(default_factory=dict)
    guests: dict[WorkerId, Slots] = field(default_factory=dict)

    def release(self, copied: Version, buddied: Version) -> int:
        """Frees the copies older than ``copied`` in ``left`` and older than ``buddied`` in ``guests``.
        Returns how many it freed.
        """
        freed = 0
        for shelf, needed in ((self.left, copied), (self.guests, buddied)):
            for slots in shelf.values():
                for n, slot in enumerate(slots):
                    if slot is not None and slot.copy.age < (needed.generation, needed.step):
                        slots[n], freed = None, freed + 1
        return freed


class Memory:
    """The slots of one worker, and its work on them."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.sim = worker, worker.sim
        self.slots: Slots = [None] * slots_for(worker.sim.rules.copy_every, worker.sim.rules.buddy_every)
        self.copies: CopySchedule | None = None
        self.buddied: Copy | None = None
        """The newest copy that is complete at the buddy, as the buddy has confirmed."""
        self.generation = 0
        self.saving: Version | None = None
        """The newest save that was begun.  It is None once the keeper has said that all saves of this worker
        are in the bucket or given up.
        """
        self.save_rule = SaveRule(worker.sim.rules.save_every, worker.sim.rules.target_step)

    # -- what the worker does
    # -------------------------------------------------------------------------------------

    def enter(self, plan: Plan) -> None:
        before = (
            self.copies if self.copies is None or self.saving is not None else replace(self.copies, saving=())
        )
        self.copies, self.buddied = (
            CopySchedule.begin(plan, self.worker.name, before, whole(self.slots), self.save_rule),
            None,
        )
        self._go_on(None)
        if not any(
            slot is not None and not slot.complete and slot.copy == self.copies.begun for slot in self.slots
        ):
            # else ``_complete`` sets this, after the first copy
            self.generation = plan.generation

    def committed(self, outcome: Outcome, *, settled: bool = False) -> None:
        """Notes an applied step.  No copy begins after a settled step, so the copies that the keeper has
        reported stay.
        """
        assert self.copies is not None
        before, self.copies = self.copies, self.copies.after(outcome)
        if not settled:
            self._go_on(before)
        elif save := self.copies.promised(before):
            self.saving = save.version

    def ended(self) -> None:
        """Begins the last save of the run, unless the commit of its step has begun it."""
        if self.copies is not None and (ended := self.copies.ended()).saving != self.copies.saving:
            self.copies = ended
            self._go_on(None)

    def _go_on(self, before: CopySchedule | None) -> None:
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
        saves = copies.begun in copies.saving
        if place is None:
            held = self.slots[whole(self.slots).index(copies.begun)]
            assert held is not None
            held.save |= saves
            self._send(copies.begun)
            return
        self.sim.oracle.copies.begun(self.worker, copies.begun, copies.plan)
        bits = self.sim.flips.of(self.worker.name, *copies.begun)
        old, slot = self.slots[place], Slot(copies.begun, save=saves, bits=bits)
        self.slots[place] = slot
        if old is not None:
            self.sim.oracle.copies.overwritten(self.worker, old)
        work_s = 0.05 + (0.4 if self.sim.rng.random() < 0.8 else 2.5) * self.sim.rng.random()
        self.sim.clock.after(work_s, self.worker.receive, self._complete, slot, copies.plan.generation)

    def _make_room(self, copies: CopySchedule) -> None:
        """Tries again to find a slot for the last save of a world.  There is none while the save before it is
        on its way.
        """
        if self.copies is not copies or self.worker.world is None or copies.begun is None:
            return
        if self.saving is None:
            self.copies = replace(copies, saving=(copies.begun,))
        self._go_on(None)

    @property
    def copies_newest(self) -> bool:
        """True while the copy that was begun last is not complete."""
        begun = self.copies.begun if self.copies is not None else None
        return any(slot is not None and slot.copy == begun and not slot.complete for slot in self.slots)

    def heed(self, keeper: Uploads) -> None:
        """Forgets the newest save if ``keeper`` knows that it is over."""
        if self.saving is not None and keeper.latest.is_over(self.worker.name, self.saving):
            self.saving = None

    def _complete(self, slot: Slot, generation: int) -> None:
        """Completes a copy that was begun in the world of ``generation``.  A save of an earlier world may
        wait for this copy.
        """
        slot.complete, self.generation = True, max(generation, self.generation)
        self._send(slot.copy)

    def through(self) -> Copied:
        """Returns the worker's part of a commit record: the newest steps of this generation of which a copy
        is complete here and at its buddy, and whether a save is asked for or late.
        """
        copies, node = self.copies, self.sim.cluster.nodes.get(self.worker.node)
        if copies is None:
            return NO_COPIES
        if node is not None and node.keeper:
            self.heed(node.uploads)
        held = whole(self.slots)
        steps = [
            copy.version.step
            for copy in (copies.begun, copies.copied)
            if copy is not None and copy in held and self._now(copy)
        ]
        at_buddy = self.buddied.version.step if self.buddied is not None and self._now(self.buddied) else -1
        behind = self.saving is not None or (bool(copies.plan.copy_every) and copies.begun not in held)
        through = max(steps, default=-1) if copies.plan.copy_every else -1
        return Copied(through, at_buddy, save=copies.asks, behind=int(behind))

    def _now(self, copy: Copy) -> bool:
        """Returns whether ``copy`` is of the worker's present cell, and of the version from which this
        generation began or of one of its steps.
        """
        assert self.copies is not None
        plan = self.copies.plan
        return copy.cell == self.copies.cell and (
            copy.version == plan.version or copy.version.generation == plan.generation
        )

    # -- to the buddy
    # ---------------------------------------------------------------------------------------------

    def _send(self, copy: Copy) -> None:
        if self.copies is not None and copy == self.copies.sent:
            self.sim.clock.after(0.1 * self.sim.rng.random(), self._begin_sending, copy)

    def _begin_sending(self, copy: Copy) -> None:
        """Begins to send ``copy`` to the buddy.  Tries again until the copy has arrived or a newer one is to
        be sent instead.

        In production the keeper sends it, from the same memory.
        """
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
        free = [
            (held.age if held else (-1, -1), n)
            for n, held in enumerate(whole(guest))
            if held is None or held != self.copies.buddied
        ]
        own = next(slot for slot in self.slots if slot is not None and slot.complete and slot.copy == copy)
        slot = guest[min(free)[1]] = Slot(copy, bits=own.bits)
        self.sim.clock.after(0.1 + 0.9 * self.sim.rng.random(), self._sent, slot, node.buddy, buddy)  # type: ignore[union-attr]

    def _sent(self, slot: Slot, buddy: NodeId, shelf: object) -> None:
        """Completes a copy at the buddy if the same keeper took the first and the last byte, or else sends
        the copy again.
        """
        if not self.worker.alive or self.sim.cluster.shelf(buddy) is not shelf:
            return self._begin_sending(slot.copy)
        slot.complete = True
        self.worker.receive(self._acknowledged, slot.copy)

    def _acknowledged(self, copy: Copy) -> None:
        self.buddied = copy


# ---- the keeper's side


def held_at(cluster: Cluster, node: NodeId) -> tuple[Holding, ...]:
    """Returns the complete copies at the keeper of ``node``: those of its node's workers, dead or alive, and
    those of workers on other nodes.
    """
    shelf = cluster.shelf(node)
    if shelf is None:
        return ()
    places = [(worker.name, worker.memory.slots) for worker in cluster.on(node)]
    places += [*shelf.left.items(), *shelf.guests.items()]
    return tuple(
        Holding(name, *copy, keeper=node)
        for name, slots in places
        for copy in whole(slots)
        if copy is not None
    )
