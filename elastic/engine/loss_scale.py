"""Loss scaling for fp16 (Micikevicius and others 2018, section 3.2): small gradients would become zero
without it.

The loss is multiplied before the backward pass, and the sums of the gradients are divided by the same number.
A scale that is too large makes some gradient infinite; then no member applies the step, as the commit says,
and the scale is halved.  After ``GROWS_AFTER`` steps in a row that were applied it is doubled.  The scale and
the number of these steps are scalars of the state, the same on every member.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from elastic.job import Job

SCALARS = ("loss_scale", "good_steps")
"""The scalars of the state; a ``loss_scale`` of 0 stands for ``FIRST``."""
FIRST = 2.0**4
"""First scale.  Our losses are sums over tokens, so that a gradient of the logits is at most the scale
itself, and that of a weight grows with the tokens of a microbatch.  With 16,384 tokens 2 is the largest scale
that works (99.5 M parameters, one H200), and each halving costs a step.
"""
LEAST = 2.0**-14
"""Least scale: a loss that overflows even then is not a matter of its scale."""
MOST = 2.0**24
"""Largest scale, as in most trainers."""
GROWS_AFTER = 2000
"""Number of applied steps in a row after which the scale is doubled."""


def is_scaled(precision: str) -> bool:
    """Returns whether the setting ``precision`` needs a loss scale."""
    return precision == "fp16"


class LossScale:
    """The loss scale of one job: 1 in every precision but fp16."""

    def __init__(self, job: Job, scalars: Mapping[str, Tensor]) -> None:
        """``scalars`` are those of the state, by name."""
        self._setting = job.loss_scale if is_scaled(job.precision) else 1.0
        self._scalars = scalars

    @property
    def value(self) -> float:
        """The number by which the loss of the next step is multiplied."""
        return (
            float(self._scalars["loss_scale"]) or FIRST
            if self._setting == "dynamic"
            else float(self._setting)
        )

    @property
    def shrinks(self) -> bool:
        """True if a gradient that is not finite halves the scale, so that it need not be a sign of a
        fault.
        """
        return self._setting == "dynamic" and self.value > LEAST

    def after(self, *, finite: bool) -> None:
        """Notes that a step is committed, and whether its gradient was finite."""
        if self._setting != "dynamic":
            return
        good = int(self._scalars["good_steps"]) + 1 if finite else 0
        scale = self.value if finite else max(self.value / 2, LEAST)
        self._scalars["loss_scale"].fill_(min(2 * scale, MOST) if good >= GROWS_AFTER else scale)
        self._scalars["good_steps"].fill_(good % GROWS_AFTER)
