"""Weights in fp8: cast once a step, and held and gathered as single bytes.

A weight goes from the member's part of it (the master) to bf16, as all weights do, and from there to fp8 by
the scale of ``fp8.py``.  So the bits are those of casting the whole weight in bf16.  The scale needs the
largest element of all parts: one all-reduce of the maxima of all weights together, at the start of a step,
among the members that hold parts of the same weights.  It has a place for each row of a whole weight if rows
have scales of their own, so members may hold other rows, or other parts of the same rows.
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

import storage.slices
from elastic.engine.cuts import cuts_of
from elastic.engine.fp8 import FORWARD, Recipe, layers_of, power_of
from elastic.engine.world import World
from elastic.models.spec import ShardingTable
from elastic.plan.placement import cell_of, held, model_part, most_rows, rows_of

UNSIGNED = 0x7FFFFFFF
"""Mask of a float32's bits without its sign bit, which a NaN may have set."""


def weights_of(model: nn.Module, table: ShardingTable) -> dict[str, nn.Linear]:
    """Returns, by the name of the weight, the layers whose weights may be held in fp8: weights that no second
    module shares.
    """
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    layers = {id(layer.weight): layer for layer in layers_of(model, table) if owners[id(layer.weight)] == 1}
    return {name: layers[id(weight)] for name, weight in model.named_parameters() if id(weight) in layers}


def whole_weights(model: nn.Module, layers: Mapping[str, nn.Linear]) -> dict[str, storage.slices.Tensor]:
    """Returns the whole weights of ``layers``, which are layers of ``model``, as the state has them."""
    cuts = cuts_of(model) if layers else {}
    return {
        name: storage.slices.Tensor(
            name, "parameter", "F8", tuple(layer.weight.shape), cuts[name].split, cuts[name].depth
        )
        for name, layer in layers.items()
    }


class Fp8Weights:
    """This member's parts of the weights in fp8, and the scales of the whole weights."""

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        whole: Mapping[str, storage.slices.Tensor],
        world: World,
        recipe: Recipe,
    ) -> None:
        """``whole`` has the whole weights, of which ``layers`` have this member's part of the model."""
        self.layers, self.world, self.recipe, layout = layers, world, recipe, world.layout
        cell = cell_of(layout, world.rank)
        self._held = {name: held(whole[name], cell) for name in layers}
        """The parts of the whole weights that this member holds."""
        self._scales = {name: whole[name].shape[0] if recipe == "row" else 1 for name in layers}
        """The number of scales of each whole weight."""
        self._own = dict[str, list[tuple[int, int]]]()
        """The rows [first, last) of the whole weights that each layer has, one after the other."""
        for name, layer in layers.items():
            part = held(whole[name], model_part(cell))
            assert part.shape == tuple(layer.weight.shape), (
                f"{name!r} has the shape {[*layer.weight.shape]}, and placement says {[*part.shape]}"
            )
            rows = {box.at[0]: (box.slice.start[0], box.slice.stop[0]) for box in part.boxes}
            self._own[name] = [rows[at] for at in sorted(rows)]
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
        powers = self._of_layers(power)
        inverse = [
            each.view_as(own)
            for each, own in zip(self._of_layers(1 / power), self.inverse.values(), strict=True)
        ]
        torch._foreach_copy_([*self.inverse.values()], inverse)
        for each, (name, (first, last)) in zip(powers, self.rows.items(), strict=True):
            factor = each[first:last, None] if self.recipe == "row" else each
            half = torch.empty_like(masters[name], dtype=torch.bfloat16)
            # rounds as if it multiplied after rounding, because factors are powers of two
            torch.mul(masters[name], factor, out=half)
            self.parts[name][: last - first].copy_(half)

    def _of_layers(self, scales: Tensor) -> list[Tensor]:
        """Returns, of one value for each scale of each whole weight, those of each layer."""
        found = []
        for (name, count), each in zip(
            self._scales.items(), scales.split([*self._scales.values()]), strict=True
        ):
            if self.recipe == "row" and self._own[name] != [(0, count)]:
                each = torch.cat([each[:0], *(each[first:last] for first, last in self._own[name])])
            found.append(each)
        return found

    def _largest(self, masters: Mapping[str, Tensor]) -> Tensor:
        """Returns the largest element behind each scale of each whole weight, one after the other, float32."""
        found = [
            torch.zeros(count, dtype=torch.bfloat16, device=self.world.device)
            for count in self._scales.values()
        ]
        for into, (name, part) in zip(found, self._held.items(), strict=True):
            if part.boxes and self.recipe == "row":
                largest = torch.linalg.vector_norm(masters[name], math.inf, dim=1)
                for box in part.boxes:
                    first, last = box.slice.start[0], box.slice.stop[0]
                    into[first:last].copy_(largest[box.at[0] : box.at[0] + last - first])
            elif part.boxes:
                into.copy_(torch.linalg.vector_norm(masters[name], math.inf))
        bits = torch.cat(found).float().view(torch.int32) & UNSIGNED
        if self.world.stage_group.size() > 1:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.world.stage_group)
        return bits.view(torch.float32)
