"""Whoever waits for a part of a checkpoint hears of it, whatever ends the thread that writes it."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic.control.events import Event, SaveFailed, ShardSaved
from elastic.engine.world import World
from elastic.ids import Version, WorkerId
from elastic.job import Fault
from elastic.train.checkpoint import Saver
from elastic.train.faults import Faults
from elastic.train.state import State
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from tests.support.toys import toy_job


def test_a_save_that_raises_is_reported_and_the_next_one_is_written(tmp_path: Path) -> None:
    """R1: an exception that nobody expected, in the background."""
    job, told = toy_job(tmp_path), list[Event]()
    checkpoints = Checkpoints(ObjectStore.open(job.bucket), job.name)
    faults = Faults((Fault(point="save", kind="exception"),))
    saver = Saver(checkpoints, WorkerId("w1"), lambda event, shard=None: told.append(event), faults)
    world = World.alone(torch.device("cpu"))
    try:
        for step in (4, 8):
            saver.save(State(job, world, Version(step, 1)))
        saver.wait()
    finally:
        world.close()
    failed, saved = told
    assert isinstance(failed, SaveFailed) and failed.version.step == 4 and "InjectedError" in failed.reason
    assert saved == ShardSaved(WorkerId("w1"), Version(8, 1))
