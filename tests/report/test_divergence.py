"""G2: where a training diverged, by a robust score of its losses and norms."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest

from elastic.report.divergence import LEAST, WINDOW, diverged_at, usual_limit

pytestmark = pytest.mark.fast


def rows(losses: list[float], norms: list[float] | None = None) -> list[dict[str, float]]:
    norms = norms or [1.0] * len(losses)
    return [
        {"step": step, "loss": loss, "norm": norm}
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
    ]


def falling(number: int, seed: int = 0) -> list[float]:
    """Losses of a training that goes well: they fall, with noise."""
    noise = random.Random(seed)
    return [5 / (1 + 0.05 * step) + 1 + noise.gauss(0, 0.05) for step in range(number)]


def test_g2_the_first_step_of_a_divergence_is_found() -> None:
    """G2: it rises and stays; it becomes not a number; the norm explodes a step before the loss.  Wherever it
    begins.
    """
    for good in (LEAST, 10, 50, 200):
        calm = falling(good)
        assert diverged_at(rows([*calm, *(30.0 + step for step in range(6))])) == good + 1
        assert diverged_at(rows([*calm, math.nan, math.nan])) == good + 1
        assert (
            diverged_at(rows([*calm, calm[-1], 40.0, 50.0, 60.0], [*([1.0] * good), 99.0, 99.0, 99.0, 99.0]))
            == good + 1
        )


@pytest.mark.parametrize("seed", range(5))
def test_what_is_no_divergence_is_left_alone(seed: int) -> None:
    """The controls: losses that fall, a spike that passed, a step that was skipped, a loss that stands still,
    too few steps to know.
    """
    calm = falling(300, seed)
    assert diverged_at(rows(calm)) is None
    assert diverged_at(rows([*calm[:150], 80.0, math.nan, 20.0, *calm[150:]])) is None
    assert diverged_at(rows([2.0] * 100 + [2.01] * 100)) is None
    assert diverged_at(rows([1.0, 50.0, 60.0])) is None and diverged_at([]) is None


def test_the_limit_is_that_of_normal_numbers_and_not_moved_by_outliers() -> None:
    """The judge is the normal distribution: 8 standard deviations above its middle, also if a tenth of the
    numbers is wild.
    """
    exact = [NormalDist(10, 2).inv_cdf((place + 0.5) / 2000) for place in range(2000)]
    assert usual_limit(exact) == pytest.approx(10 + 8 * 2, rel=1e-3)
    wild = exact[:-200] + [1e9] * 200
    assert usual_limit(wild) < 10 + 8 * 2 * 1.4
    assert usual_limit([1.0] * (LEAST - 1)) == math.inf
    mean, deviation = sum(wild) / 2000, (sum(value**2 for value in wild) / 2000) ** 0.5
    assert mean + 8 * deviation > 1e8, "the control: mean and standard deviation say nothing any more"


def test_an_old_divergence_that_came_back_does_not_count() -> None:
    calm = falling(3 * WINDOW)
    again = [*calm, *([40.0] * WINDOW), *calm[-2 * WINDOW :], *([50.0] * 10)]
    assert diverged_at(rows(again)) == len(again) - 9
