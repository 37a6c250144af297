"""Measures how much shared memory and how much lockable memory this process may take, and says what to do if
it is too little.

The workers' progress counters lie in /dev/shm, and so does the memory that NCCL shares between the GPUs of a
node.  (Ray checks its own use of it.)  Copies do not lie there: ``elastic/state/node_memory.py``.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
from pathlib import Path

from elastic.plan.copy_budget import amount
from elastic.train.gauges.counters import BYTES, FOLDER

SEGMENT = -(-BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
"""Bytes that the counters of one worker take in ``FOLDER``, rounded up to whole pages."""
SHARED = 2**30
"""Free bytes of ``FOLDER`` below which the user is warned.

Containers with NCCL are usually given 1 GiB (``--shm-size=1g``); the default of Docker and Kubernetes is a
sixteenth of that.
"""
LARGER = (
    f"on Kubernetes an emptyDir with medium: Memory and a sizeLimit, mounted at {FOLDER}; with docker "
    "--shm-size"
)


def shared_memory(folder: Path = FOLDER) -> int:
    """Returns the bytes that may still be written to ``folder``."""
    found = os.statvfs(folder)
    # a tmpfs without a limit says 0 of 0
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def lockable_memory() -> int:
    """Returns the bytes that this process may lock in memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def no_segment(free: int) -> str:
    """Returns why a worker cannot begin if ``FOLDER`` has ``free`` bytes left; "" if it can."""
    if free >= SEGMENT:
        return ""
    return (
        f"{FOLDER} has {amount(free)} left, and the counters of one worker take {amount(SEGMENT)} of "
        f"it; make {FOLDER} larger ({LARGER}), or remove files from it"
    )


def little_shared(free: int) -> str:
    """Returns a warning for GPU users if ``free`` bytes of ``FOLDER`` are too few; "" if they are enough."""
    if free >= SHARED:
        return ""
    return (
        f"{FOLDER} has {amount(free)} left, less than the {amount(SHARED)} that NCCL is usually given "
        f"to share between the GPUs of a node: if {FOLDER} is full, a process ends by SIGBUS, or "
        f"workers cannot connect; make {FOLDER} larger ({LARGER})"
    )


def little_lockable(needed: int, limit: int) -> str:
    """Returns a warning if ``needed`` bytes are to be pinned and only ``limit`` may be locked; "" if that is
    enough.
    """
    if needed <= limit:
        return ""
    return (
        f"this worker pins {amount(needed)} of host memory for copies, and RLIMIT_MEMLOCK is "
        f"{amount(limit)}: InfiniBand counts pinned memory against this limit (whether CUDA's driver "
        f"does was not verified); raise the limit by {amount(needed - limit)} or more (`ulimit -l "
        "unlimited` before `ray start`; with docker --ulimit memlock=-1; on Kubernetes "
        "LimitMEMLOCK=infinity for the node's container runtime)"
    )
