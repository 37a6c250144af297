"""Running: the world steps until it reaches the target step, is asked to stop, stalls, or grows."""

from __future__ import annotations

from elastic.control import ahead, draining, edges, growth, stopping
from elastic.control.decision import Decision, names
from elastic.control.liveness import Stall
from elastic.control.run import Running
from elastic.control.saves import target_is_saved
from elastic.control.seating import candidates, layout_of
from elastic.protocol.plan import Plan


def go_on(decision: Decision, state: Running) -> None:
    run, plan = decision.run, state.plan
    if edges.is_done(run, plan, decision.rules):
        edges.finish(decision, plan)
    elif 0 < run.enough < run.step and target_is_saved(run, decision.rules):
        edges.stop(decision, f"the last checkpoint, of step {run.history.saved[-1].step}, is in the bucket")
    elif run.stop:
        edges.pause(decision, f"stop asked for ({run.stop})", save=True)
    elif stalled := stopping.stands_still(decision, plan):
        _all_end_or(decision, stalled)
    elif len(run.workers) > len(plan.members) and not run.left:
        _grow(decision, plan)


def _all_end_or(decision: Decision, stalled: Stall) -> None:
    """Ends a world that stands still.  If some loops have ended the run and others wait for them, the next
    world ends it for all.
    """
    run = decision.run
    if not run.left or not run.enough:
        return stopping.unblock(decision, stalled)
    fix = (
        "the run ends after this step; call `ctx.stop(reason)` before `step.commit()` to end all "
        "loops together"
    )
    edges.stop(
        decision,
        (
            f"the loop of {names(run.left)} ended the run after step {run.enough} and the loops of "
            f"other workers wait for it: {fix}"
        ),
    )


def _grow(decision: Decision, plan: Plan) -> None:
    """Takes in newcomers at a step boundary if that pays; several at once rather than one after the other."""
    run, rules = decision.run, decision.rules
    if len(plan.members) >= rules.max_workers or draining.awaited(decision):
        return
    there = candidates(run, rules)
    layout = layout_of(run, there, rules)
    if (
        layout is None
        or layout.world <= plan.layout.world
        or growth.expects_more(run, there, decision.now, rules)
    ):
        return
    verdict = growth.judge(
        run, plan.members, [worker for worker in there if worker not in plan.ranks], decision.now, rules
    )
    layout = layout_of(run, tuple(worker for worker in there if worker not in verdict.declined), rules)
    if layout is not None and layout.world > plan.layout.world:
        if not ahead.is_awaited(decision):
            why = f"grow from {plan.layout} to {layout} ({verdict.why_welcome})"
            edges.pause(decision, why, save=False)
    elif frozenset(verdict.declined) - frozenset(run.members.declined):
        decision.know("members", declined=verdict.declined)
        decision.say(
            f"{names(verdict.declined)} would cost more time than they save; they wait as spares "
            f"({verdict.why_declined})"
        )
