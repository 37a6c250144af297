"""Finds out among how many members the state must be cut so that each part fits this worker's device, and its
copies fit the node.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from elastic.engine.optim.muon import MOMENTUM
from elastic.engine.precision import PRECISIONS
from elastic.engine.seeds import for_stages
from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.copy_budget import amount, slots_a_worker
from elastic.plan.memory_need import COPIED, USABLE, Need, Transient, least_roomy, least_shard
from elastic.state.node_memory import whole_disk, whole_memory
from elastic.state.streaming import GROUPS, group_bytes
from elastic.train.machine.tenants import check_free, planned, tenants_of
from elastic.train.model import bytes_of
from storage.slices import Tensor, nbytes


def limit_of(job: Job) -> int:
    """Returns the bytes of a worker's device that the job (``workers.device_gb``) lets the worker use; 0 if
    the job sets no limit.
    """
    return int(job.workers.device_gb * 1e9) if job.workers.device_gb != "auto" else 0


def memory_of(job: Job, device: torch.device) -> int:
    """Returns the bytes of ``device`` that a worker may use; 0 if they are not limited."""
    return limit_of(job) or (int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0)


def wait_for_memory(job: Job, tensors: Sequence[Tensor], device: torch.device, uuid: str) -> None:
    """Returns once as much of the device is free as a worker plans with; at once for the CPU.

    Raises as :func:`~elastic.train.machine.tenants.check_free`.
    """
    if device.type == "cuda":
        fixed = job.layout_rule().shards is not None
        wanted = planned(need_of(job, tensors), memory_of(job, device), most_shards(job), fixed=fixed)
        check_free(wanted, lambda: int(torch.cuda.mem_get_info(device)[0]), lambda: tenants_of(uuid))


def need_of(job: Job, tensors: Sequence[Tensor], zero: int | None = None) -> Need:
    """Returns what training needs beside activations.  ``zero`` is the stage of ZeRO, if it is not the job's.

    If gradients are summed in blocks of several microbatches, a member holds two sums of gradients.  A weight
    of both ends of the model has a sum for each end.  It is taken to be any that all pipeline stages have, if
    the model says what is before and behind its blocks; so the result may be a bit too large.  With fp8 it is:
    where fp8 takes more memory, every parameter counts as one that multiplies in fp8; where it takes less, no
    parameter does.
    """
    parameters = [tensor for tensor in tensors if tensor.kind == "parameter"]
    elements = sum(math.prod(tensor.shape) for tensor in parameters)
    with_moments = {tensor.name for tensor in tensors if tensor.kind.startswith("moment.")}
    has_ends = for_stages(job) and any(tensor.depth for tensor in parameters)
    summed = sum(
        math.prod(tensor.shape) * (2 if has_ends and not tensor.depth else 1)
        for tensor in parameters
        if tensor.name in with_moments or not with_moments
    )
    matrices = sum(math.prod(tensor.shape) for tensor in tensors if tensor.kind == f"moment.{MOMENTUM}")
    sums = 2 if job.reproducible and job.reduction.block > 1 else 1
    compute, stage = PRECISIONS[job.precision].compute, job.zero if zero is None else zero
    copies = compute.itemsize * elements if compute is not None else 0
    whole = copies or sum(nbytes(tensor, tensor.whole()) for tensor in parameters)
    used = (
        _visiting({tensor.name: math.prod(tensor.shape) for tensor in parameters}, whole)
        if job.offload == "weights"
        else whole
    )
    units = Counter[str]()
    for tensor in tensors:
        units[tensor.name] += nbytes(tensor, tensor.whole())
    return Need(
        state=units.total(),
        gradients=4 * sums * summed + torch.bfloat16.itemsize * matrices,
        computing=used if job.offloads else copies,
        gathered=used if stage in (1, 2) else 0,
        fp8=elements
        if PRECISIONS[job.precision].fp8 is not None and stage not in (1, 2) and not job.offloads
        else 0,
        deferred=stage == 1 and not job.reproducible,
        streamed=min(GROUPS * group_bytes(job) + sum(sorted(units.values())[-GROUPS:]), units.total())
        if job.offloads
        else 0,
        hosted=whole if job.offload == "weights" else 0,
    )


def _visiting(sizes: Mapping[str, int], whole: int) -> int:
    """Returns how many of ``whole`` bytes are on the device at once: the parameters outside of blocks, and
    the two largest blocks.

    A block is taken to be the parameters whose names agree up to and with their first number, such as
    "layers.0.".
    """
    blocks = Counter[str]()
    for name, size in sizes.items():
        if block := re.match(r".*?\.\d+\.", name):
            blocks[block[0]] += size
    away = sum(size for _, size in blocks.most_common()[2:])
    return whole - whole * away // max(sum(sizes.values()), 1)


def measured_need(job: Job, tensors: Sequence[Tensor], took: int) -> Need:
    """Returns what training needs, if a member took ``took`` bytes when it warmed up in a world of
    ``workers.max`` shards.
    """
    need = need_of(job, tensors)
    size = max(0, took - need.held(job.workers.max))
    return replace(need, transient=Transient(size, size))


def most_shards(job: Job) -> int:
    """Returns the largest number of members of a replica that the job allows."""
    rule = job.layout_rule()
    return rule.group * rule.shards if rule.shards else rule.most_parts(job.workers.max)


def policies_of(job: Job) -> tuple[str | float, ...]:
    """Returns the policy of ``recompute`` that the job names, or those that ``auto`` tries, in order.

    Compiled blocks give other bits with each policy, and each worker chooses by the memory of its own device.
    So for a compiled reproducible job ``auto`` tries only "none"; for another policy the job must name it.
    """
    if job.recompute != "auto":
        return (job.recompute,)
    return ("none",) if must_name_policy(job) else all_policies(job)


def all_policies(job: Job) -> tuple[str, ...]:
    """Returns the policies of ``recompute`` that the other settings allow, in order: each keeps fewer
    activations than the one before.
    """
    return ("none", "selective", "block") if job.activations == "keep" else ("none", "block")


def must_name_policy(job: Job) -> bool:
    """Returns whether the bits would depend on what each worker chose for ``recompute``."""
    return job.compile and job.reproducible


def states_fitting(job: Job, tensors: Sequence[Tensor]) -> float:
    """Returns how many times the whole state this node has room for, with all copies and saves, however
    workers share it.
    """
    rule = job.rules()
    slots = slots_a_worker(rule.copy_every, rule.buddy_every, offload=job.offloads)
    room = whole_disk(job.offload_folder) if job.offload_folder else whole_memory()
    return COPIED * room / (slots * bytes_of(tensors))


def fitting_whole(job: Job, tensors: Sequence[Tensor], device: torch.device, took: int) -> int:
    """Returns the smallest shard degree at which ``device`` also has room for the whole weights with which
    the model computes.

    Weights are then gathered once a step (stage 2 of ZeRO), not block by block for each microbatch (stage 3).
    Returns 0 if there is no such degree, if memory is not limited, or if the job chooses its stage or its
    degree.  ``took`` is as for :func:`fitting_shard`.
    """
    return least_whole(job, tensors, memory_of(job, device), measured_need(job, tensors, took).transient)


def least_whole(job: Job, tensors: Sequence[Tensor], memory: int, transient: Transient) -> int:
    """Returns what :func:`fitting_whole` does, for a device with ``memory`` bytes, if ``transient`` bytes
    come and go in a step.
    """
    if not memory or job.zero != "auto" or job.layout_rule().shards is not None:
        return 0
    return least_roomy(replace(need_of(job, tensors, zero=2), transient=transient), memory, most_shards(job))


def fitting_shard(job: Job, tensors: Sequence[Tensor], device: torch.device, took: int = 0) -> int:
    """Returns the smallest shard degree at which a member fits ``device``; ``took`` is what :func:`warm_up`
    has measured.

    Raises :class:`JobError` if no degree that the job allows is large enough.
    """
    memory = memory_of(job, device)
    if not memory:
        return 1
    most, need = most_shards(job), measured_need(job, tensors, took)
    if job.layout_rule().shards is not None and need.of_a_member(most) <= memory:
        return 1  # the job has chosen
    if least := least_shard(need, memory, most):
        return least
    transient = need.transient.shared
    comes = f", {amount(transient)} of it for a while in each step" if transient else ""
    less = ", lower microbatch" + (", or set recompute to 'block'" if job.recompute != "block" else "")
    raise JobError(
        f"workers.max = {job.workers.max}: even if {most} workers share the state "
        f"({amount(need.state)}), each needs {amount(need.of_a_member(most))} of device memory{comes}, "
        f"and {amount(USABLE * memory)} can be used here; raise workers.max or "
        f"parallel.dp_shard{less if transient else ''}"
    )
