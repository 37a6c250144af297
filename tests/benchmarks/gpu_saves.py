"""Measures what copies and saves cost a step on one GPU: one worker runs a job without copies, with copies,
and with saves to the bucket.

    python -m tests.benchmarks.gpu_saves [--size medium] [--steps 36] [--save-every 6] [uncopied copied saved
    only-saved]

Prints a line of JSON for each run and adds it to ``--out``.  ``after_s`` is the median of the steps right
after a save began, ``during_s`` that of all steps while the keeper uploaded a save, ``other_s`` that of the
steps without one; a run without saves has the same for the steps that would have been after a save, which
shows how much steps differ anyway.  ``bits`` is the hash of the final state, which must be the same in all
runs.  The first twelve steps are not counted.  All saves but the two newest are deleted, so that the disk
does not fill up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from actors import cluster
from actors.launch import launch
from elastic.data.prepare import prepare
from elastic.report.story import Line, StepLine
from elastic.runs.run import Run
from storage.checkpoints import MANIFEST
from tests.benchmarks.gpu_recovery import SIZES, content_hash, job_of
from tests.benchmarks.gpu_scenarios import SAVES

CHANGES: dict[str, dict[str, Any]] = {
    "uncopied": {"copies": {"copy_every": 0}},
    "copied": {},
    "saved": {},
    "only-saved": {"copies": {"copy_every": 0}},
}


def measure(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one job to its end; returns its row."""
    lines: list[Line] = []
    saves = {"checkpoint": {"save_every": options.save_every}} if "saved" in name else {}
    job, began = (
        job_of(folder, name, options, CHANGES[name] | saves | {"microbatch": options.microbatch}),
        time.time(),
    )
    with deleting_old_saves(folder / "bucket"):
        launch(job, show=lines.append)
    steps = [line for line in lines if isinstance(line, StepLine)]
    took = {one.step: other.at - one.at for one, other in pairwise(steps[12:]) if other.step == one.step + 1}
    ends = {line.step: line.at for line in steps}
    uploads = [(ends[step], over) for step, over in saved_at(Run.open(job).records()).items() if step in ends]
    during = {
        step for step in took if any(ends[step] < over and ends[step + 1] > start for start, over in uploads)
    }
    after = {step for step in took if step % options.save_every == 0}

    def median_s(of: Iterable[int]) -> float | None:
        found = [took[step] for step in of]
        return statistics.median(found) if found else None

    row = {
        "name": name,
        "first_s": steps[0].at - began,
        "median_s": statistics.median(took.values()),
        "mean_s": statistics.mean(took.values()),
        "after_s": median_s(after),
        "during_s": median_s(during),
        "other_s": median_s(took.keys() - during - after),
        "after": len(after),
        "during": len(during),
        "steps": len(took),
        "uploads_s": [over - start for start, over in uploads],
        "took_s": [round(seconds, 4) for seconds in took.values()],
        "bits": content_hash(job),
    }
    shutil.rmtree(folder / "bucket")
    return row


def saved_at(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Returns when the coordinator heard that the manifest of a step was written, in seconds of wall-clock
    time.
    """
    return {
        record["event"]["version"]["step"]: record["at"]
        for record in records
        if record["event"]["$"] == "Saved"
    }


@contextlib.contextmanager
def deleting_old_saves(bucket: Path) -> Iterator[None]:
    """Deletes the shards of all saves but the two newest that have a manifest, as long as the context lasts."""
    over = threading.Event()

    def delete() -> None:
        while not over.wait(1.0):
            whole = sorted(bucket.glob(f"*/steps/*/*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
            for manifest in whole[:-2]:
                for shard in manifest.parent.glob("*.safetensors"):
                    shard.unlink()

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> int:
    """Returns 1 if the runs do not all end with the same bits, else 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CHANGES))
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--save-every", type=int, default=SAVES)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    options.device, options.world, options.nodes = "cuda" if torch.cuda.is_available() else "cpu", 1, 1
    folder = Path(mkdtemp())
    prepare(
        Path(sysconfig.get_path("stdlib")) / "asyncio",
        str(folder / f"tokens-{SIZES[options.size]['seq_len']}"),
        (".py",),
    )
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
