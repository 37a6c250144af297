"""Measures a toy step in one process on one core, beside a plain loop with the same model: the difference is
what the engine itself costs.

    python -m tests.benchmarks.host_time

The model is that of ``peers/toy.py``, with eight microbatches a step that take no time to read.  The loops
take turns step by step. Prints the processor time of the thread that trains: the median step of each loop,
and the median of the ratios of steps that stand beside each other, three times.  So neither other work on the
machine nor a processor that changes its speed counts for much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from elastic.engine.world import World
from elastic.ids import Version
from tests.benchmarks.peers.toy import MICROBATCHES, MODEL, loss, model, optimizer
from tests.support.segments import member
from tests.support.toys import Sums, toy_job

STEPS, SETTLED, TURNS = 200, 5, 3
PLAIN = "plain"


def plain() -> Callable[[int], object]:
    module, data = model(), Sums()
    adamw = optimizer(module)

    def step(number: int) -> None:
        adamw.zero_grad()
        for microbatch in range(MICROBATCHES):
            loss(module, data, number, microbatch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adamw.step()

    return step


@contextmanager
def ours(world: World, *, reproducible: bool) -> Iterator[Callable[[int], object]]:
    with TemporaryDirectory() as folder:
        job = toy_job(
            Path(folder),
            steps=10**6,
            model_args=MODEL,
            global_batch=2 * MICROBATCHES,
            reproducible=reproducible,
        )
        with member(world, job, Version(0, 0), prefetch=0) as me:
            yield lambda _: me.step()


def main() -> None:
    torch.set_num_threads(1)
    with ExitStack() as open_:
        world = World.alone(torch.device("cpu"))
        open_.callback(world.close)
        loops = {
            PLAIN: plain(),
            "free": open_.enter_context(ours(world, reproducible=False)),
            "reproducible": open_.enter_context(ours(world, reproducible=True)),
        }
        for turn in range(TURNS):
            times: dict[str, list[float]] = {name: [] for name in loops}
            for number in range(STEPS):
                for name, step in loops.items():
                    began = time.thread_time()
                    step(turn * STEPS + number)
                    times[name].append(time.thread_time() - began)
            found = {name: each[SETTLED:] for name, each in times.items()}
            ratios = {
                name: statistics.median(a / b for a, b in zip(each, found[PLAIN], strict=True))
                for name, each in found.items()
            }
            said = (
                f"{name} {1000 * statistics.median(each):.1f} ms ({ratios[name]:.3f})"
                for name, each in found.items()
            )
            print(", ".join(said), flush=True)


if __name__ == "__main__":
    main()
