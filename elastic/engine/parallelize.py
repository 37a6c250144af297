"""Applies all axes to a model, in their order.

The process group of a wrapped model cannot be replaced, so no generation uses the model of an earlier one.
Each generation wraps a new blueprint, which is made on the meta device, and its shards are filled from the
members, keepers or checkpoints that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from elastic.code.imports import failure
from elastic.engine.activations import apply_activations
from elastic.engine.batch_norm import Statistics, apply_batch_norm
from elastic.engine.compile import INDUCTOR, apply_compile
from elastic.engine.fp8 import apply_fp8
from elastic.engine.loss_scale import is_scaled
from elastic.engine.parameters.base import Parameters
from elastic.engine.parameters.fsdp import (
    apply_fp8_gather,
    apply_fsdp,
    apply_sync,
    keep_streams,
    keep_their_kind,
    settle,
)
from elastic.engine.parameters.gathers import COLLECTIVES
from elastic.engine.parameters.split import Split
from elastic.engine.parameters.visits import Visits
from elastic.engine.parameters.whole import Whole
from elastic.engine.precision import precision_of
from elastic.engine.recomputation import apply_recompute
from elastic.engine.recomputed_groups import apply_groups
from elastic.engine.streams import stream
from elastic.engine.sync.base import Scheme
from elastic.engine.sync.collective import Collective
from elastic.engine.sync.ordered import Ordered
from elastic.engine.world import World
from elastic.errors import JobError, ModelError
from elastic.job import Job
from elastic.kernels.attention import PACKAGE, Kernel, open_flash_4
from elastic.models.spec import ShardingTable
from elastic.plan.batch import deal_of

ALONE = 1 << 20
"""Number of elements up to which blocks are joined into one bucket in a world of one member: 4 MiB of
gradients in float32.  Nothing travels there, so small buckets gain nothing, and a GPU sums a bucket of this
size in less time than the host takes to launch the sum.
"""


def parallelize(
    blueprint: nn.Module, world: World, job: Job, *, backend: str = INDUCTOR
) -> tuple[nn.Module, Parameters, Scheme, Statistics]:
    """Wraps ``blueprint`` (on meta) for ``world`` and gives it memory, but no values yet.  ``backend``
    compiles its blocks, if the job says so.

    Returns the wrapped model, this member's parts of its parameters, the scheme that sums their gradients,
    and the running statistics.
    """
    if world.device.type == "cuda":  # an earlier world may still use memory there that is free again
        torch.cuda.current_stream().wait_stream(stream(COLLECTIVES, world.device))
    aliases, table = aliases_of(blueprint), sharding_table(blueprint)
    deal = deal_of(job.microbatches, job.reduction.block, world.layout, world.nodes)
    scheme = scheme_of(job)(world, deal, deferred=job.zero == 1)
    apply_kernels(blueprint, world.device, job)
    if getattr(blueprint, "attends", None) is Kernel.FLASH_4:
        _open_flash_4()
    precision = precision_of(job, blueprint)
    if precision.fp8 is not None:
        apply_fp8(blueprint, table, precision.fp8)
    apply_recompute(blueprint, table, job.recompute)
    norms = apply_batch_norm(blueprint, table, world.device, job)
    statistics = Statistics(
        norms, scheme if scheme.keeps_sums else scheme_of(job)(world, deal, deferred=True), job.model
    )
    if job.compile:
        alone = job.recompute == "sqrt" or job.activations != "keep" or job.offload == "weights"
        apply_compile(blueprint, table, forward_alone=alone, backend=backend)
    visits = Visits(blueprint, table.blocks, world.device) if job.offload == "weights" else None
    if job.recompute == "sqrt":
        apply_groups(blueprint, table)
    apply_activations(blueprint, table, job.activations)
    if world.layout.dp_shard == 1 or job.zero in (1, 2):
        bucket = job.parallel.elements or (ALONE if world.size == 1 and visits is None else 0)
        parameters = Whole(
            blueprint, world, table, precision, scheme, offloads=job.offloads, bucket=bucket, visits=visits
        )
        for module in blueprint.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = torch.empty_like(buffer, device=world.device)
        tie(blueprint, aliases)
        return blueprint, parameters, scheme, statistics
    before = {
        (module, name): parameter
        for module in blueprint.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    fp8 = apply_fp8_gather(blueprint, world, table, precision)
    apply_fsdp(blueprint, world, table, precision)
    apply_sync(blueprint, scheme, precision)
    blueprint.to_empty(device=world.device)
    keep_their_kind(blueprint, before)
    tie(blueprint, aliases)
    if fp8 is not None:
        settle(blueprint)
    if world.device.type == "cuda":
        keep_streams(blueprint, world)
    return blueprint, Split(blueprint, scheme, fp8), scheme, statistics


def apply_kernels(model: nn.Module, device: torch.device, job: Job) -> None:
    """Sets how ``model`` attends and computes its loss, if it lets the engine choose (as
    :class:`elastic.models.llama.Llama` does).
    """
    flex = Kernel.FLEX if job.compile and device.type == "cuda" and not has_dropout(model) else Kernel.TORCH
    plain = flex if job.reproducible else Kernel.TORCH
    if job.attention == "flash-4" and device.type == "cuda":
        plain = Kernel.FLASH_4
    fuses = not is_scaled(job)  # the fused loss computes its gradient before it knows the scale
    for name, value in {"fuses_loss": fuses, "attends": plain, "attends_in_documents": flex}.items():
        if hasattr(model, name):
            setattr(model, name, value)


def has_dropout(model: nn.Module) -> bool:
    """Returns whether any layer of the model drops values."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _open_flash_4() -> None:
    try:
        open_flash_4()
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise JobError(
            f"attention = 'flash-4': {failure(error)}; install {PACKAGE} on every node, with GPUs of "
            "compute capability 9.0 or 10.0, or set attention to 'auto'"
        ) from error


