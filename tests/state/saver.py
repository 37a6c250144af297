"""A worker that saves, as a process of its own that has torch from the start."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.copy_schedule import SaveRule
from elastic.protocol.plan import Plan
from elastic.state.region import Region, frame
from elastic.state.snapshot import Snapshots
from tests.state.nodes import AT, AUTO, TENSORS, outcome, shard_of
from tests.support.cells import cell

WORKER, NODE = WorkerId("w0"), NodeId("n")
PLAN = Plan(1, AT.generation, Layout(1, 1), (WORKER,), AT, "init", (), NODE, (NODE,), copy_every=1)
SAVED = Version(5, AT.generation)


def save(how: str, pipe: Connection) -> None:
    """Says where its memory is, waits for a word, and copies the state after step 5 as a save.

    "whole": it says so once the copy is complete, and waits to be killed.  "torn": it kills itself (SIGKILL)
    while it copies.
    """
    largest = frame(TENSORS, cell(1, 0))
    region = Region.create(3, largest.bytes, largest.blocks, TENSORS)

    def strike(plan: Plan, world_rank: int, step: int) -> None:
        if how == "torn":
            os.kill(os.getpid(), signal.SIGKILL)

    snapshots = Snapshots(region, TENSORS, torch.device("cpu"), AUTO, SaveRule(5, 100), strike=strike)
    pipe.send(region.descriptor)
    pipe.recv()
    snapshots.enter(PLAN, WORKER, shard_of(AT, 1, 0))
    snapshots.settle()
    snapshots.committed(replace(outcome(5, copied=4), saves=True), shard_of(SAVED, 1, 0))
    assert snapshots.settle().copied_through == 5
    pipe.send("copied")
    signal.pause()
