"""How long a SIGKILL costs: until the first microbatch of the next world starts, and until its first commit.

    python -m tests.benchmarks.recovery [--kills 9] [--workers 2]

One run on a local Ray cluster; a worker is SIGKILLed from outside again and again, each time once the world is whole.  The moment of the
kill is the killer's clock, the first microbatch the survivor's own word in shared memory, the rest the journal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from actors import cluster
from elastic.report.recoveries import Recovery, recoveries
from elastic.runs import Run
from tests.support.chaos import Witness, trial
from tests.support.toys import toy_job

PHASES = ("decide_s", "abort_s", "form_s", "heal_s", "go_s", "step_s")


class Killer:
    """SIGKILLs the newest worker each time ``workers`` are stepping together; notes when, and when the others stepped again."""

    def __init__(self, workers: int, kills: int) -> None:
        self.workers, self.kills = workers, kills
        self.killed: list[float] = []
        self.stepped: list[float] = []
        self.whole_since: tuple[int, int] = (0, 0)
        """(generation, step) at which the world was last seen whole for the first time."""
        self.awaited: tuple[str, int] | None = None

    def __call__(self, witness: Witness, view: Any) -> bool:
        if self.awaited is not None:
            survivor, generation = self.awaited
            counters = witness.seen[survivor].counters
            if counters["generation"] > generation and counters["stepping_since_ns"] / 1e9 > self.killed[-1]:
                self.stepped.append(counters["stepping_since_ns"] / 1e9)
                self.awaited = None
            return len(self.stepped) == self.kills
        whole = view.state == "Running" and len(view.workers) == self.workers
        if whole and self.whole_since[0] != view.generation:
            self.whole_since = (view.generation, view.step)
        if whole and view.step >= self.whole_since[1] + 5 and all(worker in witness.seen for worker in view.workers):
            survivor, *_, victim = sorted(view.workers, key=lambda name: int(name[1:]))
            stepping = all(witness.seen[worker].counters["generation"] == view.generation for worker in (survivor, victim))
            if stepping:
                self.awaited = (survivor, view.generation)
                self.killed.append(time.time())
                os.kill(witness.seen[victim].counters["pid"], signal.SIGKILL)
        return False


def measure(workers: int, kills: int) -> dict[str, Any]:
    """One run with ``kills`` kills; seconds."""
    with TemporaryDirectory() as bucket:
        job = toy_job(
            bucket,
            name="recovery",
            steps=100 * (kills + 1),
            data={"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.02}},
            workers={"min": 1, "max": workers},
        )
        killer = Killer(workers, kills)
        done = trial(job, killer)
        assert done.result.state == "Finished" and len(killer.stepped) == kills, (done.result, len(killer.stepped))
        losses = [change for change in recoveries(Run.open(job).records()) if not change.planned]
    rows = []
    for killed, stepped in zip(killer.killed, killer.stepped, strict=True):
        change = next(each for each in losses if each.known_at >= killed)
        rows.append(row(change, killed, stepped))
    return {"workers": workers, "kills": rows}


def row(change: Recovery, killed: float, stepped: float) -> dict[str, Any]:
    return {
        "detect_s": change.known_at - killed,
        **{phase: value for phase, value in asdict(change).items() if phase in PHASES},
        "first_microbatch_s": stepped - killed,
        "next_commit_s": change.committed_at - killed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    cluster.connect("local")
    result = measure(arguments.workers, arguments.kills)
    ray.shutdown()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result |= {"date": str(date.today()), "commit": commit, "machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    target = Path(__file__).parent / "results" / "recovery.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    for name in result["kills"][0]:
        values = [each[name] for each in result["kills"]]
        print(f"{name:20} median {statistics.median(values):.3f}   worst {max(values):.3f}   of {len(values)}")


if __name__ == "__main__":
    main()
