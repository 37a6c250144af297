"""The ordered composition of all axes, on one page.

There is no way to swap a process group under a wrapped model, so nothing is repaired: each generation wraps a new blueprint, made on
the meta device, and its shards are filled from whoever holds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastic.engine.streams import stream
from elastic.engine.sync.ordered import OrderedReduction, Round
from elastic.engine.world import World
from elastic.job import Job
from elastic.models.spec import ShardingTable

FSDP_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
"""As torch calls them, 2.11 to 2.13."""


def parallelize(blueprint: nn.Module, world: World, job: Job) -> tuple[nn.Module, Round]:
    """Wrap ``blueprint`` (on meta) for ``world`` and give it memory, not yet values.  Returns it and the fold's round counter."""
    aliases, table = _aliases(blueprint), sharding_table(blueprint)
    if job.compile:
        apply_compile(blueprint, table)
    apply_fsdp(blueprint, world, table, job.precision)
    round_ = apply_fold(blueprint, world) if job.reproducible else apply_sum(blueprint, world)
    blueprint.to_empty(device=world.device)
    _tie(blueprint, aliases)
    if world.device.type == "cuda":
        keep_streams(blueprint, world)
    return blueprint, round_


def sharding_table(model: nn.Module) -> ShardingTable:
    """The model's own table, else: the blocks are the children of its largest ModuleList."""
    own: Callable[[], ShardingTable] | None = getattr(model, "sharding", None)
    if own is not None:
        return own()
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return ShardingTable(blocks=())
    name, largest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return ShardingTable(blocks=tuple(f"{name}.{i}" for i in range(len(largest))))


def apply_compile(model: nn.Module, table: ShardingTable) -> None:
    """Each block by itself, before it is wrapped: all blocks share one compilation, and so does the next world of this process."""
    for name in table.blocks:
        model.get_submodule(name).compile(fullgraph=True)


def apply_fsdp(model: nn.Module, world: World, table: ShardingTable, precision: str) -> None:
    """Parameters of each block are gathered, used and freed together; what is left belongs to the root.

    What is sharded stays float32 (the masters); "bf16" is the dtype in which it is gathered and computed with.
    """
    low = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for name in table.blocks:
        fully_shard(model.get_submodule(name), mesh=world.shard_mesh, mp_policy=policy)
    fully_shard(model, mesh=world.shard_mesh, mp_policy=policy)
    for module in _wrapped(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def apply_fold(model: nn.Module, world: World) -> Round:
    """Reduce gradients in the order of the microbatches."""
    round_ = Round()
    for module in _wrapped(model):
        fold = OrderedReduction(world, round_)
        if world.layout.dp_shard > 1:
            module.set_custom_reduce_scatter(fold)  # type: ignore[arg-type]  # torch's base class is private; it is duck-typed
        else:
            module.set_all_reduce_hook(fold.hook)
    return round_


def apply_sum(model: nn.Module, world: World) -> Round:
    """Reduce gradients by the library's collectives; FSDP adds up the rounds."""
    if world.layout.dp_replicate > 1:
        for module in _wrapped(model):
            module.set_all_reduce_hook(lambda grads: torch.distributed.all_reduce(grads, group=world.replicate_group))
    return Round()


def keep_streams(model: nn.Module, world: World) -> None:
    """FSDP makes streams for each model that it wraps; this one gets those of the worlds before."""
    state = model._get_fsdp_state()  # type: ignore[operator]  # of an FSDPModule
    state._lazy_init()
    for purpose in FSDP_STREAMS:
        priority = getattr(state._comm_ctx, purpose).priority
        setattr(state._comm_ctx, purpose, stream(purpose, world.device, priority))


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _aliases(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Groups of (module, attribute) that are one tied parameter, or one buffer."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in model.named_modules():
        own = (module.named_parameters, module.named_buffers)
        for name, tensor in (pair for named in own for pair in named(recurse=False, remove_duplicate=False)):
            owners.setdefault(id(tensor), []).append((module_name, name))
    return [group for group in owners.values() if len(group) > 1]


def _tie(model: nn.Module, aliases: list[list[tuple[str, str]]]) -> None:
    """``to_empty`` gives each owner memory of its own; tie them again."""
    for (first_module, first), *rest in aliases:
        tensor = getattr(model.get_submodule(first_module), first)
        for module_name, name in rest:
            setattr(model.get_submodule(module_name), name, tensor)
