"""The ordered reduction is compared with a loop in Python: blocks of microbatches are added, and then their
sums, whoever ran them.

One function computes a member's part.  It runs in threads of this process, where layouts, node maps and
blocks are drawn at random and every byte is counted, and in real processes over gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engine.sync.ordered import Ordered, OrderedReduction
from elastic.engine.world import World
from elastic.plan.batch import Deal, Unit, deal_of
from elastic.plan.layout import Layout
from elastic.plan.placement import data_rank
from tests.support import model_world
from tests.support.collectives import counting
from tests.support.ranks import Ranks
from tests.support.toy_axes import registered

MAPS = ["aaaa", "aabb", "abbb", "abab"]
SEEDS, MICROBATCHES = range(6), 7
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gradients(
    seed: int, rows: int, microbatches: int = MICROBATCHES, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Returns a flat gradient for each microbatch; magnitudes make every order another sum, and adding zero
    loses negative zeros.
    """
    draw = np.random.default_rng(seed)
    found = draw.normal(size=(microbatches, rows)) * 10.0 ** draw.integers(-4, 4, size=(microbatches, 1))
    found[:, draw.random(rows) < 0.2] = -0.0
    return [torch.from_numpy(each).to(dtype) for each in found]


def width(seed: int, layout: Layout) -> int:
    """Returns the number of elements of the whole: a multiple of the shards, as FSDP pads it, but not always
    of the replicas.
    """
    return layout.dp_shard * (seed + 1)


def dumb(grads: Sequence[torch.Tensor], block: int) -> torch.Tensor:
    """Adds in the canonical order, in float32."""
    sums = []
    for first in range(0, len(grads), block):
        part, *others = (each.float() for each in grads[first : first + block])
        for other in others:
            part = part + other
        sums.append(part)
    total, *others = sums
    for other in others:
        total = total + other
    return total


