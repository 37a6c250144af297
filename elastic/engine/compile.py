"""Compilation of a model's blocks."""

from __future__ import annotations

from torch import nn

from elastic.models.spec import ShardingTable


def apply_compile(model: nn.Module, table: ShardingTable) -> None:
    """Compile each block by itself, before it is wrapped: all blocks, and the next worlds of this process, share one compilation."""
    for name in table.blocks:
        model.get_submodule(name).compile(fullgraph=True)
