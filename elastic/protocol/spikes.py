"""Spikes: steps whose loss or gradient norm lies far above those of the steps before, and the samples that
cause them.

A spike is found by the robust z-score of Iglewicz and Hoaglin (1993): the distance from the median of the
last steps, divided by their median absolute deviation, which 1.4826 makes a standard deviation where numbers
are normal.  A few wild values move neither of the two, so earlier spikes hide no later one, as they would if
means were used.  Both the loss and the norm are judged, as in the SkipStepOptimizer of OLMo-core, because a
bad batch may show in one of them alone.  Norms are judged by their logarithm, which is nearly normal in a
healthy run; the norms themselves have a heavy tail, and one in ten thousand would be a spike.

A step is judged as a whole, so one noisy sample among many makes no spike.  With ``microbatch_z`` each
microbatch is judged, too: the distance of its mean loss from the median loss of the newest steps is compared
with the same distances of earlier microbatches.  So the largest loss that counts, :func:`most_loss`, is known
before the step's first backward pass: the device itself compares, and multiplies the gradient of a microbatch
above it by 0.  All other microbatches count as if that one had not been there.

Every member computes the same answer for itself, between the commit of a step and its update.  It needs
nothing but the outcome, which is the same on every member, and the :class:`Past`, which is part of the state
(``engine/spike_memory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum, isfinite, log
from statistics import median
from typing import NamedTuple

from elastic.protocol.commit_record import Outcome, Spike

NORMAL = 1.4826
"""Standard deviation of normal numbers, as a multiple of their median absolute deviation."""
LEAST = 0.01
"""Least deviation, as a part of the usual loss or norm: where these hardly move, there must be no spikes that
mean nothing.
"""
TINY = 1e-300
"""Norm whose logarithm stands for that of smaller ones, and of 0."""
ENOUGH = 48
"""Number of earlier microbatches that must be known before microbatches are judged."""
NEWEST_STEPS = 8
"""Number of steps whose median loss is the level from which the losses of the next step's microbatches are
counted.
"""
QUARANTINE = "spikes.quarantine"
"""The name of the tensor with the samples in quarantine, which is part of the state: the rows of
:class:`Held`, oldest first.
"""
Past = Sequence[tuple[float, float]]
"""The loss and the norm of the newest steps that count, oldest first."""


@dataclass(frozen=True)
class SpikeRule:
    """The limits by which spikes are found, and what follows from one."""

    window: int
    """Number of steps with which a step is compared.  Before there are as many, none is a spike."""
    z: float
    """Robust z-score above which a loss or a norm is a spike."""
    skips: bool = False
    """True if a spike changes no weights."""
    quarantines: bool = False
    """True if the samples that cause a spike, or a loss that is not finite, are not read again."""
    microbatch_z: float = 0.0
    """Robust z-score above which a microbatch is left out of its step, or only reported unless the rule skips
    spikes; 0 means that none is.
    """


class Held(NamedTuple):
    """A sample in quarantine.

    Its row is (sample, first step that does not read it).  The row has -1 - sample in place of the sample if
    its step was applied without its microbatch. The step is negative if a sample of the same source takes the
    place of this sample, as in a mixture with weights.  A positive step means a sample of any source, also in
    the rows of earlier versions.  A row of zeros stands for nothing.
    """

    sample: int
    step: int
    """The step that put it there, which was the last to read it."""
    applied: bool
    """True if that step changed weights, without the sample's microbatch; false if it was skipped."""
    anywhere: bool
    """True if a sample of any source takes its place."""

    @classmethod
    def of(cls, row: Sequence[int]) -> Held | None:
        """Returns the sample of a row, or None."""
        sample, first = row
        return cls(max(sample, -1 - sample), abs(first) - 1, sample < 0, first > 0) if first else None

    @property
    def row(self) -> tuple[int, int]:
        return -1 - self.sample if self.applied else self.sample, (self.step + 1) * (
            1 if self.anywhere else -1
        )


def robust_deviation(values: Sequence[float], middle: float) -> float:
    """Returns the standard deviation of ``values``, whose median is ``middle``, by their median absolute
    deviation.
    """
    return NORMAL * median([abs(each - middle) for each in values])


def robust_z(value: float, past: Sequence[float], least: float | None = None) -> float:
    """Returns how many robust standard deviations ``value`` lies above the median of ``past``.

    A deviation is at least ``least``; without it, the part ``LEAST`` of the median.
    """
    middle = median(past)
    deviation = max(robust_deviation(past, middle), LEAST * abs(middle) if least is None else least)
    if value == middle:
        return 0.0
    return (value - middle) / deviation if deviation else float("inf") * (1 if value > middle else -1)


def most_loss(past: Past, heights: Sequence[float], rule: SpikeRule) -> float | None:
    """Returns the largest mean loss of a microbatch that counts in the next step; None if each does.

    ``heights`` are those of the newest microbatches that counted: see :func:`heights_after`.  None is left
    out while too few steps or microbatches are known, or if most microbatches have the same loss of 0.
    """
    if not rule.microbatch_z or len(past) < rule.window or len(heights) < ENOUGH:
        return None
    level, middle = _level(past), median(heights)
    deviation = max(robust_deviation(heights, middle), LEAST * abs(level + middle))
    return level + middle + rule.microbatch_z * deviation if deviation else None


