"""Finishing: the target step is committed, and the run ends once its checkpoint is in the bucket."""

from __future__ import annotations

from elastic.control import edges
from elastic.control.decision import Decision
from elastic.control.run import Finished, Finishing
from elastic.control.saves import patient_until, refused_until, target_is_saved


def go_on(decision: Decision, state: Finishing) -> None:
    run, saved = decision.run, target_is_saved(decision.run, decision.rules)
    if saved and run.history.untold:
        edges.stop(decision, f"the last checkpoint is in the bucket; what step {run.history.untold[0]} consumed is still to be told")
    elif saved:
        edges.end(decision, Finished(), f"finished at step {run.step}")
    elif run.saves.find(run.version) is None:
        edges.stop(decision, "the last checkpoint cannot become complete")
    elif decision.due(patient_until(decision, state.deadline)):
        refused = f"the bucket refused the last checkpoint for {decision.rules.wait_s:g} s"
        silent = f"nothing of the last checkpoint arrived for {decision.rules.stop_s:g} s"
        edges.stop(decision, refused if refused_until(decision.rules, run.saves.pending) else silent)
