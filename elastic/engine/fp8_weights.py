"""Weights in fp8: cast once a step, and held and gathered as single bytes.

A weight goes from the member's part of it (the master) to bf16, as all weights do, and from there to fp8 by
the scale of ``fp8.py``.  So the bits are those of casting the whole weight in bf16.  The scale needs the
largest element of all parts: one all-reduce of the maxima of all weights together, at the start of a step.
The maxima travel as integers, with the bits of the float32: for numbers of 0 and more the order is the same,
and infinity and NaN come last.  So a maximum also shows that an element is not finite, and it depends on no
order.

The model computes with the fp8 values.  The parameter of such a layer only carries the gradient: its values
are NaN, in memory that all of them share.  So code of a model that reads the ``weight`` of such a layer by
itself gets NaN.  A weight that a second module has as well stays in bf16, and its layer casts it in each
pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.engine.fp8 import FORWARD, Recipe, layers_of, power_of
from elastic.engine.world import World
from elastic.models.spec import ShardingTable
from elastic.plan.placement import most_rows, rows_of

UNSIGNED = 0x7FFFFFFF
"""Mask of a float32's bits without its sign bit, which a NaN may have set."""


def weights_of(model: nn.Module, table: ShardingTable) -> dict[str, nn.Linear]:
    """Returns, by the name of the weight, the layers whose weights may be held in fp8: weights that no second
    module shares.
    """
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    layers = {id(layer.weight): layer for layer in layers_of(model, table) if owners[id(layer.weight)] == 1}
    return {name: layers[id(weight)] for name, weight in model.named_parameters() if id(weight) in layers}


class Fp8Weights:
    """This member's parts of the weights in fp8, and the scales of the whole weights."""

    def __init__(self, layers: Mapping[str, nn.Linear], world: World, recipe: Recipe) -> None:
        self.layers, self.world, self.recipe, layout = layers, world, recipe, world.layout
        self.rows = {name: rows_of(layer.out_features, layout, world.rank) for name, layer in layers.items()}
        """The rows [first, last) of each weight that this member holds."""
        self.parts = {
            name: torch.zeros(
                most_rows(layer.out_features, layout), layer.in_features, dtype=FORWARD, device=world.device
            )
            for name, layer in layers.items()
        }
        """This member's rows of each weight, padded to the length of the longest part."""
        self.inverse = {
            name: torch.empty(layer.out_features if recipe == "row" else (), device=world.device)
            for name, layer in layers.items()
        }
        """The inverse scales of each whole weight."""
        largest = max((layer.weight.numel() for layer in layers.values()), default=0)
        self._nan = torch.full((largest,), math.nan, dtype=torch.bfloat16, device=world.device)

    def carrier(self, name: str) -> Tensor:
        """Returns a tensor that stands in for a whole weight and carries its gradient: NaN, bfloat16 [out,
        in].
        """
        layer = self.layers[name]
        return self._nan[: layer.out_features * layer.in_features].view(layer.out_features, layer.in_features)

    @torch.no_grad()
    def cast(self, masters: Mapping[str, Tensor]) -> None:
        """Casts this member's parts of the weights.  All members must call it, before a step uses them."""
        if not self.layers:
            return
        power = power_of(self._largest(masters), FORWARD)
        sizes = [each.numel() for each in self.inverse.values()]
        inverse = [
            each.view_as(own)
            for each, own in zip((1 / power).split(sizes), self.inverse.values(), strict=True)
        ]
        torch._foreach_copy_([*self.inverse.values()], inverse)
        for each, (name, (first, last)) in zip(power.split(sizes), self.rows.items(), strict=True):
            factor = each[first:last, None] if self.recipe == "row" else each
            half = torch.empty_like(masters[name], dtype=torch.bfloat16)
            # rounds as if it multiplied after rounding, because factors are powers of two
            torch.mul(masters[name], factor, out=half)
            self.parts[name][: last - first].copy_(half)

    def _largest(self, masters: Mapping[str, Tensor]) -> Tensor:
        """Returns the largest element behind each scale of each weight, one after the other, float32."""
        found = [
            torch.zeros(each.numel(), dtype=torch.bfloat16, device=each.device)
            for each in self.inverse.values()
        ]
        for into, (name, (first, last)) in zip(found, self.rows.items(), strict=True):
            if first < last and self.recipe == "row":
                into[first:last].copy_(torch.linalg.vector_norm(masters[name], math.inf, dim=1))
            elif first < last:
                into.copy_(torch.linalg.vector_norm(masters[name], math.inf))
        bits = torch.cat(found).float().view(torch.int32) & UNSIGNED
        if self.world.layout.shards > 1:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.world.shard_group)
        return bits.view(torch.float32)
