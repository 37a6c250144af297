"""Compilation of a model's blocks."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from elastic.models.spec import ShardingTable

INDUCTOR = "inductor"
"""The backend of torch's compiler that makes kernels."""


VARIANTS = 8
"""Largest number of compilations of each block.  A number that differs between blocks, such as the index of a
layer, is compiled into each block, and each block is compiled with gradients and without.
"""


def apply_compile(
    model: nn.Module, table: ShardingTable, *, forward_alone: bool = False, backend: str = INDUCTOR
) -> None:
    """Compiles each block by itself, before it is wrapped, so that all blocks and all later worlds of this
    process share one compilation.

    With ``forward_alone`` what is put around ``forward`` later stays outside of the compiled code.
    ``backend`` is a backend of torch's compiler.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, VARIANTS * len(table.blocks))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    for name in table.blocks:
        block = model.get_submodule(name)
        if "forward" not in vars(block) and type(block).forward.__module__.startswith("torch."):
            block.forward = MethodType(_forward, block)
        if forward_alone:
            block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)
        else:
            block.compile(fullgraph=True, backend=backend)


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the block's own ``forward``.  Torch does not compile its own functions, such as the ``forward`` of
    ``nn.Sequential``, unless code from elsewhere calls them.
    """
    return type(block).forward(block, *args, **kwargs)
