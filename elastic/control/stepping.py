"""A world that steps: commits, stalls, growth, the last step."""

from __future__ import annotations

from elastic.control import checkpoints, growing, lineage, membership, stock
from elastic.control.actions import Pause
from elastic.control.commit import GO_ON, Outcome
from elastic.control.events import Fenced, StepDone
from elastic.control.health import stepped
from elastic.control.saving import begins, due
from elastic.control.seating import candidates, layout_of
from elastic.control.states import Finishing, Forming, Running, Stopping
from elastic.control.stopping import pause, stands_still, stop, unblock
from elastic.control.turn import Turn, names
from elastic.ids import Version, WorkerId
from elastic.plan.plan import Plan


def step_done(turn: Turn, event: StepDone) -> None:
    committed(turn, event.outcome)
    state = turn.run.state
    if isinstance(state, Stopping) and state.planned and event.outcome.boundary == GO_ON:
        turn.do(Pause(state.plan.generation, state.plan.members, state.save))  # it came too late for this commit, or not at all


def committed(turn: Turn, outcome: Outcome) -> None:
    """Whoever has seen a commit is proof of it."""
    run, plan = turn.run, turn.plan
    if outcome.generation != plan.generation:
        return
    if outcome.step <= run.version.step:
        if outcome.step in run.untold:
            turn.know(untold=tuple(step for step in run.untold if step != outcome.step))
        return
    version = Version(outcome.step, outcome.generation)
    turn.know(
        lineage=lineage.extended(run.lineage, version),
        last=outcome,
        untold=(*run.untold, *range(run.version.step + 1, outcome.step)),
        failures=tuple(failure for failure in run.failures if failure.step > outcome.step),
        watch=stepped(run.watch, turn.now),
    )
    stock.committed(turn, outcome, run)
    if version.step > run.furthest.step:
        turn.know(furthest=version, fruitless=0)
    if begins(outcome, turn.rules.save_every, turn.rules.target_step):
        checkpoints.begin(turn, version, plan.members)
    elif due(outcome.step, turn.rules.save_every, turn.rules.target_step):
        turn.say("the bucket does not keep up: steps go on, and saves are left out until the one before has been written")


def running(turn: Turn, state: Running) -> None:
    run, plan = turn.run, state.plan
    if run.version.step >= turn.rules.target_step:
        finish(turn, plan)
    elif run.stop:
        pause(turn, f"stop asked for ({run.stop})", save=True)
    elif stalled := stands_still(turn, plan):
        unblock(turn, stalled)
    elif len(run.workers) > len(plan.members):
        grow(turn, plan)


def grow(turn: Turn, plan: Plan) -> None:
    """Take in newcomers at a step boundary, several at once rather than one after the other, where that pays."""
    run, rules = turn.run, turn.rules
    if len(plan.members) >= rules.max_workers:
        return
    there = candidates(run, rules)
    layout = layout_of(len(there), rules)
    if layout is None or layout.world <= plan.layout.world or expecting(turn, there):
        return
    verdict = growing.judge(run, plan.members, [worker for worker in there if worker not in plan.members], turn.now)
    layout = layout_of(len(there) - len(verdict.declined), rules)
    if layout is not None and layout.world > plan.layout.world:
        pause(turn, f"grow from {plan.layout} to {layout} ({verdict.why_welcome})", save=False)
    elif frozenset(verdict.declined) - frozenset(run.declined):
        turn.know(declined=verdict.declined)
        turn.say(f"{names(verdict.declined)} would cost more than they bring, and wait as spares ({verdict.why_declined})")


def expecting(turn: Turn, there: tuple[WorkerId, ...]) -> bool:
    """Others are about to join and will be needed, and the last newcomer did just now."""
    newest_s = turn.now - max((turn.run.workers[worker].joined_at for worker in there), default=turn.now)
    needed = len(there) < turn.rules.max_workers
    return needed and bool(turn.run.starting) and newest_s < turn.rules.grow_debounce_s


def finish(turn: Turn, plan: Plan) -> None:
    turn.to(Finishing(plan, turn.now + turn.rules.stop_s))
    turn.say(f"step {turn.run.version.step} is the last: its checkpoint is on the way")


def fenced(turn: Turn, event: Fenced) -> None:
    """The member applies nothing more in this generation: what it holds is certain now."""
    state = turn.run.state
    if isinstance(state, Finishing):
        return
    if isinstance(state, Forming | Running):
        stop(turn, f"{event.worker} takes no more part")
        return fenced(turn, event)
    assert isinstance(state, Stopping)
    if event.generation < state.plan.generation:  # it was left out of this one
        return membership.hold(turn, {event.worker: event.held})
    if event.worker not in turn.run.workers:  # it died with its word on the way: what it saw counts, what it held is gone
        for outcome in sorted(event.outcomes, key=lambda each: each.step):
            committed(turn, outcome)
        return
    if event.worker not in state.pending:
        return turn.refuse(f"{event.worker} has answered already")
    membership.hold(turn, {event.worker: event.held})
    pending = tuple(worker for worker in state.pending if worker != event.worker)
    turn.amend(pending=pending, answers=(*state.answers, event))
    if state.save and not pending:
        turn.amend(deadline=turn.now + turn.rules.stop_s)
    for outcome in sorted(event.outcomes, key=lambda each: each.step):
        committed(turn, outcome)
