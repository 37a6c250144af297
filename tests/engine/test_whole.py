"""Parameters that are not split: what the model computes with, and how its gradients come together."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.parameters.whole import Whole
from elastic.engine.precision import PRECISIONS
from elastic.engine.sync.ordered import Ordered, OrderedReduction
from elastic.engine.world import World
from elastic.models.spec import ShardingTable
from elastic.plan.batch import deal_of
from elastic.plan.layout import Layout

BLOCKS = ShardingTable(("blocks.0", "blocks.1"))


class Model(nn.Module):
    """Two blocks, a head that is tied to the first one, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head, self.unused = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(3))
        self.head.weight = self.blocks[0].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x.to(block.weight.dtype)))
        return self.head(x).sum()


class Noting(OrderedReduction):
    """Notes the number of elements of each unit in the order in which units are summed."""

    order: ClassVar[list[int]] = []

    def reduce(self, grads: Tensor) -> Tensor | None:
        self.order.append(grads.numel())
        return super().reduce(grads)


@pytest.fixture
def alone() -> Iterator[World]:
    world = World.imagined(Layout(1, 1), torch.device("cpu"))
    yield world
    world.close()


def wrapped(model: nn.Module, world: World, precision: str, microbatches: int) -> Whole:
    scheme = Ordered(world, deal_of(microbatches, 1, world.layout, world.nodes))
    return Whole(model, world, BLOCKS, PRECISIONS[precision], scheme)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_those_of_the_plain_model_added_over_the_rounds(alone: World, precision: str) -> None:
    """Tied ones count once, and unused ones are zeros.  The control: one round less gives something else."""
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    batches = torch.randn(3, 2, 4)
    parameters = wrapped(model, alone, precision, len(batches))
    for number, batch in enumerate(batches):
        parameters.begin_round(number, last=number == len(batches) - 1)
        model(batch).backward()
        parameters.end_round()
    found, sums = parameters.grads(), []
    if precision == "bf16":
        plain.to(torch.bfloat16)
    for batch in batches:
        plain.zero_grad()
        plain(batch).backward()
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in plain.named_parameters()
        }
        sums.append({name: grad.float() + (sums[-1][name] if sums else 0) for name, grad in grads.items()})
    assert found.keys() == sums[-1].keys() == parameters.parts.keys()
    assert all(torch.equal(found[name], sums[-1][name]) for name in found)
    assert not torch.equal(found["blocks.1.weight"], sums[-2]["blocks.1.weight"])
    assert {part.dtype for part in parameters.parts.values()} == {torch.float32}


def test_units_are_summed_in_one_order_whatever_is_used(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members must call their collectives in the same order.  Block 0 is tied to the head, so its
    gradient comes last anyway; the rest of the model has a parameter without a gradient, and is summed at the
    end of the round.
    """
    monkeypatch.setattr(Ordered, "reduction", lambda self, wire: Noting(self, wire))
    model = Model()
    model.extra = nn.Parameter(torch.ones(5))
    parameters = wrapped(model, alone, "fp32", 2)
    for number, uses in enumerate((True, False)):
        Noting.order.clear()
        parameters.begin_round(number, last=number == 1)
        loss = model(torch.ones(2, 4)) if uses else model.extra.sum()
        loss.backward()
        parameters.end_round()
        assert Noting.order == [16, 16, 8]


class Turning(nn.Module):
    """Two blocks, each of which uses its weights in the order of their names, or the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)) for _ in range(2)
        )

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for block in self.blocks:
            for place in order:
                x = torch.tanh(block[place](x))  # type: ignore[index]
        return x.sum()


@pytest.mark.parametrize("watches", [True, False], ids=["", "control"])
def test_a_unit_is_summed_as_soon_as_its_last_gradient_came(
    alone: World, monkeypatch: pytest.MonkeyPatch, watches: bool
) -> None:
    """It is summed within the backward pass, also in the first one, and where the order changes from one
    microbatch to the next.

    In the control only the first parameter of a unit is watched: the last unit waits for the end of the
    round, and has the same bits.
    """
    monkeypatch.setattr(Ordered, "reduction", lambda self, wire: Noting(self, wire))
    model, plain = Turning(), Turning()
    plain.load_state_dict(model.state_dict())
    orders = [(2, 1, 0), (0, 1, 2), (1, 2, 0), (1, 0, 2)]
    parameters = wrapped(model, alone, "fp32", len(orders))
    if not watches:
        monkeypatch.setattr(parameters, "_watch", lambda number, place: None)
    early = []
    for number, order in enumerate(orders):
        Noting.order.clear()
        parameters.begin_round(number, last=number == len(orders) - 1)
        model(torch.ones(2, 4) + number, order).backward()
        early.append(len(Noting.order))
        parameters.end_round()
        assert Noting.order == [48, 48]
        plain(torch.ones(2, 4) + number, order).backward()
    assert early == ([2, 2, 2, 2] if watches else [1, 2, 1, 1])
    assert all(torch.equal(grad, plain.get_parameter(name).grad) for name, grad in parameters.grads().items())


@pytest.mark.parametrize("held", [False, True], ids=["", "control"])
def test_weights_are_given_back_with_their_world(alone: World, held: bool) -> None:
    """It needs no garbage collector, which does not see all references of tensors on a device.  The control
    holds one in a cycle.
    """
    gc.collect()
    gc.disable()
    try:
        model = Model()
        parameters = wrapped(model, alone, "bf16", 1)
        parameters.begin_round(0, last=True)
        model(torch.ones(2, 4)).backward()
        parameters.end_round()
        assert parameters.grads()
        if held:
            weight = model.blocks[0].weight
            weight.register_post_accumulate_grad_hook(partial(lambda holder, _: None, parameters))
            del weight
        whole, copy = weakref.ref(parameters), weakref.ref(parameters.copies[0])
        del model, parameters
        assert (whole() is not None) is (copy() is not None) is held
    finally:
        gc.enable()
