"""Each world reuses the device memory that the one before it took: a dozen in a row take no more than the first ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import toy_job

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

WORLDS = 12
SETTLED = 3


@pytest.fixture
def gpus() -> Iterator[Ranks]:
    pool = Ranks(2, "cuda")
    yield pool
    pool.close()


def reserved_after_two_steps(world: World, job: Job, kept: bool) -> int:
    """Returns the bytes of the device that this process has reserved after two steps."""
    with nullcontext() if kept else patch("elastic.engine.parallelize.keep_streams"), member(world, job, Version(0, 0)) as me:
        for _ in range(2):
            me.step()
    return torch.cuda.memory_reserved()


def reserved(pool: Ranks, folder: Path, *, kept: bool) -> list[int]:
    """Returns the MiB that are reserved in each world, one after the other, by the member that has most."""
    job = toy_job(folder, workers={"gpus": 1}, model_args={"vocab": 29, "dim": 1024, "layers": 3, "heads": 8})
    found = [max(pool.run(Layout(1, 2), reserved_after_two_steps, job, kept)) >> 20 for _ in range(WORLDS)]
    print(found, "MiB")
    return found


def test_a_dozen_worlds_take_no_more_than_the_first_ones(gpus: Ranks, tmp_path: Path) -> None:
    found = reserved(gpus, tmp_path, kept=True)
    assert max(found[SETTLED:]) <= 1.02 * max(found[:SETTLED])


def test_with_streams_of_its_own_each_takes_more(gpus: Ranks, tmp_path: Path) -> None:
    """Negative control: worlds that do not share their streams take more and more memory."""
    found = reserved(gpus, tmp_path, kept=False)
    assert max(found[SETTLED:]) > 1.2 * max(found[:SETTLED])
