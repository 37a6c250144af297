"""Series of numbers for plots: the columns of many rows, and a bounded number of buckets that keep every
spike.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

BUCKETS = 480
"""Largest number of buckets of a line: about one for every two pixels of a wide screen."""
COLUMNS = (
    "step",
    "time",
    "final",
    "loss",
    "norm",
    "lr",
    "tokens",
    "skipped",
    "spike",
    "left_out",
    "would_leave_out",
    "world",
    "generation",
    "validation_loss",
    "validation_data",
    "step_s",
    "tokens_per_s",
    "data_wait",
    "mfu",
    "peak_bytes",
)
"""The names of the numbers of a step that a report shows."""

SPIKE, LOSS, GRADIENT = "spike", "loss", "gradient"
"""The reasons why a step was skipped: it is a spike, or its loss, or only its gradient, is not finite."""

Numbers = NDArray[np.float64]


class Bin(NamedTuple):
    """The points of a line that share a bucket: their last ``x``, their least, greatest and mean ``y``, and
    their number.
    """

    x: float
    low: float
    high: float
    mean: float
    number: int


class Columns:
    """The numbers of all steps, an array for each name, with 8 bytes a number.  NaN stands for an unknown
    number.
    """

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        columns = {name: array("d") for name in COLUMNS}
        for row in rows:
            for name, column in columns.items():
                column.append(row.get(name, math.nan))
        self._columns = {name: np.array(column) for name, column in columns.items()}

    def __len__(self) -> int:
        return len(self["step"])

    def __getitem__(self, name: str) -> Numbers:
        return self._columns[name]

    def finite(self, name: str) -> Numbers:
        """Returns the finite numbers of the column ``name``, in order."""
        return self[name][np.isfinite(self[name])]

    def why_skipped(self, place: int) -> str:
        """Returns why the step at ``place`` was skipped: SPIKE, LOSS or GRADIENT; "" if it was not skipped.

        A step with a loss or gradient that is not finite is never a spike.
        """
        if self["skipped"][place] != 1:
            return ""
        return (
            SPIKE
            if math.isfinite(self["norm"][place])
            else GRADIENT
            if math.isfinite(self["loss"][place])
            else LOSS
        )

    def time_of(self, step: int) -> float:
        """Returns the time of the last step up to ``step``; NaN if there is none."""
        place = np.searchsorted(self["step"], step, side="right")
        return float(self["time"][place - 1]) if place else math.nan


def buckets(xs: ArrayLike, ys: ArrayLike, most: int = BUCKETS) -> list[Bin]:
    """Returns the finite points, in order of ``xs``, in at most ``most`` buckets of equal width.  If there
    are no more than ``most`` points, each has its own bucket.
    """
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= most:
        return [Bin(at, value, value, value, 1) for at, value in zip(x.tolist(), y.tolist(), strict=True)]
    places = np.minimum((x - x[0]) / ((x[-1] - x[0]) or 1.0) * most // 1, most - 1)
    ends = [*np.flatnonzero(np.diff(places)) + 1, len(x)]
    parts = zip(x[np.array(ends) - 1].tolist(), np.split(y, ends[:-1]), strict=True)
    return [
        Bin(at, float(part.min()), float(part.max()), float(part.mean()), len(part)) for at, part in parts
    ]


def smoothed(ys: ArrayLike, width: int) -> Numbers:
    """Returns, for each place, the average of the finite numbers among the ``width`` numbers around it.

    NaN stands where ``ys`` is not finite.
    """
    values = np.asarray(ys, float)
    known, ones = np.isfinite(values), np.ones(width)
    sums, counts = (
        np.convolve(each, ones)[width // 2 :][: len(values)] for each in (np.where(known, values, 0.0), known)
    )
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def sampled(xs: Sequence[float] | Numbers, ys: Numbers) -> list[Bin]:
    """Returns the last point of each bucket that :func:`buckets` makes."""
    ends = np.isin(xs, [each.x for each in buckets(xs, ys)]) & np.isfinite(ys)
    return buckets(np.asarray(xs)[ends], ys[ends], len(ys))
