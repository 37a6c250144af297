"""R4: a newcomer has compiled and loaded everything before it joins; the world that it joins does not wait
for that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.gauges.counters import Counters
from elastic.train.model import build_model, tensors_of
from elastic.train.session import make_session
from elastic.train.warmup import warm_up
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import toy_job

GPUS = torch.cuda.device_count()
LAYOUTS = [
    layout for layout in (Layout(1, 1), Layout(1, 2), Layout(2, 1), Layout(2, 2)) if layout.world <= GPUS
]
MODEL = {"vocab": 29, "dim": 32, "layers": 4, "heads": 2}

pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU here")


def graphs() -> int:
    """Returns the number of graphs compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def join(world: World, job: Job, folder: str, warm: bool) -> tuple[int, int]:
    """Joins a world as a new process does, and takes two steps.  Returns how many graphs were compiled before
    it joined, and in all.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    world.abort()
    world.close()
    if warm:
        session = make_session(job, Counters(Path(folder) / f"counters{world.rank}", create=True))
        warm_up(session, tensors_of(build_model(job, session.builder), session.rule), world.device)
        session.close()
    before = graphs()
    joined = World.form(
        world.store,
        generation=world.generation + 1000,
        layout=world.layout,
        rank=world.rank,
        device=world.device,
        form_s=60,
    )
    joined.connect(60, 60)
    with member(joined, job, Version(0, 0)) as me:
        for _ in range(2):
            me.step()
    joined.abort()
    joined.close()
    return before, graphs()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_r4_nothing_is_compiled_after_a_newcomer_has_joined(tmp_path: Path, layout: Layout) -> None:
    """The control: without warming up, something is compiled after joining, so the count proves something."""
    pool = Ranks(layout.world, "cuda")
    job = toy_job(tmp_path, compile=True, precision="bf16", model_args=MODEL, workers={"max": GPUS})
    try:
        warm = pool.run(layout, join, job, str(tmp_path), True)
        cold = pool.run(layout, join, job, str(tmp_path), False)
    finally:
        pool.close()
    print(f"{layout}: (compiled before joining, in all): {warm}; without warming up: {cold}")
    assert all(0 < before == after for before, after in warm)
    assert all(before == 0 < after for before, after in cold)
