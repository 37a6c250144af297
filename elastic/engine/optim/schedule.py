"""The learning rate of a step is a function of (job, step) alone, so it survives any resume unchanged."""

from __future__ import annotations

import math

from elastic.job import Job


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, final: float, kind: str, decay: int = 0) -> float:
    """Returns the learning rate of step ``step`` of ``steps``.  Steps count from 1; step 0 gives 0 if there is a warmup.

    It grows linearly from 0 to ``peak`` at step ``warmup``.  Then it follows half a cosine down to ``final * peak`` at the last step
    (Loshchilov and Hutter 2017, section 3, without restarts); or it stays at ``peak`` for kind "constant", and for kind "wsd" until it
    falls linearly to ``final * peak`` in the last ``decay`` steps (warmup-stable-decay; Hu and others 2024, section 4).
    """
    if step < warmup:
        return peak * step / warmup
    if kind == "constant" or steps <= warmup:
        return peak
    if kind == "wsd":
        return peak if step <= steps - decay else peak * (final + (1 - final) * max(steps - step, 0) / decay)
    fraction = min((step - warmup) / (steps - warmup), 1.0)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * fraction)))


def learning_rate_of(job: Job, step: int) -> float:
    """Returns :func:`learning_rate` with the settings of ``job``."""
    schedule = job.schedule
    return learning_rate(
        step,
        steps=job.steps,
        peak=job.optim.lr,
        warmup=schedule.warmup_steps,
        final=schedule.final,
        kind=schedule.kind,
        decay=schedule.decay_steps,
    )
