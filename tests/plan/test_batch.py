"""Microbatches are dealt out in blocks to nodes, and like cards to what is left over."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.plan.batch import Deal, deal_of
from elastic.plan.layout import Layout

pytestmark = pytest.mark.fast

Cards = list[list[int | None]]


def dumb_deal(microbatches: int, data_ranks: int) -> Cards:
    """Hand one to each rank in turn until none are left; a rank that gets none in the last round idles."""
    cards, dealt = list(range(microbatches)), []
    while cards:
        dealt.append([cards.pop(0) if cards else None for _ in range(data_ranks)])
    return dealt


@given(st.integers(1, 40), st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_blocks_of_one_are_dealt_like_cards(microbatches: int, nodes: list[str]) -> None:
    """B2: the ranks' parts are disjoint, and together they are the step; nodes make no difference."""
    dealt, deal = dumb_deal(microbatches, len(nodes)), Deal(microbatches, 1, tuple(nodes))
    assert deal.rounds == len(dealt)
    for round_, row in enumerate(dealt):
        assert [deal.microbatch_of(round_, rank) for rank in range(len(nodes))] == row


@given(st.integers(1, 60), st.integers(1, 9), st.lists(st.sampled_from("abcd"), min_size=1, max_size=14))
def test_every_microbatch_exactly_once_in_as_few_rounds_as_can_be(
    microbatches: int, block: int, nodes: list[str]
) -> None:
    """B2, N7: each round runs the next microbatches, and its units are what may be added on a node: a block,
    or its beginning.
    """
    deal = Deal(microbatches, block, tuple(nodes))
    assert deal.rounds == -(-microbatches // len(nodes)) == len(deal.units)
    found = []
    for round_, units in enumerate(deal.units):
        ranks = [rank for unit in units for rank in unit.ranks]
        assert len(set(ranks)) == len(ranks)
        for unit in units:
            found += [deal.microbatch_of(round_, rank) for rank in unit.ranks]
            last = unit.first + len(unit.ranks) - 1
            assert found[-1] == last and last // block == unit.first // block, "a unit is part of one block"
            assert len({nodes[rank] for rank in unit.ranks}) == 1
            assert unit.begins == (unit.first % block == 0) and (unit.begins or len(unit.ranks) == 1)
            assert unit.ends == (last % block == block - 1 or last == microbatches - 1)
        assert all(
            deal.microbatch_of(round_, rank) is None for rank in range(len(nodes)) if rank not in ranks
        )
    assert found == list(range(microbatches)), "in the order in which they are added"


@pytest.mark.parametrize(
    ("microbatches", "block", "sizes", "sums"),
    [
        (64, 4, (4, 4, 4, 4), [4, 4, 4, 4]),
        (64, 4, (4, 4, 4, 3), [3, 3, 3, 4, 4]),  # the short node has to run one block only, and in two rounds
        # no round to spare: the short node runs beginnings and ends of blocks
        (60, 4, (4, 4, 4, 3), [4, 5, 6, 6]),
        (64, 4, (8, 8), [4, 4, 4, 4]),
        (64, 8, (4, 4, 4, 4), [10, 10, 10, 10]),  # a block that no node has room for: half of it is one sum
        (9, 4, (4, 4), [2, 1]),
    ],
)
def test_units_of_a_round(microbatches: int, block: int, sizes: tuple[int, ...], sums: list[int]) -> None:
    """N7: the number of tensors that leave nodes in each round."""
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    assert [len(units) for units in Deal(microbatches, block, tuple(nodes)).units] == sums


def test_a_deal_of_many_ranks_counts_few_units() -> None:
    """N7 at 1,024 workers, and at 1,023: a node sends one sum a round."""
    for workers in (1024, 1023):
        deal = Deal(4096, 8, tuple(rank // 8 for rank in range(workers)))
        for units in deal.units:
            assert set(Counter(deal.nodes[unit.ranks[0]] for unit in units).values()) == {1}


def test_a_world_without_nodes_is_one_node() -> None:
    assert deal_of(8, 2, Layout(2, 2)) == Deal(8, 2, (None,) * 4)
    assert deal_of(8, 2, Layout(2, 2), ("a", "a", "b", "b")) == Deal(8, 2, ("a", "a", "b", "b"))
