"""Tells the user before a run starts what it will take: memory of its nodes, and time that may come near a
deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil

import torch
from torch import nn

from elastic.engine.paged import RESIDENT
from elastic.job import Job
from elastic.plan.copy_budget import amount, explained
from elastic.plan.placement import number_of_cells
from elastic.train.machine.device import need_of
from storage.slices import Tensor

SLOW_DISK = 1e9
"""Bytes of state a second that a disk reads while it writes as many; the workers of a node share it."""
LARGE = 1e9
"""Bytes of state from which a device or a node may have too little memory for the whole state."""
TRIVIAL = 1e6
"""Bytes of state below which the memory of copies is not worth a sentence."""
TELLING_S = 10.0
"""Seconds from which the user is told how long an initialisation on a CPU takes."""
DRAWS = 2
"""Number of times that an initialisation draws a value, as an estimate: in the constructors of layers, and in
``init_weights``.
"""


def copying(job: Job, state_bytes: int) -> list[str]:
    """Returns a sentence about the memory that copies take, or [] if copies are made and their memory is
    trivial.
    """
    if state_bytes < TRIVIAL and job.copies.copy_every != 0 and not job.offload_folder:
        return []
    text = taken_by_copies(job, state_bytes)
    if (
        job.layout_rule().shards is None
        and number_of_cells(job.layouts()[-1]) < job.workers.max
        and state_bytes >= LARGE
    ):
        text += (
            "; less where a device or a node has too little memory, because more workers share the state then"
        )
    return [text]


def taken_by_copies(job: Job, state_bytes: int, least: int = 1) -> str:
    """Returns the sentence on what copies take of a node, for each worker, if ``least`` workers or more share
    the state.
    """
    rules, cells = job.rules(), [number_of_cells(layout) for layout in job.layouts(least)]
    sizes, folder = (state_bytes / cells[-1], state_bytes / min(cells)), job.offload_folder
    return explained(*sizes, rules.copy_every, rules.buddy_every, offload=job.offloads, folder=folder)


def hosting(job: Job, tensors: Sequence[Tensor]) -> list[str]:
    """Returns sentences about a job with offloading: the stage of ZeRO that ``auto`` means, and the host
    memory of weights beside the state.
    """
    hosted, found = need_of(job, tensors).hosted, list[str]()
    if job.zero != job.parallel.zero and job.workers.max > 1:
        found.append(
            f"parallel.zero = 'auto' is {job.zero} with offload = {job.offload!r}: all workers share the "
            "state, and each gathers all weights once a step; parallel.zero = 3 is not "
            "possible, since blocks cannot be gathered from the memory of nodes"
        )
    if hosted:
        found.append(
            f"the weights with which the model computes take another {amount(hosted)} of the node's "
            "memory for each worker"
        )
    return found


def initialising(job: Job, model: nn.Module) -> list[str]:
    """Returns a sentence about an initialisation on the CPU that takes long."""
    tensors = [*model.parameters(), *model.buffers()]
    numbers, largest = (
        sum(each.numel() for each in tensors),
        max((each.nbytes for each in tensors), default=0),
    )
    takes_s = DRAWS * numbers * _draw_s() if not job.workers.gpus else 0.0
    if takes_s < TELLING_S:
        return []
    there = f"{amount(RESIDENT + 2 * largest)} of memory beside its part"
    return [
        f"every worker initialises the whole model by itself on its CPU: this takes about {takes_s:.0f} s "
        f"before the first step, and up to {there} of the state"
    ]


def updating(job: Job, state_bytes: int) -> list[str]:
    """Returns a warning if state in files is so large that an update may outlast the deadline of a fence."""
    part, fence_s = state_bytes / min(map(number_of_cells, job.layouts())), job.deadlines.fence_s
    takes_s = part / SLOW_DISK
    if not job.offload_folder or takes_s <= fence_s / 2:
        return []
    return [
        (
            f"deadlines.fence_s = {fence_s:g} may be too short for an update of {amount(part)} of "
            f"state in files, the largest part of a worker: at {amount(SLOW_DISK)} a second it takes "
            f"{takes_s:.0f} s if the disk serves one worker, and the same time again for each other "
            "worker of the node; a worker that answers later than deadlines.fence_s is ended; set "
            f"deadlines.fence_s to {ceil(2 * takes_s)} or more for each worker of a node, and "
            "deadlines.stall_s too"
        )
    ]


def _draw_s() -> float:
    """Returns the seconds in which this machine draws one normal number on one thread; a worker is assumed to
    be as fast.
    """
    threads, numbers, found = torch.get_num_threads(), torch.empty(2**18), list[float]()
    torch.set_num_threads(1)
    for _ in range(3):
        began = time.perf_counter()
        numbers.normal_(generator=torch.Generator())
        found.append((time.perf_counter() - began) / numbers.numel())
    torch.set_num_threads(threads)
    return min(found)
