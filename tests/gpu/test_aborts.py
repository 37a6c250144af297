"""A member leaves its world within 0.2 s, whether its peer stands still or has died."""

from __future__ import annotations

import statistics

import pytest
import torch

from tests.gpu.pair import first_of_two

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from elastic.engine import sockets
from elastic.engine.world import World
from elastic.plan.layout import Layout

rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if "asleep" in how:
    sockets.Waking.wake = lambda self: None
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
world = World.form(store, generation=1, layout=Layout(1, 2), rank=rank, device=torch.device("cuda", 0), form_s=120.0)
world.connect(120.0, 3600.0)
if rank == 1:
    store.set("gone", "")
    if "dies" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
dist.all_reduce(torch.ones(1 << 20, device="cuda"))
store.get("gone")
time.sleep(0.1)  # until somebody would have noticed
began = time.monotonic()
world.abort()
print(time.monotonic() - began, flush=True)
os._exit(0)
"""


def abort_s(how: str) -> float:
    """Returns the seconds that the abort took in the member that was left alone."""
    out, _ = first_of_two(SCRIPT, how, environment={})
    return float(out)


@pytest.mark.parametrize("how", ["stops", "dies"])
def test_an_abort_takes_no_half_second(how: str) -> None:
    woken = [abort_s(how) for _ in range(3)]
    asleep = [abort_s(f"{how} asleep") for _ in range(3)]  # negative control
    print(f"{how}: {woken}; when nobody wakes NCCL's threads: {asleep}")
    assert statistics.median(woken) < 0.2 < statistics.median(asleep)
