"""The commit tells the memory of a step on a GPU, and a profile there has kernels and the history of the
memory.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Usage
from elastic.train.gauges.profiler import Profiler
from storage.objects import ObjectStore
from tests.support.ranks import Ranks
from tests.support.segments import member, shard_hash
from tests.support.toys import toy_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def gpu() -> Iterator[Ranks]:
    pool = Ranks(1, "cuda")
    yield pool
    pool.close()


def measured(world: World, job: Job) -> tuple[list[Usage], int, str]:
    """Runs three steps; returns their usage, the bytes of all classes, and the hash of the state."""
    profiler = Profiler(job, ObjectStore.open(job.bucket), print)
    with member(world, job, Version(0, 0)) as me:
        found = []
        for step in (1, 2, 3):
            with profiler.watch(step, world):
                found.append(me.step().usage)
        held, state = sum(me.session.meter.held.values()), shard_hash(me.state.shard)
    profiler.close()
    return found, held, state


def job_of(bucket: Path, **settings: Any) -> Job:
    return toy_job(
        bucket, workers={"gpus": 1}, model_args={"vocab": 29, "dim": 512, "layers": 3, "heads": 8}, **settings
    )


def test_the_peak_of_a_step_holds_what_is_held_and_is_reserved(gpu: Ranks, tmp_path: Path) -> None:
    ((usages, held, _),) = gpu.run(Layout(1, 1), measured, job_of(tmp_path, precision="bf16"))
    for usage in usages:
        assert held <= usage.peak_bytes <= usage.reserved_bytes


def test_a_profile_has_kernels_and_a_snapshot_and_the_bits_stay(gpu: Ranks, tmp_path: Path) -> None:
    ((*_, plain),) = gpu.run(Layout(1, 1), measured, job_of(tmp_path / "plain"))
    ((*_, found),) = gpu.run(Layout(1, 1), measured, job_of(tmp_path, profile="2-3"))
    assert found == plain
    name = f"steps-2-3-g{gpu.generation}"
    trace, memory = (
        Path(tmp_path, "toy", "profiles", f"{name}.{kind}") for kind in ("trace.json.gz", "memory.pickle")
    )
    assert "kernel" in {
        each.get("cat") for each in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert memory.stat().st_size > 0
