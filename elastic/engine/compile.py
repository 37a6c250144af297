"""Compilation of a model's blocks."""

from __future__ import annotations

import torch
from torch import nn

from elastic.models.spec import ShardingTable

INDUCTOR = "inductor"
"""The backend of torch's compiler that makes kernels."""


def apply_compile(model: nn.Module, table: ShardingTable, *, forward_alone: bool = False, backend: str = INDUCTOR) -> None:
    """Compiles each block by itself, before it is wrapped, so that all blocks and all later worlds of this process share one
    compilation.

    With ``forward_alone`` what is put around ``forward`` later stays outside of the compiled code.  ``backend`` is one of torch's.
    """
    for name in table.blocks:
        block = model.get_submodule(name)
        if forward_alone:
            block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)
        else:
            block.compile(fullgraph=True, backend=backend)
