"""Finds out among how many members the state must be cut so that each part fits this worker's device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from elastic.engine.precision import PRECISIONS
from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.copy_budget import amount
from elastic.plan.memory import USABLE, Need, least_shard
from storage.slices import Tensor, nbytes


def memory_of(job: Job, device: torch.device) -> int:
    """Returns the bytes of ``device`` that a worker may use; 0 if they are not limited."""
    if job.workers.device_gb != "auto":
        return int(job.workers.device_gb * 1e9)
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def need_of(job: Job, tensors: Sequence[Tensor], transient: int = 0) -> Need:
    parameters = [tensor for tensor in tensors if tensor.kind == "parameter"]
    elements = sum(math.prod(tensor.shape) for tensor in parameters)
    compute = PRECISIONS[job.precision].compute
    copies = compute.itemsize * elements if compute is not None else 0
    return Need(sum(nbytes(tensor, tensor.whole()) for tensor in tensors), 4 * elements, copies, transient)


def fitting_shard(job: Job, tensors: Sequence[Tensor], device: torch.device, transient: int = 0) -> int:
    """Returns the smallest shard degree at which a member fits ``device``; ``transient`` is what a step takes for a time.

    Raises :class:`JobError` if ``workers.max`` members are too few.
    """
    memory, most = memory_of(job, device), job.workers.max
    if not memory:
        return 1
    need = need_of(job, tensors, transient)
    if least := least_shard(need, memory, most):
        return least
    raise JobError(
        f"workers.max = {most}: even if so many workers share the state ({amount(need.state)}), each needs "
        f"{amount(need.of_a_member(most))} of device memory, {amount(transient)} of it for a while in each step, and "
        f"{amount(USABLE * memory)} can be used here; raise "
        f"workers.max, lower microbatch, or set recompute"
    )
