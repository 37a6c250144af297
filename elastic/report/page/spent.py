"""Tells where the time of a run went: an account of its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from elastic.report.goodput import (
    ABORT,
    AWAY,
    BUCKETS,
    DECIDE,
    DETECT,
    HEAL,
    REDONE,
    REFORM,
    SAVING,
    STARTUP,
    STEPPING,
    VALIDATION,
    WAITING,
)
from elastic.report.page.content import TimeShare
from elastic.report.page.series import Columns, Numbers
from elastic.report.timeline import Timeline

NAMES = {
    REDONE: ("Steps done again", "bad"),
    VALIDATION: ("Validation", "save"),
    DETECT: ("Noticing faults", "recover"),
    DECIDE: ("Agreeing", "recover"),
    ABORT: ("Leaving worlds", "recover"),
    REFORM: ("Forming worlds", "recover"),
    HEAL: ("Restoring state", "recover"),
    SAVING: ("Waiting for saves", "save"),
    WAITING: ("Waiting for nodes", "recover"),
    STARTUP: ("Starting", "rest"),
    AWAY: ("Not running", "away"),
}
"""The names of the buckets of lost time, and how a page draws each."""
Spans = Sequence[tuple[float, float | None]]
"""The times at which processes began and ended; None: not known."""


def shares_of(columns: Columns, told: Timeline, alone: Spans = ()) -> list[TimeShare]:
    """Returns the uses of the run's time.  They add up to the time from the beginning of the run to its
    newest record or step.  ``alone`` has the processes with ``--local``.
    """
    took, waits = (np.nan_to_num(columns[name], posinf=0.0, neginf=0.0) for name in ("step_s", "data_wait"))
    steps_s, waited_s = float(took.sum()), float((took * waits).sum())
    if told.life:
        spent = told.account.whole.seconds
        computing_s = max(spent[STEPPING] - waited_s, 0.0)
        useful = _useful(computing_s, spent[STEPPING] - computing_s)
        parts = [TimeShare(name, spent[key], BUCKETS[key], kind) for key, (name, kind) in NAMES.items()]
    else:
        times = columns.finite("time")
        times = times[times > 0]
        # an origin's steps have no time
        total = times[-1] - times[0] + next(filter(None, took), 0.0) if times.size else 0.0
        away_s = _away(times, alone)
        useful = _useful(steps_s - waited_s, waited_s)
        parts = [
            TimeShare(
                "Between steps",
                float(total) - steps_s - away_s,
                "saves, validations, and the start of each process after the first",
                "rest",
            ),
            TimeShare("Not running", away_s, BUCKETS[AWAY], "away"),
        ]
    return [each for each in (*useful, *parts) if each.seconds > 0.0005]


def _useful(computing_s: float, waited_s: float) -> list[TimeShare]:
    return [
        TimeShare(
            "Computing", computing_s, "steps that count: forward, backward, exchange, update", "compute"
        ),
        TimeShare("Waiting for data", waited_s, "the slowest worker of each step waited for samples", "data"),
    ]


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
