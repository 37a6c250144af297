"""Sums the seconds of tests by folder and by file, so that whoever adds a test sees what it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

SHOWN = 15
"""Number of folders, and of files, whose seconds are printed at the end of a run of all tests."""


def longest(seconds: Mapping[str, float], parts: int) -> list[str]:
    """Returns a line for each of the ``SHOWN`` longest folders (``parts`` = 2) or files (3): its seconds, its tests and its name."""
    sums: dict[str, list[float]] = defaultdict(list)
    for nodeid, duration in seconds.items():
        sums["/".join(nodeid.partition("::")[0].split("/")[:parts])].append(duration)
    by_time = sorted(sums, key=lambda name: -sum(sums[name]))
    return [f"{sum(sums[name]):8.1f} s {len(sums[name]):5} tests  {name}" for name in by_time[:SHOWN]]
