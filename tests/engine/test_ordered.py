"""The ordered reduction is compared with a loop in Python: pieces are added in the order of the microbatches, whoever ran them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elastic.engine.sync.base import Round
from elastic.engine.sync.ordered import OrderedReduction
from elastic.engine.world import World
from elastic.plan.batch import active, rounds
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks

LAYOUTS = [Layout(1, 1), Layout(1, 2), Layout(2, 1), Layout(1, 3), Layout(3, 1), Layout(2, 2), Layout(1, 4), Layout(4, 1)]
SEEDS, MICROBATCHES = range(12), 7


def gradients(seed: int, rows: int) -> list[torch.Tensor]:
    """Returns a flat gradient for each microbatch; magnitudes make every order another sum, and adding zero loses negative zeros."""
    draw = np.random.default_rng(seed)
    found = draw.normal(size=(MICROBATCHES, rows)) * 10.0 ** draw.integers(-4, 4, size=(MICROBATCHES, 1))
    found[:, draw.random(rows) < 0.2] = -0.0
    return [torch.from_numpy(each).float() for each in found]


def width(seed: int, layout: Layout) -> int:
    """Returns the number of elements of the whole: a multiple of the shards, as FSDP pads it, but not always of the replicas."""
    return layout.dp_shard * (seed + 1)


def dumb(seed: int, layout: Layout) -> torch.Tensor:
    first, *others = gradients(seed, width(seed, layout))
    for other in others:
        first = first + other
    return first


def folded(world: World) -> list[torch.Tensor]:
    """Returns this member's shard of the sum for each seed.  An idle member brings NaN."""
    layout, round_ = world.layout, Round()
    reduction, found = OrderedReduction(world, round_), []
    for seed in SEEDS:
        mine = gradients(seed, width(seed, layout))[world.rank :: world.size]
        output = torch.empty(width(seed, layout) // layout.dp_shard)
        count = rounds(MICROBATCHES, world.size)
        for number in range(count):
            round_.active, round_.last = active(number, world.size, MICROBATCHES), number == count - 1
            grads = mine[number] if number < len(mine) else torch.full((width(seed, layout),), float("nan"))
            reduction.reduce(grads, output)
        found.append(output.clone())
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_fold_is_a_sum_in_the_order_of_the_microbatches(ranks: Ranks, layout: Layout) -> None:
    """Promise 1, bitwise: 7 microbatches over 1 to 4 ranks; what an idle rank brings does not enter; -0.0 stays -0.0."""
    members: list[list[torch.Tensor]] = ranks.run(layout, folded)
    for seed in SEEDS:
        whole = torch.cat([members[index][seed] for index in range(layout.dp_shard)])
        assert whole.numpy().tobytes() == dumb(seed, layout).numpy().tobytes()
        assert all(torch.equal(each[seed], members[rank % layout.dp_shard][seed]) for rank, each in enumerate(members))


def test_the_order_shows() -> None:
    """Negative control: another order of these gradients gives another sum, and beginning with zeros would lose negative zeros."""
    layout = Layout(1, 4)
    backwards = [sum(gradients(seed, width(seed, layout))[::-1][1:], gradients(seed, width(seed, layout))[-1]) for seed in SEEDS]
    assert any(not torch.equal(torch.as_tensor(other), dumb(seed, layout)) for seed, other in zip(SEEDS, backwards, strict=True))
    assert any(torch.signbit(total[total == 0]).any() for total in (dumb(seed, layout) for seed in SEEDS))
