"""Commits: what becomes known when somebody has seen a step committed.

A member that has seen a commit is proof of it, whoever else died.  World rank 0 reports each commit, and an answer to the fence brings
those that may not have been reported.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.control import copy_inventory, saves
from elastic.control.decision import Decision
from elastic.control.liveness import stepped
from elastic.control.run import Stopping
from elastic.ids import Version
from elastic.protocol import lineage
from elastic.protocol.actions import Pause
from elastic.protocol.commit_record import GO_ON, Outcome
from elastic.protocol.copy_schedule import due
from elastic.protocol.events import StepDone


def step_done(decision: Decision, event: StepDone) -> None:
    committed(decision, event.outcome)
    state = decision.run.state
    if isinstance(state, Stopping) and state.planned and event.outcome.boundary == GO_ON:
        decision.do(Pause(state.plan.generation, state.plan.members, state.save))  # it came too late for this commit, or not at all


def all_committed(decision: Decision, outcomes: Iterable[Outcome]) -> None:
    """The commits that a fenced member remembers, oldest first."""
    for outcome in sorted(outcomes, key=lambda each: each.step):
        committed(decision, outcome)


def committed(decision: Decision, outcome: Outcome) -> None:
    """Takes note of one commit; one of another generation, or one that was told before, changes nothing."""
    run, history, plan = decision.run, decision.run.history, decision.plan
    if outcome.generation != plan.generation:
        return
    if outcome.step in history.untold:
        return decision.know("history", untold=tuple(step for step in history.untold if step != outcome.step))
    if not history.is_news(outcome):
        return
    version = Version(outcome.step, outcome.generation)
    decision.know(
        "history",
        lineage=lineage.extended(history.lineage, version),
        last=outcome,
        untold=(*history.untold, *range(history.version.step + 1, outcome.step)),
        failures=tuple(failure for failure in history.failures if failure.step > outcome.step),
    )
    decision.know(watch=stepped(run.watch, decision.now))
    copy_inventory.committed(decision, outcome, run)
    if version.step > history.furthest.step:
        decision.know("history", furthest=version, fruitless=0)
    if saves.begins(outcome, decision.rules.save_every, decision.rules.target_step):
        saves.begin(decision, outcome)
    elif outcome.behind and due(outcome.step, decision.rules.save_every, decision.rules.target_step):
        decision.say("the bucket does not keep up: steps go on, and saves are left out until the one before has been written")
