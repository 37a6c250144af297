"""Backward passes within another one, as torch's checkpoint with ``use_reentrant=True`` runs them: a gradient
may come in several parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic.engine.parameters.whole import Whole
from elastic.engine.precision import PRECISIONS
from elastic.engine.sync.ordered import Ordered
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.batch import deal_of
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import member, train, train_here
from tests.support.toys import small_job

SMALL = 16


class Looped(nn.Module):
    """Two blocks under a checkpoint: each is used once, or ``twice``, or the head is ``tied`` to the first,
    or its loss is ``inside``.
    """

    def __init__(self, kind: str = "once", reentrant: bool = True) -> None:
        super().__init__()
        self.kind, self.reentrant = kind, reentrant
        self.embedding = nn.Embedding(29, SMALL)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SMALL, SMALL), nn.Tanh(), nn.Linear(SMALL, SMALL)) for _ in range(2)
        )
        self.middle, self.head = nn.Linear(SMALL, SMALL, bias=False), nn.Linear(SMALL, 29)
        if kind == "tied":
            self.middle.weight = self.layers[0][0].weight  # type: ignore[index]

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.kind == "inside":
            sum(layer(x.detach()).square().mean() for layer in self.layers).backward()
        for layer in (*self.layers, *self.layers) if self.kind == "twice" else self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.middle(x))  # type: ignore[no-any-return]


TOKENS = torch.arange(3 * 2 * 7).view(3, 2, 7) % 29


def rounds(
    kind: str, reentrant: bool, end: Callable[[Whole], None]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the summed gradients of three microbatches, and those of plain torch.  ``end`` ends a round."""
    torch.manual_seed(0)
    model, plain = Looped(kind, reentrant), Looped(kind, reentrant)
    plain.load_state_dict(model.state_dict())
    world = World.imagined(Layout(1, 1), torch.device("cpu"))
    try:
        scheme = Ordered(world, deal_of(len(TOKENS), 1, world.layout, world.nodes))
        whole = Whole(model, world, ShardingTable(("layers.0", "layers.1")), PRECISIONS["fp32"], scheme)
        for number, tokens in enumerate(TOKENS):
            whole.begin_round(number, last=number + 1 == len(TOKENS))
            model(tokens).square().sum().backward()
            end(whole)
            plain(tokens).square().sum().backward()
        return whole.grads(), {
            name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None
        }
    finally:
        world.close()


def without_looking(whole: Whole) -> None:
    """Ends a round as if no gradient had come late."""
    for parameter in (each for unit in whole._units[: whole._next] for each in unit.computing):
        parameter.grad = None
    whole.end_round()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "reentrant"), [("once", True), ("once", False), ("twice", False), ("tied", False)]
)
def test_gradients_that_come_at_once_are_those_of_plain_torch(kind: str, reentrant: bool) -> None:
    found, judge = rounds(kind, reentrant, Whole.end_round)
    assert found.keys() == judge.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, judge[name], rtol=1e-5, atol=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "named"),
    [("twice", "layers.1.0.weight"), ("tied", "layers.0.0.weight"), ("inside", "layers.1.0.weight")],
)
def test_a_gradient_that_comes_after_its_sum_is_an_error(kind: str, named: str) -> None:
    """The sentence names a parameter and the remedy.  The control: without the error that parameter has
    another gradient than in plain torch.
    """
    with pytest.raises(
        ModelError,
        match=(
            f"^the model uses '{named}' more than once, and a part of its gradient came after .*; give "
            r"checkpoint\(\) use_reentrant=False"
        ),
    ):
        rounds(kind, True, Whole.end_round)
    found, judge = rounds(kind, True, without_looking)
    assert not torch.allclose(found[named], judge[named], rtol=1e-3)


def job(bucket: Path, reentrant: bool, **changes: Any) -> Job:
    return small_job(
        bucket,
        model=f"{__name__}:Looped",
        model_args={"kind": "twice", "reentrant": reentrant},
        steps=2,
        **changes,
    )


def said(world: World, job: Job) -> str:
    with member(world, job, Version(0, 0)) as me:
        try:
            me.step()
        except ModelError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        (Layout(1, 2), 2),
        pytest.param(Layout(1, 2), 1, marks=pytest.mark.full),
        pytest.param(Layout(2, 1), "auto", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_member_says_so_and_the_remedy_gives_the_bits_of_one_worker(
    ranks: Ranks, tmp_path: Path, layout: Layout, zero: int | str
) -> None:
    one = train_here(job(tmp_path / "one", False), 2)
    nested, mended = (
        job(tmp_path / f"{reentrant}", reentrant, parallel={"zero": zero}) for reentrant in (True, False)
    )
    assert all(
        sentence.startswith("the model uses 'layers.1.") for sentence in ranks.run(layout, said, nested)
    )
    assert train(ranks, mended, layout, 2).hash == one.hash
