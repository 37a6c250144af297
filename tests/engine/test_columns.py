"""An axis that computes is one file, one row of ``plan/axes.py`` and one entry of ``REWRITES``.

The axis is a test's own (``tests/support/columns.py``), and everything else is the product's: the step, the
reduction, the optimizer, checkpoints and export.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from elastic.engine import parallelize
from elastic.engine.parallelize import REWRITES
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.axes import chunk_size
from elastic.plan.layout import Layout
from tests.support import columns
from tests.support.columns import Blocks, Columns
from tests.support.ranks import Ranks
from tests.support.segments import Part, Trained, segment, train, train_here
from tests.support.toy_axes import registered
from tests.support.toys import LIGHT, toy_job

STEPS = 3


def of_columns(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains with the axis in the product's table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWRITES, columns.AXIS, columns.rewrite)
        return segment(world, job, version, last)


def job_of(bucket: Path, **changes: object) -> Job:
    """Returns the toy job, in which each step clips."""
    args = {**LIGHT["model_args"], "hidden": 56}
    settings = {**LIGHT, "model": "tests.support.columns:build", "model_args": args}
    return toy_job(bucket, **(settings | changes))


def trained(
    ranks: Ranks,
    job: Job,
    layout: Layout,
    last: int = STEPS,
    version: Version = Version(0, 0),  # noqa: B008 (frozen)
    how: Callable[..., Part] = of_columns,
) -> Trained:
    with registered():
        return train(ranks, job, layout, last, version, how=how)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_here(job_of(tmp_path_factory.mktemp("one")), STEPS, how=of_columns)


def over(degree: int) -> tuple[tuple[str, int], ...]:
    return ((columns.AXIS, degree),)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        (Layout(2, 1, over(2)), "auto"),
        (Layout(1, 1, over(4)), "auto"),
        (Layout(4, 1), "auto"),
        (Layout(1, 2, over(2)), 2),
        (Layout(1, 2, over(2)), 3),
    ],
    ids=str,
)
def test_the_degree_of_an_axis_shows_in_no_bit(
    ranks: Ranks, tmp_path: Path, one: Trained, layout: Layout, zero: object
) -> None:
    """Each member has its own columns of weights and moments, and one exported state has the bits of one
    worker.
    """
    found = trained(ranks, job_of(tmp_path, parallel={"zero": zero}), layout)
    assert found.hash == one.hash
    for ours, theirs in zip(found.outcomes, one.outcomes, strict=True):
        assert (ours.losses, ours.squared_norm) == (theirs.losses, theirs.squared_norm)
        assert ours.norm > 1, "it is clipped"


def test_it_computes_what_linear_layers_do(tmp_path: Path, one: Trained) -> None:
    """Equal bits would hide an error that all degrees share."""
    plain = train_here(job_of(tmp_path), STEPS)
    assert plain.hash != one.hash
    for ours, theirs in zip(one.outcomes, plain.outcomes, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_a_checkpoint_goes_on_at_another_degree(ranks: Ranks, tmp_path: Path, one: Trained) -> None:
    job = job_of(tmp_path)
    two = trained(ranks, job, Layout(2, 1, over(2)), 2)
    assert trained(ranks, job, Layout(1, 1, over(4)), STEPS, two.version).hash == one.hash


def turned(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains with the members' blocks in the wrong order."""
    with pytest.MonkeyPatch.context() as patch:
        gathered = Blocks.all
        patch.setattr(Blocks, "all", lambda self, mine, count: gathered(self, mine, count).flip(0))
        return of_columns(world, job, version, last)


def left_out(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains without the exchange in backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blocks, "sum", lambda self, mine, count: mine.sum(0))
        return of_columns(world, job, version, last)


def by_member(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains with sums in which each member adds its own blocks first, as the library's collectives do."""

    def added(self: Blocks, mine: Tensor, count: int) -> Tensor:
        each = self.all(mine, count).split(chunk_size(count, self.degree))
        return reduce(torch.add, [reduce(torch.add, blocks) for blocks in each])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blocks, "sum", added)
        return of_columns(world, job, version, last)


@pytest.mark.parametrize("how", [turned, left_out, by_member], ids=lambda how: how.__name__)
def test_a_wrong_exchange_shows(ranks: Ranks, tmp_path: Path, one: Trained, how: Callable[..., Part]) -> None:
    """The negative controls."""
    assert trained(ranks, job_of(tmp_path), Layout(2, 1, over(2)), how=how).hash != one.hash


class Dropped(Columns):
    """Drops elements of the weight, of which a member has a part."""

    def __init__(self, whole: nn.Linear, together: int, blocks: Blocks) -> None:
        super().__init__(whole, together, blocks)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = columns._Product.apply(x, self.dropout(self.weight), self)
        return result


def dropping(world: World, job: Job, version: Version, last: int, *, refused: bool = True) -> Part:
    """Trains with dropout inside of the divided layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "Columns", Dropped)
        if not refused:
            patch.setattr(parallelize, "_refuse_dropout", lambda *_: None)
        return of_columns(world, job, version, last)


def test_dropout_inside_of_a_divided_layer_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A8: at degree 1 nothing is divided.  The control is the reason: members drop the same places of their parts.
    The dropout of the other tests is behind the layers, where all members have the whole.
    """
    job, two = job_of(tmp_path), Layout(2, 1, over(2))
    one = train_here(job, 1, how=dropping)
    with pytest.raises(
        AssertionError,
        match=r"ModelError: layers\.0\.attention\.wq\.dropout is dropout inside of a layer that parallel\.columns = 2",
    ):
        trained(ranks, job, two, 1, how=dropping)
    other = trained(ranks, job_of(tmp_path / "other"), two, 1, how=partial(dropping, refused=False))
    assert other.hash != one.hash
