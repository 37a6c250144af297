"""The data axes: parameters are split over ``dp_shard`` members by FSDP2, and gradients are summed over all data ranks.

This is the only module that knows FSDP2.  FSDP2 splits the parameters of each block, gathers them before the block runs, and frees them
afterwards.  It gets the one-dimensional mesh of the shards only.  A :class:`~elastic.engine.sync.base.Scheme` sums the gradients over
the data ranks.  FSDP2 calls it through two hooks: a custom reduce-scatter for parameters that are split, and an all-reduce hook, which
FSDP2 also calls for parameters that are not split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastic.engine.precision import Precision
from elastic.engine.streams import stream
from elastic.engine.sync.base import Reduction, Scheme
from elastic.engine.world import World
from elastic.models.spec import ShardingTable

FSDP_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
"""Attributes of FSDP2's communication context that hold streams, in torch 2.11 to 2.13."""


def apply_fsdp(model: nn.Module, world: World, table: ShardingTable, precision: Precision) -> None:
    """Wraps each block by itself, and the rest of ``model`` as the root.  Gradients are summed and never divided."""
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    for name in table.blocks:
        fully_shard(model.get_submodule(name), mesh=world.shard_mesh, mp_policy=policy)
    fully_shard(model, mesh=world.shard_mesh, mp_policy=policy)
    for module in _wrapped(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def apply_sync(model: nn.Module, world: World, scheme: Scheme) -> None:
    """Lets ``scheme`` sum the gradients of every wrapped module."""
    for module in _wrapped(model):
        reduction = scheme.reduction()
        if world.layout.dp_shard == 1:
            module.set_all_reduce_hook(_Unsplit(reduction))
            continue
        module.set_custom_reduce_scatter(_Split(reduction))  # type: ignore[arg-type]  # torch's base class is private; it is duck-typed
        if reduction.across_replicas is not None:
            module.set_all_reduce_hook(reduction.across_replicas)


class _Split:
    """The reduce-scatter that FSDP2 calls for parameters that are split."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp, async_op: bool = False
    ) -> None:
        self.reduction.reduce(input_tensor, output_tensor)


class _Unsplit:
    """Sums the gradients of parameters that are not split.

    FSDP2 calls it as its all-reduce hook, since it runs no reduce-scatter for them.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def __call__(self, grads: Tensor) -> None:
        self.reduction.reduce(grads, grads)
        if self.reduction.across_replicas is not None:
            self.reduction.across_replicas(grads)


def keep_streams(model: nn.Module, world: World) -> None:
    """Gives ``model`` the streams of earlier worlds in place of the streams that FSDP2 makes for each model."""
    state = model._get_fsdp_state()  # type: ignore[operator]  # of an FSDPModule
    state._lazy_init()
    for purpose in FSDP_STREAMS:
        priority = getattr(state._comm_ctx, purpose).priority
        setattr(state._comm_ctx, purpose, stream(purpose, world.device, priority))


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
