"""Counts operations on tensors, and the bytes that these hold: costs that do not depend on the machine."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Live(TorchDispatchMode):
    """Counts the operations that make new tensors, and notes the greatest number of bytes that they held at
    one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak_bytes, self.operations, self.known = 0, 0, 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {
            id(each.untyped_storage())
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for tensor in [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]:
            storage = tensor.untyped_storage()
            if id(storage) not in old and storage not in self.known:
                self.known[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
                self.operations += 1
        return made

    def _add(self, count: int) -> None:
        self.bytes += count
        self.peak_bytes = max(self.peak_bytes, self.bytes)
