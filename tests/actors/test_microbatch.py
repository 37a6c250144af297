"""A cluster decides ``microbatch = "auto"`` when the run begins, and no other cluster changes it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import cluster
from actors.launch import launch
from actors.living import attach
from elastic.config.sections import Workers
from elastic.errors import JobError, PlatformGaveUp
from elastic.plan.memory_need import USABLE
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.checks.estimate import by_recompute, tensors_of_job
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.support.toys import LIGHT, toy_job

STEPS, STOP = 12, 4


def job_of(bucket: Path, device_gb: float | str, **changes: Any) -> Any:
    """Returns a job that is slow enough to be stopped on its way."""
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * STEPS, "read_s": 0.05}}
    workers = {"min": 1, "max": 2, "device_gb": device_gb}
    return toy_job(
        bucket,
        **{"name": "auto", "steps": STEPS, "data": data, "workers": workers, **LIGHT, "microbatch": "auto"}
        | changes,
    )


@pytest.mark.full
def test_a_run_keeps_its_number_and_its_bits_on_another_cluster(tmp_path: Path) -> None:
    """Only one sample fits beside the state.  Resumed without that limit, 2 would be taken, which have other
    bits: the control.
    """
    sizes = []
    for number in (1, 2):
        named = job_of(tmp_path, "auto", microbatch=number, recompute="none")
        ((need,), tensors) = by_recompute(named).values(), tensors_of_job(named)
        parameters = sum(math.prod(tensor.shape) for tensor in tensors if tensor.kind == "parameter")
        sizes.append(16 * parameters + need.transient.alone)

    def stop(line: Line) -> None:
        if isinstance(line, StepLine) and line.step == STOP:
            ray.get(attach("auto").stop.remote("a test asks for it"))

    small = job_of(tmp_path, sum(sizes) / 2 / USABLE / 1e9)
    first = trial(small, hash_it=False, tell=stop)
    assert first.result.state == "Stopped" and STOP <= first.result.step < STEPS
    sentences = [line.text for line in first.lines if isinstance(line, Sentence)]
    assert any(
        text.startswith("microbatch = 1: with 2, recompute = 'none' and the whole state on one device")
        for text in sentences
    )
    assert json.loads((tmp_path / "auto" / "job.json").read_text())["job"]["microbatch"] == 1
    second = trial(job_of(tmp_path, "auto"))
    assert second.result.state == "Finished" and Run.find(small).job.microbatch == 1
    assert any(
        isinstance(line, Sentence) and line.text == "microbatch = 1: the run began with it"
        for line in second.lines
    )
    hashes = [alone(job_of(tmp_path, "auto", name=f"m{number}", microbatch=number)).hash for number in (1, 2)]
    assert second.hash == hashes[0] != hashes[1]
    assert_nothing_left(second)


def test_devices_that_are_too_small_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(
        JobError,
        match=(
            r"microbatch = 'auto': even with 1 sample and 2 workers sharing the "
            r"state, a worker needs"
        ),
    ):
        launch(job_of(tmp_path, 1e-4, recompute="none"))
    assert attach("auto") is None and not (tmp_path / "auto").exists()


def test_a_cluster_without_gpus_cannot_say_their_memory() -> None:
    with pytest.raises(
        PlatformGaveUp,
        match=(
            r"no node of the cluster could say .* \(none answered\); set workers.device_gb, or set "
            r"microbatch to a number"
        ),
    ):
        cluster.smallest_gpu(Workers(gpus=1))
