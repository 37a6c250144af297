"""Models the sources of notices that nodes will be taken, and judges what the run makes of a notice.

Five rules must hold:

* A node whose notice came in time is in no world when it is taken, and no committed step is done again because
  it was taken.  In time means ``ENOUGH_S`` before, while no other fault is felt.
* A node that may or will be taken gets no new worker, no store, and no copies of others as long as another node
  can have them.
* No member leaves because of advice.  A worker on a node that may or will be taken has a spare elsewhere as long
  as there is room, and no spare is kept that was started for a node that stays.
* The run lets a node go only if it needs nothing there.
* A notice that is withdrawn is undone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import TYPE_CHECKING

from elastic.control.draining import OVERDUE_S
from elastic.control.run import Finishing, Running, Stopping
from elastic.ids import NodeId
from elastic.protocol.actions import Action, Form, LetGo, Pair, StartWorkers
from elastic.protocol.events import (
    Event,
    KeeperLost,
    NodeAdvised,
    NodeDraining,
    NodeStays,
    Recovered,
    parts,
)
from elastic.sim.network import Way
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.run import RunState
    from elastic.sim.cluster import Cluster, Node
    from elastic.sim.simulation import Simulation

Word = NodeDraining | NodeAdvised | NodeStays
"""A source says one of these of its node."""
ADVISED = 0.3
"""Share of the notices that come with advice about another node, which stays."""
AT_ONCE = 0.5
"""Share of the machines that are taken as soon as the run lets them go."""
BACK_S = (1.0, 5.0)
"""Times in seconds between which a new node joins in the place of one that was taken."""
ENOUGH_S = 8.0
"""Time in seconds from a notice to its deadline in which a world hands over and the next one forms."""
SETTLED_S = 15.0
"""Time in seconds after the end of the last fault from which on it is not felt any more."""
AFTERMATH_S = 10.0
"""Time in seconds after which nobody does steps again because of a node that was taken."""
LATE_S = 2.0
"""Longest time in seconds in which a coordinator notes that advice has expired."""
UNDONE_S = 3.0
"""Time in seconds in which a coordinator hears that a notice is withdrawn."""


def in_time_of(word: Word, ahead_s: float) -> Word:
    """Returns what a keeper tells a coordinator whose clock is ``ahead_s`` ahead of the node's: times by the
    coordinator's clock.
    """
    match word:
        case NodeDraining():
            return replace(word, deadline=word.deadline + ahead_s)
        case NodeAdvised():
            return replace(word, until=word.until + ahead_s)
    return word


class Announcements:
    """The sources of notices of all nodes.  Each notice has a source of its own, whose newest word
    (``Node.words``) the node's keeper tells.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.sim, self.clock = cluster, cluster.sim, cluster.clock
        self.rng = Random(f"sources of notices {self.sim.seed}")
        self.doomed: set[NodeId] = set()
        """The nodes whose notices are not withdrawn."""
        self._number = 0

    def give(self, node: Node, lead_s: float, amount: float) -> None:
        """Announces that ``node`` is taken in ``lead_s`` seconds, and takes or spares it as ``NODE_NOTICE``
        says.
        """
        self._number += 1
        source, deadline = f"source {self._number}", self.clock.now + lead_s
        stays = 0.0 < amount <= 1.0
        self.sim.oracle.notices.given(node.name, source, deadline, stays=stays)
        self._word(node, NodeDraining(node.name, deadline, source))
        if stays:
            self.clock.after(amount * lead_s, self._withdraw, node, source)
        else:
            self.doomed.add(node.name)
            self.clock.after(lead_s, self._take, node)
        others = [each for each in self.cluster.nodes.values() if each is not node]
        if others and self.rng.random() < ADVISED:
            advised = self.rng.choice(others)
            self._word(advised, NodeAdvised(advised.name, deadline, f"advice {self._number}"))

    def _withdraw(self, node: Node, source: str) -> None:
        self._word(node, NodeStays(node.name, source))
        self.sim.oracle.notices.withdrawn(node.name, source)

    def _take(self, node: Node) -> None:
        if node.alive:
            self.sim.oracle.notices.taken(node.name)
            self.sim.tell(f"the machine of node {node.name} is taken")
            self.cluster.node_dies(node, "its machine was taken")
            self.clock.after(self.rng.uniform(*BACK_S), self.cluster.add_node, node.host)

    def let_go(self, node: Node) -> None:
        """Handles the acknowledgement of the node's notices: many a machine is taken at once."""
        self.sim.oracle.occasions["a node is let go"] += 1
        if node.name in self.doomed and self.rng.random() < AT_ONCE:
            self.clock.after(self.rng.random(), self._take, node)

    # -- what the keepers say

    def _word(self, node: Node, word: Word) -> None:
        node.words[word.source] = word
        self._send(node, word.source, node.frozen_until)

    def _send(self, node: Node, source: str, not_before: float) -> None:
        self.cluster.network.send_surely(
            Way.FROM, node.name, self.say, node.name, source, not_before=not_before
        )

    def say(self, name: NodeId, source: str) -> None:
        """Tells the coordinator the newest word of a source, if the node's keeper runs; another keeper asks
        the sources anew.
        """
        node = self.cluster.nodes.get(name)
        if node is not None and node.keeper:
            self.sim.tell_coordinator(node.words[source])

    def say_all(self, name: NodeId, not_before: float) -> None:
        """Lets the node's keeper repeat all words, at ``not_before`` or later."""
        if (node := self.cluster.nodes.get(name)) is not None:
            for source in node.words:
                self._send(node, source, not_before)


