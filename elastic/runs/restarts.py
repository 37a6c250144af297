"""Stops restarts without progress: a command that starts a run again and again in vain gets an error (R23).

A supervisor that restarts what failed would pay for machines forever if the run always breaks before its next
save.  So each claim of a run (``owner/<incarnation>.json``) notes the durable step at which it began, and the
number of restarts in vain.

A restart is in vain if it begins at the same durable step as the start before it, and that start was not
stopped, did not fail for a fault of the job, and did more than wait for machines.  A fault of the job does
not count, because a person mends it and starts again.  Starts with ``--local`` and starts before the newest
branch do not count either.
"""

from __future__ import annotations

from typing import Any

from elastic.control.run import Failed, Finished, RunState, Stopped
from elastic.errors import NoProgress
from elastic.runs.run import LOCAL, Run


def begins(run: Run) -> dict[str, Any]:
    """Returns the entries of the first claim of a start: the durable step, and the number of restarts in vain
    up to this one.

    If the number is too large, the user has asked for another try (``--again``), so the count begins anew.
    """
    vain = in_vain(run)
    return {"durable": _durable(run), "vain": vain if _within(run, vain) else 0}


def goes_on(run: Run) -> dict[str, Any]:
    """Returns the entries of the claim of a coordinator that takes over: those of the claim before it."""
    owner = run.owner() or {}
    return {key: owner[key] for key in ("durable", "vain") if key in owner}


def check(run: Run, *, again: bool) -> None:
    """Raises :class:`NoProgress` if ``watch.max_restarts`` restarts were in vain, unless ``again``."""
    vain = in_vain(run)
    if not again and not _within(run, vain):
        raise NoProgress(
            f"{run.job.name} was started {vain} times in a row and saved no step after step "
            f"{_durable(run)}, and watch.max_restarts = {run.job.watch.max_restarts} permits no more; "
            "`elastic replay` shows what happened; correct the cause, or save more often "
            f"(checkpoint.save_every = {run.job.checkpoint.save_every}), then start the run once with "
            "--again"
        )


def in_vain(run: Run) -> int:
    """Returns the number of restarts in a row that were in vain, with this one if it counts."""
    owner, last = run.owner(), run.last_recorded()
    if owner is None or owner["address"] == LOCAL or "durable" not in owner or run.branched:
        return 0
    if _durable(run) > owner["durable"]:
        return 0
    if last is not None and last.incarnation >= run.latest_claim():
        if isinstance(last.state, Stopped | Finished) or (
            isinstance(last.state, Failed) and last.state.job_error
        ):
            return 0
        if isinstance(last.state, Failed) and not _tried(last, owner["durable"]):
            return int(owner["vain"])
    return int(owner["vain"]) + 1


def _within(run: Run, vain: int) -> bool:
    most = run.job.watch.max_restarts
    return not most or vain <= most


def _tried(last: RunState, durable: int) -> bool:
    """Returns whether a run that ended did anything but wait for machines."""
    return last.step > durable or last.history.fruitless > 0


def _durable(run: Run) -> int:
    newest = run.newest()
    return newest.step if newest is not None else 0
