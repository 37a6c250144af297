"""``python -m tests.benchmarks.decisions [workers]`` measures how long one call of ``advance`` takes, by state and event, in a large world.

The states are those of a run: all have joined, the world forms, steps, breaks, is settled, is stopped by its user, is taken over by
another coordinator, saves for the last time.  Where all members report one after the other, only the first few and the last few reports
are told; those between are put into the state beforehand.  For each (state, event) the slowest call counts, in seconds of processor time:
this includes garbage collection, but not other processes of the machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from elastic.control.machine import advance
from elastic.control.rules import Rules
from elastic.control.run import Answer, Finished, Finishing, Forming, Host, Running, RunState, Stopped, Stopping, Waiting, Worker
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from elastic.protocol.copy_schedule import due
from elastic.protocol.plan import Plan
from tests.control.play import but, outcome
from tests.support.cells import cell, classes

CLASSES = classes((4096, 32768, 128256))
PER_NODE = 8
RESULT = Path(__file__).parent / "results" / "decisions.json"
FEW = 3
"""Number of members, at each end of the list, whose reports are told one by one; those between are put into the state beforehand."""

Slowest = dict[tuple[str, str], float]


class Timed:
    """A run of many workers, and its slowest call by (state, event)."""

    def __init__(self, workers: int) -> None:
        layout = LayoutRule(dp_replicate=None, dp_shard=8, min_shard=8)
        self.rules = Rules(8, workers, layout, target_step=6, save_every=2, lease_s=600.0, stall_s=600.0, copy_every=1, buddy_every=1)
        self.now = 0.0
        self.run = RunState.begin(1, 0.0)
        self.slowest: Slowest = defaultdict(float)
        self.nodes = [NodeId(f"n{number}") for number in range(workers // PER_NODE)]
        self.names = [WorkerId(f"w{number}") for number in range(1, workers + 1)]

    def tell(self, *events: ev.Event) -> None:
        for event in events:
            self.now += 0.0001
            pair = (type(self.run.state).__name__, type(event).__name__)
            began = time.thread_time()
            self.run = advance(self.run, event, self.now, self.rules).run
            self.slowest[pair] = max(self.slowest[pair], time.thread_time() - began)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(ev.Tick())

    @property
    def plan(self) -> Plan:
        assert self.run.plan is not None
        return self.run.plan

    # ---- what all of them say

    def join(self) -> None:
        """Brings in nodes, keepers and workers."""
        between = {node: True for node in self.nodes[FEW:-FEW]}
        for node in (*self.nodes[:FEW], *self.nodes[-FEW:]):
            self.tell(ev.NodeFound(node), ev.KeeperUp(node))
        keepers, hosts = tuple(sorted((*self.run.cluster.keepers, *between))), {node: Host(f"{node}:7") for node in between}
        self.run = but(self.run, "cluster", nodes={**self.run.cluster.nodes, **between}, keepers=keepers)
        self.run = but(self.run, "copies", hosts={**hosts, **self.run.copies.hosts})
        self.tell(ev.Capacity(len(self.names)))
        nodes = {name: self.nodes[i // PER_NODE] for i, name in enumerate(self.names)}
        self.tell(*(ev.Joined(name, nodes[name], "cuda", CLASSES) for name in self.names[:FEW]))
        there = {name: Worker(nodes[name], "cuda", self.now) for name in self.names[FEW:-FEW]}
        waited_for = {name: at for name, at in self.run.members.starting.items() if name not in there}
        self.run = but(self.run, "members", workers={**self.run.workers, **there}, starting=waited_for)
        self.tell(*(ev.Joined(name, nodes[name], "cuda", CLASSES) for name in self.names[-FEW:]))
        self.wait(self.rules.grow_debounce_s)

    def form(self) -> None:
        state = self.run.state
        assert isinstance(state, Forming), state
        members, generation = state.plan.members, state.plan.generation
        self.tell(ev.Tick(), *(ev.Here(name, generation) for name in members[:FEW]))
        self.run = replace(self.run, state=replace(self.run.state, here=members[:-FEW]))  # type: ignore[type-var]
        self.tell(*(ev.Here(name, generation) for name in members[-FEW:]), *(ev.Ready(name, generation) for name in members[:FEW]))
        self.run = replace(self.run, state=replace(self.run.state, ready=members[:-FEW]))  # type: ignore[type-var]
        self.tell(*(ev.Ready(name, generation) for name in members[-FEW:]))
        assert isinstance(self.run.state, Running), self.run.state
        self.tell(*(ev.Renewed(name, generation) for name in members[:FEW]))

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            saves = due(step, self.rules.save_every, self.rules.target_step)
            self.tell(ev.StepDone(self.plan.members[0], self.plan.generation, replace(outcome(step, self.plan.generation), saves=saves)))
            self.tell(ev.Tick())

    def save(self, version: Version) -> None:
        members = self.plan.members
        self.tell(*(ev.ShardSaved(name, version) for name in members[:FEW]))
        known = self.run.saves.find(version)
        assert known is not None
        self.run = replace(self.run, saves=self.run.saves.put(replace(known, reported=members[:-FEW])))
        self.tell(*(ev.ShardSaved(name, version) for name in members[-FEW:]), ev.SaveFailed(version, "the store does not answer"))
        self.wait(self.rules.fence_s)
        self.tell(ev.Saved(version, "digest"))

    def beat(self) -> None:
        """Lets every keeper beat once, with the counters of eight members."""
        home: dict[NodeId, list[WorkerId]] = defaultdict(list)
        for name in self.plan.members:
            home[self.run.workers[name].node].append(name)
        generation = self.plan.generation
        self.tell(*(ev.Beat(node, tuple(ev.Progress(name, generation, 3, 1, 7) for name in members)) for node, members in home.items()))

    def keep(self, plan: Plan, *versions: Version) -> None:
        """Lets every keeper answer: it has copies of its own eight workers' shards (seven of them twice), and a shard of another node."""
        shards: dict[NodeId, list[tuple[WorkerId, int]]] = defaultdict(list)
        for rank, (name, node) in enumerate(zip(plan.members, plan.nodes, strict=True)):
            shards[node].append((name, plan.layout.coordinates(rank)["dp_shard"]))
            shards[self.nodes[(self.nodes.index(node) + 1) % len(self.nodes)] if rank % PER_NODE == 0 else node] += shards[node][-1:]
        held = {
            node: tuple(Holding(name, version, cell(plan.layout.dp_shard, index), node) for name, index in found for version in versions)
            for node, found in shards.items()
        }
        asked = self.run.copies.asked
        assert asked == plan.generation
        some = [*self.nodes[:FEW], *self.nodes[-FEW:]]
        self.tell(*(ev.Kept(node, asked, held[node]) for node in some[:FEW]))
        hosts = {node: replace(host, kept=held[node], asked=asked) for node, host in self.run.copies.hosts.items() if node not in some}
        self.run = but(self.run, "copies", hosts={**self.run.copies.hosts, **hosts})
        self.tell(*(ev.Kept(node, asked, held[node]) for node in some[FEW:]))

    def answer(self, version: Version) -> None:
        """Lets all pending members answer the fence."""
        state = self.run.state
        assert isinstance(state, Stopping)
        plan, pending = state.plan, state.pending
        ranks = {member: rank for rank, member in enumerate(plan.members)}

        def fenced(names: Iterable[WorkerId]) -> list[ev.Fenced]:
            shard = {name: plan.layout.coordinates(ranks[name])["dp_shard"] for name in names}
            held = {name: (Holding(name, version, cell(plan.layout.dp_shard, shard[name])),) for name in shard}
            seen = (outcome(version.step, plan.generation),)
            return [ev.Fenced(name, plan.generation, held[name], version.step + 1, seen) for name in shard]

        self.tell(ev.Tick(), *fenced(pending[:FEW]))
        assert isinstance(self.run.state, Stopping)
        said = fenced(pending[FEW:-FEW])
        answers = (*self.run.state.answers, *(Answer(each.worker, each.held, each.prepared, each.newest_seen) for each in said))
        workers = {**self.run.workers}
        for each in said:
            workers[each.worker] = replace(workers[each.worker], holdings=each.held)
        self.run = replace(
            but(self.run, "members", workers=workers), state=replace(self.run.state, answers=answers, pending=pending[-FEW:])
        )
        self.tell(*fenced(pending[-FEW:]))
        assert not isinstance(self.run.state, Stopping), self.run.state


