"""Replays a spot trace with the decisions of a run, but without the messages between coordinator and members:
for worlds of thousands.

``advance`` hears of machines, workers, notices and losses as in :class:`~elastic.sim.replay.Protocol`, so it
judges newcomers, lets nodes leave and stops worlds by the same functions.  The members' answers, the seats
and the search for the state are left out: a world that has ended is followed at once by the world that
:func:`~elastic.control.seating.layout_of` chooses, in which survivors come first, and commits are noted and
not told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from elastic.control import edges, growth, membership
from elastic.control.copy_inventory import choose_buddies
from elastic.control.decision import Decision
from elastic.control.draining import TAKEN
from elastic.control.evolve import evolve
from elastic.control.liveness import averaged
from elastic.control.rules import Rules
from elastic.control.run import NEVER, Forming, Home, Running, Stopping, Waiting, Worker
from elastic.control.seating import layout_of, needed
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.wager import WAIT
from elastic.protocol import lineage
from elastic.protocol.actions import Fence
from elastic.protocol.events import Capacity, Event, Tick
from elastic.protocol.plan import Plan
from elastic.sim.costs import Costs
from elastic.sim.replay import CLASSES, KIND, PROTOCOL, Machine, Protocol, World
from elastic.sim.trace import Row

POLICIES = ("own", "shrink", "spare", "wait")
"""The run's own policy, and simpler ones to compare it with: ``shrink`` steps on with the machines that are
left and takes in every newcomer at once; ``spare`` takes in newcomers only where a world ends anyway; ``wait``
forms no world that is smaller than the one before.
"""
FORCED_S = {"shrink": 1e-3, "spare": 1e9}
"""Time of a re-form in seconds that these policies believe, so that growth always pays, or never."""


class Policy(Protocol):
    """The decisions alone.  Worlds follow each other without the answers of their members."""

    def __init__(
        self,
        rows: Sequence[Row],
        costs: Costs,
        lead_s: float,
        seconds: float,
        rules: Rules | None = None,
        policy: str = "own",
    ) -> None:
        super().__init__(rows, costs, lead_s, seconds, rules)
        # copies are not listed here; in a large world buddies are chosen only where a loss asks for them
        self.small = self.rules.max_workers <= PROTOCOL
        self.rules = replace(self.rules, copy_every=0, buddy_every=int(self.small))
        self.policy, self.least = policy, self.rules.min_workers
        self.had: set[WorkerId] = set()
        """The workers that have been members."""
        self.known = self.run.history
        self.paired: Plan | None = None
        self.connected: frozenset[WorkerId] = frozenset()
        """The members of the next world, if they have connected ahead."""

    # -- machines

    def come(self, machines: list[Machine]) -> None:
        if self.small:
            return super().come(machines)
        cluster = self.run.cluster
        if self.lead_s:
            cluster = evolve(
                cluster, nodes={**cluster.nodes, **dict.fromkeys((m.node for m in machines), True)}
            )
        self.run = evolve(self.run, cluster=evolve(cluster, keepers=cluster.keepers or (machines[0].node,)))
        self.free |= {each.node: each for each in machines}
        decision = Decision(self.run, self.now, self.rules, inf)
        membership.capacity(decision, Capacity(len(self._free())))
        membership.start_workers(decision)
        self._perform_all(decision)

    def _perform_all(self, decision: Decision) -> None:
        self.run = decision.run
        for action in decision.actions:
            self._perform(action)

    def _newcomers(self, plan: Plan) -> list[WorkerId]:
        return sorted(self.run.workers.keys() - plan.ranks.keys())

    def _join(self, workers: list[WorkerId]) -> None:
        """Takes in newcomers; in a large world all at once, since ``advance`` compares each with all others."""
        if self.small:
            return super()._join(workers)
        homes = {each: self.homes[each] for each in workers if self._lives(each)}
        self.could_step([*homes.values()])
        members, cluster = self.run.members, self.run.cluster
        doomed = {each for each, home in homes.items() if cluster.deadline(home.node) is not None}
        new = {
            each: Worker(home.node, KIND, self.now, host=home.host)
            for each, home in homes.items()
            if each not in doomed
        }
        starting = {each: at for each, at in members.starting.items() if each not in homes}
        members = evolve(members, workers={**members.workers, **new}, starting=starting, classes=CLASSES)
        stays = {known.node: Home(known.host, self.now) for known in new.values()}
        cluster = evolve(cluster, homes={**cluster.homes, **stays})
        self.run = evolve(self.run, members=members, cluster=cluster)
        for each in doomed:
            homes[each].worker = None
        state = self.run.state
        plan = state.plan if isinstance(state, Running) else None
        # nothing happens as long as no newcomer pays and no notice is open
        if (
            plan is None
            or cluster.notices
            or self.pays_at(self.run, plan.members, self._newcomers(plan)) < inf
        ):
            self.tell(Tick())

    def _keepers_gone(self, machines: list[Machine]) -> None:
        if self.small or self.lead_s:
            super()._keepers_gone(machines)

    # -- steps

    def _tell_steps(self) -> None:
        """Notes the commits up to now."""
        world = self.world
        if world is not None and self.run.generation == world.generation and self.run.plan is not None:
            last = world.committed(self.now)
            last = min(last, world.boundary - 1) if world.boundary else last
            if last > max(self.run.step, world.base):
                self._skip_to(world, last)
                copied = Version(last, world.generation)
                self.run = evolve(self.run, copies=evolve(self.run.copies, copied=copied, buddied=copied))
            self._note_saved(world)

    def _advance(self, event: Event, at: float) -> None:
        self.known = self.run.history
        super()._advance(event, at)

    def _shelve(self, world: World, step: int) -> None:
        pass

    # -- the end of a world, and the next one

    def _answer(self, action: Fence) -> None:
        if isinstance(self.run.state, Stopping) and self.run.generation == action.generation:
            self._tell_steps()
            self._next()

    def _at_boundary(self, world: World) -> None:
        state = self.run.state
        if self.world is world and world.steps(self.now) and isinstance(state, Stopping):
            self.halt("leave" if self._leaves(state.plan) else "growth")
            self._skip_to(world, world.boundary)
            self._next()

    def _next(self) -> None:
        """Ends the present world, and lets the next one follow at once if there are enough workers."""
        plan = self.run.plan
        assert plan is not None
        decision = Decision(self.run, self.now, self.rules, inf)
        workers = self.run.workers
        ahead = self.run.state.ahead if isinstance(self.run.state, Stopping) else None
        self.connected = frozenset(ahead.members if ahead is not None else ())
        leaving = self.run.cluster.leaving
        taken = [each for each in plan.members if each in workers and workers[each].node in leaving]
        membership.expel(decision, tuple(taken), TAKEN)
        decision.know(state=Waiting(self.now))
        self._perform_all(decision)
        there = needed(self.run, self.rules)
        layout = layout_of(self.run, there, self.rules)
        choice = None
        if layout is not None and self._source()[1] == "live":
            choice = growth.at_the_end(self.run, self.rules, there[: layout.world], self.now)
        if choice is not None and choice.what == WAIT:
            self.run = evolve(self.run, state=Waiting(self.now, self.now + choice.wait_s))
            return self.tell(Tick())
        if layout is not None:
            self._begin(layout, there[: layout.world])
        if layout is None or self.run.cluster.notices:
            self.tell(Tick())

    def _form(self, plan: Plan) -> None:
        """Takes members and layout of a world that did not follow another one; its state is found here."""
        self.run = evolve(self.run, history=self.known)
        self._begin(plan.layout, plan.members)

    def _begin(self, layout: Layout, members: tuple[WorkerId, ...]) -> None:
        before, (version, tier) = self.begun, self._source()
        self.planned(version.step)
        newcomers = any(member not in self.had for member in members)
        moved = (
            tier != "live"
            or before is None
            or layout.shards != before.layout.shards
            or not before.ranks.keys() >= set(members)
        )
        connected = self.connected == frozenset(members)
        run, history = self.run, self.run.history
        nodes = tuple(run.workers[member].node for member in members)
        line = lineage.cut(history.lineage, version)
        number = run.generation if isinstance(run.state, Forming) else run.next_generation
        plan = Plan(
            1,
            number,
            layout,
            members,
            version,
            tier,
            (),
            store_node=nodes[0],
            nodes=nodes,
            copy_every=1,
            buddy_every=self.rules.buddy_every,
            lineage=line,
        )
        self.run = evolve(
            run,
            generation=number,
            state=Forming(plan, NEVER, since=self.now),
            history=evolve(history, lineage=line, last=None, untold=()),
            members=evolve(run.members, seats=members, kind=KIND),
        )
        after_s = self.prepare_s(tier, newcomers=newcomers, moved=moved, connected=connected)
        self.clock.after(after_s, self._ready, plan)

    def _ready(self, plan: Plan) -> None:
        state = self.run.state
        if not isinstance(state, Forming) or state.plan is not plan or not self.ended.isdisjoint(plan.ranks):
            return
        decision = Decision(self.run, self.now, self.rules, inf)
        took_s = self.now - state.since
        decision.amend(deadline=NEVER, since=state.since)
        edges.go(decision, plan)
        watch, newcomers = self.run.watch, not self.had.issuperset(plan.members)
        reform_s, join_s = watch.reform_s, watch.join_s
        if newcomers:
            join_s = averaged(join_s, took_s)
        if not newcomers or not reform_s:
            reform_s = averaged(reform_s, took_s)
        if (forced_s := FORCED_S.get(self.policy)) is not None:
            reform_s = join_s = forced_s
        if plan.tier in ("live", "host") or forced_s is not None:
            decision.know("watch", reform_s=reform_s, join_s=join_s)
        self._perform_all(decision)
        if self.policy == "wait":
            self.rules = replace(self.rules, min_workers=max(self.least, len(plan.members)))
        self.tell()

    def _go(self, plan: Plan) -> None:
        self.begun = plan
        self.had.update(plan.members)
        self.go(plan)

    # -- the state

    def _source(self) -> tuple[Version, str]:
        """Returns the newest version of which all parts are somewhere, and where."""
        run, plan, world = self.run, self.begun, self.world
        if plan is None:
            return Version(0, 0), "init"
        shards, ranks = plan.layout.shards, plan.ranks
        gone = list(ranks.keys() - run.workers.keys())
        gone += (
            [each for each in ranks.keys() & run.workers.keys() if run.workers[each].unfit]
            if run.cluster.leaving
            else []
        )
        number = Counter(ranks[each] % shards for each in gone)
        lacking = {shard for shard, each in number.items() if each == plan.layout.replicas}
        version = run.version
        if not lacking:
            return version, "live"
        if world is not None and not world.boundary:
            step = world.committed(world.ends_at - self.costs.copy_s)
            version = plan.version if step == world.base else Version(step, world.generation)
        # a buddy is another node, so it is still there if only one is gone
        copied = {
            ranks[each] % shards
            for each in gone
            if (len(gone) == 1 < len(ranks)) or self._copied(plan, ranks[each])
        }
        if version.step and copied >= lacking:
            return version, "host"
        return (run.history.saved[-1], "bucket") if run.history.saved else (Version(0, 0), "init")

    def _copied(self, plan: Plan, rank: int) -> bool:
        """Returns whether a copy of the member's part is left on its node or at the buddy of its node."""
        node = plan.nodes[rank]
        return self._is_there(node) or self._is_there(self._buddies(plan).get(node, node))

    def _is_there(self, node: NodeId) -> bool:
        machine = self.by_node.get(node)
        return machine is not None and self.is_up(machine)

    def _buddies(self, plan: Plan) -> dict[NodeId, NodeId]:
        """Returns the buddies of the nodes of a world, as they are chosen when it begins."""
        if not self.small and self.paired is not plan:
            zones = dict.fromkeys(plan.nodes, "")
            self.paired, self.buddies = plan, choose_buddies(plan.nodes, zones, self.buddies)
        return self.buddies
