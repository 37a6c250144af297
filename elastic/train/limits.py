"""How much more memory this process may take, and who says so.

What is copied lies in anonymous files (memfd): they count for the cgroup like any memory, and not for the size of /dev/shm.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.train.counters import FOLDER, Counters

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of cgroups: controller, its folder; limit, use, and what of it can be given back.  The second version, and the first."""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN) -> tuple[int, str]:
    """Bytes that may still be taken, and the limit that is met first: the node's, or that of a group which this process is in."""
    found = [(1024 * int(_table(meminfo)["MemAvailable:"]), "the node (MemAvailable)")]
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
    """No other worker of this node is here too: what one finds free is not what another is about to take."""
    folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def promised() -> int:
    """Bytes that the copies of this node's workers, of any run, will take beyond what they have written so far."""
    total = 0
    for path in FOLDER.glob("elastic-*-w*"):
        with suppress(OSError, ValueError):  # just made, or gone
            counters = Counters(path, create=False)
            if counters["copies"]:
                region = os.stat(f"/proc/{counters['pid']}/fd/{counters['copies']}")
                total += max(region.st_size - 512 * region.st_blocks, 0)
    return total


def _table(path: Path) -> Mapping[str, str]:
    """Of each line the first word, and the second."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
