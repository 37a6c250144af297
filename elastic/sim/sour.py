"""Models nodes on which workers die or hang soon after their start, and judges what the run makes of them.

Five rules must hold:

* A node with enough incidents, while no other node has any, gets no worker for a while.
* A node is closed only after incidents there, and only if it had clearly more than other nodes.
* It is not closed for longer than its incidents explain.
* Each time is at least twice as long as the one before, if they follow each other.
* A run without a world uses a closed node if nothing else can come.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING

from elastic.control.lemons import DOUBLINGS
from elastic.control.run import Lemon, RunState, Waiting
from elastic.ids import NodeId
from elastic.protocol.actions import Action, Kill, StartWorkers
from elastic.protocol.events import Broken, Fact, KeeperLost, Lost, StartFailed
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation
    from elastic.sim.worker import Worker

SOON_S = (0.2, 8.0)
"""Times in seconds after its start between which a worker on a lemon fails."""
HANGS, HANGS_S = 0.25, 20.0
"""Share of these workers that hang instead of dying, and for how many seconds."""
LATE_S = 6.0
"""Longest time in seconds in which a coordinator notes that a time is over, or that no room is left."""


def _hung(action: Kill) -> bool:
    return action.examine or action.reason.startswith("nothing was heard")


class Lemons:
    """Lets workers on lemons fail."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.rng = sim, Random(f"workers on lemons {sim.seed}")

    def started(self, worker: Worker) -> None:
        if worker.node in self.sim.scenario.lemons:
            self.sim.clock.after(self.rng.uniform(*SOON_S), self._fails, worker)

    def _fails(self, worker: Worker) -> None:
        if not worker.alive or self.sim.clock.now > self.sim.scenario.sour_s:
            return
        self.sim.oracle.occasions["a worker fails on a lemon"] += 1
        if self.rng.random() < HANGS and worker.joined:
            self.sim.tell(f"{worker.name} hangs on {worker.node}")
            worker.freeze(HANGS_S)
        else:
            self.sim.tell(f"{worker.name} dies on {worker.node}")
            self.sim.cluster.die(worker, "its node is a lemon")


class LemonsOracle:
    """Judges which nodes get no worker, by the incidents of which the acting coordinator was told."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.now = sim, 0.0
        self.told: dict[NodeId, list[float]] = defaultdict(list)
        self.ever: set[NodeId] = set()
        """The nodes that ever had an incident, those that are gone included."""
        self.closings: dict[NodeId, list[Lemon]] = defaultdict(list)
        self._stuck_since: float | None = None

    def _skips(self) -> bool:
        """Returns whether nothing is judged: another coordinator has taken over, perhaps with another clock."""
        return not self.sim.scenario.lemons or bool(self.sim.oracle.headless)

    def resumed(self) -> None:
        """Forgets everything: what a run knows of nodes ends with it."""
        self.told.clear()
        self.ever.clear()
        self.closings.clear()
        self._stuck_since = None

    def note(
        self,
        before: RunState,
        taken: tuple[Fact, ...],
        actions: tuple[Action, ...],
        after: RunState,
        now: float,
    ) -> None:
        """Notes a decision that was made ``now``, by the clock of the coordinator."""
        self.now = now
        if self._skips():
            return
        for each in taken:
            match each:
                case KeeperLost(node=node) if each.with_its_node:
                    self.told.pop(node, None)
                    self.closings.pop(node, None)
                case StartFailed() if each.node is not None and each.worker in before.members.starting:
                    self._incident(before, each.node, now)
                case Lost() | Broken() if each.worker in before.workers:
                    if isinstance(each, Lost) or each.cause == "device":
                        self._incident(before, before.workers[each.worker].node, now)
        for action in actions:
            for worker in action.workers if isinstance(action, Kill) and _hung(action) else ():
                if worker in before.workers:
                    self._incident(before, before.workers[worker].node, now)
        self._judge_closings(before, after, now)
        self._judge_waiting(before, after, now)

    def _incident(self, before: RunState, node: NodeId, now: float) -> None:
        """Notes an incident.  What fails together is one, and what fails on a closed node is none."""
        debounce_s, known = self.sim.rules.grow_debounce_s, self.told[node]
        if not before.cluster.lemons.get(node, Lemon()).closed and (
            not known or now - known[-1] >= debounce_s
        ):
            known.append(now)
            self.ever.add(node)

    def _count(self, node: NodeId, now: float) -> int:
        return sum(now - at < self.sim.rules.lemon_window_s for at in self.told.get(node, ()))

    def _judge_closings(self, before: RunState, after: RunState, now: float) -> None:
        rules = self.sim.rules
        for node, known in after.cluster.lemons.items():
            earlier = before.cluster.lemons.get(node, Lemon())
            if earlier.closed and not known.closed and now < earlier.until:
                self.sim.oracle.occasions["a closed node is used"] += 1
                if self._stuck_since is None or now - self._stuck_since < rules.refused_s - LATE_S:
                    raise Violation(f"node {node} is used before its time, and other room may come")
            if not known.closed:
                continue
            if now > known.since + rules.lemon_cool_s * 2 ** (len(self.told[node]) - 1) + LATE_S:
                raise Violation(f"node {node} is closed for longer than its incidents explain")
            if earlier.closed:
                continue
            self.sim.oracle.occasions["a lemon is closed"] += 1
            # what is told in the same decision may have been told later
            others = [
                self._count(each, now) - (self.told[each][-1:] == [now])
                for each in after.cluster.nodes
                if each != node
            ]
            if self._count(node, now) <= 2 * min(others, default=0):
                raise Violation(f"node {node} is closed, and workers fail elsewhere as often")
            if (last := self.closings[node][-1:]) and now < last[0].until + rules.lemon_window_s:
                before_s, cool_s = last[0].until - last[0].since, known.until - known.since
                if cool_s < min(2 * before_s, rules.lemon_cool_s * 2**DOUBLINGS) - 0.001:
                    raise Violation(f"node {node} is closed for {cool_s:g} s, after {before_s:g} s before")
            self.closings[node].append(known)

    def _judge_waiting(self, before: RunState, after: RunState, now: float) -> None:
        """Checks that a run without a world waits no longer than ``refused_s`` after an incident, or after it last
        used a closed node, whose room is heard of a moment later.
        """
        changed = before.cluster.lemons != after.cluster.lemons
        stuck = isinstance(after.state, Waiting) and not after.members.starting and not after.cluster.slots
        if not stuck or not any(known.closed for known in after.cluster.lemons.values()) or after.stop:
            self._stuck_since = None
        elif self._stuck_since is None or changed:
            self._stuck_since = now
        elif now - self._stuck_since > self.sim.rules.refused_s + LATE_S:
            raise Violation("the run waits, and does not use a node that is closed")

    def judge(self, after: RunState, action: Action) -> None:
        if not isinstance(action, StartWorkers) or self._skips():
            return
        rules, now = self.sim.rules, self.now
        for node in self.told.keys() & self.sim.cluster.nodes.keys() - after.cluster.notices.keys():
            alone = self.ever <= {node}
            closes = rules.lemon_after if alone else len(self.told[node]) + 1
            recent = [at for at in self.told[node] if now - at < rules.lemon_window_s]
            if len(recent) < closes or node in action.avoid:
                continue
            found = after.cluster.lemons.get(node, Lemon())
            if found.closed or not self.closings[node]:
                raise Violation(f"{action.workers[0]} may start on node {node}, where workers fail")
