"""Whoever waits for a part of a checkpoint hears of it, whatever ends the thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from elastic.engine.world import World
from elastic.ids import Version, WorkerId
from elastic.job import Fault, Job
from elastic.protocol.events import Event, SaveFailed, ShardSaved
from elastic.train.checkpoint import Saver
from elastic.train.faults import Faults
from elastic.train.model import State
from storage.checkpoints import Checkpoints, Part, ShardReceipt
from storage.objects import ObjectStore
from tests.support.toys import toy_job


def test_a_save_that_raises_is_reported_and_the_next_one_is_written(tmp_path: Path) -> None:
    """R1: an exception that nobody expected, in the background."""
    job, told = toy_job(tmp_path), list[Event]()
    checkpoints = Checkpoints(ObjectStore.open(job.bucket), job.name)
    faults = Faults((Fault(point="save", kind="exception", generation=3),))
    saver = Saver(checkpoints, WorkerId("w1"), lambda event, shard=None: told.append(event), faults)
    world = World.alone(torch.device("cpu"), generation=3)
    try:
        for step in (4, 8):
            saver.save(State(job, world, Version(step, 1)))
        saver.wait()
    finally:
        world.close()
    failed, saved = told
    assert isinstance(failed, SaveFailed) and failed.version.step == 4 and "InjectedError" in failed.reason
    assert failed.by == 3 and saved == ShardSaved(WorkerId("w1"), Version(8, 1), by=3)


class Down(Checkpoints):
    """In a bucket that does not answer for a while."""

    def __init__(self, job: Job) -> None:
        super().__init__(ObjectStore.open(job.bucket), job.name)
        self.back = threading.Event()

    def write_shard(self, version: Version, name: str, parts: Sequence[Part], *more: object, **named: object) -> ShardReceipt:
        self.back.wait(60)
        return super().write_shard(version, name, parts, *more, **named)  # type: ignore[arg-type]


def test_only_the_newest_of_several_saves_of_one_version_is_written(tmp_path: Path) -> None:
    """The last step's worlds break one after the other: what a world that was left would write counts for nobody, and is not waited for."""
    job, told = toy_job(tmp_path), list[Event]()
    checkpoints = Down(job)
    saver = Saver(checkpoints, WorkerId("w1"), lambda event, shard=None: told.append(event), Faults(()))
    for generation in (1, 2, 3, 4):
        world = World.alone(torch.device("cpu"), generation=generation)
        saver.save(State(job, world, Version(8, 1)))
        world.close()
    checkpoints.back.set()
    saver.wait()
    assert told == [ShardSaved(WorkerId("w1"), Version(8, 1), by=generation) for generation in (1, 4)]


def test_who_still_writes_the_save_before_says_so_and_waits_for_it_once(tmp_path: Path) -> None:
    """R11: a step is not to wait for the bucket; a save that is begun nevertheless is written after this one."""
    job, told = toy_job(tmp_path), list[Event]()
    checkpoints = Down(job)
    saver = Saver(checkpoints, WorkerId("w1"), lambda event, shard=None: told.append(event), Faults(()))
    world = World.alone(torch.device("cpu"))
    try:
        assert saver.done(60)
        saver.save(State(job, world, Version(4, 1)))
        assert not saver.done(0.01)
        assert not saver.done(3600), "it was waited for already"
        saver.save(State(job, world, Version(8, 1)))
        assert told == [], "that of a stop waits aside, and holds up nobody: who stands still here would be taken for hung"
        checkpoints.back.set()
        saver.wait()
    finally:
        world.close()
    assert told == [ShardSaved(WorkerId("w1"), Version(step, 1), by=1) for step in (4, 8)]
