"""R4, R13: compiled code does not depend on the layout, so a member of any world finds its code compiled, and
computes the same bits.

A process warms up once, as a worker and a spare do before they join, and then steps in worlds of several
sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.memory_need import USABLE
from elastic.train import warmup
from elastic.train.gauges.counters import Counters
from elastic.train.model import build_model, builder_of, tensors_of
from elastic.train.session import make_session
from tests.support.ranks import Ranks
from tests.support.segments import Part, finish, segment, train_here
from tests.support.toys import small_job

MODEL = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2}
WORLDS = ((Layout(1, 2), None), (Layout(2, 1), None), (Layout(1, 1), None), (Layout(1, 2), 2))
MORE = (*WORLDS, (Layout(1, 3), None), (Layout(3, 1), None), (Layout(1, 2), None))
"""Layouts, and stages of ZeRO.  A member holds shards in the first one, and whole weights in the next three.
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Starts three processes of their own, because what a process has compiled stays in it; they share what
    the compilers keep.
    """
    pool = Ranks(3, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))})
    yield pool
    pool.close()


def graphs() -> tuple[int, int]:
    """Returns the number of graphs that this process has traced so far, and the number of those that it has
    compiled.
    """
    counters = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"]), int(counters["inductor"]["fxgraph_cache_miss"])


def warm(world: World, job: Job, folder: str, whole: bool) -> tuple[int, int]:
    """Forgets all that was traced here, and warms up; without ``whole`` only with shards."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    world.abort()
    world.close()
    genuine = warmup._with_whole_weights
    if not whole:
        warmup._with_whole_weights = lambda *_: []  # type: ignore[assignment]
    session = make_session(job, Counters(Path(folder) / f"counters{os.getpid()}-{whole}", create=True))
    try:
        warmup.warm_up(session, tensors_of(build_model(job, session.builder), session.rule), world.device)
    finally:
        warmup._with_whole_weights = genuine
        session.close()
    return graphs()


def step(world: World, job: Job) -> tuple[Part, tuple[int, int]]:
    """Trains two steps.  Returns their result, and the graphs of this process."""
    part = segment(world, job, Version(0, 0), 2)
    return part, graphs()


@pytest.mark.parametrize(
    ("worlds", "changes"),
    [
        (WORLDS, {}),
        pytest.param(WORLDS, {"precision": "fp8"}, marks=pytest.mark.full),
        pytest.param(MORE, {"recompute": "block", "precision": "bf16"}, marks=pytest.mark.full),
    ],
    ids=["fp32", "fp8", "bf16"],
)
def test_no_world_compiles_anything_after_the_warm_up(
    three: Ranks, tmp_path: Path, worlds: Any, changes: dict[str, Any]
) -> None:
    """R4, R13: and all worlds have the same bits, which are not those of blocks that are not compiled.

    The control warms up with shards only; then a world without shards traces its blocks.
    """
    job = small_job(tmp_path / "warm", compile=True, model_args=MODEL, workers={"max": 4}, **changes)
    warmed = []
    # one after the other, so that later ones find code on the disk
    for process in range(max(layout.world for layout, _ in worlds)):
        three.start(Layout(1, 1), [process], warm, job, str(tmp_path), True)
        warmed.append(three.answer(process))
    assert all(traced > 0 for traced, _ in warmed) and any(compiled > 0 for _, compiled in warmed)
    hashes = set[str]()
    for number, (layout, zero) in enumerate(worlds):
        own = job.in_stage(zero).replace(bucket=str(tmp_path / str(number)))
        found = three.run(layout, step, own)
        assert [counts for _, counts in found] == warmed[: layout.world], (layout, zero)
        hashes.add(
            finish(
                own,
                layout,
                [part.receipt for part, _ in found],
                Version(2, found[0][0].outcomes[-1].generation),
            )
        )
    assert len(hashes) == 1
    assert train_here(small_job(tmp_path / "plain", model_args=MODEL, **changes), 2).hash not in hashes
    warmed = three.run(Layout(1, 1), warm, job, str(tmp_path), False)
    assert [counts for _, counts in three.run(Layout(1, 1), step, job)] != warmed


@pytest.mark.full
def test_worlds_that_gather_once_a_step_find_their_code_too(three: Ranks, tmp_path: Path) -> None:
    """R4: the devices have room for half of the state beside whole weights to compute with, and not for the
    whole state.

    The control warms up as if they had no room for whole weights.
    """
    job = small_job(tmp_path, compile=True, precision="bf16", model_args=MODEL | {"dim": 48})
    elements = sum(parameter.numel() for parameter in build_model(job, builder_of(job)).parameters())
    job = job.replace(workers={"max": 4, "device_gb": 15 * elements / USABLE / 1e9})
    for whole in (True, False):
        warmed = three.run(Layout(1, 3), warm, job, str(tmp_path), whole)
        found = {zero: three.run(Layout(1, 3), step, job.in_stage(zero)) for zero in (None, 2)}
        same = {zero: [counts for _, counts in members] == warmed for zero, members in found.items()}
        assert same == {None: True, 2: whole}, (warmed, found)
