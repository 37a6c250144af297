"""R1, R14: a worker is SIGKILLed at four exact points, and the run ends with the bits of the undisturbed one.

Replicas (2→1→2) heal from each other and lose nothing.  Shards (3→2→3) have only the bucket until there are copies in host memory: they
lose what was committed since the last durable save, and do it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.job import Job
from tests.support.chaos import Trial, alone, assert_survived, trial
from tests.support.toys import toy_job

STEPS = 60
LONG = pytest.mark.full  # in another layout, or with other faults beside it, the point is in the short run too


def job_of(bucket: Path, name: str, workers: int, **changes: Any) -> Job:
    """Reading takes a moment, so that a newcomer has the time to join before the end."""
    values: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "data": {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.02}},
        "workers": {"min": 1, "max": workers},
        "deadlines": {"grow_debounce_s": 8},
    }
    return toy_job(bucket, **(values | changes))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The undisturbed run: one worker in this process, without Ray (U9)."""
    data = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.0}}
    return alone(job_of(tmp_path_factory.mktemp("reference"), "local", 1, data=data))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return trial(job_of(tmp_path_factory.mktemp("undisturbed"), "undisturbed", 2))


def test_the_cluster_gives_the_bits_of_local(undisturbed: Trial, reference: Any) -> None:
    """U9, B1: two workers under Ray, and one process without."""
    assert undisturbed.result.state == "Finished"
    assert (undisturbed.hash, undisturbed.losses) == (reference.hash, reference.losses)
    assert undisturbed.witness.total("microbatches_run") == STEPS * undisturbed.job.microbatches
    assert undisturbed.witness.generation == 1


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize("point", [pytest.param("forward", marks=LONG), "backward", "before_update", "save"])
def test_a_replica_is_killed(tmp_path: Path, undisturbed: Trial, point: str) -> None:
    """R1, R14, R4: replicate 2→1→2, healed live, no step lost."""
    job = job_of(
        tmp_path,
        f"replicate-{point}",
        2,
        faults=[{"point": point, "step": 12, "world_rank": 1}],
        checkpoint={"save_every": 6},
    )
    assert_survived(trial(job), undisturbed, worlds=(2, 1, 2), tiers=("init", "live", "live"))


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize("point", ["forward", "backward", pytest.param("before_update", marks=LONG), "save"])
def test_a_shard_is_killed(tmp_path: Path, undisturbed: Trial, point: str) -> None:
    """R1, R14, R4: shard 3→2→3 with ``save_every = 1``, from the bucket; at most two committed steps are done again."""
    job = job_of(
        tmp_path,
        f"shard-{point}",
        3,
        parallel={"dp_replicate": 1},
        faults=[{"point": point, "step": 12, "world_rank": 1}],
        checkpoint={"save_every": 1},
    )
    assert_survived(trial(job), undisturbed, worlds=(3, 2, 3), tiers=("init", "bucket", "live"))
