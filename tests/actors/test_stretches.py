"""L4: a branch with another batch and another order, on a cluster, while its coordinator and a worker die."""

from __future__ import annotations

import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from actors.launch import launch
from elastic.data.cursor import Cursor
from elastic.errors import JobError
from elastic.job import Job
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from tests.actors.test_failover import Killer, running
from tests.support.chaos import assert_nothing_left, exported_hash, samples, trial
from tests.support.toys import LIGHT, toy_job

EPOCH, OLD, NEW, BRANCH, LAST = 128, 16, 32, 4, 9
GATE = 6
"""Step that waits until the coordinator has died."""


def job_of(bucket: Path, steps: int, **changes: Any) -> Job:
    settings = {
        "name": "branched",
        "schedule": {"kind": "constant"},
        "parallel": {"dp_replicate": 1},
        "steps": steps,
    }
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": EPOCH}}
    return toy_job(bucket, **settings | {"data": data} | LIGHT | changes)


def branched(bucket: Path, **changes: Any) -> Job:
    """Trains the first branch in this process, and begins the second, as a word says.  Returns its job."""
    assert run_local(job_of(bucket, BRANCH), lambda line: None)[0] == "Finished"
    job = job_of(bucket, LAST, global_batch=NEW, seed=5, **changes)
    with pytest.raises(JobError, match="with --branch"):
        launch(job)
    assert (
        Run.look(job, branch=True)
        .branch(0.0)
        .startswith(f"branch 2 of branched goes on from step {BRANCH}: global_batch = 16 before")
    )
    return job


@pytest.mark.full
def test_l4_a_branch_with_another_batch_lives_through_kills(tmp_path: Path) -> None:
    """L4, R6, A10: the ledger has each sample of each epoch once, and the bits are those of one worker.

    The control: the bits of a run with the second batch from its beginning are others.
    """
    here = branched(tmp_path / "alone")
    assert run_local(here, lambda line: None)[0] == "Finished"
    cursor = Cursor.of(Run.look(here).job.stretches(), EPOCH)
    gate = {str(cursor.ids(GATE)[0]): str(tmp_path / "gate")}
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": EPOCH, "gates": gate}}
    job = branched(
        tmp_path, data=data, faults=[{"point": "backward", "step": 8, "world_rank": 1, "generation": 2}]
    )
    killer = Killer(tmp_path, [running(BRANCH + 1)])
    chaos = trial(job, killer)
    assert chaos.result.state == "Finished" and [end.signal for end in killer.ends] == [signal.SIGKILL]
    assert len(chaos.witness.killed()) == 1
    assert chaos.hash == exported_hash(here)
    steps = samples(chaos.ledger)
    assert [(step, sum(map(len, parts))) for step, parts in steps] == [
        (step, NEW) for step in range(BRANCH + 1, LAST + 1)
    ]
    begun = [Cursor(EPOCH, 1, 0).at(position) for position in range(BRANCH * OLD)]
    trained = begun + [sample for _, parts in steps for sample in chain(*parts)]
    assert sorted(trained[:EPOCH]) == list(range(EPOCH)) and len(set(trained[EPOCH:])) == len(trained) - EPOCH
    assert trained[: BRANCH * OLD + NEW] != [
        Cursor(EPOCH, 1, 0).at(position) for position in range(BRANCH * OLD + NEW)
    ]
    other = job_of(tmp_path / "other", LAST, global_batch=NEW, seed=5)
    assert run_local(other, lambda line: None)[0] == "Finished" and exported_hash(other) != chaos.hash
    assert_nothing_left(chaos)
