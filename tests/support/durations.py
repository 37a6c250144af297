"""Sums the seconds of tests by folder and by file, so that whoever adds a test sees what it takes, and a run
begins with the longest.

``python -m tests.support.durations`` writes those of the last run, if it was of all tests, into
``tests/durations.tsv``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

SHOWN = 15
"""Number of folders, and of files, whose seconds are printed at the end of a run of all tests."""
FILE = Path(__file__).parents[1] / "durations.tsv"
CACHE = ".pytest_cache/v"
KEY = "elastic/durations"
"""Key of pytest's cache under which the seconds of each test of the last run are, set-up and end included.
No test fails by a time.
"""


def by_name(seconds: Mapping[str, float], parts: int) -> dict[str, list[float]]:
    """Returns the seconds of the tests of each folder (``parts`` = 2) or file (3)."""
    found: dict[str, list[float]] = defaultdict(list)
    for nodeid, duration in seconds.items():
        found["/".join(nodeid.partition("::")[0].split("/")[:parts])].append(duration)
    return found


def longest(seconds: Mapping[str, float], parts: int) -> list[str]:
    """Returns a line for each of the ``SHOWN`` longest folders (``parts`` = 2) or files (3): its seconds, its
    tests and its name.
    """
    sums = by_name(seconds, parts)
    by_time = sorted(sums, key=lambda name: -sum(sums[name]))
    return [f"{sum(sums[name]):8.1f} s {len(sums[name]):5} tests  {name}" for name in by_time[:SHOWN]]


def known() -> dict[str, float]:
    """Returns the seconds of each file of tests, as they were on some machine at some time."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    return {name: float(seconds) for name, seconds in (line.split("\t") for line in lines)}


def main() -> None:
    cache = FILE.parents[1] / CACHE / KEY
    files = by_name(json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}, 3)
    if lacks := [name for name in known() if name not in files and (FILE.parents[1] / name).exists()]:
        raise SystemExit(
            f"the last run had {len(files)} files of tests, and not {lacks[0]}: run all tests that run by "
            "default first"
        )
    FILE.write_text("".join(f"{name}\t{sum(files[name]):.1f}\n" for name in sorted(files)), encoding="utf-8")


if __name__ == "__main__":
    main()
