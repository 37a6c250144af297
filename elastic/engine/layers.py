"""The gradient norms of single layers, from the norms of the tensors that the global norm is made of.

Every member knows the squared norm of each whole tensor, with the same bits in every layout (``norm.py``).
They go to the host with the commit records, in the same copy, so nothing is launched, sent or waited for
because of a layer.  The host adds them exactly (``fsum``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from elastic.engine.parallelize import sharding_table

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
        """Returns what a commit tells of the layers: all of them, or, if the step is not ``finite``, only the
        one in which that began.

        ``squares`` are those of the tensors of the gradient of a loss that was multiplied by ``scale``.
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
        """Returns which of the layers that are not finite was so first; "" if there is none.

        The backward pass goes through the blocks from the last to the first, and what is not finite stays so.
        If all blocks are strange, the first may be a layer behind them, which is the last one of the model if
        its layers are declared in the order of their use.
        """
        names = tuple(strange)
        blocks = [block for block in self.blocks if block in names]
        return (blocks if blocks and blocks[-1] != self.blocks[-1] else [*names] or [""])[-1]
