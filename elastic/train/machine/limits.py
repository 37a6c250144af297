"""How much more memory this process may take, and who says so.

What is copied lies in anonymous files (memfd): they count for the cgroup like any memory, and not for the size of /dev/shm.  There lie
the workers' progress counters, and what NCCL shares between the GPUs of a node.  (What Ray puts there it looks after itself.)
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
"""Bytes that the counters of one worker take of ``FOLDER``, where memory is given page by page."""
SHARED = 2**30
"""Bytes that containers with NCCL are usually given there (``--shm-size=1g``); the default of Docker and Kubernetes is a sixteenth."""
LARGER = f"on Kubernetes an emptyDir with medium: Memory and a sizeLimit, mounted at {FOLDER}; with docker --shm-size"
VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of cgroups: controller, its folder; limit, use, and what of it can be given back.  The second version, and the first."""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN) -> tuple[int, str]:
    """Bytes that may still be taken, and the limit that is met first: the node's, or that of a group which this process is in."""
    found = [(1024 * int(_table(meminfo)["MemAvailable:"]), "the node (MemAvailable)")]
    groups: dict[str, str] = {}
    with suppress(OSError):  # a kernel without them
        groups = {names: path for _, names, path in (line.split(":", 2) for line in own.read_text().splitlines())}
    for controller, folder, limit, used, cached in VERSIONS:
        mine = Path(next((path for names, path in groups.items() if controller in names.split(",")), "/")).relative_to("/")
        for group in (cgroup / folder / each for each in (mine, *mine.parents)):
            with suppress(OSError):  # not to be seen from here, or not limited
                allowed, taken = (group / limit).read_text().strip(), int((group / used).read_text())
                if allowed.isdigit():
                    kept = int(allowed) - taken + int(_table(group / "memory.stat").get(cached, "0"))
                    found.append((kept, f"the container ({limit} = {allowed})"))
    return min(found)


@contextmanager
def alone() -> Iterator[None]:
    """No other worker of this node is here too: what one finds free is not what another is about to take.  It waits ``PATIENCE_S``."""
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
    """Of this node's copies, of any run: the bytes that they will take beyond what is written, and those that only a keeper still holds.

    The second are of workers that died, and given back when the next world has newer ones, or of other nodes' workers.
    """
    sizes, holders = dict[int, tuple[int, int]](), defaultdict[int, set[str]](set)
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # gone, or not ours to see
            if os.readlink(entry).startswith(REGIONS):
                found = os.stat(entry)
                sizes[found.st_ino] = found.st_size, 512 * found.st_blocks
                holders[found.st_ino].add(entry.parts[2])
    coming = sum(max(size - written, 0) for size, written in sizes.values())
    return coming, sum(written for inode, (_, written) in sizes.items() if len(holders[inode]) == 1)


def shared_memory(folder: Path = FOLDER) -> int:
    """Bytes that may still be written there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize  # a tmpfs without a limit says 0 of 0


def lockable_memory() -> int:
    """Bytes that this process may lock in memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def no_segment(free: int) -> str:
    """Why a worker cannot begin where ``FOLDER`` has so many bytes left; "" where it can."""
    if free >= SEGMENT:
        return ""
    return (
        f"{FOLDER} has {amount(free)} left, and the counters of one worker take {amount(SEGMENT)} of it; make it larger ({LARGER}), "
        "or remove what fills it"
    )


def little_shared(free: int) -> str:
    """What the user of a GPU should know where ``FOLDER`` has so many bytes left; "" where that is enough."""
    if free >= SHARED:
        return ""
    return (
        f"{FOLDER} has {amount(free)} left, less than the {amount(SHARED)} that NCCL is usually given to share between the GPUs of a node: "
        f"where it is full a process ends by SIGBUS, or a world does not form; make it larger ({LARGER})"
    )


def little_lockable(needed: int, limit: int) -> str:
    """What the user should know where ``needed`` bytes are to be pinned and so many may be locked; "" where that is enough."""
    if needed <= limit:
        return ""
    return (
        f"this worker pins {amount(needed)} of host memory for copies, and RLIMIT_MEMLOCK is {amount(limit)}: whether CUDA's driver counts "
        f"what it pins was not verified, InfiniBand's verbs do; raise it by {amount(needed - limit)} or more (`ulimit -l unlimited` before "
        f"`ray start`; with docker --ulimit memlock=-1; on Kubernetes LimitMEMLOCK=infinity for the node's container runtime)"
    )


def _table(path: Path) -> Mapping[str, str]:
    """Of each line the first word, and the second."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
