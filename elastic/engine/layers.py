"""The gradient norms of single layers, from the norms of the tensors that the global norm is made of.

Every member knows the squared norm of each whole tensor, with the same bits in every layout (``norm.py``).  They go to the host with the
commit records, in the same copy, so nothing is launched, sent or waited for because of a layer.  The host adds them exactly (``fsum``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from elastic.engine.parallelize import sharding_table

LayerSquares = tuple[tuple[str, float], ...]
"""The squared norm of the summed gradient of each layer, by the layer's name, in the order of the model."""


def layers_of(model: nn.Module, trained: Iterable[str]) -> dict[str, list[int]]:
    """Returns, for each layer of ``model``, the places of its tensors in ``trained``, which has the names of the trained parameters.

    A layer is a block of the model, or a module outside of the blocks that has parameters of its own; its name is the path of the module.
    """
    blocks, found = frozenset(sharding_table(model).blocks), dict[str, list[int]]()
    for place, name in enumerate(trained):
        found.setdefault(_layer_of(name, blocks), []).append(place)
    return found


def _layer_of(parameter: str, blocks: frozenset[str]) -> str:
    words = parameter.split(".")
    paths = (".".join(words[:length]) for length in range(1, len(words)))
    return next((path for path in paths if path in blocks), ".".join(words[:-1]) or parameter)


def squares_of(layers: Mapping[str, Sequence[int]], squares: Sequence[float], scale: float) -> LayerSquares:
    """Returns the squared norm of each layer.  ``squares`` are those of the tensors of a loss that was multiplied by ``scale``."""
    return tuple((name, math.fsum(squares[place] for place in places) / scale**2) for name, places in layers.items())


def recorded(squares: LayerSquares, *, due: bool, finite: bool, scaled: bool) -> LayerSquares:
    """Returns the part of ``squares`` that a commit tells: all if it is ``due``, and otherwise nothing, unless the step is not ``finite``.

    Then it is the layer in which that began.  The backward pass goes from the last layer to the first, and what is not finite stays so; so
    this is the last one.  A ``scaled`` loss that overflows is usual and tells nothing: its scale becomes smaller.
    """
    if not finite and scaled:
        return ()
    if due:
        return squares
    return () if finite else tuple(each for each in squares if not math.isfinite(each[1]))[-1:]
