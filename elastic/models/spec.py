"""Models tell the engine their structure by a sharding table, and users name published ones by a preset.
This file is pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class ShardingTable:
    """``blocks`` holds the dotted names of the modules that are wrapped, gathered and freed one at a time, in
    forward order.
    """

    blocks: tuple[str, ...]

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
