"""Finishing: the last step is committed, and the run ends once its checkpoint is in the bucket."""

from __future__ import annotations

from elastic.control import edges, stopping
from elastic.control.decision import Decision
from elastic.control.run import Finishing
from elastic.control.saves import patient_until, refused_until, target_is_saved
from elastic.protocol.commit_record import ENDS


def go_on(decision: Decision, state: Finishing) -> None:
    run, saved = decision.run, target_is_saved(decision.run, decision.rules)
    if saved and run.history.untold:
        edges.stop(
            decision,
            (
                "the last checkpoint is in the bucket, but the samples of step "
                f"{run.history.untold[0]} are not recorded yet"
            ),
        )
    elif saved and _is_validating(decision, state):
        return  # the world still measures what its last step has made
    elif saved:
        owed = decision.rules.validates_last and not _is_validated(decision)
        lost = "; the last validation was cut off; `elastic evaluate` measures it" if owed else ""
        edges.finished(decision, f"finished at step {run.step}", lost)
    elif run.saves.find(run.version) is None:
        edges.stop(decision, "the last checkpoint cannot become complete")
    elif decision.due(patient_until(decision, state.deadline)):
        refused = f"the bucket refused the last checkpoint for {decision.rules.wait_s:g} s"
        silent = f"nothing of the last checkpoint arrived for {decision.rules.stop_s:g} s"
        if refusing := bool(refused_until(decision.rules, run.saves.pending)):
            # a later world would only wait as long for the same bucket
            decision.know(gave_up=refused, stop=run.stop or refused)
        edges.stop(decision, refused if refusing else silent)


def _is_validated(decision: Decision) -> bool:
    score = decision.run.history.validated
    return score is not None and score.version == decision.run.version


def _is_validating(decision: Decision, state: Finishing) -> bool:
    """Returns whether the validation after the last step may still arrive: the world that committed the step
    is complete and moves.
    """
    run, plan, last = decision.run, state.plan, decision.run.history.last
    if (
        not decision.rules.validates_last
        or _is_validated(decision)
        or run.version.generation != plan.generation
    ):
        return False
    if run.step < (plan.ends or decision.rules.target_step) and (last is None or last.boundary != ENDS):
        return False  # each loop was left by itself, with no common end at which to validate
    return (
        all(member in run.workers for member in plan.members)
        and stopping.stands_still(decision, plan) is None
    )
