"""Evicting: a straggler leaves the world at a step boundary, as members do whose machine will be taken
(``draining.py``), so no step is lost.  The others connect the next world first, beside the steps (``ahead.py``).
The straggler's process ends.  A spare takes its seat, or a new process once there is room: the cause is often the
process, and then the new one is as fast as the others.

Limits keep a run from evicting itself to death: a world must form without the worker, ``REST`` steps lie
between two evictions, and a node from which a second worker is evicted gets no new one for ``LEMON_S``, unless
workers are few.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic.control.decision import Decision, count
from elastic.control.run import Running
from elastic.control.seating import candidates, layout_of, staying
from elastic.ids import NodeId, WorkerId

REST = 100
"""Number of steps from one eviction to the next: each costs a pause, and a new process must show its pace."""
LEMON_S = 3600.0
"""Time in seconds for which an eviction counts against its node."""
SLOW = "it is slow"
"""The reason why an evicted worker is ended."""


def go_on(decision: Decision) -> None:
    """Lets the slowest straggler leave, if the job evicts stragglers and nothing keeps this one."""
    run = decision.run
    _forget_old_evictions(decision)
    if not decision.rules.evicts or not isinstance(run.state, Running) or run.stop or run.enough:
        return
    if (leaving := run.stragglers.leaving) and not forms_without(decision, leaving):
        decision.know("stragglers", leaving=())  # others were lost while the next world connected
    elif leaving:
        return
    if not (slow := run.stragglers.named):
        return
    worker = slow[0]
    if why := _why_it_stays(decision, worker):
        if (kept := f"{worker} stays: {why}") != run.stragglers.kept:
            decision.know("stragglers", kept=kept)
            decision.say(kept)
        return
    decision.know("stragglers", leaving=(worker,), free_from=run.step + REST, kept="")
    node = run.workers[worker].node
    times = (*run.cluster.evicted.get(node, ()), decision.now)
    decision.open("cluster", "evicted")[node] = times
    if len(times) > 1:
        decision.know("cluster", slots=0)  # perhaps they were there; the next ``Capacity`` tells
        decision.say(
            f"node {node[:8]} gets no new worker for {LEMON_S / 60:.0f} min: {len(times)} of its workers were slow"
        )


def _why_it_stays(decision: Decision, worker: WorkerId) -> str:
    """Returns why ``worker`` stays although it is slow; "" if it may leave."""
    run, rules = decision.run, decision.rules
    if run.step < run.stragglers.free_from:
        return f"one worker is evicted in {REST} steps, and the next one may be from step {run.stragglers.free_from} on"
    if not forms_without(decision, (worker,)):
        others = len(candidates(run, rules)) - 1
        return f"{count(others, 'other worker')} cannot form a world (workers.min = {rules.min_workers})"
    return ""


def forms_without(decision: Decision, workers: Collection[WorkerId]) -> bool:
    """Returns whether a world can be formed of the other workers, on nodes that are not taken."""
    rest = staying(decision.run, decision.rules, workers)
    return layout_of(decision.run, rest, decision.rules) is not None


def _forget_old_evictions(decision: Decision) -> None:
    evicted = decision.run.cluster.evicted
    if any(decision.due(times[0] + LEMON_S) for times in evicted.values()):
        left: dict[NodeId, tuple[float, ...]] = {
            node: tuple(at for at in times if not decision.due(at + LEMON_S))
            for node, times in evicted.items()
        }
        decision.know("cluster", evicted={node: times for node, times in left.items() if times})
