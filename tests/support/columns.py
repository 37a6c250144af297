"""An axis that only tests have, and that computes: its members compute other columns of what linear layers
return, and exchange them.

The layers are those of ``column`` in the model's sharding table.  The features that stay together there are a
block, and a layer computes block by block at every degree, so each product has the same shape.  Members
exchange blocks, in forward those of the result, and in backward those of the gradient of the input, which
everybody adds from the first to the last.  So the degree shows in no bit.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic.engine.parallelize import REWRITES
from elastic.engine.world import World
from elastic.models.llama import Llama
from elastic.models.spec import ShardingTable
from elastic.plan.axes import chunk, chunk_size

AXIS = "columns"


def rewrite(model: nn.Module, world: World, table: ShardingTable, axis: str = AXIS) -> None:
    """Lets each linear layer of ``table.column`` compute this member's columns: the axis' entry in
    ``REWRITES`` of ``engine/parallelize.py``.
    """
    blocks = Blocks(world, axis)
    for name, layer in [*model.named_modules()]:
        together = next((size for each, size in table.column.items() if fnmatchcase(name, each)), 0)
        if together:
            assert isinstance(layer, nn.Linear) and isinstance(together, int)
            model.set_submodule(name, Columns(layer, together, blocks))


class Blocks:
    """The exchange of blocks between the members along ``axis``."""

    def __init__(self, world: World, axis: str) -> None:
        self.world, self.degree = world, dict(world.layout.degrees).get(axis, 1)
        self.index = world.layout.coordinates(world.rank).get(axis, 0)
        self.group = world.along([axis]) if self.degree > 1 else None

    def mine(self, count: int) -> slice:
        """Returns which of ``count`` blocks are this member's."""
        return slice(*chunk(count, self.degree, self.index))

    def all(self, mine: Tensor, count: int) -> Tensor:
        """Returns the blocks of all members in their order, [count, …].  ``mine`` has those of this one."""
        if self.group is None:
            return mine
        sent = mine.new_zeros(chunk_size(count, self.degree), *mine.shape[1:])
        sent[: len(mine)] = mine
        found = mine.new_empty(self.degree * len(sent), *mine.shape[1:])
        self.world.begin_all_gather(found.view(-1), sent.view(-1), self.group)()
        return found[:count]

    def sum(self, mine: Tensor, count: int) -> Tensor:
        """Returns the sum of the blocks of all members, from the first to the last."""
        first, *others = self.all(mine, count)
        for other in others:
            first = first + other
        return first


class Columns(nn.Module):
    """A linear layer without a bias, of whose weight this member has some blocks of rows."""

    def __init__(self, whole: nn.Linear, together: int, blocks: Blocks) -> None:
        super().__init__()
        assert whole.bias is None
        self.together, self.count, self.blocks = together, whole.out_features // together, blocks
        mine = blocks.mine(self.count)
        weight = whole.weight.detach()[mine.start * together : mine.stop * together]
        self.weight = nn.Parameter(torch.empty_like(weight), requires_grad=whole.weight.requires_grad)

    def parts(self, weight: Tensor) -> Tensor:
        """Returns this member's blocks of the weight, [blocks, features of a block, input]."""
        return weight.view(len(weight) // self.together, self.together, weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Product.apply(x, self.weight, self)
        return result


class _Product(torch.autograd.Function):
    """Multiplies […, input] with the blocks of a weight: […, output]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Columns) -> Tensor:
        rows, parts = x.flatten(0, -2), layer.parts(weight)
        ctx.save_for_backward(rows, weight)
        ctx.layer = layer
        mine = rows.new_empty(len(parts), len(rows), layer.together)
        for number, part in enumerate(parts):
            mine[number] = rows @ part.T
        return layer.blocks.all(mine, layer.count).transpose(0, 1).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (rows, weight), layer = ctx.saved_tensors, ctx.layer
        parts, blocks = layer.parts(weight), grad.reshape(len(rows), layer.count, layer.together)
        own = blocks.transpose(0, 1)[layer.blocks.mine(layer.count)].contiguous()
        of_rows, of_weight = rows.new_empty(len(parts), *rows.shape), torch.empty_like(parts)
        for number, (block, part) in enumerate(zip(own, parts, strict=True)):
            of_rows[number] = block @ part
            of_weight[number] = block.T @ rows
        of_x = layer.blocks.sum(of_rows, layer.count).view(*grad.shape[:-1], -1)
        return of_x, of_weight.view_as(weight), None


class OfColumns(Llama):
    """The toy model, with columns of linear layers cut and nothing else.  With ``hidden`` = 56 the seven
    blocks of ``w1`` and ``w3`` fit no degree.
    """

    def sharding(self) -> ShardingTable:
        layers = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
        columns = {f"*.{name}": 8 for name in layers}
        # of four members two have none of its columns
        return ShardingTable(super().sharding().blocks, column={**columns, "*.wo": 16})


def build(**args: Any) -> nn.Module:
    return OfColumns(**args)


def build_in_a_job(**args: Any) -> nn.Module:
    """Builds the same model, of which a job gets columns by ``parallel.tp``: in each process of the job, the
    axis comes into the product's table with the model.
    """
    REWRITES["tp"] = partial(rewrite, axis="tp")
    return build(**args)
