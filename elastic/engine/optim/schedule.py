"""The learning rate of a step is a function of (job, step) alone, so it survives any resume unchanged."""

from __future__ import annotations

import math

from elastic.job import Job


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, final: float, kind: str) -> float:
    """Returns the learning rate of step ``step`` of ``steps``.  Steps count from 1; step 0 gives 0 if there is a warmup.

    It grows linearly from 0 to ``peak`` at step ``warmup``, then follows half a cosine down to ``final * peak`` at the last step
    (Loshchilov and Hutter 2017, section 3, without restarts), or stays at ``peak`` for kind "constant".
    """
    if step < warmup:
        return peak * step / warmup
    if kind == "constant" or steps <= warmup:
        return peak
    fraction = min((step - warmup) / (steps - warmup), 1.0)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * fraction)))


def learning_rate_of(job: Job, step: int) -> float:
    """Returns :func:`learning_rate` with the settings of ``job``."""
    schedule = job.schedule
    return learning_rate(step, steps=job.steps, peak=job.optim.lr, warmup=schedule.warmup_steps, final=schedule.final, kind=schedule.kind)