@dataclass
class StandingNotice:
    """A notice that stands.  ``in_time`` is True if its node must leave before ``deadline``."""

    node: NodeId
    source: str
    since: float
    deadline: float
    stays: bool
    in_time: bool


class NoticesOracle:
    """Judges every decision about nodes that may or will be taken."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.all: list[StandingNotice] = []
        self.heard: dict[NodeId, dict[str, float]] = defaultdict(dict)
        """The times at which the words of each node's sources expire, as far as the acting coordinator was told."""
        self._disturbed_until = 0.0
        """The time until which a node may be taken in a world: its notice came too late, or the bucket, which
        has to take the state before, was too slow.
        """
        self._too_many_since = inf
        """The time since which a run that steps keeps more workers than it wants."""

    # -- what happens

    def given(self, node: NodeId, source: str, deadline: float, *, stays: bool) -> None:
        now = self.sim.clock.now
        in_time = deadline - now >= ENOUGH_S and self._is_calm()
        if not in_time:
            self._disturbed_until = max(self._disturbed_until, deadline)
        self.all.append(StandingNotice(node, source, now, deadline, stays, in_time))

    def _is_calm(self) -> bool:
        """Returns whether a world steps and no fault is felt."""
        oracle, coordinator, scenario = self.sim.oracle, self.sim.coordinators.acting, self.sim.scenario
        until = max(self.sim.strikes.disturbed_until, self._disturbed_until)
        return (
            bool(oracle.went)
            and coordinator is self.sim.coordinators.present
            and (until == 0.0 or self.sim.clock.now > until + SETTLED_S)
            and scenario.error_step is None
            and scenario.dry_step is None
            and not scenario.misset
        )

    def _undisturbed(self, notice: StandingNotice) -> bool:
        until = max(self.sim.strikes.disturbed_until, self._disturbed_until)
        return notice.in_time and until < notice.since and not self.sim.oracle.stop_asked

    def taken(self, name: NodeId) -> None:
        """Judges the moment at which a node is taken."""
        run = self.sim.coordinators.acting.run
        if isinstance(run.state, Finishing) or (isinstance(run.state, Stopping) and run.state.save):
            self.sim.oracle.occasions["the bucket takes too long for a node that leaves"] += 1
            self._disturbed_until = self.sim.clock.now
        inside = [each.name for each in self.sim.cluster.on(name) if each.world is not None]
        for notice in self.all:
            if notice.node == name and not notice.stays and self._undisturbed(notice) and not run.over:
                self.sim.oracle.occasions["a node leaves in time"] += 1
                if inside:
                    raise Violation(f"node {name} is taken, and {inside[0]} is in a world")

    def withdrawn(self, name: NodeId, source: str) -> None:
        notice = next(each for each in self.all if each.source == source)
        notice.deadline = self.sim.clock.now
        if self._is_calm():
            self.sim.clock.after(UNDONE_S, self._undone, name, notice.deadline)

    def _undone(self, name: NodeId, since: float) -> None:
        until = max(self.sim.strikes.disturbed_until, self._disturbed_until)
        announced = any(each.node == name and (not each.stays or each.deadline > since) for each in self.all)
        run = self.sim.coordinators.acting.run
        if until > since or announced or run.over:
            return
        self.sim.oracle.occasions["a notice is undone"] += 1
        unfit = [worker for worker, known in run.workers.items() if known.node == name and known.unfit]
        if run.cluster.deadline(name) is not None or name in run.cluster.leaving or unfit:
            raise Violation(f"node {name} is not taken after all, and the run still does without it")

    # -- what the coordinator is told, and what it decides

    def note(self, before: RunState, event: Event, after: RunState) -> None:
        for each in parts(event):
            match each:
                case Recovered():  # it knows what its predecessor has recorded
                    self.heard = defaultdict(dict)
                    for node, known in before.cluster.notices.items():
                        self.heard[node] = {said.source: said.at if said.advice else inf for said in known}
                case NodeDraining() if each.node in after.cluster.nodes:
                    self.heard[each.node][each.source] = inf
                case NodeAdvised() if each.node in after.cluster.nodes:
                    self.heard[each.node][each.source] = each.until
                case NodeStays():
                    self.heard[each.node].pop(each.source, None)
                case KeeperLost() if each.with_its_node:
                    self.heard.pop(each.node, None)
        if after.cluster.leaving:
            announced = {each.node for each in self.all}
            if advised := set(after.cluster.leaving) - announced:
                raise Violation(f"node {min(advised)} leaves, and nobody says that it will be taken")

    def judge_spares(self, after: RunState, now: float) -> None:
        """Checks that there are as many workers on nodes that stay as the run wants, if there is room, and soon no
        more.  The decision was made at ``now``; its record may be stored later.
        """
        rules = self.sim.rules
        plan, calm = after.plan, isinstance(after.state, Running) and not after.stop
        if not calm or plan is None or not self.all:
            self._too_many_since = inf
            return
        stays = [each for each, known in after.workers.items() if known.node not in after.cluster.notices]
        known = len(stays) + len(after.members.starting)
        number, few = rules.max_workers + rules.spares, len(after.workers) < rules.min_workers
        self.sim.oracle.occasions["a spare is warm"] += known >= number and len(after.workers) > number
        if after.cluster.slots and known < number and now >= after.members.start_after and not few:
            raise Violation(
                f"the run has {known} of {number} workers on nodes that stay, and there is room for more"
            )
        outside = [each for each in stays if each not in plan.ranks and not after.workers[each].holdings]
        self._too_many_since = min(self._too_many_since, now) if len(stays) > number and outside else inf
        if now > self._too_many_since + LATE_S:
            raise Violation(f"{outside[0]} is kept, and the run has {len(stays)} of {number} workers")

    def judge(self, after: RunState, action: Action) -> None:
        if not self.all:
            return
        now = self.sim.coordinators.acting.now
        self._forget_the_overdue(now)
        going = {node for node, said in self.heard.items() if any(until > now for until in said.values())}
        staying = set(after.cluster.keepers) - {
            node for node, said in self.heard.items() if any(until > now - LATE_S for until in said.values())
        }
        match action:
            case StartWorkers():
                few = len(after.workers) < self.sim.rules.min_workers
                closed = {node for node in going if not few or inf in self.heard[node].values()}
                if wrong := closed - set(action.avoid):
                    raise Violation(f"{action.workers[0]} may start on node {min(wrong)}, which may be taken")
            case Form(plan=plan) if plan != self.sim.oracle.plan:  # a coordinator that took over repeats it
                if plan.store_node in going and staying:
                    raise Violation(f"the store is on node {plan.store_node}, which may be taken")
                self._judge_progress(plan.generation, plan.version.step)
            case Pair():
                for node, buddy, _ in action.buddies:
                    if buddy in going and staying - {node}:
                        raise Violation(f"the buddy of node {node} is node {buddy}, which may be taken")
            case LetGo():
                if wrong := set(action.nodes) & {*(after.plan.nodes if after.plan is not None else ())}:
                    raise Violation(f"node {min(wrong)} is let go, and is in the world")
                if wrong := {
                    node for node in action.nodes for save in after.saves.pending if node in save.needed
                }:
                    raise Violation(f"node {min(wrong)} is let go, and has parts of a save")

    def _forget_the_overdue(self, now: float) -> None:
        """Forgets notices whose machines count as not taken.  Of a node that is gone, nobody may say so."""
        over = [each for each in self.all if each.deadline + OVERDUE_S <= now]
        for each in over:
            self.heard[each.node].pop(each.source, None)

    def _judge_progress(self, generation: int, step: int) -> None:
        """Checks that a world does no committed step again if all that happens are notices in time."""
        now, oracle = self.sim.clock.now, self.sim.oracle
        if any(
            notice.since <= now <= notice.deadline + AFTERMATH_S and self._undisturbed(notice)
            for notice in self.all
        ):
            newest = max((version.step for version in oracle.parent if oracle.on_lineage(version)), default=0)
            if newest > step:
                raise Violation(
                    f"generation {generation} begins from step {step}, and step {newest} was committed: "
                    "nothing but notices happened"
                )
