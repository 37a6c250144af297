"""Finds where a training diverged, from the losses and norms of its steps alone.

The usual range of a number is the median of the steps before it and their median absolute deviation (MAD),
which a few wild steps hardly move: 1.4826 × MAD is the standard deviation of normal numbers (Hampel 1974).  A
spike from which the loss came back is no divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from elastic.protocol.spikes import robust_deviation

WINDOW = 32
"""Number of steps before a number that tell its usual range, and of newest steps that tell whether the loss
came back.
"""
LEAST = 4
"""Smallest number of steps that tell a usual range."""
FAR = 8.0
"""Number of standard deviations above the median beyond which a number is strange."""
NARROW = 0.02
"""Smallest standard deviation, as a part of the median: a small rise is not strange, even if the losses
before it hardly differ.
"""


def diverged_at(rows: Sequence[Mapping[str, float]]) -> int | None:
    """Returns the first step whose loss or norm is strange and after which the loss did not come back, or
    None.

    ``rows`` have "step", "loss" and "norm", in order.  The loss of a step is computed with the weights
    *before* the step's update; these are the first bad weights.
    """
    for place, row in enumerate(rows):
        before, newest = rows[max(0, place - WINDOW) : place], rows[max(place, len(rows) - WINDOW) :]
        limit, limit_of_norm = (usual_limit([each[name] for each in before]) for name in ("loss", "norm"))
        if (_over(row["loss"], limit) or _over(row["norm"], limit_of_norm)) and _over(
            _middle([each["loss"] for each in newest]), limit
        ):
            return int(row["step"])
    return None


def usual_limit(values: Sequence[float]) -> float:
    """Returns the limit above which the next number is strange; infinity if fewer than :data:`LEAST`
    ``values`` are finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < LEAST:
        return math.inf
    middle = median(finite)
    return middle + FAR * max(robust_deviation(finite, middle), NARROW * abs(middle))


def _over(value: float, limit: float) -> bool:
    return value > limit or not math.isfinite(value)


def _middle(values: Sequence[float]) -> float:
    """Returns the median; a value that is not finite counts as infinite."""
    return median(value if math.isfinite(value) else math.inf for value in values)
