"""L7: a run deletes what no rule keeps, also when its coordinator dies between the two phases of a deletion."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from actors.cli.checkpoint_commands import gc
from actors.view import View
from elastic.job import Job
from elastic.report.story import Line, Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from tests.support.chaos import Witness, alone, assert_nothing_left, trial
from tests.support.toys import toy_job

STEPS, OBJECTS = 44, 4
"""Number of steps of the run, and of the objects of a checkpoint of two workers: two shards, the index and
the manifest.
"""


def job_of(bucket: Path, name: str, **checkpoint: int) -> Job:
    return toy_job(
        bucket,
        name=name,
        steps=STEPS,
        data={
            "dataset": "tests.support.toys:Sums",
            "args": {"samples": 16 * STEPS, "read_s": 0.03 if checkpoint else 0.0},
        },
        workers={"min": 1, "max": 2},
        checkpoint={"save_every": 2, **checkpoint},
    )


def good(run: Run) -> list[int]:
    return [each.version.step for each in run.checkpoints.versions() if each.good]


class Strike:
    """Kills the coordinator once a checkpoint is marked and not yet removed, some saves after the first."""

    def __init__(self, steps: Path) -> None:
        self.steps, self.struck, self.marked, self.most = steps, 0, list[Path](), 0

    def __call__(self, witness: Witness, view: View) -> bool:
        self.most = max(
            self.most, sum(1 for path in self.steps.rglob("*.*") if not path.name.startswith("."))
        )
        marked = list(self.steps.glob("*/*/DELETED.json"))
        if not self.struck and view.step >= 10 and marked:
            self.struck, self.marked = view.pid, marked
            os.kill(view.pid, signal.SIGKILL)
        return bool(self.struck) and view.pid != self.struck and view.step >= STEPS - 6


@pytest.mark.full  # how many saves there are depends on how fast they are
def test_l7_a_coordinator_dies_in_the_middle_of_a_deletion(tmp_path: Path) -> None:
    """The journal says which saves there were: while one is on its way no other one begins."""
    control = job_of(tmp_path / "alone", "local")
    reference = alone(control)
    assert len(good(Run.open(control))) == STEPS // 2, "the control: without a rule nothing is deleted"
    job = job_of(tmp_path / "bucket", "kept", keep_last=2, keep_every=10)
    strike = Strike(tmp_path / "bucket" / "kept" / "steps")
    chaos = trial(job, strike)
    assert chaos.result.state == "Finished" and strike.struck, chaos.result
    assert chaos.hash == reference.hash
    assert_nothing_left(chaos)
    run = Run.open(job)
    saved = [
        record["event"]["version"]["step"] for record in run.records() if record["event"].get("$") == "Saved"
    ]
    firsts = sorted({step // 10: step for step in reversed(saved) if step >= 10}.values())
    kept = sorted({*firsts, *saved[-2:]})
    assert saved[-1] == STEPS and len(saved) >= 10 and set(kept) <= set(good(run))
    assert not any(path.exists() for path in strike.marked), (
        "the next coordinator has removed what this one had marked"
    )
    assert strike.most <= OBJECTS * (4 + 2 + 3 * 2), (
        "kept for their step, kept as the last, and a round each of marked, saved and begun"
    )
    gc(job, dry_run=False, force=False)
    assert good(run) == kept == sorted(int(path.name) for path in strike.steps.iterdir())
    assert all(run.checkpoints.verify(each.version).good for each in run.checkpoints.versions())
    longer, lines = job.replace(steps=STEPS + 4), list[Line]()
    assert (
        Run.look(longer, branch=True)
        .branch(time.time())
        .startswith(f"branch 2 of kept goes on from step {STEPS}")
    )
    assert run_local(longer, lines.append)[2] == STEPS + 4
    assert any(
        isinstance(line, Sentence) and f"from step {STEPS} of generation" in line.text for line in lines
    )
    assert good(run) == sorted({*firsts, STEPS, STEPS + 2, STEPS + 4}), (
        "without Ray too, but what the branch goes on from stays"
    )
