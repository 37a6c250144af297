"""What copies and saves cost a step, on one GPU: one worker, the same job without copies, with copies, and with saves to the bucket.

    python -m tests.benchmarks.gpu_saves [--size medium] [--steps 36] [uncopied copied saved]

Prints a line of JSON for each run and adds it to ``--out``.  ``after`` is the median of the steps right after a save began, ``other`` that
of steps at least two later; ``bits`` is the hash of the final state, which must be the same in all runs.  The first twelve steps are not
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import time
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from actors import cluster
from actors.launch import launch
from elastic.data.prepare import prepare
from elastic.report.story import Line, StepLine
from tests.benchmarks.gpu_recovery import SIZES, content_hash, job_of
from tests.benchmarks.gpu_scenarios import SAVES

CHANGES: dict[str, dict[str, Any]] = {
    "uncopied": {"copies": {"copy_every": 0}},
    "copied": {},
    "saved": {"checkpoint": {"save_every": SAVES}},
}


def measure(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job to its end; returns its row."""
    lines: list[Line] = []
    job, began = job_of(folder, name, options, CHANGES[name]), time.time()
    launch(job, show=lines.append)
    steps = [line for line in lines if isinstance(line, StepLine)]
    took = {one.step: other.at - one.at for one, other in pairwise(steps[12:]) if other.step == one.step + 1}
    after = [seconds for step, seconds in took.items() if step % SAVES == 0]
    other = [seconds for step, seconds in took.items() if step % SAVES > 1]
    return {
        "name": name,
        "first_s": steps[0].at - began,
        "median_s": statistics.median(took.values()),
        "after_s": statistics.median(after),
        "other_s": statistics.median(other),
        "steps": len(took),
        "bits": content_hash(job),
    }


def main() -> int:
    """1 where the runs do not end with the same bits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CHANGES))
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    options.device, options.world, options.nodes = "cuda" if torch.cuda.is_available() else "cpu", 1, 1
    folder = Path(mkdtemp())
    prepare(Path(sysconfig.get_path("stdlib")) / "asyncio", str(folder / f"tokens-{SIZES[options.size]['seq_len']}"), (".py",))
    cluster.connect("local")
    rows = []
    for name in options.names:
        rows.append(measure(folder, name, options))
        print(json.dumps(rows[-1]), flush=True)
        with (options.out / "gpu_saves.jsonl").open("a") as kept:
            kept.write(json.dumps(rows[-1]) + "\n")
    return int(len({row["bits"] for row in rows}) > 1)


if __name__ == "__main__":
    sys.exit(main())
