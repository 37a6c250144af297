"""Tells where the time of a run went: an account of its seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from elastic.report.page.model import Share
from elastic.report.page.series import Columns
from elastic.report.recoveries import Recovery
from elastic.report.timeline import AWAY, ENDED, Timeline
from elastic.report.words import duration

PHASES = ("decide", "abort", "form", "heal", "go", "step")
"""The phases of a recovery, in order: see :mod:`elastic.report.recoveries`."""


def shares_of(columns: Columns, told: Timeline) -> list[Share]:
    """Returns where the time went.  The parts add up to the time from the beginning of the run to the newest record or step."""
    took = [each if math.isfinite(each) else 0.0 for each in columns["step_s"]]
    waits = [each if math.isfinite(each) else 0.0 for each in columns["data_wait"]]
    steps_s = math.fsum(took)
    waited_s = math.fsum(step_s * wait for step_s, wait in zip(took, waits, strict=True))
    useful = [
        Share("Computing", steps_s - waited_s, "steps that count: forward, backward, exchange, update", "compute"),
        Share("Waiting for data", waited_s, "the slowest worker of each step waited for samples", "data"),
    ]
    if not told.life:
        times = [at for at in columns["time"] if math.isfinite(at) and at > 0]
        total = times[-1] - times[0] + next(filter(None, took), 0.0) if times else 0.0  # an origin's steps have no time
        rest = Share("Between steps", max(total - steps_s, 0.0), "saves and validation, and time in which no process trained", "rest")
        return [each for each in (*useful, rest) if each.seconds > 0] if total else []
    again_s = max(told.committed_s - steps_s, 0.0)
    phases = {name: 0.0 for name in PHASES}
    for recovery in told.recoveries:
        for name, value in zip(PHASES, phases_of(recovery), strict=True):
            phases[name] += value
    between = {state: told.spent[state] for state in ("Stopping", "Forming", "Waiting", "Finishing", AWAY)}
    away = between.pop(AWAY) + sum(told.spent[state] for state in ENDED)
    parts = [
        *useful,
        Share("Steps done again", again_s, "committed once, and given up with the worker that alone had their state", "bad"),
        Share("Agreeing", between["Stopping"], "members are fenced, and the outcome of the last step is decided", "recover"),
        Share("Forming worlds", between["Forming"], f"of it {duration(phases['heal'])} healing the state", "recover"),
        Share("Waiting for workers", between["Waiting"], "no world, since there were too few workers", "recover"),
        Share("Last save", between["Finishing"], "all steps are done, and the checkpoint is on its way", "save"),
        Share("Not running", away, "stopped or failed, until it was started again", "away"),
    ]
    left_s = max(told.spent["Running"] - steps_s - again_s, 0.0)
    parts.insert(3, Share("Between steps", left_s, "first steps of worlds, interrupted steps, and faults not noticed yet", "rest"))
    return [each for each in parts if each.seconds > 0.0005]


def shares_useful(shares: Iterable[Share]) -> float:
    """Returns the seconds in steps that count."""
    return sum(each.seconds for each in shares if each.kind in ("compute", "data"))


def shares_told(shares: Sequence[Share]) -> str:
    total = sum(each.seconds for each in shares)
    return f"{duration(total)} from the beginning of the run to the newest record." if shares else ""


def phases_of(recovery: Recovery) -> tuple[float, ...]:
    """Returns the seconds of each phase, as in :data:`PHASES`."""
    return (recovery.decide_s, recovery.abort_s, recovery.form_s, recovery.heal_s, recovery.go_s, recovery.step_s)
