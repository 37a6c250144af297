"""How much memory may still be taken, read from the files in which the kernel says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.train.limits import free_memory

pytestmark = pytest.mark.fast


def test_the_limit_that_is_met_first_counts(tmp_path: Path) -> None:
    """Of a container without the file cache, which the kernel gives back; of a node where there is no container, or none with a limit."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000 kB\nMemAvailable:  1000 kB\n")
    assert free_memory(meminfo, tmp_path / "none") == (1_024_000, "the node (MemAvailable)")
    for name, text in (("memory.max", "max"), ("memory.current", "700000"), ("memory.stat", "anon 5\ninactive_file 100000\n")):
        (tmp_path / name).write_text(text + "\n")
    assert free_memory(meminfo, tmp_path)[0] == 1_024_000, "no limit"
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_memory(meminfo, tmp_path) == (400_000, "the container (memory.max = 1000000)")


def test_this_machine_says_so_too() -> None:
    free, where = free_memory()
    assert free > 0 and where
