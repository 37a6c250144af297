"""Compilation of a model's blocks."""

from __future__ import annotations

import torch
from torch import nn

from elastic.models.spec import ShardingTable


def apply_compile(model: nn.Module, table: ShardingTable, *, forward_alone: bool = False) -> None:
    """Compiles each block by itself, before it is wrapped, so that all blocks and all later worlds of this process share one
    compilation.

    With ``forward_alone`` what is put around ``forward`` later stays outside of the compiled code.
    """
    for name in table.blocks:
        block = model.get_submodule(name)
        if forward_alone:
            block.forward = torch.compile(block.forward, fullgraph=True)
        else:
            block.compile(fullgraph=True)
