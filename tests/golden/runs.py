"""Golden runs on real clusters: workers and coordinators that are killed, a stop, a resumption.  Each ends
with a golden hash.

    python -m tests.golden.runs FOLDER undisturbed killed shards coordinator stopped

performs them in one Ray cluster on this machine, each with the bucket ``FOLDER/<name>/bucket``, and prints
one JSON object: hash by run. ``make.py`` keeps what the buckets then hold as golden journals, and as the
golden checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from actors import cluster
from actors.launch import launch
from actors.living import attach
from elastic.data.cursor import Cursor
from elastic.job import Job
from tests.golden.jobs import final_hash, job_in, settings_of
from tests.support.chaos import assert_survived, trial
from tests.support.kills import Script, one_after_another, perform
from tests.support.kills import undisturbed as alone_of_kills

DEADLINES = {"grow_debounce_s": 8, "stall_s": 120}
CHECKPOINT = "checkpoint"
"""Folder of the bucket as the stop left it, beside the bucket in which the run went on."""


def undisturbed(folder: Path) -> Job:
    """Two replicas, from the first step to the last."""
    job = _job(folder, "stopped", "undisturbed", workers={"min": 2, "max": 2})
    assert trial(job).result.state == "Finished"
    return job


def killed(folder: Path) -> Job:
    """The world goes 2→1→2→1→2→1→2: SIGKILL in the backward pass, between commit and update, and in a save."""
    strikes = [("backward", "SIGKILL", 1), ("before_update", "SIGKILL", 1), ("save", "SIGKILL", 1)]
    return _survived(one_after_another("replicate", 2, strikes), folder, "killed")


def shards(folder: Path) -> Job:
    """The world goes 3→2→3→2→3: a shard that dies with its worker is restored from the hosts' memory."""
    strikes = [("forward", "SIGKILL", 1), ("before_update", "SIGSEGV", 0), ("before_update", "exception", 1)]
    return _survived(one_after_another("shard", 3, strikes), folder, "shards")


def coordinator(folder: Path) -> Job:
    """The coordinator is killed while two shards step, and the run waits at step 8 until the next one has
    taken over.
    """
    job, gate = _gated(folder, "coordinator", 8, workers={"min": 2, "max": 2}, parallel={"dp_shard": 2})
    struck: list[int] = []

    def act(_: Any, view: Any) -> bool:
        if not struck and view.state == "Running" and view.step >= 4:
            struck.append(view.pid)
            os.kill(view.pid, signal.SIGKILL)
        if view.incarnation > 1:
            gate.touch()
        return view.incarnation > 1

    assert trial(job, act).result.state == "Finished" and struck
    return job


def stopped(folder: Path) -> Job:
    """A 2×2 run stops near the middle; then another command goes on with three replicas."""
    job, gate = _gated(
        folder, "stopped", 7, workers={"min": 4, "max": 4}, parallel={"dp_replicate": 2, "dp_shard": 2}
    )

    def act(_: Any, view: Any) -> bool:
        if view.state == "Running" and view.step >= 4:
            found = attach(job.name)
            assert found is not None
            ray.get(found.stop.remote("a test asks for it"))
            gate.touch()
            return True
        return False

    assert trial(job, act, hash_it=False).result.state == "Stopped"
    shutil.copytree(Path(job.bucket) / job.name, folder / CHECKPOINT / job.name)
    resumed = job.replace(workers={"min": 3, "max": 3}, parallel={})
    assert launch(resumed).state == "Finished"
    return resumed


RUNS: Mapping[str, Callable[[Path], Job]] = {
    each.__name__: each for each in (undisturbed, killed, shards, coordinator, stopped)
}
JOBS = {
    "undisturbed": "stopped",
    "killed": "kills",
    "shards": "kills",
    "coordinator": "stopped",
    "stopped": "stopped",
}
"""The golden job that each run trains."""


def _job(folder: Path, golden: str, name: str, **changes: Any) -> Job:
    job: Job = job_in(folder / "bucket", golden, {"name": name, "deadlines": DEADLINES, **changes})
    return job


def _gated(folder: Path, name: str, step: int, **changes: Any) -> tuple[Job, Path]:
    """Returns a job that cannot read the samples of ``step`` before the file, which is returned too, exists."""
    gate = folder / f"gate-{name}"
    args = settings_of("stopped")["data"]["args"]  # one epoch: each sample belongs to exactly one step
    sample = Cursor(args["samples"], 16, 0, "permutation").microbatch_ids(step, 0, 2)[0]
    data = {"dataset": "tests.support.toys:Sums", "args": {**args, "gates": {str(sample): str(gate)}}}
    return _job(folder, "stopped", name, data=data, **changes), gate


def _survived(script: Script, folder: Path, name: str) -> Job:
    """Performs the script.  Raises AssertionError where a fault did not strike as the script says."""
    chaos = perform(script, folder / "bucket", name)
    assert_survived(chaos, alone_of_kills(folder / "alone"), worlds=script.worlds, tiers=script.tiers)
    return chaos.job


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    cluster.connect("local")  # each run has a folder of its own: the gates of two would have the same names
    hashes = {name: final_hash(RUNS[name](folder / name)) for name in names}
    ray.shutdown()
    print(json.dumps(hashes))


if __name__ == "__main__":
    main()