def scheme_of(job: Job) -> type[Scheme]:
    """Returns the scheme by which the members of ``job`` synchronise."""
    return Ordered if job.reproducible else Collective


def sharding_table(model: nn.Module) -> ShardingTable:
    """Returns the model's own table.  If it has none, the blocks are the children of its largest ModuleList.

    A block is a module that is called, because the engine acts on a block by wrapping its ``forward``.  A
    container, such as a ModuleList of the parts of a layer, is no block; where the largest list holds a
    container, the modules in the container are blocks.  Raises :class:`ModelError` for a container in the
    model's own table.
    """
    own: Callable[[], ShardingTable] | None = getattr(model, "sharding", None)
    if own is not None:
        table = own()
        for name in table.blocks:
            if not _is_called(block := model.get_submodule(name)):
                raise ModelError(
                    f"sharding() of {type(model).__name__} names {name!r}, a {type(block).__name__}, which "
                    "is never called, for it has no forward(); name modules that are called, such as its "
                    "children, or give it a forward() and call it"
                )
        return table
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not lists:
        return ShardingTable(blocks=())
    name, largest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return ShardingTable(blocks=tuple(_called(name, largest)))


def _is_called(module: nn.Module) -> bool:
    """Returns whether ``module`` has a ``forward``; without one nobody can call it."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _called(name: str, container: nn.Module) -> Iterator[str]:
    """Yields the names of the outermost modules in ``container`` that are called."""
    for child_name, child in container._modules.items():
        if child is not None and _is_called(child):
            yield f"{name}.{child_name}"
        elif child is not None:
            yield from _called(f"{name}.{child_name}", child)


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Returns the names of the weights with two dimensions inside the blocks."""
    table = sharding_table(model)
    return frozenset(
        name for name, parameter in model.named_parameters() if parameter.dim() == 2 and table.block_of(name)
    )


def shared_across(model: nn.Module) -> tuple[str, str] | None:
    """Returns two names of one parameter that is in two blocks, or in one and in the rest of the model; None
    if there is none.

    FSDP2 gathers and frees the parameters of a block for that block alone, so such a model cannot be wrapped
    in stage 3 of ZeRO.
    """
    found = dict[int, tuple[str, str]]()
    for unit, name, parameter in _units(model):
        first_unit, first = found.setdefault(id(parameter), (unit, name))
        if unit != first_unit:
            return first, name
    return None


def without_dimensions(model: nn.Module) -> str:
    """Returns the name of a parameter without dimensions, or "".  FSDP2 cannot cut it, so such a model cannot
    be in stage 3 of ZeRO.
    """
    return next((name for name, parameter in model.named_parameters() if not parameter.dim()), "")


def unlike_within(model: nn.Module) -> tuple[str, str] | None:
    """Returns two trained parameters with different dtypes in one block, or in the rest of the model; None if
    there are none.

    FSDP2 sums all gradients of a block in one memory, and those of the rest as well, so such a model cannot
    be wrapped in stage 3 of ZeRO.
    """
    found = dict[str, tuple[torch.dtype, str]]()
    for unit, name, parameter in _units(model):
        dtype, first = (
            found.setdefault(unit, (parameter.dtype, name))
            if parameter.requires_grad
            else (parameter.dtype, name)
        )
        if parameter.dtype != dtype:
            return first, name
    return None


def _units(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yields (block, name, parameter) for each name of each parameter; the block "" is the rest of the
    model.
    """
    table = sharding_table(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield table.block_of(name), name, parameter


def aliases_of(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Returns the groups of (module, attribute) that are one tied parameter, or one buffer."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in model.named_modules():
        own = (module.named_parameters, module.named_buffers)
        for name, tensor in (pair for named in own for pair in named(recurse=False, remove_duplicate=False)):
            owners.setdefault(id(tensor), []).append((module_name, name))
    return [group for group in owners.values() if len(group) > 1]


def tie(model: nn.Module, aliases: list[list[tuple[str, str]]]) -> None:
    """Ties parameters and buffers again after each owner got memory of its own."""
    for (first_module, first), *rest in aliases:
        tensor = getattr(model.get_submodule(first_module), first)
        for module_name, name in rest:
            setattr(model.get_submodule(module_name), name, tensor)