def _level(past: Past) -> float:
    return median([loss for loss, _ in past[-NEWEST_STEPS:]])


def judged(past: Past, outcome: Outcome, rule: SpikeRule, most: float | None = None) -> Outcome:
    """Returns ``outcome`` with the spike that it is, with what it leaves out, and with the samples that go
    into quarantine.

    ``most`` is the :func:`most_loss` by which the gradient was made.  If it has left out more than half of
    the microbatches, the model is the cause and not the data, and the whole step is skipped.  A rule that
    skips nothing leaves nothing out, and says what it would.
    """
    if most is not None and outcome.finite and not rule.skips:
        warned = replace(outcome, warned_loss=most)
        outcome, most = warned if warned.warned else outcome, None
    fewer = outcome if most is None or not outcome.finite else replace(outcome, most_loss=most)
    if 2 * len(fewer.left_out) <= len(outcome.losses):
        outcome = fewer if fewer.left_out else outcome
    elif _spike(past, outcome, rule) is None:
        assert most is not None
        outcome = replace(outcome, spike=Spike("microbatches", len(fewer.left_out), most, True))
    spike = outcome.spike or _spike(past, outcome, rule)
    blamed = sorted({*outcome.left_out, *_blamed(past, outcome, rule, spike)}) if rule.quarantines else []
    if spike is None and not blamed:
        return outcome
    samples = dict.fromkeys(sample for microbatch in blamed for sample in outcome.samples[microbatch])
    return replace(outcome, spike=spike, quarantined=tuple(samples))


def after(past: Past, outcome: Outcome, rule: SpikeRule) -> list[tuple[float, float]]:
    """Returns the past of the next step: with ``outcome``, if its step is applied and its loss is finite."""
    known = [*past]
    if outcome.applies and isfinite(outcome.loss):
        known.append((outcome.loss, outcome.norm))
    return known[-rule.window :]


def heights_after(heights: Sequence[float], past: Past, outcome: Outcome, most: int) -> list[float]:
    """Returns the heights of the ``most`` newest microbatches, with those that counted in ``outcome``, if its
    step is applied.

    The height of a microbatch is its mean loss less the median loss of the newest steps before its own.  So a
    loss that falls while the model learns does not widen the spread of heights.  ``past`` is the past before
    the step.
    """
    new = list[float]()
    if past and outcome.applies and isfinite(outcome.loss):
        level, left_out = _level(past), {*outcome.left_out, *outcome.warned}
        each = enumerate(zip(outcome.losses, outcome.counts, strict=True))
        new = [loss / count - level for index, (loss, count) in each if count and index not in left_out]
    return [*heights, *new][-most:]


def held_after(held: tuple[Held, ...], outcome: Outcome, *, anywhere: bool) -> tuple[Held, ...]:
    """Returns the samples in quarantine, oldest first, with the new ones of ``outcome``.  With ``anywhere`` a
    sample of any source takes the place of a new one, otherwise one of the same source.
    """
    if not outcome.quarantined:
        return held
    known = {each.sample for each in held}
    new = (
        Held(sample, outcome.step, outcome.applies, anywhere)
        for sample in outcome.quarantined
        if sample not in known
    )
    return (*held, *new)


def listed(held: Sequence[Held]) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Returns the samples in quarantine, each with the step that put it there, and those of these steps that
    were applied, in order.
    """
    return tuple((each.sample, each.step) for each in held), tuple(
        sorted({each.step for each in held if each.applied})
    )


def _spike(past: Past, outcome: Outcome, rule: SpikeRule) -> Spike | None:
    if not outcome.finite or not isfinite(outcome.loss) or len(past) < rule.window:
        return None
    losses, norms = zip(*past, strict=True)
    if (z := robust_z(outcome.loss, losses)) > rule.z:
        return Spike("loss", z, median(losses), rule.skips)
    if (z := robust_z(_log(outcome.norm), [*map(_log, norms)], LEAST)) > rule.z:
        return Spike("norm", z, median(norms), rule.skips)
    return None


def _log(norm: float) -> float:
    return log(max(norm, TINY))


def _blamed(past: Past, outcome: Outcome, rule: SpikeRule, spike: Spike | None) -> list[int]:
    """Returns the microbatches whose samples go into quarantine, in order.

    They are the microbatches whose loss is not finite.  For a spike of the loss they are the fewest
    microbatches, taken by largest mean loss, without which the step would be no spike.  If these are more
    than half of the step, the model is the cause and not the data, and none is blamed.
    """
    losses, counts = outcome.losses, outcome.counts
    strange = [index for index, loss in enumerate(losses) if not isfinite(loss)]
    if spike is not None and spike.what == "microbatches":
        return [0] if len(losses) == 1 else []
    if strange or spike is None or spike.what != "loss":
        return strange if 2 * len(strange) <= max(len(losses), 2) else []
    before, left = [loss for loss, _ in past], set(range(len(losses))).difference(outcome.left_out)
    worst = sorted(left, key=lambda index: (-losses[index] / max(counts[index], 1), index))
    for number, index in enumerate(worst[: max(len(losses) // 2, 1)], 1):
        left.discard(index)
        rest = fsum(losses[each] for each in left) / max(sum(counts[each] for each in left), 1)
        if not left or robust_z(rest, before) <= rule.z:
            return sorted(worst[:number])
    return []
