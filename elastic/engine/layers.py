"""The gradient norms of single layers, computed from the norms of single tensors, which the global norm needs
anyway.

Every member knows the squared norm of each whole tensor, with the same bits in every layout (``norm.py``).
They go to the host with the commit records, in the same copy, so nothing is launched, sent or waited for
because of a layer.  The host adds them exactly (``fsum``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from elastic.engine.blocks import sharding_table

LayerSquares = tuple[tuple[str, float], ...]
"""The squared norm of the summed gradient of each layer, by the layer's name, in the order of the model."""


@dataclass(frozen=True)
class Layers:
    """The layers of a model.

    A layer is a block, or a module outside of the blocks that has trained parameters of its own; its name is
    the path of the module.
    """

    places: dict[str, list[int]]
    """The places of each layer's tensors in the gradient."""
    blocks: tuple[str, ...]
    """The names of the blocks that are trained, in the order in which the model runs them."""

    @staticmethod
    def of(model: nn.Module) -> Layers:
        table, places = sharding_table(model), dict[str, list[int]]()
        trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
        for place, name in enumerate(trained):
            places.setdefault(table.block_of(name) or name.rpartition(".")[0] or name, []).append(place)
        return Layers(places, tuple(block for block in table.blocks if block in places))

    def recorded(self, squares: Sequence[float], scale: float, *, finite: bool) -> LayerSquares:
        """Returns the squared norms of layers that a commit records: of all layers, or, if the step is not
        ``finite``, only of the layer that was not finite first.

        ``squares`` has the squared norm of each tensor of the gradient.  The loss was multiplied by
        ``scale``.
        """
        found = {
            name: math.fsum(squares[place] for place in places) / scale**2
            for name, places in self.places.items()
        }
        if finite:
            return tuple(found.items())
        first = self._first(name for name, square in found.items() if not math.isfinite(square))
        return ((first, found[first]),) if first else ()

    def _first(self, strange: Iterable[str]) -> str:
        """Returns the layer that was not finite first, among the layers ``strange`` that are not finite; ""
        if there is none.

        The backward pass goes through the blocks from the last to the first, and values that are not finite
        stay so.  If the last block is strange, the first layer may be one behind the blocks: the last of the
        strange ones, if the model declares its layers in the order of their use.
        """
        names = tuple(strange)
        blocks = [block for block in self.blocks if block in names]
        return (blocks if blocks and blocks[-1] != self.blocks[-1] else [*names] or [""])[-1]