def through_a_failure(workers: int) -> Slowest:
    """Runs through a failure.

    A member cannot go on and another dies.  The world forms again, the coordinator is followed by another, and the run ends.
    """
    timed = Timed(workers)
    timed.join()
    timed.form()
    timed.steps(1, 2)
    timed.save(Version(2, 1))
    timed.beat()
    timed.tell(ev.Broken(timed.names[3], 1, 3, "peer", "connection closed"), ev.Lost(timed.names[5], "its process died"))
    timed.keep(timed.plan, Version(1, 1), Version(2, 1))
    timed.answer(Version(2, 1))
    assert timed.run.generation == 2
    timed.form()
    timed.tell(ev.Capacity(1), ev.StartFailed(timed.names[0], "no"), ev.NodeRefused(NodeId("x"), "another bucket"))
    timed.tell(ev.Recovered(2, tuple(timed.run.workers), tuple(timed.nodes)))
    timed.tell(*(ev.Attached(name, timed.plan, True) for name in timed.names[:FEW]), ev.Stumbled("KeyError"))
    timed.steps(3, 5)
    timed.tell(ev.KeeperLost(timed.nodes[0], "its process died"), ev.KeeperUp(timed.nodes[0]))
    timed.steps(6, 6)
    assert isinstance(timed.run.state, Finishing), timed.run.state
    timed.save(Version(6, 2))
    assert isinstance(timed.run.state, Finished), timed.run.state
    timed.tell(ev.Tick(), ev.Joined(WorkerId("w0"), timed.nodes[0], "cuda", CLASSES))
    return timed.slowest


