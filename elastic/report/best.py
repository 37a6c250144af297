"""The best of the validations of a run.

Losses on different held-out samples cannot be compared.  Only losses on the samples of the newest validation
count, and losses whose samples nobody noted, as in older releases.
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
"""Number of validations in a row that must be worse than the best one before a run over-fits.  One or two may
be worse by chance.
"""
LEAST = 0.01
"""Smallest rise that counts, as a part of the best loss.  A loss that no longer improves goes up and down by
less.
"""


def number_of(held_out: str) -> int:
    """Returns the number that stands in a row of metrics for ``held_out``, the name of held-out samples: 32
    bits of a digest, or 0 if the name is empty.
    """
    return int.from_bytes(sha256(held_out.encode()).digest()[:4]) if held_out else 0


class Loss(NamedTuple):
    """The loss of a validation.  ``data`` is the :func:`number_of` its held-out samples, or 0 if nobody noted
    them.
    """

    mean: float
    data: int = 0


class Best(NamedTuple):
    """The version with the smallest loss.  ``others`` is the number of validations that do not count, because
    they used other samples.
    """

    version: Version
    loss: float
    others: int = 0

    @property
    def left_out(self) -> str:
        """A phrase about the validations that do not count; "" if there are none."""
        each = "1 validation" if self.others == 1 else f"{self.others} validations"
        return f"{each} on other held-out samples not counted" if self.others else ""


def comparable(found: Mapping[Version, Loss]) -> dict[Version, Loss]:
    """Returns the losses on the same samples as the newest validation that has noted its samples, and all
    losses without a note of their samples.
    """
    newest = next((found[version].data for version in sorted(found, reverse=True) if found[version].data), 0)
    return {version: loss for version, loss in found.items() if loss.data in (0, newest)}


def best(found: Mapping[Version, Loss]) -> Best | None:
    """Returns the first of the smallest :func:`comparable` losses; None if there is none.

    NaN is never the best.
    """
    counted = comparable(found)
    losses = {version: loss.mean for version, loss in counted.items() if not isnan(loss.mean)}
    version = min(losses, key=lambda each: (losses[each], each), default=None)
    return None if version is None else Best(version, losses[version], len(found) - len(counted))


def newest_improvement(found: Mapping[Version, Loss], min_delta: float) -> Best | None:
    """Returns the newest improvement among the :func:`comparable` losses: one that is smaller than the
    improvement before it by more than ``min_delta``.
    """
    last: Best | None = None
    for version, loss in sorted(comparable(found).items()):
        if is_better(loss.mean, None if last is None else last.loss, min_delta):
            last = Best(version, loss.mean)
    return last


def enough(found: Mapping[Version, Loss], patience: int, min_delta: float) -> int:
    """Returns the step of the newest validation if at least ``patience`` validations have come after the
    :func:`newest_improvement`; else 0.
    """
    top, counted = newest_improvement(found, min_delta), sorted(comparable(found))
    worse = sum(version > top.version for version in counted) if top is not None else 0
    return counted[-1].step if 0 < patience <= worse else 0


def over_fit(
    found: Mapping[Version, Loss], training: Callable[[int], Iterable[tuple[int, float]]], again: str
) -> str:
    """Returns the sentence about a run that over-fits; "" if the run does not.

    A run over-fits if its newest :data:`RISES` validations are worse than the best one, and the newest is
    worse by :data:`LEAST` or more of the best loss, while the training loss fell.  If both losses rise, the
    run diverges.  ``training`` yields the (step, loss) of the steps after a given step, in order.  The
    training loss is a mean over the steps before the best and before the newest validation, as many as lie
    between the last two validations; ``training`` is asked for no others.  ``again`` names the option that
    goes on from the best version.
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
        f"the validation loss has risen since step {since} ({top.loss:.4g} then, {now:.4g} now) while "
        f"the training loss fell: the run over-fits; `{again}` goes back to the best step"
    )
