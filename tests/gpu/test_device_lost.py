"""R1: a worker loses its device in the middle of a step; it is replaced, the other one stays, and the bits
are the undisturbed run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors import cluster
from actors.launch import launch
from elastic.job import Job
from elastic.runs.run import Run
from tests.support.chaos import Trial, assert_survived, trial
from tests.support.toys import toy_job

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes 2 GPUs"),
]
STEPS = 48


@pytest.fixture(scope="module", autouse=True)
def local_cluster() -> Iterator[None]:
    cluster.connect("local")
    yield
    ray.shutdown()


def job_of(bucket: Path, name: str, **changes: Any) -> Job:
    """Returns a job whose data take a moment to read, so that a newcomer has the time to join before the end."""
    values: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "data": {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.08}},
        "workers": {"min": 1, "max": 2, "gpus": 1},
        "checkpoint": {"save_every": 1},
        "deadlines": {"grow_debounce_s": 15},
    }
    return toy_job(bucket, **(values | changes))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return trial(job_of(tmp_path_factory.mktemp("undisturbed"), "undisturbed"))


@pytest.mark.parametrize(
    ("layout", "point", "tier"),
    [("replicate", "backward", "live"), ("replicate", "in_update", "live"), ("shard", "forward", "host")],
)
def test_a_device_is_lost(tmp_path: Path, undisturbed: Trial, layout: str, point: str, tier: str) -> None:
    """Replicas lose nothing; shards lose at most a step.  A single error is not taken for an error of the
    job.
    """
    fault = {"point": point, "kind": "device_assert", "step": 12, "world_rank": 1}
    parallel = {"dp_replicate": 1} if layout == "shard" else {}
    job = job_of(tmp_path, f"{layout}-{point}", faults=[fault], parallel=parallel)
    assert_survived(trial(job), undisturbed, worlds=(2, 1, 2), tiers=("init", tier, "live"))


def test_a_device_that_is_lost_twice_at_one_step_is_the_jobs(tmp_path: Path) -> None:
    """R20, the control: the same error on a second worker at the same step is an error of the job."""
    fault = {"point": "forward", "kind": "device_assert", "step": 12}
    job = job_of(tmp_path, "twice", faults=[{**fault, "world_rank": 1}, {**fault, "generation": 2}])
    result = launch(job, show=lambda _: None)
    assert (result.state, result.exit_code) == ("Failed", 1), result
    assert "device-side assert triggered at step 12, again on" in result.reason
    broken = [record["event"] for record in Run.open(job).records() if record["event"]["$"] == "Broken"]
    assert [each["generation"] for each in broken if each["cause"] == "device"] == [1, 2]
