"""A world that steps: commits, stalls, growth, the last step."""

from __future__ import annotations

from elastic.control import checkpoints, copy_inventory, growth, membership
from elastic.control.decision import Decision, names
from elastic.control.liveness import stepped
from elastic.control.saving import begins
from elastic.control.seating import candidates, layout_of
from elastic.control.states import Finishing, Forming, Running, Stopping
from elastic.control.stopping import pause, stands_still, stop, unblock
from elastic.ids import Version, WorkerId
from elastic.protocol import lineage
from elastic.protocol.actions import Pause
from elastic.protocol.commit_record import GO_ON, Outcome
from elastic.protocol.copy_schedule import due
from elastic.protocol.events import Fenced, StepDone
from elastic.protocol.plan import Plan


def step_done(decision: Decision, event: StepDone) -> None:
    committed(decision, event.outcome)
    state = decision.run.state
    if isinstance(state, Stopping) and state.planned and event.outcome.boundary == GO_ON:
        decision.do(Pause(state.plan.generation, state.plan.members, state.save))  # it came too late for this commit, or not at all


def committed(decision: Decision, outcome: Outcome) -> None:
    """Whoever has seen a commit is proof of it."""
    run, plan = decision.run, decision.plan
    if outcome.generation != plan.generation:
        return
    if outcome.step <= run.version.step:
        if outcome.step in run.untold:
            decision.know(untold=tuple(step for step in run.untold if step != outcome.step))
        return
    version = Version(outcome.step, outcome.generation)
    decision.know(
        lineage=lineage.extended(run.lineage, version),
        last=outcome,
        untold=(*run.untold, *range(run.version.step + 1, outcome.step)),
        failures=tuple(failure for failure in run.failures if failure.step > outcome.step),
        watch=stepped(run.watch, decision.now),
    )
    copy_inventory.committed(decision, outcome, run)
    if version.step > run.furthest.step:
        decision.know(furthest=version, fruitless=0)
    if begins(outcome, decision.rules.save_every, decision.rules.target_step):
        checkpoints.begin(decision, outcome)
    elif outcome.behind and due(outcome.step, decision.rules.save_every, decision.rules.target_step):
        decision.say("the bucket does not keep up: steps go on, and saves are left out until the one before has been written")


def running(decision: Decision, state: Running) -> None:
    run, plan = decision.run, state.plan
    if run.version.step >= decision.rules.target_step:
        finish(decision, plan)
    elif run.stop:
        pause(decision, f"stop asked for ({run.stop})", save=True)
    elif stalled := stands_still(decision, plan):
        unblock(decision, stalled)
    elif len(run.workers) > len(plan.members):
        grow(decision, plan)


def grow(decision: Decision, plan: Plan) -> None:
    """Take in newcomers at a step boundary, several at once rather than one after the other, where that pays."""
    run, rules = decision.run, decision.rules
    if len(plan.members) >= rules.max_workers:
        return
    there = candidates(run, rules)
    layout = layout_of(len(there), rules)
    if layout is None or layout.world <= plan.layout.world or expecting(decision, there):
        return
    verdict = growth.judge(run, plan.members, [worker for worker in there if worker not in plan.members], decision.now)
    layout = layout_of(len(there) - len(verdict.declined), rules)
    if layout is not None and layout.world > plan.layout.world:
        pause(decision, f"grow from {plan.layout} to {layout} ({verdict.why_welcome})", save=False)
    elif frozenset(verdict.declined) - frozenset(run.declined):
        decision.know(declined=verdict.declined)
        decision.say(f"{names(verdict.declined)} would cost more than they bring, and wait as spares ({verdict.why_declined})")


def expecting(decision: Decision, there: tuple[WorkerId, ...]) -> bool:
    """Others are about to join and will be needed, and the last newcomer did just now."""
    newest_s = decision.now - max((decision.run.workers[worker].joined_at for worker in there), default=decision.now)
    needed = len(there) < decision.rules.max_workers
    return needed and bool(decision.run.starting) and newest_s < decision.rules.grow_debounce_s


def finish(decision: Decision, plan: Plan) -> None:
    decision.to(Finishing(plan, decision.now + decision.rules.stop_s))
    decision.say(f"step {decision.run.version.step} is the last: its checkpoint is on the way")


def fenced(decision: Decision, event: Fenced) -> None:
    """The member applies nothing more in this generation: what it holds is certain now."""
    state = decision.run.state
    if isinstance(state, Finishing):
        return
    if isinstance(state, Forming | Running):
        stop(decision, f"{event.worker} takes no more part")
        return fenced(decision, event)
    assert isinstance(state, Stopping)
    if event.generation < state.plan.generation:  # it was left out of this one
        return membership.hold(decision, {event.worker: event.held})
    if event.worker not in decision.run.workers:  # it died with its word on the way: what it saw counts, what it held is gone
        for outcome in sorted(event.outcomes, key=lambda each: each.step):
            committed(decision, outcome)
        return
    if event.worker not in state.pending:
        return decision.refuse(f"{event.worker} has answered already")
    membership.hold(decision, {event.worker: event.held})
    pending = tuple(worker for worker in state.pending if worker != event.worker)
    decision.amend(pending=pending, answers=(*state.answers, event))
    if state.save and not pending:
        decision.amend(deadline=decision.now + decision.rules.stop_s)
    for outcome in sorted(event.outcomes, key=lambda each: each.step):
        committed(decision, outcome)
