"""Begins what a command that trains has asked for: a fork, a branch, and the note of the code.  This comes
last, after all checks.

A branch changes the run, so the run is claimed before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from elastic.code.sources import Sources
from elastic.control.run import Finished
from elastic.engine.optim.schedule import learning_rate_of
from elastic.errors import CodeError, Refused
from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.commit_record import out_of_patience
from elastic.report.story import Show, tell
from elastic.runs import alone, code, owed
from elastic.runs.resume import StartPoint, impatient, rewind
from elastic.runs.run import LOCAL, Run
from storage.errors import Exists
from storage.journal import latest_claim
from storage.objects import ObjectStore


def begin(start: StartPoint, show: Show, branch: bool | None, claims: Callable[[Run, int], int]) -> int:
    """Begins a fork, or a branch, if one is asked for and there is anything to change.

    ``branch`` is as :meth:`Run.agree` takes it.  A branch is begun once ``claims`` has claimed the run: from
    then on, an earlier coordinator that still lives can do nothing more.  ``claims`` gets the run and its
    newest claim.  Returns the incarnation that was claimed, or 0 without a branch.

    The run is looked at anew here, and each fact is read again after the claim, whatever the caller knows:
    meanwhile another command may have begun the run, and its coordinator may have saved a step.

    Raises :class:`Refused` if another command has begun a branch meanwhile, and :class:`JobError` if one has
    begun to delete the checkpoint from which this one goes on.
    """
    tell(show, start.begin())
    job, now = start.job, time.time()
    # read first, because a command that claims after this may begin a branch
    seen = latest_claim(ObjectStore.open(job.bucket), job.name)
    run = Run.look(job, branch=branch)
    if there := run.local_elsewhere():
        what = f"{job.name} was started with --local {there}, and the bucket does not say that it has ended"
        tell(show, f"{what}: if it still trains there, it saves nothing more and ends at its next save")
    if run.branches_at(start.at) is None:
        return 0
    run.check_local()
    past = _idle(run, seen)
    try:
        incarnation = claims(run, seen)
        said = (
            run.branch(now, incarnation=incarnation)
            if start.at is None
            else rewind(run, now, start.at, incarnation, start.word)
        )
    except Exists:
        raise Refused(
            f"another command has just started {job.name}, or a branch of {job.name}; see `elastic runs`"
        ) from None
    version = run.newest()
    step = 1 if version is None else version.step + 1
    tell(show, f"{said}{_rates(run.before, run.job, step)}{past}")
    return incarnation


def _idle(run: Run, claim: int) -> str:
    """Returns the part of a sentence about the newest ``claim`` if the owner of the claim has recorded
    nothing: it may still be about to begin.
    """
    last, owner = run.last_recorded(), run.owner()
    if owner is None or owner["address"] == LOCAL or (last is not None and last.incarnation >= claim):
        return ""
    return f"; it goes past claim {claim}, made at {run.home()}, which has recorded nothing"


def _rates(before: Job, now: Job, step: int) -> str:
    """Returns the part of a sentence with the learning rates of ``step``, if a branch changes them."""
    try:
        old, new = (learning_rate_of(each, step) for each in (before, now))
    except CodeError:  # the code of the earlier schedule is gone
        return ""
    return (
        f"; the learning rate of step {step} is {new:.3g}, where it would have been {old:.3g}"
        if old != new
        else ""
    )


def begin_here(
    start: StartPoint, sources: Sources, show: Show, branch: bool | None, job: Job
) -> tuple[Run, int]:
    """Begins the run in this process, with the code ``sources``, and returns it with the incarnation that was
    claimed.
    """
    with alone.EndWriter(ObjectStore.open(job.bucket), job.name) as ending:

        def claims(run: Run, seen: int | None = None) -> int:
            ending.claim = run.claim_here(after=seen)
            return ending.claim

        begin(replace(start, job=job), show, branch, claims)
        run = Run.open(job)
        incarnation = ending.claim or claims(run)
        tell(show, code.note(run, sources, time.time()))
    return run, incarnation


def finished(run: Run, held_out: str | None = None) -> tuple[str, int] | None:
    """Returns a sentence and the last step of the run if the run is finished and owes nothing; otherwise
    None.

    ``held_out`` names the samples of validation; without it, the end by ``validation.patience`` is not
    checked.  A coordinator that begins ends a finished run as well.  A run with sinks never counts as
    finished here, because no command knows whether a sink has all rows.
    """
    job, history, end = run.job, run.state().history, run.end()
    steps, why = (end.step or job.steps, end.why) if isinstance(end, Finished) else (job.steps, "")
    found, last = impatient(run, history.lineage, held_out) if held_out is not None else None, steps
    if found is not None and found[1] < steps:
        last, why = found[1], out_of_patience(job.validation.patience, job.validation.min_delta, *found)
    newest = max(history.saved, default=Version(0, 0)).step
    if newest < max(last, 1) or job.metrics.sinks or owed.debts(run, history.lineage, end=steps):
        return None
    return f"finished: step {newest} is in the bucket{f': {why}' if why else ''}", newest
