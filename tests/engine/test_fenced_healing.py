"""A generation that is fenced while it heals: what has arrived by then may be garbage, and is not held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from elastic.control.events import Ready
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.plan import Plan
from elastic.train.counters import Counters
from elastic.train.loop import Trainer
from elastic.train.setup import make_session
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from tests.support.toys import Own, toy_job

TRAINERS: list[Trainer] = []


class Fencing(Own):
    """The coordinator's fence reaches the worker in the middle of its healing: here, from its own initialisation."""

    def init_weights(self) -> None:
        super().init_weights()
        for trainer in TRAINERS:
            trainer.fence(1)


def fencing() -> Fencing:
    return Fencing()


@pytest.fixture
def events() -> Iterator[list[Any]]:
    yield []
    TRAINERS.clear()


@pytest.mark.parametrize("model", ["tests.engine.test_fenced_healing:fencing", "tests.support.toys:own"], ids=["fenced", "control"])
def test_what_arrived_after_the_fence_is_not_held(tmp_path: Path, events: list[Any], model: str) -> None:
    """The plan, its settlement and the end are given in advance; the control, which is not fenced, holds its shard and says so."""
    job: Job = toy_job(tmp_path, model=model, model_args={})
    session = make_session(job, Counters(tmp_path / "counters", create=True), prefetch=0)
    worker, store = WorkerId("w1"), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    checkpoints = Checkpoints(ObjectStore.open(job.bucket), job.name)
    trainer = Trainer(session, worker, torch.device("cpu"), checkpoints, lambda event, shard=None: events.append(event))
    TRAINERS.append(trainer)
    trainer.form(Plan(1, 1, Layout(1, 1), (worker,), Version(0, 0), "init", (), NodeId("n")), ("127.0.0.1", store.port))
    trainer.exit()
    trainer.run()
    session.loader.close()
    fenced = model.startswith("tests.engine")
    assert [type(event) is Ready for event in events].count(True) == (0 if fenced else 1)
    assert len(trainer.gate.shards) == (0 if fenced else 1)
