"""Models the collectives of one generation.  No decision controls them.

They follow three rules.  A collective completes nowhere unless every member contributed.  Once all have, it
completes on *any subset* of the members: each sees it after a time of its own, and perhaps never if a member
has gone meanwhile.  If a member *aborts*, the collective for which the others wait may look complete, with
garbage as its result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.ids import WorkerId
from elastic.protocol.commit_record import Copied, Outcome, is_saved, strongest
from elastic.protocol.plan import Plan
from elastic.protocol.reruns import Differ

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation
    from elastic.sim.worker import Worker


class World:
    """A world, in which members find each other (``arrive``) and commit step after step (``contribute``)
    until they leave.
    """

    def __init__(self, sim: Simulation, plan: Plan) -> None:
        self.sim, self.plan, self.generation = sim, plan, plan.generation
        self.here: dict[WorkerId, Worker] = {}
        self.broken = False
        """True if a member died or left, or lost contact; nothing new completes then."""
        self.asked: dict[int, dict[WorkerId, tuple[int, Copied]]] = {}
        """Contributions by step and worker: the boundary flag for which the worker asked, and its report of
        its copies.
        """
        self.completed_at: dict[int, float] = {}
        self.outcomes: dict[int, Outcome] = {}

    def arrive(self, worker: Worker) -> None:
        """Adds a member.

        The groups form once all members have arrived, if the store answers.  Otherwise each member hangs
        until it is told to leave.
        """
        self.here[worker.name] = worker
        if len(self.here) == len(self.plan.members):
            self.sim.clock.after(0.1 + 0.4 * self.sim.rng.random(), self._form)

    def _form(self) -> None:
        if (
            self.broken
            or self.sim.cluster.peers_cut(self.plan.members)
            or not self.sim.cluster.store_answers(self.plan)
        ):
            return
        for name in self.plan.members:
            worker = self.here[name]
            form = worker.refused if worker.node in self.sim.scenario.misset else worker.formed
            worker.later(0.1 * self.sim.rng.random(), form)

    def contribute(self, worker: Worker, step: int, boundary: int, copied: Copied) -> None:
        """Takes the worker's record of ``step``.  The last member's record makes the commit."""
        asked = self.asked.setdefault(step, {})
        asked[worker.name] = (boundary, copied)
        if not self.broken and self.sim.cluster.peers_cut(self.plan.members):
            self.falls_apart()
        if self.broken:
            self._tell_of_loss(worker)
        elif len(asked) == len(self.plan.members):
            self._complete(step, list(asked.values()))

    def _complete(self, step: int, asked: list[tuple[int, Copied]]) -> None:
        try:
            found: Outcome | Differ = self._outcome(step, asked)
        except Differ as differ:
            found = differ
        rng = self.sim.rng
        for name in self.plan.members:
            delay_s = 0.02 + (0.05 if rng.random() < 0.8 else 0.6) * rng.random()
            worker = self.here[name]
            worker.later(delay_s, self._arrives, worker, found)

    def _outcome(self, step: int, asked: list[tuple[int, Copied]]) -> Outcome:
        """Returns the outcome that all members conclude.  Raises :class:`Differ` if their gradients differ."""
        reran = self.sim.liars.compared(self.plan, step)
        mark = (
            self.sim.rng.random()
        )  # tells outcomes of the same step in two generations apart, as real losses would
        boundary, records = strongest(each[0] for each in asked), [each[1] for each in asked]
        copied, buddied = (
            min(each.copied_through for each in records),
            min(each.buddied_through for each in records),
        )
        behind = any(each.behind for each in records)
        saves = is_saved(boundary, max(each.save for each in records), behind)
        # for some steps, members ask for fewer copies
        seldom = step // 7 % 4 if self.generation % 3 == 0 else 0
        outcome = Outcome(
            step,
            self.generation,
            1.0,
            (mark,),
            (1,),
            ((step,),),
            True,
            boundary,
            copied,
            buddied,
            behind,
            seldom,
            seldom + 1,
            saves,
            reran=reran,
        )
        seen = self.sim.spikes.seen(self.plan, outcome)
        members = [self.here[name] for name in self.plan.members]
        self.outcomes[step] = self.sim.oracle.pace.measured(self.plan, members, seen)
        self.completed_at[step] = self.sim.clock.now
        return self.outcomes[step]

    def _arrives(self, worker: Worker, found: Outcome | Differ) -> None:
        if self.broken and self.sim.rng.random() < 0.5:
            self._tell_of_loss(worker)
        elif isinstance(found, Differ):
            worker.differs(found)
        else:
            worker.commit_seen(found)

    def gone(self, worker: Worker, *, aborts: bool = False) -> None:
        """Notes that the worker died, or left the groups by an abort (``aborts``)."""
        self.broken = True
        for name in self.plan.members:
            other = self.here.get(name)
            if other is None or other is worker:
                continue
            if aborts and other.world is self and self.sim.rng.random() < 0.4:
                other.later(0.005, other.garbled)
            self._tell_of_loss(other)

    def falls_apart(self) -> None:
        """Breaks the world, because its members no longer reach each other."""
        self.broken = True
        for worker in self.here.values():
            self._tell_of_loss(worker)

    def _tell_of_loss(self, worker: Worker) -> None:
        """Tells ``worker`` of the loss, with probability 0.6: only workers whose own connection was closed
        notice it, and the others hang.
        """
        if worker.world is self and self.sim.rng.random() < 0.6:
            worker.later(0.02 + 0.3 * self.sim.rng.random(), worker.peer_lost)
