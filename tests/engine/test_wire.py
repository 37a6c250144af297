"""E6: gradients are added in float32, whatever the format in which they travel, and nothing that travels
decides the bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.engine.sync.ordered import Ordered, OrderedReduction
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.batch import deal_of
from elastic.plan.layout import Layout
from elastic.train.model import build_model, builder_of
from tests.engine.test_ordered import dumb, gradients
from tests.support.collectives import counting
from tests.support.ranks import Ranks
from tests.support.segments import Trained, member, segment, train_here
from tests.support.toys import small_job
from tests.support.worlds import STEPS

BF16: dict[str, Any] = {"reduction": {"wire": "bf16"}}
PLACES = [
    (Layout(1, 1), ""),
    (Layout(2, 2), "aabb"),
    (Layout(1, 4), "abbb"),
    (Layout(4, 1), "aaaa"),
    (Layout(3, 1), "aab"),
]
"""Layouts, each with the nodes of its members."""
BLOCK, MICROBATCHES, ELEMENTS, SEED = 3, 8, 120, 5


def summed(world: World) -> Tensor:
    """Returns this member's shard of a sum of gradients that are rounded to bf16 on their way."""
    scheme, whole = (
        Ordered(world, deal_of(MICROBATCHES, BLOCK, world.layout, world.nodes)),
        gradients(SEED, ELEMENTS, MICROBATCHES),
    )
    reduction, total = scheme.reduction(torch.bfloat16), None
    for number in range(scheme.deal.rounds):
        index = scheme.deal.microbatch_of(number, world.rank)
        scheme.round.number, scheme.round.last = number, number == scheme.deal.rounds - 1
        total = reduction.reduce(
            torch.full((ELEMENTS,), torch.nan) if index is None else whole[index].clone()
        )
    assert total is not None
    return total


def summed_after(world: World) -> Tensor:
    """The control: what a node has added is rounded, too, before it is sent, which is where a sum depends on
    the layout.
    """
    genuine = OrderedReduction._added
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrderedReduction, "_added", lambda *args: genuine(*args).bfloat16())
        return summed(world)


def is_whole(members: Sequence[Tensor], layout: Layout, expected: Tensor) -> bool:
    return torch.equal(torch.cat(list(members[: layout.dp_shard])), expected)


@pytest.mark.parametrize(("layout", "nodes"), PLACES, ids=str)
def test_e6_each_gradient_is_rounded_once_and_added_in_float32(
    ranks: Ranks, layout: Layout, nodes: str
) -> None:
    """E6: to the bit the sum that a plain loop makes.  The controls: a loop that does not round, or adds in
    bf16, makes another.
    """
    whole = gradients(SEED, ELEMENTS, MICROBATCHES)
    rounded = [each.bfloat16() for each in whole]
    found: list[Tensor] = ranks.run(layout, summed, nodes=nodes)
    assert found[0].dtype == torch.float32 and is_whole(found, layout, dumb(rounded, BLOCK))
    assert not is_whole(found, layout, dumb(whole, BLOCK))
    assert not is_whole(found, layout, torch.stack(rounded).sum(0).float())


def test_e6_a_sum_that_is_rounded_depends_on_the_nodes(ranks: Ranks) -> None:
    """Negative control: why sums travel in float32."""
    expected = dumb([each.bfloat16() for each in gradients(SEED, ELEMENTS, MICROBATCHES)], BLOCK)
    layout = Layout(1, 4)
    assert [
        is_whole(ranks.run(layout, summed_after, nodes=nodes), layout, expected) for nodes in ("abcd", "abbb")
    ] == [True, False]


def test_e6_two_runs_are_equal_and_the_format_is_part_of_the_job(reference: Trained, tmp_path: Path) -> None:
    """E6: the same job again has the same bits; in float32 it has others, and nearly the same losses.
    ``test_covering.py`` has worlds.

    One worker sends nothing, and rounds all the same.
    """
    alone, again = (train_here(small_job(tmp_path / name, **BF16), STEPS) for name in ("alone", "again"))
    assert again.hash == alone.hash != reference.hash
    assert [replace(each, generation=0) for each in again.outcomes] == [
        replace(each, generation=0) for each in alone.outcomes
    ]
    for mine, theirs in zip(alone.outcomes, reference.outcomes, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-3)


def sent(world: World, job: Job) -> Counter[str]:
    """Returns the bytes of the collectives of one step, by name; of an all-to-all those that this member
    sends to others.
    """
    with member(world, job, Version(0, 0)) as me, counting() as calls:
        me.step()
    found: Counter[str] = Counter()
    for call in calls:
        others = sum(count for rank, count in enumerate(call.sent) if rank != world.rank)
        found[call.name] += others if call.name == "alltoall_base" else call.bytes
    return found


@pytest.mark.parametrize(
    ("layout", "reproducible", "name"),
    [
        (Layout(1, 2), True, "alltoall_base"),
        (Layout(1, 2), False, "reduce_scatter"),
        (Layout(2, 1), False, "allreduce"),
    ],
    ids=["ordered", "reduce-scatter", "all-reduce"],
)
def test_e6_half_the_bytes_travel(
    ranks: Ranks, tmp_path: Path, layout: Layout, reproducible: bool, name: str
) -> None:
    """E6: counted at the real collectives.  All else that travels stays as it was."""
    cases = [
        (small_job(tmp_path / wire, reproducible=reproducible, reduction={"wire": wire}),)
        for wire in ("fp32", "bf16")
    ]
    wide, narrow = ranks.run_each(layout, sent, cases)
    trained = len(list(build_model(cases[0][0], builder_of(cases[0][0])).parameters()))
    for theirs, mine in zip(wide, narrow, strict=True):
        (key,) = (each for each in theirs if each.startswith(name))
        # one byte for each parameter, whether it has a gradient
        flags = trained if name == "allreduce" else 0
        assert theirs[key] - flags == 2 * (mine[key] - flags) > 0
        assert {each: count for each, count in theirs.items() if each != key} == {
            each: count for each, count in mine.items() if each != key
        }


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(2, 2)], ids=str)
def test_e6_the_library_s_sum_in_bf16_is_the_same_on_all_replicas(
    ranks: Ranks, reference: Trained, tmp_path: Path, layout: Layout
) -> None:
    """E6: it is near that in float32, and depends on the layout."""
    job = small_job(tmp_path, reproducible=False, **BF16)
    parts = ranks.run(layout, segment, job, Version(0, 0), STEPS)
    for rank, part in enumerate(parts):
        assert part.hashes == parts[rank % layout.dp_shard].hashes
    for mine, theirs in zip(parts[0].outcomes, reference.outcomes, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-3)
