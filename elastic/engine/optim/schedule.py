"""The learning rate of a step is a function of (job, step) alone, so it survives any resume unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from elastic.code.imports import arguments, failure, load, unknown_argument
from elastic.errors import CodeError
from elastic.job import Job

TRIED = 2000
"""Largest number of steps for which a schedule of the user's is tried before the run begins.  It takes
milliseconds.
"""

Schedule = Callable[..., float]
"""``schedule(step, steps, **schedule.args)`` returns the part of ``optim.lr`` that step ``step`` of ``steps``
uses: a number, 0 or more.

Steps count from 1; step 0 is asked for, too, and is not used.  The result must depend on nothing else: every
process asks for itself, in any order, and again after a resume.
"""


def learning_rate(
    step: int, *, steps: int, peak: float, warmup: int, final: float, kind: str, decay: int = 0
) -> float:
    """Returns the learning rate of step ``step`` of ``steps``.  Steps count from 1; step 0 gives 0 if there
    is a warmup.

    It grows linearly from 0 to ``peak`` at step ``warmup``.  Then it follows half a cosine down to ``final *
    peak`` at the last step (Loshchilov and Hutter 2017, section 3, without restarts), or for kind "linear" a
    line; or it stays at ``peak`` for kind "constant", and for kind "wsd" until it falls linearly to ``final *
    peak`` in the last ``decay`` steps (warmup-stable-decay; Hu and others 2024, section 4).  For kind "rsqrt"
    it falls with the inverse square root of the step (Vaswani and others 2017, section 5.3).
    """
    if step < warmup:
        return peak * step / warmup
    if kind == "rsqrt":
        return peak * math.sqrt(max(warmup, 1) / max(step, 1))
    if kind == "constant" or steps <= warmup:
        return peak
    if kind == "wsd":
        return peak if step <= steps - decay else peak * (final + (1 - final) * max(steps - step, 0) / decay)
    fraction = min((step - warmup) / (steps - warmup), 1.0)
    fallen = 1 - fraction if kind == "linear" else 0.5 * (1 + math.cos(math.pi * fraction))
    return peak * (final + (1 - final) * fallen)


def learning_rate_of(job: Job, step: int) -> float:
    """Returns :func:`learning_rate` with the settings of ``job``, or the rate by the user's schedule.

    Raises :class:`CodeError` if the schedule fails, or returns anything but a finite number of 0 or more.
    """
    schedule = job.schedule
    if ":" in schedule.kind:
        return job.optim.lr * _own(job, step)
    return learning_rate(
        step,
        steps=job.steps,
        peak=job.optim.lr,
        warmup=schedule.warmup_steps,
        final=schedule.final,
        kind=schedule.kind,
        decay=schedule.decay_steps,
    )


def own_rate_of(job: Job, step: int) -> float | None:
    """Returns the learning rate of a step if a schedule of the user's sets it; None if the settings of the
    job do.

    The commit of the step records this number, so that readers of the run do not need the user's code.
    """
    return learning_rate_of(job, step) if ":" in job.schedule.kind else None


def rate_for_readers(job: Job, step: int, told: float | None) -> float:
    """Returns the learning rate of a step without the user's code.  ``told`` is the rate that the commit of
    the step records, or None.

    The result is NaN for a schedule of the user's in steps of older versions, whose commits record no rate.
    """
    if told is not None:
        return told
    return math.nan if ":" in job.schedule.kind else learning_rate_of(job, step)


def check_schedule(job: Job) -> None:
    """Tries a schedule of the user's at steps of the whole run, twice each.  Raises :class:`CodeError` if it
    is no valid schedule.
    """
    if ":" not in job.schedule.kind:
        return
    steps = sorted({round(number * job.steps / TRIED) for number in range(TRIED + 1)})
    first = [_own(job, step) for step in steps]
    for step, part, again in zip(steps, first, map(_own, [job] * len(steps), steps), strict=True):
        if part != again:
            raise CodeError(
                f"schedule.kind = {job.schedule.kind!r} returned {part!r} for step {step}, and "
                f"{again!r} at the next call for the same step; it must depend on its arguments alone, "
                "without a memory, clock or random numbers"
            )


def _own(job: Job, step: int) -> float:
    schedule = job.schedule
    named, asked = f"schedule.kind = {schedule.kind!r}", f"step {step} of {job.steps}"
    found: Schedule = load(schedule.kind, "schedule.kind")
    given = arguments("schedule.args", schedule.args)
    try:
        part = found(step, job.steps, **given)
    # the user's code may raise anything, first of all for an argument that it does not know
    except Exception as error:
        if unknown := unknown_argument("schedule.args", named, found, schedule.args, error, given=2):
            raise CodeError(unknown) from error
        args = f" and schedule.args = {schedule.args}" if schedule.args else ""
        raise CodeError(
            f"{named} failed for {asked}{args} with {failure(error)}; it is called as schedule(step, steps, "
            "**args)"
        ) from error
    if isinstance(part, bool) or not isinstance(part, Real) or not math.isfinite(part) or part < 0:
        raise CodeError(
            f"{named} returned {part!r:.60} for {asked}; it must return a factor of optim.lr: a finite "
            "number, 0 or more"
        )
    return float(part)
