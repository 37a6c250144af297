"""R4, R13: compiled code does not depend on the layout, so a member of any world finds its code compiled.

A process warms up once, as a worker and a spare do before they join, and then steps in worlds of n − 1, n and n + 1 members.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.memory import USABLE
from elastic.train import warmup
from elastic.train.counters import Counters
from elastic.train.model import build_model, builder_of, tensors_of
from elastic.train.session import make_session
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import toy_job

MODEL = {"vocab": 29, "dim": 32, "layers": 2, "heads": 2}
LAYOUTS = (Layout(1, 2), Layout(2, 1), Layout(1, 1), Layout(1, 3), Layout(3, 1), Layout(1, 2))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Starts three processes of their own, because what a process has compiled stays in it; they share what the compilers keep."""
    pool = Ranks(3, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))})
    yield pool
    pool.close()


def graphs() -> tuple[int, int]:
    """Returns the number of graphs that this process has traced so far, and the number of those that it has compiled."""
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
    session = make_session(job, Counters(Path(folder) / f"counters{world.rank}-{whole}", create=True))
    try:
        warmup.warm_up(session, tensors_of(build_model(job, session.builder), session.rule), world.device)
    finally:
        warmup._with_whole_weights = genuine
        session.close()
    return graphs()


def step(world: World, job: Job) -> tuple[int, int]:
    with member(world, job, Version(0, 0)) as me:
        for _ in range(2):
            me.step()
    return graphs()


@pytest.mark.parametrize("changes", [{}, pytest.param({"recompute": "block", "precision": "bf16"}, marks=pytest.mark.full)])
def test_no_world_compiles_anything_after_the_warm_up(three: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    """R4, R13: the control warms up with shards only; then a world without shards traces its blocks."""
    job = toy_job(tmp_path, compile=True, model_args=MODEL, workers={"max": 4}, **changes)
    for whole in (True, False):
        warmed = three.run(Layout(1, 3), warm, job, str(tmp_path), whole)
        assert all(traced > 0 for traced, _ in warmed) and (any(compiled > 0 for _, compiled in warmed) or not whole)
        found = {(number, layout): three.run(layout, step, job) for number, layout in enumerate(LAYOUTS if whole else LAYOUTS[:2])}
        same = {key: counts == warmed[: key[1].world] for key, counts in found.items()}
        if whole:
            assert all(same.values()), (warmed, found)
        else:
            assert same[0, Layout(1, 2)] and not same[1, Layout(2, 1)], (warmed, found)


@pytest.mark.full
def test_worlds_that_gather_once_a_step_find_their_code_too(three: Ranks, tmp_path: Path) -> None:
    """R4: the devices have room for half of the state beside whole weights to compute with, and not for the whole state.

    The control warms up as if they had no room for whole weights.
    """
    job = toy_job(tmp_path, compile=True, precision="bf16", model_args=MODEL | {"dim": 48})
    elements = sum(parameter.numel() for parameter in build_model(job, builder_of(job)).parameters())
    job = job.replace(workers={"max": 4, "device_gb": 15 * elements / USABLE / 1e9})
    for whole in (True, False):
        warmed = three.run(Layout(1, 3), warm, job, str(tmp_path), whole)
        found = {(layout, zero): three.run(layout, step, job.in_stage(zero)) for layout in LAYOUTS[3:4] for zero in (None, 2)}
        same = {zero: counts == warmed[: layout.world] for (layout, zero), counts in found.items()}
        assert same == {None: True, 2: whole}, (warmed, found)
