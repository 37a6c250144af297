"""Counts the cores that the processes of this machine may use: by affinity, and by the quotas of the
containers that they are in.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from elastic.state.node_memory import CGROUP, OWN, groups


def usable_cores(cgroup: Path = CGROUP, own: Path = OWN) -> int:
    """Returns the number of cores; a fraction of a core counts as a whole one."""
    return min([len(os.sched_getaffinity(0)), *(max(1, math.ceil(quota)) for quota in _quotas(cgroup, own))])


def _quotas(cgroup: Path, own: Path) -> Iterator[float]:
    """Yields the cores that each cgroup of this process allows, in version 2 and 1 of cgroups, as far as they
    have a quota.
    """
    for group in groups("", cgroup, own):
        with suppress(OSError, ValueError):  # not visible from here, or "max"
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) / int(period)
    for group in groups("cpu", cgroup / "cpu", own):
        with suppress(OSError, ValueError):
            quota = (group / "cpu.cfs_quota_us").read_text()
            if int(quota) > 0:  # -1: there is none
                yield int(quota) / int((group / "cpu.cfs_period_us").read_text())
