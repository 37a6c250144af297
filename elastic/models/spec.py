"""Models tell the engine their structure by a sharding table, and users name published ones by a preset.
This file is pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Fused:
    """Several matrices that are one layer, side by side along the dimension that is cut: each of them is cut."""

    lengths: tuple[int, ...]
    """The lengths of the matrices along that dimension."""
    unit: int = 1
    """The number of elements that stay together there, as those of a head."""


@dataclass(frozen=True)
class ShardingTable:
    """The structure of a model, for the axes.

    ``blocks`` are names of modules.  In all other fields ``*`` stands for any letters of a name, as in
    ``optim.groups``: ``*.wq`` means that layer of each block.  Fields may be left out: the model is then
    trained with the data axes only.
    """

    blocks: tuple[str, ...]
    """The modules that are wrapped, gathered and freed one at a time, in forward order; pipeline stages are
    whole blocks.
    """
    column: Mapping[str, int | Fused] = field(default_factory=dict)
    """The linear layers of which each tensor rank computes some of the output features, with the number of
    features that stay together, as those of a head.  A weight is [output, input], as in ``nn.Linear``.
    """
    row: Mapping[str, int | Fused] = field(default_factory=dict)
    """The linear layers of which each tensor rank has some of the input features, so that their products are
    added; their biases are whole.
    """
    vocabulary: tuple[str, ...] = ()
    """The layers whose rows are the words of the vocabulary: embedding and head."""
    sequence: tuple[str, ...] = ()
    """The modules that work token by token, as norms do: each tensor rank runs them on a part of the
    sequence, and has all of their weights.
    """
    experts: tuple[str, ...] = ()
    """The modules, or weights, whose first dimension is the expert.  Tensor ranks have all of them."""
    first: tuple[str, ...] = ()
    """The modules before the blocks, which only the first pipeline stage has."""
    last: tuple[str, ...] = ()
    """The modules behind the blocks, which only the last pipeline stage has.  What is in no block, and neither
    in ``first`` nor in ``last``, every stage has.
    """

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.blocks)

    def block_of(self, parameter: str) -> str:
        """Returns the outermost block that has the parameter or module of this name in it; "" if that is
        outside of the blocks.
        """
        words = parameter.split(".")
        return next((path for path in accumulate(words[:-1], "{}.{}".format) if path in self._names), "")


@dataclass(frozen=True)
class Equivalent:
    """Describes the model of transformers that computes what a model of ours does."""

    config: Mapping[str, Any]
    """The fields of its ``config.json``."""
    words: Mapping[str, str]
    """Maps words in our names of tensors to its words.  Words that are not here are the same."""
    transposed: tuple[str, ...] = ()
    """Our words of the layers whose matrices it keeps transposed."""

    def names(self, ours: Iterable[str]) -> dict[str, tuple[str, bool]]:
        """Maps its name of each tensor to ours, and says whether the tensor is transposed there."""
        endings = tuple(f"{word}.weight" for word in self.transposed)
        return {
            ".".join(self.words.get(word, word) for word in name.split(".")): (name, name.endswith(endings))
            for name in ours
        }


def each_once(model: Any, names: Iterable[str]) -> list[Any]:
    """Returns the modules of ``model`` with these names, in this order.  A module with several of these
    names comes once.
    """
    return [*dict.fromkeys(model.get_submodule(name) for name in names)]


def with_preset(
    preset: str | None, presets: Mapping[str, Mapping[str, Any]], args: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of the preset, if one is named, with those of ``args`` in their place.  Raises
    ValueError for another name.
    """
    if preset is None:
        return {**args}
    if preset not in presets:
        near = difflib.get_close_matches(preset, presets, 1)
        raise ValueError(
            f"preset = {preset!r} must be one of "
            f"{', '.join(presets)}{f'; did you mean {near[0]!r}?' if near else ''}"
        )
    return {**presets[preset], **args}
