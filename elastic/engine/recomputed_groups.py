"""Groups of blocks of which only the first keeps its input: √L of √L blocks each (Chen and others 2016,
section 4).

Each block already keeps nothing but its input (``recompute = "block"``).  Where that input is what the block
before it returned, it need not be kept either: when the backward pass comes to a group, its blocks run once
more from the input of the first.  So L blocks keep √L inputs, 2 √L in the backward pass, and all but the last
block of a group run three times.  Chen's groups run twice, but all their blocks keep everything at once.  A
block of a transformer needs some twenty times its input, so that would be more than all inputs together.

The model's own code between blocks stays as it is.  A block joins the group of the one before it only if its
input is the same memory, unchanged; otherwise it begins a group.  The graph is never touched, so gradients
flow as they did.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import get_device_states, set_device_states

from elastic.engine.parameters.fsdp import gathered
from elastic.models.spec import ShardingTable, each_once


def apply_groups(model: nn.Module, table: ShardingTable) -> None:
    """Lets groups of √L blocks keep one input, where one block's result is the next one's input.  The blocks
    have a policy already.
    """
    chain = _Chain(math.ceil(math.sqrt(len(table.blocks))))
    for block in each_once(model, table.blocks):
        block.forward = partial(chain.run, block, block.forward)


class _Values(NamedTuple):
    """Identifies the values of a tensor: its memory, the place there, and the number of changes so far."""

    memory: StorageWeakRef
    version: int
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Values:
        memory = StorageWeakRef(tensor.untyped_storage())
        return cls(
            memory, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        )


@dataclass
class _BlockRun:
    """One run of a block in a forward pass: what it takes to repeat it, but for its first argument."""

    block: nn.Module
    forward: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[Tensor, list[int], list[Tensor]]

    @torch.enable_grad()  # as in the forward pass: a compiled block then runs the same code
    def repeat(self, x: Tensor) -> Tensor:
        state, devices, states = self.random
        with (
            gathered(self.block),
            torch.autograd.graph.saved_tensors_hooks(_forget, _unpack),
            torch.random.fork_rng(devices),
        ):
            torch.set_rng_state(state)
            set_device_states(devices, states)
            return _first(
                self.forward(x.detach().requires_grad_(x.requires_grad), *self.args, **self.kwargs)
            ).detach()


@dataclass
class _Group:
    """Consecutive runs of blocks in one forward pass.  It lives as long as the saved tensors of one of them."""

    input: Tensor
    runs: list[_BlockRun] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """The inputs that are there again, until they are used."""

    def input_of(self, number: int) -> Tensor:
        if number == 0:
            return self.input
        if number not in self.inputs:
            x = self.input
            for n, run in enumerate(self.runs[:-1], start=1):
                x = self.inputs[n] = run.repeat(x)
        return self.inputs.pop(number)


class _Chain:
    """The blocks of a model, while a forward pass goes from one to the next."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.returned: _Values | None = None
        """The result of the last block."""
        self.group: Callable[[], _Group | None] = lambda: None
        """Returns the last group, unless it is no longer used."""

    def run(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not args or not isinstance(x := args[0], Tensor):
            return forward(*args, **kwargs)
        values, group = _Values.of(x), self.group()
        if group is None or len(group.runs) == self.size or values != self.returned:
            group = _Group(x.detach().requires_grad_(x.requires_grad))
            self.group = weakref.ref(group)
        number = len(group.runs)
        others, named = tree_map_only(Tensor, torch.detach, (args[1:], kwargs))
        group.runs.append(_BlockRun(block, forward, others, named, _generators(x)))

        def pack(tensor: Tensor) -> Tensor | _SavedInput:
            return _SavedInput(group, number) if _Values.of(tensor) == values else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            out = forward(*args, **kwargs)
        self.returned = _Values.of(_first(out))
        return out


class _SavedInput(NamedTuple):
    """The input of a block, in the place of the tensor."""

    group: _Group
    number: int


def _forget(_: Tensor) -> None:
    """Keeps nothing."""


def _unpack(saved: Tensor | _SavedInput) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.group.input_of(saved.number)


def _generators(x: Tensor) -> tuple[Tensor, list[int], list[Tensor]]:
    """Returns the state of the CPU's generator of random numbers, and of that of the device of ``x``."""
    return (torch.get_rng_state(), *get_device_states(x))


def _first(out: Any) -> Tensor:
    """Returns the tensor that a block returned, alone or as the first of several."""
    found = out if isinstance(out, Tensor) else out[0]
    assert isinstance(found, Tensor), f"a block returned {type(found).__name__}"
    return found