def reduced(
    world: Any, block: int, elements: int, seed: int, microbatches: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns this member's shard of the sum.  An idle member brings NaN."""
    scheme = Ordered(world, deal_of(microbatches, block, world.layout, world.nodes))
    reduction, whole = scheme.reduction(), gradients(seed, elements, microbatches, dtype)
    output = torch.full((elements // world.layout.shards,), float("nan"), device=world.device)
    for number in range(scheme.deal.rounds):
        index = scheme.deal.microbatch_of(number, data_rank(world.layout, world.rank))
        scheme.round.number, scheme.round.last = number, number == scheme.deal.rounds - 1
        grads = torch.full((elements,), float("nan"), dtype=dtype) if index is None else whole[index].clone()
        total = reduction.reduce(grads.to(world.device))
        assert (total is not None) is scheme.round.last
        if total is not None:
            output.copy_(total)
        kept = [each for each in (reduction.total, reduction.open) if each is not None]
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in kept), (
            "a sum keeps no buffer of a round alive"
        )
    return output


def assert_equal(members: Sequence[torch.Tensor], layout: Layout, expected: torch.Tensor) -> None:
    whole = torch.cat(list(members[: layout.dp_shard]))
    assert whole.numpy().tobytes() == expected.numpy().tobytes()
    assert all(
        each.numpy().tobytes() == members[rank % layout.dp_shard].numpy().tobytes()
        for rank, each in enumerate(members)
    )


def reduced_by_columns(world: Any, block: int, elements: int, seed: int, microbatches: int) -> torch.Tensor:
    """Returns this member's shard of the sum of its columns: those with another index have other gradients."""
    column = world.layout.coordinates(world.rank)["tp"]
    return reduced(world, block, elements, seed + column, microbatches, torch.float32)


def assert_columns(
    found: Sequence[torch.Tensor], layout: Layout, seed: int, block: int, elements: int
) -> None:
    """Each member has its shard of the sum that a loop in Python makes of the gradients of its columns."""
    for rank, mine in enumerate(found):
        index = layout.coordinates(rank)
        whole = dumb(gradients(seed + index["tp"], elements), block)
        expected = whole.chunk(layout.dp_shard)[index["dp_shard"]]
        assert mine.numpy().tobytes() == expected.numpy().tobytes(), (str(layout), rank)


COLUMNS = [Layout(2, 1, (("tp", 2),)), Layout(1, 2, (("tp", 2),))]
"""Two data groups of two members: world ranks 0 and 2, and 1 and 3."""


# ---- in threads


@pytest.mark.parametrize("nodes", ["aaaa", "aabb"])
@pytest.mark.parametrize("layout", [*COLUMNS, Layout(2, 2, (("tp", 2),))], ids=str)
def test_members_with_other_columns_have_sums_of_their_own(layout: Layout, nodes: str) -> None:
    """A data rank is no world rank: members along an axis that cuts the model run one microbatch together."""
    with registered():
        each_node = "".join(node * (layout.world // 4) for node in nodes)
        for block in (1, 3):
            found, exchange = model_world.run(
                layout, each_node, reduced_by_columns, block, 12, 5, MICROBATCHES
            )
            assert_columns(found, layout, 5, block, 12)
            assert all((a - b) % 2 == 0 for a, b in exchange.bytes), "nothing travels between data groups"


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([*COLUMNS, Layout(2, 2, (("tp", 2),)), Layout(3, 1, (("tp", 2),))]),
    st.lists(st.sampled_from("abc"), min_size=8, max_size=8),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_each_data_group_adds_on_its_own_nodes(
    layout: Layout, nodes: list[str], block: int, seed: int
) -> None:
    """Microbatches are dealt by the nodes of one data group; another may have a block's members elsewhere."""
    with registered():
        found, _ = model_world.run(
            layout, "".join(nodes[: layout.world]), reduced_by_columns, block, 12, seed, MICROBATCHES
        )
        assert_columns(found, layout, seed, block, 12)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Layout, str]:
    layout = Layout(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    return layout, "".join(
        draw(st.lists(st.sampled_from("abc"), min_size=layout.world, max_size=layout.world))
    )


@settings(max_examples=60, deadline=None)
@given(
    worlds(),
    st.integers(1, 6),
    st.integers(1, 26),
    st.integers(1, 9),
    st.integers(0, 2**32),
    st.sampled_from(sorted(WIRE)),
)
def test_the_bits_depend_on_the_job_alone(
    world: tuple[Layout, str], block: int, microbatches: int, rows: int, seed: int, dtype: str
) -> None:
    """N7: any layout, any placing of its members on up to three nodes, any block, both dtypes of a gradient."""
    layout, nodes = world
    elements = layout.dp_shard * rows
    found, _ = model_world.run(layout, nodes, reduced, block, elements, seed, microbatches, WIRE[dtype])
    assert_equal(found, layout, dumb(gradients(seed, elements, microbatches, WIRE[dtype]), block))


def reversed_in_a_block(patch: pytest.MonkeyPatch) -> None:
    genuine = OrderedReduction._added

    def added(self: OrderedReduction, unit: Unit, *others: Any) -> torch.Tensor:
        return genuine(self, replace(unit, ranks=unit.ranks[::-1]), *others)

    patch.setattr(OrderedReduction, "_added", added)


def end_of_a_block_is_added(patch: pytest.MonkeyPatch) -> None:
    genuine = Deal._dealt

    def dealt(self: Deal, first: int, last: int) -> list[Unit]:
        unit, *others = genuine(self, first, last)
        head, rest = (
            Unit(first, unit.ranks[:1], begins=True, ends=False),
            Unit(first + 1, unit.ranks[1:], begins=False, ends=True),
        )
        return [head, rest, *others]

    patch.setattr(Deal, "_dealt", dealt)


@pytest.mark.parametrize("wrong", [reversed_in_a_block, end_of_a_block_is_added])
def test_a_wrong_order_shows(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Negative control: a block that is added backwards, or a node that adds the end of a block, gives
    another sum.
    """
    layout = Layout(1, 8)
    expected = dumb(gradients(3, 80, 8), 4)
    good, _ = model_world.run(layout, "aaaabbbb", reduced, 4, 80, 3, 8, torch.float32)
    assert_equal(good, layout, expected)
    wrong(monkeypatch)
    bad, _ = model_world.run(layout, "aaaabbbb", reduced, 4, 80, 3, 8, torch.float32)
    assert torch.allclose(torch.cat(bad), expected, rtol=1e-3, atol=1e-3) and not torch.equal(
        torch.cat(bad), expected
    )


def hierarchical(layout: Layout, nodes: str, elements: int) -> dict[str, float]:
    """Returns the bytes that leave each node in a hierarchical reduce-scatter: a float32 sum for each element
    that others own.
    """
    owned = Counter(nodes)
    return {node: 4 * elements * (1 - owned[node] / layout.world) for node in owned}


@pytest.mark.parametrize(
    ("nodes", "layout", "microbatches", "most"),
    [
        ("aaaabbbbccccdddd", Layout(4, 4), 64, 1.1),
        ("aaaabbbbccccdddd", Layout(1, 16), 64, 1.1),
        ("aaaabbbbccccddd", Layout(1, 15), 64, 1.3),
        ("aaabbbbccccdddd", Layout(3, 5), 64, 1.3),
        ("abcdabcdabcdabcd", Layout(1, 16), 64, 1.1),
    ],
)
def test_a_node_sends_one_sum_a_round(nodes: str, layout: Layout, microbatches: int, most: float) -> None:
    """N7: bytes out of each node in a round, counted where they are sent, with ``block`` = 4 = the ranks of a
    whole node.
    """
    elements, rounds = layout.world * 60, Deal(microbatches, 4, tuple(nodes)).rounds
    _, exchange = model_world.run(layout, nodes, reduced, 4, elements, 1, microbatches, torch.float32)
    gathered = final_bytes(layout, nodes, elements)
    expected = hierarchical(layout, nodes, elements)
    for node, sent in exchange.out_of(nodes).items():
        assert sent - gathered[node] <= most * rounds * expected[node], (node, sent, gathered[node], expected)
    _, one = model_world.run(layout, nodes, reduced, 1, elements, 1, microbatches, torch.float32)
    assert sum(one.out_of(nodes).values()) > 3 * sum(exchange.out_of(nodes).values()), (
        "without blocks each gradient leaves its node"
    )
    peers = Counter(source for source, target in exchange.bytes)
    assert max(peers.values()) <= 4 + len(set(nodes))


def final_bytes(layout: Layout, nodes: str, elements: int) -> Counter[str]:
    """Returns the bytes out of each node that belong to the replicas' exchange after the last round: those of
    a step without gradients.
    """

    def gather(world: Any) -> None:
        scheme = Ordered(world, deal_of(1, 1, world.layout, world.nodes))
        part = -(-elements // world.size)
        scheme.reduction()._from_replicas(torch.zeros(part), elements // world.layout.dp_shard)

    _, exchange = model_world.run(layout, nodes, gather)
    return exchange.out_of(nodes)


def test_replicas_get_a_piece_from_another_node_once() -> None:
    """The exchange after the last round: a node gets each piece of others once, which is what a hierarchical
    all-gather sends.
    """
    layout, nodes = Layout(16, 1), "aaaabbbbccccdddd"
    assert final_bytes(layout, nodes, 1600) == dict.fromkeys("abcd", 4 * 400 * 3)


# ---- in processes


def folded(world: World, nodes: str, block: int) -> list[torch.Tensor]:
    """Returns this member's shard of the sum for each seed, as if the members were on ``nodes``."""
    world.nodes = tuple(nodes)
    return [
        reduced(world, block, width(seed, world.layout), seed, MICROBATCHES, torch.float32) for seed in SEEDS
    ]


CASES = {
    Layout(1, 1): [],
    Layout(1, 2): [("ab", 3)],
    Layout(2, 1): [],
    Layout(1, 3): [("abb", 2)],
    Layout(3, 1): [("aab", 2)],
    Layout(2, 2): [(nodes, 3) for nodes in MAPS],
    Layout(1, 4): [(nodes, 2) for nodes in MAPS],
    Layout(4, 1): [(nodes, 2) for nodes in MAPS],
}
"""The nodes of members, and blocks, by layout, besides one node without blocks."""


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_the_fold_is_a_sum_in_the_order_of_the_microbatches(ranks: Ranks, layout: Layout) -> None:
    """Promise 1, bitwise: 7 microbatches over 1 to 4 ranks; what an idle rank brings does not enter; -0.0
    stays -0.0.
    """
    cases = [("", 1), *CASES[layout]]
    for (_, block), members in zip(cases, ranks.run_each(layout, folded, cases), strict=True):
        for seed in SEEDS:
            expected = dumb(gradients(seed, width(seed, layout)), block)
            assert_equal([each[seed] for each in members], layout, expected)


def sent(world: World, block: int) -> tuple[Counter[int], int]:
    """Returns the bytes that this member sends to each other one in 8 microbatches, by the arguments of its
    real collectives.
    """
    with counting() as calls:
        reduced(world, block, 960, 1, 8, torch.float32)
    found: Counter[int] = Counter()
    for call in calls.named("alltoall_base"):
        found.update({rank: count for rank, count in enumerate(call.sent) if count and rank != world.rank})
    return found, len(calls.named("alltoall_base"))


def test_real_processes_send_what_threads_send(ranks: Ranks) -> None:
    """The bytes at the seam to ``torch.distributed``, of two nodes of two: half as many leave a node as
    without blocks.
    """
    layout, nodes = Layout(1, 4), "aabb"
    out = {}
    found: list[tuple[Counter[int], int]]
    for block, found in zip((1, 2), ranks.run_each(layout, sent, [(1,), (2,)], nodes=nodes), strict=True):
        _, exchange = model_world.run(layout, nodes, reduced, block, 960, 1, 8, torch.float32)
        pairs = {
            (source, target): count
            for source, (each, _) in enumerate(found)
            for target, count in each.items()
        }
        assert pairs == exchange.bytes and {calls for _, calls in found} == {4}, (
            "two rounds, each in a node and between nodes"
        )
        out[block] = exchange.out_of(nodes)
    assert out[2] == {"a": 2 * 4 * 480, "b": 2 * 4 * 480} and out[1] == {"a": 4 * 4 * 480, "b": 4 * 4 * 480}


def test_the_order_shows() -> None:
    """Negative control: another order of these gradients gives another sum, and beginning with zeros would
    lose negative zeros.
    """
    wholes = [gradients(seed, width(seed, Layout(1, 4))) for seed in SEEDS]
    orders: list[Callable[[list[torch.Tensor]], torch.Tensor]] = [
        lambda each: dumb(each[::-1], 1),
        lambda each: dumb(each, 2),
    ]
    for order in orders:
        assert any(not torch.equal(order(each), dumb(each, 1)) for each in wholes)
    assert any(torch.signbit(total[total == 0]).any() for total in (dumb(each, 1) for each in wholes))


def test_other_columns_have_groups_of_their_own(ranks: Ranks) -> None:
    """Real processes over gloo, which make the groups of their data groups alone."""
    with registered():
        for layout in COLUMNS:
            found = ranks.run(layout, reduced_by_columns, 3, 12, 5, MICROBATCHES)
            assert_columns(found, layout, 5, 3, 12)
