"""Each world gives its memory on the device back, and reuses what the one before it took: a dozen take no
more than the first ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

WORLDS = 12
SETTLED = 3


def left_behind(world: World, job: Job) -> int:
    """Returns the bytes of the device that are taken after a world in which this member took two steps, and
    were not before.
    """
    before = torch.cuda.memory_allocated()
    with member(world, job, Version(0, 0)) as me:
        for _ in range(2):
            me.step()
    del me
    gc.collect()
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"precision": "bf16", "compile": True}, {"recompute": "block"}],
    ids=str,
)
def test_a_world_leaves_nothing_behind(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The first world does not count, since it fills caches.  One matrix of the model has 4 MB."""
    pool = Ranks(1, "cuda")
    job = toy_job(
        tmp_path,
        workers={"gpus": 1},
        model_args={"vocab": 29, "dim": 1024, "layers": 3, "heads": 8},
        **settings,
    )
    try:
        found = [pool.run(Layout(1, 1), left_behind, job)[0] for _ in range(3)]
    finally:
        pool.close()
    print(found)
    assert max(found[1:]) < 2**20


@two
def test_a_world_that_gathers_whole_weights_leaves_nothing_behind(gpus: Ranks, tmp_path: Path) -> None:
    model = {"vocab": 29, "dim": 1024, "layers": 3, "heads": 8}
    job = toy_job(tmp_path, workers={"gpus": 1}, model_args=model, precision="bf16", parallel={"zero": 2})
    found = [max(gpus.run(Layout(1, 2), left_behind, job)) for _ in range(3)]
    print(found)
    assert max(found[1:]) < 2**20


@pytest.fixture
def gpus() -> Iterator[Ranks]:
    pool = Ranks(2, "cuda")
    yield pool
    pool.close()


def reserved_after_two_steps(world: World, job: Job, kept: bool) -> int:
    """Returns the bytes of the device that this process has reserved after two steps."""
    with (
        nullcontext() if kept else patch("elastic.engine.parameters.split.keep_streams"),
        member(world, job, Version(0, 0)) as me,
    ):
        for _ in range(2):
            me.step()
    return torch.cuda.memory_reserved()


def reserved(pool: Ranks, folder: Path, *, kept: bool) -> list[int]:
    """Returns the MiB that are reserved in each world, one after the other, by the member that has most."""
    job = toy_job(folder, workers={"gpus": 1}, model_args={"vocab": 29, "dim": 1024, "layers": 3, "heads": 8})
    found = [max(pool.run(Layout(1, 2), reserved_after_two_steps, job, kept)) >> 20 for _ in range(WORLDS)]
    print(found, "MiB")
    return found


@two
def test_a_dozen_worlds_take_no_more_than_the_first_ones(gpus: Ranks, tmp_path: Path) -> None:
    found = reserved(gpus, tmp_path, kept=True)
    assert max(found[SETTLED:]) <= 1.02 * max(found[:SETTLED])


@two
def test_with_streams_of_its_own_each_takes_more(gpus: Ranks, tmp_path: Path) -> None:
    """Negative control: worlds that do not share their streams take more and more memory."""
    found = reserved(gpus, tmp_path, kept=False)
    assert max(found[SETTLED:]) > 1.2 * max(found[:SETTLED])
