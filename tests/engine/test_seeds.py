"""Numerics 6: a block draws from a seed of its own, which follows from the job, the step, the microbatch, the
block and the number of its call, and from nothing that ran before it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from elastic.engine.seeds import IN_FLIGHT, Seeds
from elastic.models.spec import ShardingTable
from elastic.train.checks.plain import WatchedSeeds
from tests.support.toys import small_job

CPU = torch.device("cpu")


class Draws(nn.Module):
    """A block that notes what it draws: from torch, from Python and from numpy."""

    def __init__(self, draws: int = 1) -> None:
        super().__init__()
        self.draws, self.drawn = draws, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.draws):
            mask = F.dropout(torch.ones_like(x), 0.5)
            self.drawn.append((mask.tolist(), random.random(), numpy.random.uniform()))
            x = x * mask
        return x


class Model(nn.Module):
    """Blocks one after the other; ``again`` runs each of them in torch's checkpoint."""

    def __init__(self, *draws: int, again: bool | None = None) -> None:
        super().__init__()
        self.layers, self.again, self.after = nn.ModuleList(map(Draws, draws)), again, list[float]()
        self.draws_after = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again)
        if self.draws_after:
            self.after.append(torch.rand(()).item())
        return x


class Stage(Model):
    """The second and the third block of a model with three."""

    def __init__(self, *draws: int) -> None:
        super().__init__(*draws)
        self.layers = nn.ModuleDict(zip("12", self.layers, strict=True))  # type: ignore[assignment]

    def sharding(self) -> ShardingTable:
        return ShardingTable(blocks=("layers.1", "layers.2"))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():  # type: ignore[operator]
            x = layer(x)
        self.after.append(torch.rand(()).item())
        return x


def drawn(job: Any, model: Model, *places: tuple[int, int], passes: int = 1) -> list[Any]:
    """Returns what the blocks, and the code after them, draw in the microbatches ``places``."""
    seeds = Seeds(model, job, CPU)
    for place in places:
        seeds.begin(*place)
        for _ in range(passes):
            model(torch.ones(8, requires_grad=True)).sum().backward()
    blocks = [each for each in model.modules() if isinstance(each, Draws)]
    return [*(block.drawn for block in blocks), model.after]


@pytest.mark.fast
def test_a_block_draws_whatever_ran_before_it(tmp_path: Path) -> None:
    """The control is numerics 5: there a block draws what is left by the one before it."""
    job = small_job(tmp_path)
    for numerics, same in ((6, True), (5, False)):
        asked = job.replace(numerics=numerics)
        first, second = (drawn(asked, Model(draws, 1, 1), (3, 1)) for draws in (1, 2))
        assert (first[1:] == second[1:]) is same


@pytest.mark.fast
def test_a_stage_draws_what_a_whole_model_draws_in_its_blocks(tmp_path: Path) -> None:
    """The control is numerics 5: there the stage draws what the first block of the whole model draws."""
    job = small_job(tmp_path)
    for numerics, same in ((6, True), (5, False)):
        asked = job.replace(numerics=numerics)
        *whole, after = drawn(asked, Model(1, 1, 1), (3, 1))
        *stage, last = drawn(asked, Stage(1, 1), (3, 1))
        assert ((stage, last) == (whole[1:], after)) is same


@pytest.mark.fast
def test_each_block_call_and_microbatch_has_numbers_of_its_own(tmp_path: Path) -> None:
    found = drawn(small_job(tmp_path), Model(1, 1), (1, 0), (1, 1), (2, 0), passes=2)
    numbers = [repr(each) for of in found for each in of]
    assert len(numbers) == len(set(numbers)) == 3 * 3 * 2


@pytest.mark.fast
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_in_torch_s_checkpoint_draws_the_same_again(tmp_path: Path, reentrant: bool) -> None:
    """Both passes of a microbatch: each block draws for each, and again what it drew first."""
    once = drawn(small_job(tmp_path), Model(1, 1), (3, 1), passes=2)
    twice = drawn(small_job(tmp_path), Model(1, 1, again=reentrant), (3, 1), passes=2)
    for one, two in zip(once[:2], twice[:2], strict=True):
        assert two == [one[0], one[0], one[1], one[1]]
    assert once[2] == twice[2]


@pytest.mark.fast
def test_a_block_draws_the_same_again_after_later_microbatches_began(tmp_path: Path) -> None:
    """A pipeline runs the forward passes of two microbatches before both backward passes, which run blocks again.
    The memory is bounded: after many more microbatches the seeds of the first ones are gone.
    """
    model = Model(1, 1, again=False)
    seeds, losses = Seeds(model, small_job(tmp_path), CPU), []
    for number in (0, 1):
        seeds.begin(1, number)
        losses.append(model(torch.ones(8, requires_grad=True)).sum())
    for loss in losses:
        loss.backward()
    for block in model.layers:
        first, second, *again = block.drawn
        assert again == [first, second] and first != second
    model.again = None
    for number in range(2 * IN_FLIGHT):
        seeds.begin(2, number)
        model(torch.ones(8))
    assert len(seeds._known) == 2 * IN_FLIGHT, "two calls for each microbatch"


@pytest.mark.fast
def test_a_microbatch_that_begins_anew_draws_the_same(tmp_path: Path) -> None:
    """The first pass was not ended, and had called fewer blocks."""
    model = Model(1, 1)
    seeds = Seeds(model, small_job(tmp_path), CPU)
    for blocks in (1, 2, 2):
        seeds.begin(1, 0)
        for layer in model.layers[:blocks]:
            layer(torch.ones(8))
    assert [len(block.drawn) for block in model.layers] == [3, 2]
    assert all(each == block.drawn[0] for block in model.layers for each in block.drawn)


@pytest.mark.fast
def test_a_block_with_two_names_has_one_seed_a_call(tmp_path: Path) -> None:
    model = Model(1, 1)
    model.layers[1] = model.layers[0]
    found, _ = drawn(small_job(tmp_path), model, (1, 0))
    assert len(found) == 2 and found[0] != found[1]


@pytest.mark.fast
def test_nothing_is_seeded_before_the_first_microbatch(tmp_path: Path) -> None:
    model = Model(1)
    Seeds(model, small_job(tmp_path), CPU)
    torch.manual_seed(5)
    model(torch.ones(8))
    assert torch.initial_seed() == 5


@pytest.mark.fast
@pytest.mark.parametrize("again", [None, False])
def test_the_trial_sees_whether_anything_draws(tmp_path: Path, again: bool | None) -> None:
    """Nothing does, where torch's checkpoint runs a block again, with older generators.  The controls draw: in a
    block, and after the last one.
    """
    for draws, after, found in ((0, False, False), (1, False, True), (0, True, True)):
        model = Model(draws, 0, again=again)
        model.draws_after = after
        seeds = WatchedSeeds(model, small_job(tmp_path), CPU)
        for number in range(2):
            seeds.begin(1, number)
            model(torch.ones(8, requires_grad=True) * 1).sum().backward()
            seeds.look()
        assert seeds.found is found
