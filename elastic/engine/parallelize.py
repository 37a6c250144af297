"""Applies all axes to a model, in their order.

The process group of a wrapped model cannot be replaced, so no generation uses the model of an earlier one.
Each generation wraps a new blueprint, which is made on the meta device, and its shards are filled from the
members, keepers or checkpoints that hold them.
"""

from __future__ import annotations

import torch
from torch import nn

from elastic.engine.activations import apply_activations
from elastic.engine.batch_norm import Statistics, apply_batch_norm
from elastic.engine.blocks import sharding_table
from elastic.engine.compile import INDUCTOR, apply_compile
from elastic.engine.fp8 import apply_fp8
from elastic.engine.kernels import apply_kernels, open_kernels
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
from elastic.engine.parameters.ties import aliases_of, tie
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
from elastic.job import Job
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
    open_kernels(blueprint)
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


def scheme_of(job: Job) -> type[Scheme]:
    """Returns the scheme by which the members of ``job`` synchronise."""
    return Ordered if job.reproducible else Collective
