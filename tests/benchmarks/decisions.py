"""``python -m tests.benchmarks.decisions [workers]``: how long one call of ``advance`` takes, by state and event, in a world of so many.

The states are come to by events only, as in a run: all workers joined, the world formed, stepped and broke, and each member's word is
taken one by one.  Of each kind of event the slowest call counts.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator

from elastic.control import events as ev
from elastic.control.machine import advance
from elastic.control.rules import Rules
from elastic.control.states import Finished, Finishing, Forming, Running, RunState, Stopping, Waiting
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding
from tests.control.play import outcome

ROWS = (4096, 32768, 128256)
PER_NODE = 8


class Timed:
    """A run, and the slowest call by (state, event)."""

    def __init__(self, rules: Rules, run: RunState | None = None) -> None:
        self.rules, self.now = rules, 0.0
        self.run = run or RunState.begin(1, 0.0)
        self.slowest: dict[tuple[str, str], float] = defaultdict(float)
        self.calls = 0

    def tell(self, event: ev.Event) -> None:
        self.now += 0.0001
        state = type(self.run.state).__name__
        began = time.perf_counter()
        self.run = advance(self.run, event, self.now, self.rules).run
        took_s = time.perf_counter() - began
        pair = (state, type(event).__name__)
        self.slowest[pair] = max(self.slowest[pair], took_s)
        self.calls += 1

    def all(self, events: Iterator[ev.Event]) -> None:
        for event in events:
            self.tell(event)


def rules_for(workers: int) -> Rules:
    layout = LayoutRule(dp_replicate=None, dp_shard=8, min_shard=8)
    return Rules(min_workers=8, max_workers=workers, layout=layout, target_step=6, save_every=2, lease_s=600.0, stall_s=600.0)


def story(workers: int) -> Timed:
    """Join, form, step, save, lose one of all, settle, form again, be paused, lose the coordinator, step to the end."""
    timed = Timed(rules_for(workers))
    nodes = [NodeId(f"n{number}") for number in range(workers // PER_NODE)]
    names = [WorkerId(f"w{number}") for number in range(1, workers + 1)]
    for node in nodes:
        timed.tell(ev.NodeFound(node))
        timed.tell(ev.KeeperUp(node))
    timed.tell(ev.Capacity(workers))
    timed.all(ev.Joined(name, nodes[i // PER_NODE], "cuda", ROWS) for i, name in enumerate(names))
    timed.now += timed.rules.grow_debounce_s
    timed.tell(ev.Tick())
    assert isinstance(timed.run.state, Forming), timed.run.state
    _form(timed)
    _steps(timed, 1, 2)
    _save(timed, Version(2, 1))
    _beats(timed, nodes)
    timed.tell(ev.Broken(names[3], 1, 3, "peer", "connection closed"))
    timed.tell(ev.Lost(names[5], "its process died"))
    _answers(timed, Version(2, 1))
    assert isinstance(timed.run.state, Forming) and timed.run.generation == 2, timed.run.state
    _form(timed)
    timed.tell(ev.Recovered(2, tuple(timed.run.workers), tuple(nodes)))
    timed.all(ev.Attached(name, timed.run.plan, True) for name in timed.run.plan.members) if timed.run.plan else None
    _steps(timed, 3, 6)
    timed.tell(ev.Tick())
    assert isinstance(timed.run.state, Finishing), timed.run.state
    timed.tell(ev.KeeperLost(nodes[0], "its process died"))
    timed.tell(ev.Stumbled("KeyError"))
    _save(timed, Version(6, 2))
    assert isinstance(timed.run.state, Finished), timed.run.state
    timed.tell(ev.Tick())
    return timed


def stopped_story(workers: int) -> Timed:
    """The first world steps, and the user asks for a stop; at its boundary a member is lost; then there are too few."""
    timed = story_until_running(workers)
    timed.tell(ev.StopRequested("Ctrl-C"))
    assert isinstance(timed.run.state, Stopping) and timed.run.state.planned
    plan = timed.run.state.plan
    timed.tell(ev.StepDone(plan.members[0], 1, outcome(1, 1)))
    timed.tell(ev.Lost(plan.members[-1], "its process died"))
    _answers(timed, Version(1, 1))
    return timed


def story_until_running(workers: int) -> Timed:
    timed = Timed(rules_for(workers))
    timed.tell(ev.KeeperUp(NodeId("n0")))
    timed.tell(ev.Capacity(workers))
    timed.all(ev.Joined(WorkerId(f"w{number}"), NodeId("n0"), "cuda", ROWS) for number in range(1, workers + 1))
    timed.now += timed.rules.grow_debounce_s
    timed.tell(ev.Tick())
    _form(timed)
    return timed


def _form(timed: Timed) -> None:
    state = timed.run.state
    assert isinstance(state, Forming)
    members, generation = state.plan.members, state.plan.generation
    timed.tell(ev.Tick())
    timed.all(ev.Here(name, generation) for name in members)
    timed.all(ev.Ready(name, generation) for name in members)
    assert isinstance(timed.run.state, Running), timed.run.state
    timed.all(ev.Renewed(name, generation) for name in members[:100])


def _steps(timed: Timed, first: int, last: int) -> None:
    plan = timed.run.plan
    assert plan is not None
    for step in range(first, last + 1):
        timed.tell(ev.StepDone(plan.members[0], plan.generation, outcome(step, plan.generation)))
        timed.tell(ev.Tick())


def _save(timed: Timed, version: Version) -> None:
    plan = timed.run.plan
    assert plan is not None
    timed.all(ev.ShardSaved(name, version) for name in plan.members)
    timed.tell(ev.SaveFailed(version, "the store does not answer"))
    timed.now += timed.rules.fence_s
    timed.tell(ev.Tick())
    timed.tell(ev.Saved(version, "digest"))


def _beats(timed: Timed, nodes: list[NodeId]) -> None:
    plan = timed.run.plan
    assert plan is not None
    for i, node in enumerate(nodes[:200]):
        members = plan.members[i * PER_NODE : (i + 1) * PER_NODE]
        timed.tell(ev.Beat(node, tuple(ev.Progress(name, plan.generation, 3, 1, 7) for name in members)))


def _answers(timed: Timed, version: Version) -> None:
    state = timed.run.state
    assert isinstance(state, Stopping)
    plan = state.plan
    timed.tell(ev.Tick())
    for name in state.pending:
        shard = plan.layout.coordinates(plan.world_rank(name))[1]
        held = (Holding(name, version, plan.layout.dp_shard, shard),)
        timed.tell(ev.Fenced(name, plan.generation, held, version.step + 1, (outcome(version.step, plan.generation),)))
    assert not isinstance(timed.run.state, Stopping | Waiting) or timed.run.workers


def measure(workers: int) -> tuple[dict[tuple[str, str], float], int]:
    """The slowest call by (state, event), and how many calls there were."""
    stories = [story(workers), stopped_story(workers)]
    slowest: dict[tuple[str, str], float] = defaultdict(float)
    for each in stories:
        for pair, took_s in each.slowest.items():
            slowest[pair] = max(slowest[pair], took_s)
    return dict(slowest), sum(each.calls for each in stories)


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    began = time.perf_counter()
    slowest, calls = measure(workers)
    took_s = time.perf_counter() - began
    for (state, event), slow_s in sorted(slowest.items(), key=lambda each: -each[1]):
        print(f"{1000 * slow_s:9.2f} ms  {event} in {state}")
    print(f"{workers} workers, {calls} calls, {1000 * took_s / calls:.2f} ms a call; slowest {1000 * max(slowest.values()):.1f} ms")


if __name__ == "__main__":
    main()
