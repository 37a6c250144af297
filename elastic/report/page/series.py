"""Series of numbers for plots: the columns of many rows, and a bounded number of buckets that keep every spike."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

BUCKETS = 480
"""Largest number of buckets of a line: about one for two pixels of a wide screen."""
COLUMNS = (
    *("step", "time", "final", "loss", "norm", "lr", "tokens", "skipped", "spike", "left_out", "would_leave_out", "world"),
    *("generation", "validation_loss", "validation_data"),
    *("step_s", "tokens_per_s", "data_wait", "mfu", "peak_bytes"),
)
"""The names of the numbers of a step that a report shows."""

SPIKE, LOSS, GRADIENT = "spike", "loss", "gradient"
"""The reasons why a step was skipped: it is a spike, or its loss, or only its gradient, is not finite."""


class Bucket(NamedTuple):
    """The points of a line that share a place: the last ``x`` of them, their least, greatest and mean ``y``, and their number."""

    x: float
    low: float
    high: float
    mean: float
    number: int


class Columns:
    """The numbers of all steps, a compact column for each name: 8 bytes a number.  A number that is not known is NaN."""

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._columns = {name: array("d") for name in COLUMNS}
        for row in rows:
            for name, column in self._columns.items():
                column.append(row.get(name, math.nan))

    def __len__(self) -> int:
        return len(self["step"])

    def __getitem__(self, name: str) -> array[float]:
        return self._columns[name]

    def known(self, name: str) -> bool:
        """Returns whether any step has a finite number of that name."""
        return any(map(math.isfinite, self._columns[name]))

    def last(self, name: str) -> float:
        """Returns the newest finite number of that name; NaN without any."""
        return next((value for value in reversed(self._columns[name]) if math.isfinite(value)), math.nan)

    def why_skipped(self, place: int) -> str:
        """Returns why the step in that place was skipped: SPIKE, LOSS or GRADIENT; "" if it was not.

        A spike has a finite gradient, and what is not finite is never a spike.
        """
        if self["skipped"][place] != 1:
            return ""
        return SPIKE if math.isfinite(self["norm"][place]) else GRADIENT if math.isfinite(self["loss"][place]) else LOSS

    def time_of(self, step: int) -> float:
        """Returns the time of the last step that is not after ``step``; NaN without any."""
        place = bisect_right(self["step"], step)
        return self["time"][place - 1] if place else math.nan


def buckets(xs: Sequence[float], ys: Sequence[float], most: int = BUCKETS) -> list[Bucket]:
    """Returns the finite points, in order of ``xs``, in at most ``most`` buckets of equal width.  Few points have a bucket each."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y) and math.isfinite(x)]
    if len(points) <= most:
        return [Bucket(x, y, y, y, 1) for x, y in points]
    first, span = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    found, place, inside = list[Bucket](), 0, list[float]()
    last = first
    for x, y in points:
        here = min(int((x - first) / span * most), most - 1)
        if here != place and inside:
            found.append(_bucket(last, inside))
            inside = []
        place, last = here, x
        inside.append(y)
    return [*found, _bucket(last, inside)]


def _bucket(x: float, ys: Sequence[float]) -> Bucket:
    return Bucket(x, min(ys), max(ys), math.fsum(ys) / len(ys), len(ys))


def smoothed(ys: Sequence[float], width: int) -> list[float]:
    """Returns the average of the finite numbers among the ``width`` around each, which has its own place in their middle.

    NaN stands where ``ys`` is not finite.
    """
    finite = [math.isfinite(y) for y in ys]
    sums = [0.0, *accumulate(y if known else 0.0 for y, known in zip(ys, finite, strict=True))]
    counts = [0, *accumulate(finite)]
    found = list[float]()
    for place, known in enumerate(finite):
        first, end = max(place - (width - 1) // 2, 0), min(place + width // 2 + 1, len(ys))
        found.append((sums[end] - sums[first]) / (counts[end] - counts[first]) if known else math.nan)
    return found


def sampled(xs: Sequence[float], ys: Sequence[float], most: int = BUCKETS) -> list[Bucket]:
    """Returns at most ``most`` of the points: those where :func:`buckets` ends its buckets."""
    ends = {each.x for each in buckets(xs, ys, most)}
    return [Bucket(x, y, y, y, 1) for x, y in zip(xs, ys, strict=True) if x in ends and math.isfinite(y)]


def unbroken(points: Sequence[Bucket], span: float) -> Iterator[Sequence[Bucket]]:
    """Yields the parts of a line between gaps, in which there was no step: places much wider apart than most, and than 1 % of ``span``."""
    gaps = sorted(after.x - before.x for before, after in pairwise(points))
    limit = max(10 * gaps[len(gaps) // 2], span / 100) if gaps else span
    begin = 0
    for place, (before, after) in enumerate(pairwise(points), 1):
        if after.x - before.x > limit:
            yield points[begin:place]
            begin = place
    yield points[begin:]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round numbers from ``low`` to ``high`` for an axis: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / pace - 1e-9), math.floor(high / pace + 1e-9)
    return [float(f"{place * pace:.12g}") for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten from ``low`` to ``high``, every second or third if there are many, with 2 and 5 times them if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    pace = max(1, (last - first) // 5)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    return [found for power in range(first, last + 1, pace) for each in factors if low <= (found := each * 10.0**power) <= high]