def through_silence(workers: int) -> Slowest:
    """Runs through silence.

    Half of the members do not take the plan, later nobody of the next world is heard any more; in a second run the next coordinator finds
    only half of the workers.
    """
    timed = Timed(workers)
    timed.join()
    state = timed.run.state
    assert isinstance(state, Forming)
    timed.run = replace(timed.run, state=replace(state, here=state.plan.members[::2]))
    timed.wait(timed.rules.form_s)
    timed.answer(Version(0, 0))
    timed.form()
    timed.steps(1, 1)
    timed.wait(timed.rules.stall_s)
    timed.wait(timed.rules.lease_over_s)
    timed.wait(timed.rules.fence_s)
    assert isinstance(timed.run.state, Waiting), timed.run.state
    again = Timed(workers)
    again.join()
    again.form()
    again.tell(ev.Recovered(2, tuple(again.names[: workers // 2]), tuple(again.nodes)))
    return {**timed.slowest, **{pair: max(s, timed.slowest.get(pair, 0.0)) for pair, s in again.slowest.items()}}


def through_darkness(workers: int) -> Slowest:
    """Runs through the loss of all workers at once.  Others begin from the copies that are left."""
    timed = Timed(workers)
    timed.join()
    timed.form()
    timed.steps(1, 2)
    plan = timed.plan
    timed.tell(ev.Recovered(2, (), tuple(timed.nodes)))
    assert isinstance(timed.run.state, Waiting), timed.run.state
    timed.keep(plan, Version(1, 1), Version(2, 1))
    timed.names = [WorkerId(f"w{workers + number}") for number in range(1, workers + 1)]
    timed.join()
    assert isinstance(timed.run.state, Forming) and timed.plan.tier == "host", timed.run.state
    return timed.slowest


def through_a_stop(workers: int) -> Slowest:
    """Runs through a stop that the user asks for, with a member lost at the boundary."""
    timed = Timed(workers)
    timed.join()
    timed.form()
    timed.steps(1, 1)
    timed.tell(ev.StopRequested("Ctrl-C"), ev.Tick(), ev.Lost(timed.names[-1], "its process died"))
    timed.answer(Version(1, 1))
    assert isinstance(timed.run.state, Stopped), timed.run.state
    return timed.slowest


def measure(workers: int) -> Slowest:
    """Returns the slowest call in seconds, by (state, event)."""
    slowest: Slowest = defaultdict(float)
    for each in (through_a_failure(workers), through_silence(workers), through_darkness(workers), through_a_stop(workers)):
        for pair, took_s in each.items():
            slowest[pair] = max(slowest[pair], took_s)
    return dict(slowest)


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    slowest = measure(workers)
    rows = [{"state": state, "event": event, "ms": round(1000 * took_s, 3)} for (state, event), took_s in sorted(slowest.items())]
    RESULT.write_text(json.dumps({"workers": workers, "slowest": rows}, indent=1) + "\n", encoding="utf-8")
    for (state, event), took_s in sorted(slowest.items(), key=lambda each: -each[1]):
        print(f"{1000 * took_s:9.2f} ms  {event} in {state}")
    print(f"{workers} workers: the slowest of {len(slowest)} (state, event) takes {1000 * max(slowest.values()):.1f} ms")


if __name__ == "__main__":
    main()
