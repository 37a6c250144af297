"""Compilation of a model's blocks."""

from __future__ import annotations

from torch import nn

from elastic.models.spec import ShardingTable


def apply_compile(model: nn.Module, table: ShardingTable) -> None:
    """Compiles each block by itself, before it is wrapped, so that all blocks and all later worlds of this process share one
    compilation.
    """
    for name in table.blocks:
        model.get_submodule(name).compile(fullgraph=True)
