"""Measures how much more memory this process may take, and names the limit.

Copies lie in anonymous files (memfd), which count for the cgroup like any memory, but not for the size of /dev/shm.  The workers' progress
counters lie in /dev/shm, and so does the memory that NCCL shares between the GPUs of a node.  (Ray checks its own use of it.)
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.plan.copy_budget import amount
from elastic.state.region import NAME
from elastic.train.counters import BYTES, FOLDER

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
REGIONS = f"/memfd:{NAME}"
PATIENCE_S = 30.0
SEGMENT = -(-BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
"""Bytes that the counters of one worker take in ``FOLDER``, rounded up to whole pages."""
SHARED = 2**30
"""Free bytes of ``FOLDER`` below which the user is warned.

It is what containers with NCCL are usually given (``--shm-size=1g``); the default of Docker and Kubernetes is a sixteenth of it.
"""
LARGER = f"on Kubernetes an emptyDir with medium: Memory and a sizeLimit, mounted at {FOLDER}; with docker --shm-size"
VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names in the two versions of cgroups, 2 and 1: controller, its folder, and the fields for limit, use and reclaimable memory."""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN) -> tuple[int, str]:
    """Returns the bytes that may still be taken, and the limit that is reached first: the node's or that of a group of this process."""
    found = [(1024 * int(_table(meminfo)["MemAvailable:"]), "the node (MemAvailable)")]
    groups: dict[str, str] = {}
    with suppress(OSError):  # the kernel has no cgroups
        groups = {names: path for _, names, path in (line.split(":", 2) for line in own.read_text().splitlines())}
    for controller, folder, limit, used, cached in VERSIONS:
        mine = Path(next((path for names, path in groups.items() if controller in names.split(",")), "/")).relative_to("/")
        for group in (cgroup / folder / each for each in (mine, *mine.parents)):
            with suppress(OSError):  # the group is not visible from here, or has no limit
                allowed, taken = (group / limit).read_text().strip(), int((group / used).read_text())
                if allowed.isdigit():
                    kept = int(allowed) - taken + int(_table(group / "memory.stat").get(cached, "0"))
                    found.append((kept, f"the container ({limit} = {allowed})"))
    return min(found)


@contextmanager
def alone() -> Iterator[None]:
    """Excludes other workers of this node, so that two do not count on the same free memory.  It waits at most ``PATIENCE_S`` seconds."""
    folder, until = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        else:
            print(f"somebody has looked for memory for {PATIENCE_S:g} s, and holds the lock on {FOLDER}; going on without", flush=True)
        yield
    finally:
        os.close(folder)


def copies_here() -> tuple[int, int]:
    """Returns two sizes of this node's copies, of any run: bytes still to be written, and bytes that only a keeper still holds.

    The second belong to workers of other nodes, or to dead workers; the latter are freed when the next world has newer copies.
    """
    sizes, holders = dict[int, tuple[int, int]](), defaultdict[int, set[str]](set)
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process is gone, or belongs to another user
            if os.readlink(entry).startswith(REGIONS):
                found = os.stat(entry)
                sizes[found.st_ino] = found.st_size, 512 * found.st_blocks
                holders[found.st_ino].add(entry.parts[2])
    coming = sum(max(size - written, 0) for size, written in sizes.values())
    return coming, sum(written for inode, (_, written) in sizes.items() if len(holders[inode]) == 1)


def shared_memory(folder: Path = FOLDER) -> int:
    """Returns the bytes that may still be written to ``folder``."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize  # a tmpfs without a limit says 0 of 0


def lockable_memory() -> int:
    """Returns the bytes that this process may lock in memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def no_segment(free: int) -> str:
    """Returns why a worker cannot begin if ``FOLDER`` has ``free`` bytes left; "" if it can."""
    if free >= SEGMENT:
        return ""
    return (
        f"{FOLDER} has {amount(free)} left, and the counters of one worker take {amount(SEGMENT)} of it; make it larger ({LARGER}), "
        "or remove what fills it"
    )


def little_shared(free: int) -> str:
    """Returns a warning for GPU users if ``free`` bytes of ``FOLDER`` are too few; "" if they are enough."""
    if free >= SHARED:
        return ""
    return (
        f"{FOLDER} has {amount(free)} left, less than the {amount(SHARED)} that NCCL is usually given to share between the GPUs of a node: "
        f"where it is full a process ends by SIGBUS, or a world does not form; make it larger ({LARGER})"
    )


def little_lockable(needed: int, limit: int) -> str:
    """Returns a warning if ``needed`` bytes are to be pinned and only ``limit`` may be locked; "" if that is enough."""
    if needed <= limit:
        return ""
    return (
        f"this worker pins {amount(needed)} of host memory for copies, and RLIMIT_MEMLOCK is {amount(limit)}: whether CUDA's driver counts "
        f"what it pins was not verified, InfiniBand's verbs do; raise it by {amount(needed - limit)} or more (`ulimit -l unlimited` before "
        f"`ray start`; with docker --ulimit memlock=-1; on Kubernetes LimitMEMLOCK=infinity for the node's container runtime)"
    )


def _table(path: Path) -> Mapping[str, str]:
    """Returns a mapping from the first word of each line to the second."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
