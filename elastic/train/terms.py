"""The contract of a loss, (sum, count), and the sentences for whatever breaks it.

A count is a number of terms: the journal has whole numbers, and a step without terms divides by 1.  So a sum
of weights such as 4.5 is no count: cut to 4, it would divide by the wrong number; 0.5, cut to 0, would not
divide at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from elastic.errors import LossError
from elastic.job import Job
from elastic.protocol.commit_record import Outcome, is_count

CONTRACT = (
    "it must return (sum, count): two scalars, the sum over the terms of the microbatch and their number, "
    "not a mean"
)
"""End of the message of an error that a wrong :data:`Loss` causes."""


def wrong_count(named: str, count: float, where: str = "") -> str:
    """Returns the sentence for a count that is no number of terms.  The sentence begins with ``named``;
    ``where`` says which microbatch has that count.
    """
    where = f": {where}" if where else ""
    return (
        f"{named}{where} returned the count {count:.9g}, but a count is a number of terms: a whole "
        "number, 0 or more; for a loss with weights return the weighted sum and the number of terms, "
        "with weights whose mean is about 1"
    )


def expect_no_means(job: Job, outcome: Outcome) -> None:
    """Raises :class:`LossError` if the loop of a new run gave a mean beside the count 1 for each microbatch
    of its first step.
    """
    if job.loop and outcome.step == 1 and job.microbatch_size > 1 and {*outcome.counts} == {1}:
        raise LossError(
            f"loop = {job.loop!r}: step.backward() got the count 1 for each microbatch of "
            f"{job.microbatch_size} samples; {CONTRACT}.  For a mean over n terms, call step.backward(mean "
            "* n, n)"
        )


def expect_sum(named: str, returned: Any, model: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns ``returned``.  Raises :class:`LossError`, which begins with ``named``, unless it is (sum,
    count), two scalars.

    It waits for no device, so a count in a tensor may still be wrong.  ``model`` is the job's setting, which
    the message names if the sum has no gradient.
    """
    match returned:
        case (torch.Tensor(shape=()), torch.Tensor(shape=()) | Real()):
            loss, count = returned
            # a count on a device is checked at the commit, which waits for it
            if not isinstance(count, torch.Tensor) and not is_count(float(count)):
                raise LossError(wrong_count(named, float(count)))
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise LossError(
                    f"{named} returned a sum without a gradient: the sum was detached, was computed "
                    f"without gradients, or depends on no parameter of {model!r} that requires a "
                    "gradient"
                )
            return loss, count
        case tuple() | list():
            came = f"({', '.join(map(_described, returned))})"
        case _:
            came = _described(returned)
    raise LossError(f"{named} {'got' if named.endswith('backward()') else 'returned'} {came}; {CONTRACT}")


def _short(value: object) -> str:
    """Returns a value as one line of text: the keys of a mapping; of anything else at most 40 characters."""
    if isinstance(value, Mapping):
        return f"with the keys {', '.join(map(repr, value)) or 'none'}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:40]}…"


def _described(value: object) -> str:
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"{type(value).__name__} {_short(value)}"
    )
