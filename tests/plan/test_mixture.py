"""The turns of the parts of a mixture: exact shares at any time."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.plan.mixture import MixtureTurns, shares, turns

pytestmark = pytest.mark.fast

weights = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)


def strays(parts: list[int], wanted: list[int]) -> Fraction:
    """Returns the largest distance of a part's number of samples from its exact share, over all prefixes."""
    counts, worst = [0] * len(wanted), Fraction(0)
    for number, part in enumerate(parts, 1):
        counts[part] += 1
        worst = max(
            worst,
            *(
                abs(count - Fraction(number * share, sum(wanted)))
                for count, share in zip(counts, wanted, strict=True)
            ),
        )
    return worst


@given(weights, st.integers(1, 300))
def test_a_part_is_never_a_whole_sample_from_its_exact_share(wanted: list[int], positions: int) -> None:
    """A2: at every prefix, and for every part."""
    deal = MixtureTurns(0, (0,) * len(wanted), shares([float(each) for each in wanted]))
    assert strays([deal.at(position)[0] for position in range(positions)], wanted) < 1


def test_independent_draws_stray() -> None:
    """Negative control of the test above: so does the shuffled period."""
    draw = random.Random(0)
    assert strays(draw.choices(range(3), [5, 3, 2], k=300), [5, 3, 2]) > 2
    period = list(turns((50, 30, 20))[0]) * 3
    assert strays(period, [5, 3, 2]) < 1
    draw.shuffle(period)
    assert strays(period, [5, 3, 2]) > 1


@given(weights, st.integers(0, 50), st.integers(0, 200))
def test_looking_up_is_counting(wanted: list[int], since: int, more: int) -> None:
    """The place in a part is the number of positions that it had before."""
    had = [3 * part for part in range(len(wanted))]
    deal = MixtureTurns(since, tuple(had), shares([float(each) for each in wanted]))
    for position in range(since, since + more):
        assert deal.before(position) == tuple(had)
        part, place = deal.at(position)
        assert place == had[part]
        had[part] += 1


def test_weights_are_taken_as_they_are_written() -> None:
    assert shares((0.7, 0.2, 0.1)) == (7, 2, 1) == shares((70, 20.0, 10))
    assert shares((1e-05, 2e-05, 0.0)) == (1, 2, 0)
    assert shares(()) == () and shares((0.0, 0.0)) == (0, 0)
    assert [turns((7, 2, 1))[0].count(part) for part in range(3)] == [7, 2, 1]
