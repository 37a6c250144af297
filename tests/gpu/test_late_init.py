"""An abort while NCCL still makes a communicator does not find it; the member leaves as soon as it is there."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.pair import first_of_two

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SCRIPT = """
import os, sys, threading, time
import torch
import torch.distributed as dist
from elastic.engine.world import World
from elastic.errors import WorldBroken
from elastic.plan.layout import Layout

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
world = World.form(store, generation=1, layout=Layout(1, 2), rank=rank, device=torch.device("cuda", 0), form_s=120.0)
if rank == 1:
    meet = World._meet
    World._meet = lambda *arguments: (meet(*arguments), time.sleep(4))  # rank 0 waits for this member inside of NCCL
    world.connect(120.0, 3600.0)
    time.sleep(600)
aborts = threading.Timer(2.0, world.abort)
aborts.start()
try:
    world.connect(120.0, 3600.0)
    print("connected", flush=True)
except WorldBroken as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_communicator_whose_making_ends_after_the_abort() -> None:
    out, _ = first_of_two(SCRIPT, environment={})
    assert out.splitlines()[-1] == "generation 1 was aborted while it connected"
