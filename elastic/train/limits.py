"""How much more memory this process may take, and who says so.

What is copied lies in anonymous files (memfd): they count for the cgroup like any memory, and not for the size of /dev/shm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Limit, use, and what of it can be given back: of the second and of the first version of cgroups."""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> tuple[int, str]:
    """Bytes that may still be taken, and the limit that is met first."""
    found = [(1024 * int(_table(meminfo)["MemAvailable:"]), "the node (MemAvailable)")]
    for limit, used, stat, cached in FILES:
        try:
            allowed, taken = (cgroup / limit).read_text().strip(), int((cgroup / used).read_text())
            if allowed.isdigit():
                found.append(
                    (int(allowed) - taken + int(_table(cgroup / stat).get(cached, "0")), f"the container ({Path(limit).name} = {allowed})")
                )
        except OSError:  # no such cgroup here
            continue
    return min(found)


def _table(path: Path) -> Mapping[str, str]:
    """Of each line the first word, and the second."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
