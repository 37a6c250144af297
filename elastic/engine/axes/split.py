"""Parameters that are split over ``dp_shard`` members by FSDP2; gradients are summed over all data ranks.

This is the only module that knows FSDP2.  FSDP2 splits the parameters of each block, gathers them before the block runs, and frees them
afterwards.  It gets the one-dimensional mesh of the shards only.  A :class:`~elastic.engine.sync.base.Scheme` sums the gradients over
the data ranks.  FSDP2 calls it as a custom reduce-scatter, and perhaps as a hook for the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from elastic.engine.axes.base import Parameters
from elastic.engine.precision import Precision
from elastic.engine.streams import stream
from elastic.engine.sync.base import Reduction, Scheme
from elastic.engine.world import World
from elastic.models.spec import ShardingTable

FSDP_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
"""Attributes of FSDP2's communication context that hold streams, in torch 2.11 to 2.13."""


class Split(Parameters):
    """The parameters of a model that FSDP2 has split."""

    def __init__(self, model: nn.Module, scheme: Scheme) -> None:
        self.scheme = scheme
        self._parameters = dict(model.named_parameters())
        self.parts = {name: _local(parameter).detach() for name, parameter in self._parameters.items()}
        self.trained = frozenset(name for name, parameter in self._parameters.items() if parameter.requires_grad)

    def begin_round(self, number: int, *, last: bool) -> None:
        self.scheme.round.number, self.scheme.round.last = number, last
        if self.scheme.keeps_sums or number == 0:
            self.forget_grads()

    def end_round(self) -> None:
        """FSDP2 has summed everything in the backward pass."""

    def grads(self) -> dict[str, Tensor]:
        found = {}
        for name, part in self.parts.items():
            if name in self.trained:
                grad = self._parameters[name].grad
                found[name] = torch.zeros_like(part) if grad is None else _local(grad)
        return found

    def forget_grads(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


def _local(tensor: Tensor) -> Tensor:
    """Returns the part of a split tensor that is in this process."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def apply_fsdp(model: nn.Module, world: World, table: ShardingTable, precision: Precision) -> None:
    """Wraps each block by itself, and the rest of ``model`` as the root.  Gradients are summed and never divided."""
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    for name in table.blocks:
        fully_shard(model.get_submodule(name), mesh=world.shard_mesh, mp_policy=policy)
    fully_shard(model, mesh=world.shard_mesh, mp_policy=policy)
    for module in _wrapped(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def apply_sync(model: nn.Module, scheme: Scheme) -> None:
    """Lets ``scheme`` sum the gradients of every wrapped module."""
    for module in _wrapped(model):
        reduction = scheme.reduction()
        module.set_custom_reduce_scatter(_Reduce(reduction))  # type: ignore[arg-type]  # torch's base class is private; it is duck-typed
        if reduction.across_replicas is not None:
            module.set_all_reduce_hook(reduction.across_replicas)


class _Reduce:
    """The reduce-scatter that FSDP2 calls."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp, async_op: bool = False
    ) -> None:
        if (total := self.reduction.reduce(input_tensor)) is not None:
            output_tensor.copy_(total)


def keep_streams(model: nn.Module, world: World) -> None:
    """Gives ``model`` the streams of earlier worlds in place of the streams that FSDP2 makes for each model."""
    state = model._get_fsdp_state()  # type: ignore[operator]  # of an FSDPModule
    state._lazy_init()
    for purpose in FSDP_STREAMS:
        priority = getattr(state._comm_ctx, purpose).priority
        setattr(state._comm_ctx, purpose, stream(purpose, world.device, priority))


@contextmanager
def gathered(block: nn.Module) -> Iterator[None]:
    """Gathers the parameters of ``block`` for a run that is none of its model's, if they are split.  Every member must do so."""
    if not isinstance(block, FSDPModule):
        yield
        return
    block.unshard()
    yield
    block.reshard()


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
