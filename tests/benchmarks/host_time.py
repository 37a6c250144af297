"""Measures a toy step in one process on one core, beside a plain loop with the same model: the difference is what the engine itself costs.

    python -m tests.benchmarks.host_time

The model is that of ``peers/toy.py``, with eight microbatches a step that take no time to read.  Prints the processor time of the thread
that trains, the median of 60 steps of each loop, three times in turn: other work on the machine hardly counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from elastic.engine.world import World
from elastic.ids import Version
from tests.benchmarks.peers.toy import MICROBATCHES, MODEL, loss, model, optimizer
from tests.support.segments import member
from tests.support.toys import Sums, toy_job

STEPS, SETTLED, TURNS = 60, 5, 3


def timed(step: Callable[[int], object]) -> float:
    """Returns the median milliseconds of the processor that a step takes, without the first ``SETTLED``."""
    times = []
    for number in range(SETTLED + STEPS):
        began = time.thread_time()
        step(number)
        times.append(time.thread_time() - began)
    return 1000 * statistics.median(times[SETTLED:])


def plain() -> float:
    module, data = model(), Sums()
    adamw = optimizer(module)

    def step(number: int) -> None:
        adamw.zero_grad()
        for microbatch in range(MICROBATCHES):
            loss(module, data, number, microbatch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adamw.step()

    return timed(step)


def ours(*, reproducible: bool) -> float:
    with TemporaryDirectory() as folder:
        job = toy_job(Path(folder), steps=10**6, model_args=MODEL, global_batch=2 * MICROBATCHES, reproducible=reproducible)
        world = World.alone(torch.device("cpu"))
        try:
            with member(world, job, Version(0, 0), prefetch=0) as me:
                return timed(lambda _: me.step())
        finally:
            world.close()


def main() -> None:
    torch.set_num_threads(1)
    for _ in range(TURNS):
        base, free, exact = plain(), ours(reproducible=False), ours(reproducible=True)
        print(f"plain {base:.1f} ms, free {free:.1f} ms ({free / base:.2f}), reproducible {exact:.1f} ms ({exact / base:.2f})", flush=True)


if __name__ == "__main__":
    main()
