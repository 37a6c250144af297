"""Microbatches are dealt out like cards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.plan.batch import active, microbatch_of, rounds

pytestmark = pytest.mark.fast

Deal = list[list[int | None]]


def dumb_deal(microbatches: int, data_ranks: int) -> Deal:
    """Hand one to each rank in turn until none are left; a rank that gets none in the last round idles."""
    cards, dealt = list(range(microbatches)), []
    while cards:
        dealt.append([cards.pop(0) if cards else None for _ in range(data_ranks)])
    return dealt


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_microbatch_exactly_once_in_order_whatever_the_world(microbatches: int, data_ranks: int) -> None:
    """B2: the ranks' parts are disjoint, and together they are the step."""
    dealt = dumb_deal(microbatches, data_ranks)
    assert rounds(microbatches, data_ranks) == len(dealt)
    for round_, row in enumerate(dealt):
        assert [microbatch_of(round_, rank, data_ranks, microbatches) for rank in range(data_ranks)] == row
        assert active(round_, data_ranks, microbatches) == sum(index is not None for index in row)
    assert active(len(dealt), data_ranks, microbatches) == 0
