"""While the device is stuck and its queue of launches is full, the rest of the process goes on.

A kernel that sleeps, on the stream that everything waits for, stands in for a hanging collective.  One thread
launches until the queue is full and beyond; another one ticks, as the control thread must to answer a fence.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from elastic.engine.world import LEAD, World
from elastic.train.machine.gpus import LAUNCHES
from tests.support.commands import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STUCK_S = 3.0
# "malloc" is how compiled code allocates, with the GIL held; "freed": an event is recorded when the tensor
# goes
CALLS = {
    "eager": "x.add_(1)",
    "event": "torch.cuda.Event().record()",
    "freed": "y = torch.empty(1 << 20, device='cuda'); y.record_stream(side); del y; x.add_(1)",
    "malloc": (
        "len(kept) < 100 and kept.append(torch._C._dynamo.guards._empty_strided_cuda((24 << 20,), (1,), "
        "torch.uint8)); x.add_(1)"
    ),
    "compiled": "compiled(x)",
    "backward": "compiled(leaf).sum().backward()",
}
SCRIPT = """
import sys, threading, time
import torch

call, stuck_s = compile(sys.argv[1], "call", "exec"), float(sys.argv[2])
x, leaf = torch.zeros(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda", requires_grad=True)
compiled, side, kept = torch.compile(lambda v: torch.sin(v) * 2 + torch.cos(v)), torch.cuda.Stream(), []
for _ in range(3):
    exec(call)
torch.cuda.synchronize()
began, longest, stop = time.monotonic(), 0.0, False
cycles = int(1e8)
torch.cuda._sleep(cycles)
torch.cuda.synchronize()
cycles = int(cycles * stuck_s / (time.monotonic() - began))


def tick():
    global longest
    last = time.monotonic()
    while not stop:
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now


ticking = threading.Thread(target=tick)
ticking.start()
torch.cuda._sleep(cycles)
began, blocked = time.monotonic(), 0.0
for _ in range(5000):
    before = time.monotonic()
    exec(call)
    blocked = max(blocked, time.monotonic() - before)
stop = True
ticking.join()
print(f"{blocked:.3f} {longest:.3f}")
"""


def stuck(call: str, environment: dict[str, str]) -> tuple[float, float]:
    """Returns (longest time that one call took, longest time that another thread did not run) in seconds."""
    command = [sys.executable, "-c", SCRIPT, call, str(STUCK_S)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    blocked, longest = ran.stdout.split()[-2:]
    print(f"{call}: one call took {blocked} s, the other thread stood for {longest} s")
    return float(blocked), float(longest)


@pytest.mark.parametrize("call", CALLS)
def test_a_full_queue_of_launches_stops_no_other_thread(call: str) -> None:
    blocked, longest = stuck(CALLS[call], LAUNCHES)
    if blocked < 0.5 * STUCK_S:
        pytest.skip(f"no call blocked, the longest took {blocked} s: the queue was never full")
    assert longest < 0.2 * STUCK_S


def test_the_static_launcher_would_stop_them() -> None:
    """Negative control: with inductor's static launcher a full queue stops the other thread."""
    blocked, longest = stuck(CALLS["compiled"], {"TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "1"})
    assert blocked > 0.5 * STUCK_S
    assert longest > 0.5 * STUCK_S


@pytest.mark.parametrize("lead", [LEAD, 10**6], ids=["as it is", "with any lead (negative control)"])
def test_the_host_keeps_near_the_device(monkeypatch: pytest.MonkeyPatch, lead: int) -> None:
    """A host that keeps near the device leaves an abort little to wait for."""
    monkeypatch.setattr("elastic.engine.world.LEAD", lead)
    world, blocks = World.alone(torch.device("cuda")), 4 * LEAD
    try:
        done = [torch.cuda.Event() for _ in range(blocks)]
        behind = []
        for number in range(blocks):
            world.keep_up()
            behind.append(number - sum(event.query() for event in done[:number]))
            torch.cuda._sleep(10**7)  # some milliseconds
            done[number].record()
        world.finish()
    finally:
        world.close()
    assert (max(behind) <= LEAD) == (lead == LEAD)
