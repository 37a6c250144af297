"""Applies all policies and axes to a model, in their order.

1. What a block computes: its part along the axes that divide the model, kernels, precision, recomputation,
   batch norms.  All of it is compiled together.
2. What is put around a compiled block: its weights visit the device, its input is computed again, and what it
   keeps is moved or compressed, its random numbers have a seed.  Each is put around the ones before it.
3. How parameters are held: whole or split.  They get memory, and a scheme sums their gradients.

The process group of a wrapped model cannot be replaced, so no generation uses the model of an earlier one.
Each generation wraps a new blueprint, which is made on the meta device, and its shards are filled from the
members, keepers or checkpoints that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from elastic.engine.activations import apply_activations
from elastic.engine.batch_norm import Statistics, apply_batch_norm
from elastic.engine.blocks import sharding_table
from elastic.engine.compile import INDUCTOR, apply_compile
from elastic.engine.fp8 import apply_fp8
from elastic.engine.kernels import apply_kernels, open_kernels
from elastic.engine.parameters.base import Parameters
from elastic.engine.parameters.both_ends import weights_of_both_ends
from elastic.engine.parameters.gathers import COLLECTIVES
from elastic.engine.parameters.split import apply_split
from elastic.engine.parameters.visits import Visits
from elastic.engine.parameters.whole import apply_whole
from elastic.engine.precision import precision_of
from elastic.engine.recomputation import apply_recompute
from elastic.engine.recomputed_groups import apply_groups
from elastic.engine.seeds import Seeds, for_stages
from elastic.engine.streams import stream
from elastic.engine.sync.base import Scheme
from elastic.engine.sync.collective import Collective
from elastic.engine.sync.ordered import Ordered
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.batch import deal_of

Rewrite = Callable[[nn.Module, World, ShardingTable], None]
"""``rewrite(model, world, table)`` puts modules that compute a member's part in the place of modules of
``model``, which is on meta.  Parameters keep their names, and have the shapes that ``plan/placement.py``
says.  All that computes with a part of an activation or of a weight is in such a module.
"""
REWRITES: dict[str, Rewrite] = {}
"""Maps the name of an axis that divides the model to what rewrites modules for it.  It is called in every
world, also at degree 1, so that modules can add in the same order at each degree.  No axis of the product is
here yet.
"""


def parallelize(
    blueprint: nn.Module, world: World, job: Job, *, backend: str = INDUCTOR
) -> tuple[nn.Module, Parameters, Scheme, Statistics, Seeds]:
    """Wraps ``blueprint`` (on meta) for ``world`` and gives it memory, but no values yet.  ``backend``
    compiles its blocks, if the job says so.

    Returns the wrapped model, this member's parts of its parameters, the scheme that sums their gradients,
    the running statistics, and the seeds of random numbers.
    """
    _wait_for_earlier_worlds(world.device)
    table, precision = sharding_table(blueprint), precision_of(job, blueprint)
    deal = deal_of(job.microbatches, job.reduction.block, world.layout, world.nodes)
    scheme = scheme_of(job)(world, deal, deferred=job.zero == 1)

    # what a block computes
    for axis, rewrite in REWRITES.items():
        before = {*blueprint.modules()}
        rewrite(blueprint, world, table)
        if (degree := dict(world.layout.degrees).get(axis, 1)) > 1:
            _refuse_dropout(blueprint, before, f"parallel.{axis} = {degree}")
    apply_kernels(blueprint, world.device, job)
    open_kernels(blueprint)
    if precision.fp8 is not None:
        apply_fp8(blueprint, table, precision.fp8)
    if job.recompute not in ("none", "auto"):  # a worker that must recompute has replaced "auto"
        apply_recompute(blueprint, table, job.recompute)
    statistics = apply_batch_norm(blueprint, table, scheme, job)
    if job.compile:
        apply_compile(blueprint, table, forward_alone=_wraps_compiled_blocks(job), backend=backend)

    # what is put around a compiled block
    visits = Visits(blueprint, table.blocks, world.device) if job.offload == "weights" else None
    if job.recompute == "sqrt":
        apply_groups(blueprint, table)
    if job.activations != "keep":
        apply_activations(blueprint, table, job.activations)
    seeds = Seeds(blueprint, job, world.device)

    # how parameters are held
    parameters: Parameters
    behind = weights_of_both_ends(blueprint, table) if for_stages(job) else {}
    if world.layout.shards == 1 or job.zero in (1, 2):
        parameters = apply_whole(
            blueprint,
            world,
            table,
            precision,
            scheme,
            job.parallel,
            offloads=job.offloads,
            visits=visits,
            behind=behind,
        )
    else:
        parameters = apply_split(blueprint, world, table, precision, scheme, behind)
    return blueprint, parameters, scheme, statistics, seeds


def _refuse_dropout(model: nn.Module, before: Collection[nn.Module], setting: str) -> None:
    """Raises :class:`ModelError` for dropout in a module that was not there ``before``, and so computes a part:
    all members of a model group have one seed (:class:`Seeds`), which is right for what they compute alike.
    """
    for name, module in model.named_modules():
        if module not in before and isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name} is dropout inside of a layer that {setting} divides: members would drop the same places "
                "of their different parts, so the degree would show in the result; set this dropout to 0, or "
                "put it behind the layer"
            )


def scheme_of(job: Job) -> type[Scheme]:
    """Returns the scheme by which the members of ``job`` synchronise."""
    return Ordered if job.reproducible else Collective


def _wraps_compiled_blocks(job: Job) -> bool:
    """Returns whether ``forward`` of the blocks is replaced once they are compiled."""
    return for_stages(job) or job.recompute == "sqrt" or job.activations != "keep" or job.offload == "weights"


def _wait_for_earlier_worlds(device: torch.device) -> None:
    """Lets the device wait for the collectives of earlier worlds, which may still use memory that is free
    again.
    """
    if device.type == "cuda":
        torch.cuda.current_stream().wait_stream(stream(COLLECTIVES, device))
