"""The best of the validations of a run.

Losses on different held-out samples say nothing about each other.  If the samples have changed in between,
only losses on those of the newest version are compared.  An older release did not note which samples it had
read; such a loss counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from itertools import takewhile
from math import isfinite, isnan
from statistics import fmean
from typing import NamedTuple

from elastic.ids import Version
from elastic.protocol.commit_record import is_better

RISES = 3
"""Number of validations in a row that must be worse than the best one before a run over-fits: one or two may
be chance.
"""
LEAST = 0.01
"""Smallest rise, as a part of the best loss, that counts: a loss that stands still goes up and down by less.
"""


def number_of(held_out: str) -> int:
    """Returns the number that stands for held-out samples in a row, which has no text: 32 bits of a digest; 0
    if they are not known.
    """
    return int.from_bytes(sha256(held_out.encode()).digest()[:4]) if held_out else 0


class Loss(NamedTuple):
    """The loss of a validation, and the number of the samples that it is over; 0 if nobody noted it."""

    mean: float
    data: int = 0


class Best(NamedTuple):
    """The version with the smallest loss, and the number of validations that do not count, since they were on
    other samples.
    """

    version: Version
    loss: float
    others: int = 0

    @property
    def left_out(self) -> str:
        """The words about the validations that do not count; "" if there are none."""
        each = "1 validation" if self.others == 1 else f"{self.others} validations"
        return f"{each} on other held-out samples not counted" if self.others else ""


def comparable(found: Mapping[Version, Loss]) -> dict[Version, Loss]:
    """Returns the losses on the samples on which the newest version was validated, and those of which nobody
    noted the samples.
    """
    newest = next((found[version].data for version in sorted(found, reverse=True) if found[version].data), 0)
    return {version: loss for version, loss in found.items() if loss.data in (0, newest)}


def best(found: Mapping[Version, Loss]) -> Best | None:
    """Returns the best of the :func:`comparable` losses, the first one of several; None if there is none.

    What is no number is never the best.
    """
    counted = comparable(found)
    losses = {version: loss.mean for version, loss in counted.items() if not isnan(loss.mean)}
    version = min(losses, key=lambda each: (losses[each], each), default=None)
    return None if version is None else Best(version, losses[version], len(found) - len(counted))


def mark(found: Mapping[Version, Loss], min_delta: float) -> Best | None:
    """Returns the last of the :func:`comparable` losses that was smaller by more than ``min_delta`` than the
    one before that was.
    """
    last: Best | None = None
    for version, loss in sorted(comparable(found).items()):
        if is_better(loss.mean, None if last is None else last.loss, min_delta):
            last = Best(version, loss.mean)
    return last


def enough(found: Mapping[Version, Loss], patience: int, min_delta: float) -> int:
    """Returns the step of the newest validation if it is one of ``patience`` or more in a row after the
    :func:`mark`; else 0.
    """
    top, counted = mark(found, min_delta), sorted(comparable(found))
    worse = sum(version > top.version for version in counted) if top is not None else 0
    return counted[-1].step if 0 < patience <= worse else 0


def over_fit(
    found: Mapping[Version, Loss], training: Callable[[int], Iterable[tuple[int, float]]], again: str
) -> str:
    """Returns the sentence about a run that over-fits; "" for another one.

    It over-fits if the newest :data:`RISES` validations are worse than the best one, the newest by
    :data:`LEAST` of it, while the training loss fell.  If both rise, the run diverges.  ``training`` yields
    the (step, loss) of the steps after one, in order; the means of as many steps as there are from one
    validation to the next are compared, and no others are asked for.  ``again`` names the option that goes on
    from the best.
    """
    top, losses = best(found), {version: loss.mean for version, loss in comparable(found).items()}
    later = sorted(version for version in losses if top is not None and version > top.version)
    if top is None or len(later) < RISES or not all(losses[version] > top.loss for version in later[-RISES:]):
        return ""
    since, newest, every = top.version.step, later[-1].step, later[-1].step - later[-2].step
    now = losses[later[-1]]
    if now - top.loss < LEAST * abs(top.loss):
        return ""

    def before(last: int) -> list[float]:
        return [
            loss
            for _, loss in takewhile(lambda each: each[0] <= last, training(last - every))
            if isfinite(loss)
        ]

    then, lately = before(since), before(newest)
    if not (then and lately and fmean(lately) < fmean(then)):
        return ""
    return (
        f"the validation loss has risen since step {since} ({top.loss:.4g} there, {now:.4g} now) while the "
        "training loss fell: the run "
        f"over-fits; `{again}` goes on from there"
    )
