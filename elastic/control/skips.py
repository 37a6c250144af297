"""Skipped steps: a step that is a spike, or whose gradient is not finite, changes no weights or moments, and
training goes on with the next samples.  This module also lists the samples in quarantine because of such
steps, and the steps that ``spikes.action = "warn"`` only warned of.

Which steps were skipped is a value, :class:`Skips`, and each commit that tells of one replaces it.  So a
coordinator that takes over, and a run that is resumed, go on where the last one was.  Steps that are given up
are taken out again, and count anew when they are computed anew.

fp16 finds the scale of its loss by steps that overflow.  Such a step does not count, unless a loss itself is
not finite, which no scale changes, or the scale is already the least one (``engine/loss_scale.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Self

from elastic.control.rules import WatchRule
from elastic.protocol.commit_record import Outcome, Spike

KEPT = 32
"""Number of newest stretches of skipped steps that are kept; of earlier stretches, only the number of steps
is kept.
"""
SHOWN = 8
"""Largest number of microbatches, of samples of a microbatch, and of stretches that a sentence names one by
one.
"""


@dataclass(frozen=True)
class Steps:
    """Steps of the lineage: the newest by their numbers, the older ones only counted."""

    stretches: tuple[tuple[int, int], ...] = ()
    """The first and the last step of each stretch of steps in a row, oldest first."""
    earlier: int = 0
    """The number of steps in stretches that are not kept any more."""

    @property
    def total(self) -> int:
        return self.earlier + sum(last - first + 1 for first, last in self.stretches)

    @property
    def last(self) -> int:
        """The newest of the steps; 0 without any."""
        return max((last for _, last in self.stretches), default=0)

    @property
    def named(self) -> str:
        """The newest of the steps, as a sentence names them."""
        shown = ", ".join(_steps(*each) for each in self.stretches[-SHOWN:])
        return f"the last of them {shown}" if self.earlier or len(self.stretches) > SHOWN else shown

    def cut(self, step: int) -> Self:
        """Returns the steps up to ``step``; those after it were given up."""
        return replace(
            self, stretches=tuple((first, min(last, step)) for first, last in self.stretches if first <= step)
        )

    def with_step(self, step: int) -> Self:
        """Returns the steps with one more."""
        joined = list[tuple[int, int]]()
        for first, last in sorted((*self.stretches, (step, step))):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(joined[-1][1], last)
            else:
                joined.append((first, last))
        old = sum(last - first + 1 for first, last in joined[:-KEPT])
        return replace(self, stretches=tuple(joined[-KEPT:]), earlier=self.earlier + old)


@dataclass(frozen=True)
class Skips(Steps):
    """The steps that were skipped, and what is known beside them."""

    spikes: tuple[int, ...] = ()
    """The steps that were skipped because they were spikes; of many, the newest."""
    quarantined: tuple[tuple[int, int], ...] = ()
    """The samples in quarantine, oldest first, each with the step that put it there: no later step reads it.

    Members go by the list in the state; this list is for reports.  Until the next step is reported, it may
    lack samples that only a dead coordinator knew.
    """
    resumed: int = 0
    """The step at which the run was resumed last: a row of steps that ends the run begins after it."""
    failed: str = ""
    """The sentence about the row of steps that ends the run as failed; "" if there is none."""
    warned: Steps = Steps()
    """The steps that were spikes and counted all the same."""
    would_leave_out: Steps = Steps()
    """The steps that counted with all their microbatches, some of which would have been left out if the run
    did more than warn.
    """

    @property
    def summary(self) -> str:
        """The sentence with the number of steps; "" if there is nothing to say."""
        why = f"because no finite gradient came{' or it was a spike' if self.spikes else ''}"
        warned, kept = self.warned.total, self.would_leave_out.total
        told = [
            f"{_number(self.total)} skipped, {why}: {self.named}" if self.total else "",
            f"{_number(warned)} {'a spike' if warned == 1 else 'spikes'} (warned): {self.warned.named}"
            if warned
            else "",
            (
                f"{kept} {'step' if kept == 1 else 'steps'} had microbatches that would be left out "
                f"(warned): {self.would_leave_out.named}"
            )
            if kept
            else "",
            f"{_samples(len(self.quarantined))} in quarantine" if self.quarantined else "",
        ]
        return "; ".join(filter(None, told))

    def cut(self, step: int) -> Skips:
        """Returns the skips up to ``step``; the steps after it were given up."""
        if (
            max(
                self.last,
                self.warned.last,
                self.would_leave_out.last,
                *(since for _, since in self.quarantined),
            )
            <= step
        ):
            return self
        return replace(
            super().cut(step),
            warned=self.warned.cut(step),
            would_leave_out=self.would_leave_out.cut(step),
            spikes=tuple(each for each in self.spikes if each <= step),
            quarantined=tuple((sample, since) for sample, since in self.quarantined if since <= step),
        )

    def completed(self, listed: Sequence[tuple[int, int]], applied: Sequence[int] = ()) -> Skips:
        """Returns the skips with the samples in quarantine that members have ``listed`` from the state and
        that are missing here.

        The steps that put these samples in quarantine count as skipped, except those that were ``applied``.
        The cause of such a step is not known, so the step is noted as a spike.
        """
        known, found = dict(self.quarantined), self
        missing = tuple((sample, since) for sample, since in listed if sample not in known)
        for step in sorted({since for _, since in missing}.difference(applied)):
            if not any(first <= step <= last for first, last in found.stretches):
                found = replace(found.with_step(step), spikes=tuple(sorted((*found.spikes, step)))[-KEPT:])
        whole = sorted((*self.quarantined, *missing), key=lambda pair: pair[1])
        return replace(found, quarantined=tuple(whole)) if missing else self

    def resume(self, step: int, *, forgets: bool = False) -> Skips:
        """Returns the skips of a run that is resumed at ``step``: its row of skipped steps begins anew.

        ``forgets`` means that the run reads samples in quarantine again.
        """
        found = replace(self.cut(step), resumed=step, failed="")
        return replace(found, quarantined=()) if forgets else found


def note(skips: Skips, outcome: Outcome, rule: WatchRule, *, ends: bool) -> tuple[Skips, str]:
    """Returns the skips after ``outcome``, and the sentence about a step that is skipped, is a spike, or has
    microbatches left out or warned of; "" for any other step.

    With ``ends`` no step follows, so the run no longer fails because of a row of skipped steps.
    """
    strange = [index for index, loss in enumerate(outcome.losses) if not isfinite(loss)]
    known = dict(skips.quarantined)
    if new := tuple((sample, outcome.step) for sample in outcome.quarantined if sample not in known):
        skips = replace(skips, quarantined=(*skips.quarantined, *new))
    apart = f"; samples {_listed(outcome.quarantined)} are in quarantine from now on" if new else ""
    if outcome.applies or (outcome.rescales and not strange):
        parts = [f"is a spike: {_height(outcome, outcome.spike)}"] if outcome.spike else []
        skips = replace(skips, warned=skips.warned.with_step(outcome.step)) if outcome.spike else skips
        if outcome.left_out:
            parts.append(
                f"leaves out {_bad(outcome, outcome.left_out)}: above {outcome.most_loss:.4g} no loss "
                "counts (spikes.microbatch_z)"
            )
        if warned := outcome.warned:
            skips = replace(skips, would_leave_out=skips.would_leave_out.with_step(outcome.step))
            whole = "be skipped, since it would " if 2 * len(warned) > len(outcome.losses) else ""
            limit = f"above {outcome.warned_loss:.4g} no loss would count (spikes.microbatch_z)"
            parts.append(
                f"would {whole}leave out {_bad(outcome, warned)}: {limit}, but spikes.action = 'warn' "
                "changes nothing"
            )
        return skips, f"step {outcome.step} {' and '.join(parts)}{apart}" if parts else ""
    skips = skips.with_step(outcome.step)
    if outcome.spike is not None:
        skips = replace(skips, spikes=(*skips.spikes, outcome.step)[-KEPT:])
    first, last = next(each for each in reversed(skips.stretches) if each[0] <= outcome.step <= each[1])
    first = max(first, skips.resumed + 1)
    said = f"step {outcome.step} is skipped and changes no weights: {_cause(outcome, strange)}{apart}"
    row, most = last - first + 1, rule.max_skipped
    if row > 1 and not skips.failed:
        said += f"; these are {row} in a row" + (f", of at most {most} (watch.max_skipped)" if most else "")
    if most and row >= most and not ends and not skips.failed:
        skips = replace(skips, failed=_failure(first, last, most))
    return skips, said


def _cause(outcome: Outcome, strange: list[int]) -> str:
    if outcome.spike is not None:
        return _height(outcome, outcome.spike)
    if not strange:
        return f"every loss is finite, but the gradient is not (its norm is {outcome.norm:g})"
    if len(strange) == len(outcome.losses) > 1:
        whole = f"no loss of its {len(strange)} microbatches is finite"
        return (
            f"{whole}; the loss of microbatch 0 is {outcome.losses[0]:g} (samples "
            f"{_listed(outcome.samples[0])})"
        )
    named = [
        f"microbatch {index} is {outcome.losses[index]:g} (samples {_listed(outcome.samples[index])})"
        for index in strange[:SHOWN]
    ]
    more = f", and {len(strange) - SHOWN} more are not finite" if len(strange) > SHOWN else ""
    return f"the loss of {', of '.join(named)}{more}"


def _bad(outcome: Outcome, which: Sequence[int]) -> str:
    means = {index: outcome.losses[index] / max(outcome.counts[index], 1) for index in which[:SHOWN]}
    named = ", ".join(
        f"microbatch {index} (loss {mean:.4g}, samples {_listed(outcome.samples[index])})"
        for index, mean in means.items()
    )
    more = f" and {len(which) - SHOWN} more" if len(which) > SHOWN else ""
    return f"{named}{more} of {len(outcome.losses)}"


def _height(outcome: Outcome, spike: Spike) -> str:
    if spike.what == "microbatches":
        number = f"{spike.z:g} of its {len(outcome.losses)} microbatches"
        return (
            f"the losses of {number} are above {spike.usual:.4g}, the largest that counts "
            "(spikes.microbatch_z)"
        )
    what, value = ("loss", outcome.loss) if spike.what == "loss" else ("norm of the gradient", outcome.norm)
    return (
        f"its {what}, {value:.4g}, is {spike.z:.1f} robust standard deviations above the usual "
        f"{spike.usual:.4g}"
    )


def _failure(first: int, last: int, most: int) -> str:
    good = f"the last good step is {first - 1}" if first > 1 else "no step was good"
    return (
        f"{_number(last - first + 1)} skipped in a row, {_steps(first, last)}, and watch.max_skipped "
        f"is {most}: {good}, and no weight has changed since; look at the samples named in the "
        "sentences about these steps, or lower optim.lr and go on with --branch"
    )


def _number(steps: int) -> str:
    return f"{steps} {'step was' if steps == 1 else 'steps were'}"


def _samples(number: int) -> str:
    return f"{number} {'sample is' if number == 1 else 'samples are'}"


def _steps(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _listed(ids: Iterable[int]) -> str:
    shown = [str(each) for each in ids]
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
