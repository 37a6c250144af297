"""Evicting: a straggler leaves the world at a step boundary, as members do whose machine will be taken
(``draining.py``), so no step is lost.  The others connect the next world first, beside the steps (``ahead.py``).
The straggler's process ends.  A spare takes its seat, or a new process once there is room: the cause is often the
process, and then the new one is as fast as the others.

Limits keep a run from evicting itself to death: a world must form without the worker, ``REST`` steps lie
between two evictions, and each counts as an incident of its node, of which ``CLOSED_AFTER`` close the node for a
time (``lemons.py``).
"""

from __future__ import annotations

from collections.abc import Collection

from elastic.control import lemons
from elastic.control.decision import Decision, count
from elastic.control.run import Running
from elastic.control.seating import candidates, layout_of, staying
from elastic.ids import WorkerId

REST = 100
"""Number of steps from one eviction to the next: each costs a pause, and a new process must show its pace."""
CLOSED_AFTER = 2
"""Number of incidents of a node after which an eviction closes it.  That is less than for a crash: a new process
on a slow node holds up all others for at least ``REST`` steps.
"""
SLOW = "it is slow"
"""The reason why an evicted worker is ended."""


def go_on(decision: Decision) -> None:
    """Lets the slowest straggler leave, if the job evicts stragglers and nothing keeps this one."""
    run = decision.run
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
    lemons.failed(decision, run.workers[worker].node, f"{worker} was slow", closed_after=CLOSED_AFTER)


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
