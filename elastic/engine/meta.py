"""Builds models on the meta device, where tensors have shapes and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NORMAL = (torch.Tensor.normal_, nn.init.normal_)


@contextmanager
def without_memory() -> Iterator[None]:
    """Everything that is built inside is on the meta device."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Draws no normal numbers for tensors on the meta device, which have no values.

    For these calls torch 2.13 imports its compiler, which takes a second in each command and worker.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NORMAL and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **kwargs)
