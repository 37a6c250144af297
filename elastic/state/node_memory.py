"""Measures the memory, or the disk, that a node has left for copies, and takes it for them.

Copies lie in anonymous files (memfd), which count for the cgroup like any memory, but not for the size of
/dev/shm.  The system allocates such memory when it is written, and kills a process (SIGKILL) when a limit is
passed.  So a slot is written only after :func:`reserve` has found room and taken the memory.  Meanwhile no
other process of the node looks for room.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.plan.copy_budget import amount
from elastic.state.region import NAME, Region

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MOUNTS = Path("/proc/self/mountinfo")
FOLDER = Path("/dev/shm")
"""The folder whose lock :func:`alone` takes: all containers that share memory have it."""
REGIONS = f"/memfd:{NAME}"
"""Beginning of the link in ``/proc/<pid>/fd`` of a descriptor that is a region."""
PATIENCE_S = 30.0
"""Longest time in seconds that :func:`alone` waits: without a limit, one process that hangs would stop the
whole node.
"""
SPARE = 2**27
"""Bytes that copies leave free for training, which takes memory little by little and without :func:`reserve`.
"""
VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names in the two versions of cgroups, 2 and 1: controller, its folder, and the fields for limit, use and
reclaimable memory.
"""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN) -> tuple[int, str]:
    """Returns the bytes that may still be taken, and the limit that is reached first: the node's or that of a
    cgroup of this process.
    """
    found = [(1024 * int(_table(meminfo)["MemAvailable:"]), "the node (MemAvailable)")]
    for group, limit, allowed, used, cached in _limits(cgroup, own):
        with suppress(OSError):
            kept = (
                allowed
                - int((group / used).read_text())
                + int(_table(group / "memory.stat").get(cached, "0"))
            )
            found.append((kept, f"the container ({limit} = {allowed})"))
    return min(found)


def whole_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN) -> int:
    """Returns the bytes that the node has, or that the cgroups of this process allow if that is less."""
    return min(
        [1024 * int(_table(meminfo)["MemTotal:"]), *(allowed for _, _, allowed, _, _ in _limits(cgroup, own))]
    )


def _limits(cgroup: Path, own: Path) -> Iterator[tuple[Path, str, int, str, str]]:
    """Yields each cgroup of this process that has a limit: its folder, the name of the limit, its bytes, and
    the names in ``VERSIONS`` of the fields for use and reclaimable memory.
    """
    for controller, folder, limit, used, cached in VERSIONS:
        for group in groups(controller, cgroup / folder, own):
            with suppress(OSError):  # the group is not visible from here, or has no limit
                allowed = (group / limit).read_text().strip()
                if allowed.isdigit():
                    yield group, limit, int(allowed), used, cached


def groups(controller: str, folder: Path, own: Path = OWN) -> list[Path]:
    """Returns the folders below ``folder`` of this process's cgroup for ``controller`` and of the cgroups
    around it; some may not be visible.
    """
    found: dict[str, str] = {}
    with suppress(OSError):  # the kernel has no cgroups
        found = {
            names: path for _, names, path in (line.split(":", 2) for line in own.read_text().splitlines())
        }
    mine = Path(
        next((path for names, path in found.items() if controller in names.split(",")), "/")
    ).relative_to("/")
    return [folder / each for each in (mine, *mine.parents)]


def free_disk(folder: str | int) -> tuple[int, str]:
    """Returns the free bytes of the disk that has ``folder`` (a path or the descriptor of an open file), and
    the name of that disk for messages.
    """
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, "the disk of offload_folder"


def whole_disk(folder: str) -> int:
    """Returns the bytes of the disk that has ``folder``."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize


def filesystem(folder: str, mounts: Path = MOUNTS) -> str:
    """Returns the type of the filesystem that has ``folder``, such as ``ext4``; empty if the system does not
    tell.
    """
    there, found = Path(folder).resolve(), dict[Path, str]()
    with suppress(OSError):
        for line in mounts.read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
            found[Path(place)] = kind.split()[0]  # a later mount hides an earlier one at the same place
    return next((found[each] for each in (there, *there.parents) if each in found), "")


def free_for(region: Region) -> tuple[int, str]:
    """Returns the bytes that may still be taken where ``region`` is, and the limit that is reached first."""
    return free_disk(region.descriptor) if region.on_disk else free_memory()


@contextmanager
def alone() -> Iterator[None]:
    """Excludes other workers and keepers of this node, so that two do not count on the same free memory.

    After ``PATIENCE_S`` seconds it goes on without the lock.
    """
    folder, until = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        else:
            print(
                f"other processes have held the lock on {FOLDER} for {PATIENCE_S:g} s; going on without it",
                flush=True,
            )
        yield
    finally:
        os.close(folder)


def copies_here(folder: str = "") -> tuple[int, int]:
    """Returns two sizes of this node's copies, of all runs: the bytes that are wanted but not written yet,
    and the written bytes that may become free.

    With ``folder`` these are the copies in files of that folder, otherwise the copies in memory.

    Two kinds of bytes may become free: bytes of living workers beyond what they want, and regions that only a
    keeper still holds, which are copies of workers on other nodes and of dead workers.  The copies of dead
    workers are freed once the next world has newer copies.
    """
    sizes, holders = dict[int, tuple[int, int]](), defaultdict[int, set[str]](set)
    links = f"{os.path.realpath(folder)}/" if folder else REGIONS
    for process, entry in _open_files():
        # the process is gone, belongs to another user, or runs another release
        with suppress(OSError, ValueError):
            if (link := os.readlink(entry)).startswith(links) and link.endswith(" (deleted)"):
                found = os.stat(entry)
                sizes[found.st_ino] = Region.wanted(Path(entry)), 512 * found.st_blocks
                holders[found.st_ino].add(process)
    coming = sum(max(wanted - written, 0) for wanted, written in sizes.values())
    only_kept = {inode for inode in sizes if len(holders[inode]) == 1}
    return coming, sum(
        written if inode in only_kept else max(written - wanted, 0)
        for inode, (wanted, written) in sizes.items()
    )


def _open_files() -> Iterator[tuple[str, str]]:
    """Yields the number of a process and a path in /proc for each open file of this node, as plain texts
    because there are many thousands.
    """
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it is gone, or belongs to another user
            yield from (
                (process, f"/proc/{process}/fd/{number}") for number in os.listdir(f"/proc/{process}/fd")
            )


def reserve(region: Region, slot: int, size: int) -> str:
    """Takes the memory that the first ``size`` bytes of the slot still lack.  Returns "", or why there is no
    room.
    """
    if not region.lacks(slot, size):
        return ""
    with alone():
        return take(region, slot, size)


def take(region: Region, slot: int, size: int) -> str:
    """Takes memory like :func:`reserve`, for a caller that is :func:`alone` already."""
    (free, where), lacking = free_for(region), region.lacks(slot, size)
    if lacking and lacking + SPARE > free:
        return (
            f"{amount(lacking)} more are needed, but {where} has {amount(free)} left, of which "
            f"{amount(SPARE)} must stay free"
        )
    try:
        region.reserve(slot, size)
    except OSError as error:  # somebody else filled the disk just now
        return f"{amount(lacking)} more are needed, but {where} gives no memory: {error.strerror}"
    return ""


def _table(path: Path) -> Mapping[str, str]:
    """Returns a mapping from the first word of each line to the second."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
