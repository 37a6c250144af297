"""A10: the batch grows as the schedule says, and no sample is lost or repeated at a change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.cursor import Cursor
from elastic.plan.ramp import Batches

pytestmark = pytest.mark.fast


@st.composite
def ramps(draw: st.DrawFn) -> Batches:
    start, increment, sizes = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 12))
    return Batches(start + increment * sizes, start, increment, draw(st.integers(1, 3000)))


def told(batches: Batches, steps: int) -> list[int]:
    """Returns the batch of each step by the rule, one step after the other: which share of the ramp is being
    consumed?
    """
    consumed, found = 0, []
    sizes = (batches.final - batches.start) // batches.increment
    for _ in range(steps):
        found.append(
            min(batches.final, batches.start + batches.increment * (consumed * sizes // batches.samples))
        )
        consumed += found[-1]
    return found


@given(ramps(), st.integers(1, 400))
def test_the_batch_of_every_step_is_that_of_the_rule(batches: Batches, steps: int) -> None:
    expected = told(batches, steps)
    assert [batches.of(step) for step in range(1, steps + 1)] == expected
    assert all(a <= b for a, b in pairwise(expected))
    assert [batches.before(step) for step in range(1, steps + 2)] == [
        sum(expected[:n]) for n in range(steps + 1)
    ]


def test_a_ramp_of_gpt_3() -> None:
    """A10: 32 k to 3.2 million tokens over 4 billion, in sequences of 2,048 tokens: 16 samples to 1,568, by
    16.
    """
    batches = Batches(1568, 16, 16, 4_000_000_000 // 2048)
    assert batches.of(1) * 2048 == 32_768
    done = next(step for step in range(1, 10**6) if batches.of(step) == 1568)
    assert 4_000_000_000 <= batches.before(done) * 2048 < 4_000_000_000 + 1568 * 2048
    assert Batches(1568).of(1) == Batches(1568).of(10**6) == 1568, "the control"


@settings(max_examples=40)
@given(ramps(), st.integers(1, 30), st.integers(1, 300))
def test_every_sample_once_an_epoch_across_changes(batches: Batches, steps: int, samples: int) -> None:
    """The stream of samples is that of a run without a ramp; only the steps are cut differently."""
    cursor, plain = Cursor(samples, batches, 3), Cursor(samples, 1, 3)
    stream = [sample for step in range(1, steps + 1) for sample in cursor.ids(step)]
    assert stream == [sample for step in range(1, len(stream) + 1) for sample in plain.ids(step)]
