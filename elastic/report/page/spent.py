"""Tells where the time of a run went: an account of its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from elastic.report.page.content import TimeShare
from elastic.report.page.series import Columns, Numbers
from elastic.report.timeline import AWAY, ENDED, Timeline
from elastic.report.words import duration

NOT_RUNNING = "the run was stopped, had failed or was killed, until it was started again"
"""The use of the time in which nothing ran."""
Spans = Sequence[tuple[float, float | None]]
"""The times at which processes began and ended; None: not known."""


def shares_of(columns: Columns, told: Timeline, alone: Spans = ()) -> list[TimeShare]:
    """Returns the uses of the run's time.  They add up to the time from the beginning of the run to its
    newest record or step.  ``alone`` has the processes with ``--local``.
    """
    took, waits = (np.nan_to_num(columns[name], posinf=0.0, neginf=0.0) for name in ("step_s", "data_wait"))
    steps_s, waited_s = float(took.sum()), float((took * waits).sum())
    useful = [
        TimeShare(
            "Computing",
            steps_s - waited_s,
            "steps that count: forward, backward, exchange, update",
            "compute",
        ),
        TimeShare("Waiting for data", waited_s, "the slowest worker of each step waited for samples", "data"),
    ]
    spent = told.spent
    if not told.life:
        times = columns.finite("time")
        times = times[times > 0]
        # an origin's steps have no time
        total = times[-1] - times[0] + next(filter(None, took), 0.0) if times.size else 0.0
        away_s = _away(times, alone)
        parts = [
            TimeShare(
                "Between steps",
                float(total) - steps_s - away_s,
                "saves, validations, and the start of each process after the first",
                "rest",
            ),
            TimeShare("Not running", away_s, NOT_RUNNING, "away"),
        ]
    else:
        again_s = max(told.committed_s - steps_s, 0.0)
        left_s = spent["Running"] - steps_s - again_s
        heal, away_s = (
            duration(sum(each.heal_s for each in told.recoveries)),
            sum(spent[state] for state in (AWAY, *ENDED)),
        )
        parts = [
            TimeShare(
                "Steps done again",
                again_s,
                "steps that were committed, then lost with the only worker that had their state",
                "bad",
            ),
            TimeShare(
                "Between steps",
                left_s,
                "first step of each world, interrupted steps, and the time until faults were noticed",
                "rest",
            ),
            TimeShare(
                "Agreeing",
                spent["Stopping"],
                "before each new world: workers are fenced, and the outcome of the last step is decided",
                "recover",
            ),
            TimeShare(
                "Forming worlds",
                spent["Forming"],
                f"including {heal} to restore the state of workers",
                "recover",
            ),
            TimeShare(
                "Waiting for workers",
                spent["Waiting"],
                "no world, since there were too few workers",
                "recover",
            ),
            TimeShare(
                "Last save",
                spent["Finishing"],
                "all steps are done, and the last checkpoint is being written",
                "save",
            ),
            TimeShare("Not running", away_s, NOT_RUNNING, "away"),
        ]
    return [each for each in (*useful, *parts) if each.seconds > 0.0005]


def _away(times: Numbers, alone: Spans) -> float:
    """Returns the seconds between the first and the last of the ``times`` of steps in which no process of
    ``alone`` trained.  A process that was killed trained until its last step that is known.
    """
    away_s = 0.0
    for (began, ended), (again, _) in pairwise(alone):
        before = times[times < again]
        if before.size and again < times[-1]:
            away_s += max(again - max(before[-1], began if ended is None else ended), 0.0)
    return float(away_s)
