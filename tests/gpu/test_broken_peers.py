"""A member leaves a world whose peer's sockets broke within 5 s, although torch has noticed the break before
anybody aborts.
"""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.gpu_recovery import SOCKETS
from tests.gpu.pair import first_of_two

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SCRIPT = """
import gc, os, signal, sys, time
import torch
import torch.distributed as dist
from elastic.engine.world import World
from elastic.plan.layout import Layout

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
world = World.form(store, generation=1, layout=Layout(1, 2), rank=rank, device=torch.device("cuda", 0), form_s=60.0)
world.connect(60.0, 3600.0)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1 << 20, device="cuda"))
time.sleep(3)  # not to wait for something: so long torch's watchdog has to see it
began = time.monotonic()
world.abort()
time.sleep(2)  # for its watchdog to look at what was aborted: then it sleeps, if ever
world.close()
del world
gc.collect()
print(time.monotonic() - began - 2, flush=True)
os._exit(0)
"""


def test_a_world_is_left_at_once() -> None:
    """Measures the time from the abort until nothing of the world is left, in the process whose peer was
    killed.
    """
    out, errors = first_of_two(SCRIPT, environment=SOCKETS)
    assert "failure detected by watchdog" in errors, errors[-3000:]
    print(f"left in {out.strip()} s")
    assert float(out) < 5
