"""Measures what the ordered reduction costs beside FSDP's own reduce-scatter: whole steps, and the bare
exchange by message size.

    python -m tests.benchmarks.fold [--size large]            # on all GPUs of this machine, over NCCL
    python -m tests.benchmarks.fold --size tiny --world 2     # a rehearsal on CPUs, over gloo

All cases run in the same processes, one for each device; each case has fresh weights, and its steps are timed
after three that are not. A ratio above 1 says that the fold is slower.  ``reproducible = true`` is the fold
with deterministic kernels, ``false`` the library's sum with free ones; the two mixed cases tell what each of
both costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic.data.prepare import prepare
from elastic.engine.sync.ordered import Ordered
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import Llama
from elastic.plan.batch import deal_of
from elastic.plan.layout import Layout
from elastic.train.session import prepare_process
from tests.support.segments import member

SIZES: dict[str, dict[str, Any]] = {
    "large": {"model": {"dim": 2048, "layers": 20, "heads": 16}, "seq_len": 2048},
    "medium": {"model": {"dim": 768, "layers": 12, "heads": 12}, "seq_len": 1024},
    "tiny": {"model": {"dim": 64, "layers": 3, "heads": 2}, "seq_len": 64},
}
ROUNDS = (1, 4)
WARM = 3


class Quick(Llama):
    """A model whose weights cost no time to draw, since their values do not matter here."""

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.01)


def build(**args: Any) -> nn.Module:
    with torch.device("meta"):
        model = Quick(**args)
    return model if torch.get_default_device().type == "meta" else model.to_empty(device="cpu")


def job_of(folder: Path, options: argparse.Namespace, rounds: int, fold: bool) -> Job:
    size = SIZES[options.size]
    return Job(
        name="fold",
        bucket=str(folder / "bucket"),
        model="tests.benchmarks.fold:build",
        model_args=size["model"],
        data={"args": {"path": str(folder / "tokens"), "seq_len": size["seq_len"]}},
        steps=1000,
        global_batch=rounds * options.world,
        microbatch=1,
        precision="bf16",
        compile=options.device == "cuda",
        reproducible=fold,
        workers={"gpus": int(options.device == "cuda"), "cpus": 1},
    )


def seconds_of_steps(world: World, job: Job, count: int) -> float:
    """Returns the median time of a whole step: compute, reduce, commit, update."""
    with member(world, job, Version(0, 0)) as me:
        times = []
        for _ in range(WARM + count):
            began = time.perf_counter()
            me.step()  # ends when the device has applied the update
            times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:])


def steps(world: World, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each number of rounds: every way of reducing, with each kind of kernels."""
    rows = []
    for rounds in ROUNDS:
        row: dict[str, Any] = {"layout": str(world.layout), "rounds": rounds}
        for deterministic in (True, False):
            torch.use_deterministic_algorithms(deterministic)
            for fold in (True, False):
                name = f"{'fold' if fold else 'sum'}, {'deterministic' if deterministic else 'free'}"
                row[name] = seconds_of_steps(world, job_of(folder, options, rounds, fold), options.steps)
        row["reproducible true : false"] = row["fold, deterministic"] / row["sum, free"]
        row["fold : sum, deterministic"] = row["fold, deterministic"] / row["sum, deterministic"]
        row["fold : sum, free"] = row["fold, free"] / row["sum, free"]
        rows.append(row)
    return rows


def folded(world: World, grads: torch.Tensor, output: torch.Tensor, rounds: int) -> None:
    scheme = Ordered(world, deal_of(rounds * world.size, 1, world.layout))
    folding = scheme.reduction()
    for number in range(rounds):
        scheme.round.number, scheme.round.last = number, number + 1 == rounds
        if (total := folding.reduce(grads)) is not None:
            output.copy_(total)


def scattered(world: World, grads: torch.Tensor, output: torch.Tensor, rounds: int) -> None:
    part = output if rounds == 1 else torch.empty_like(output)
    for number in range(rounds):
        dist.reduce_scatter_tensor(part, grads, group=world.shard_group)
        if part is not output:
            output.copy_(part) if number == 0 else output.add_(part)


def exchanges(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the bare reduction of one module's float32 gradients over the shard group, by their bytes, for
    one round and four.
    """
    rows = []
    for mib in options.mib:
        count = (mib << 18) // world.size * world.size
        grads, output = (
            torch.ones(count, device=world.device),
            torch.empty(count // world.size, device=world.device),
        )
        row: dict[str, Any] = {"mib": mib}
        for rounds in ROUNDS:
            for name, reduce in (("fold", folded), ("sum", scattered)):
                row[f"{name} {rounds}"] = timed(world, partial(reduce, world, grads, output, rounds))
                assert bool((output == world.size * rounds).all())
            row[f"ratio {rounds}"] = row[f"fold {rounds}"] / row[f"sum {rounds}"]
        rows.append(row)
    return rows


def timed(world: World, call: Callable[[], None], count: int = 10) -> float:
    """Returns the median time in seconds of a call until the device is done."""
    times = []
    for _ in range(WARM + count):
        dist.barrier()
        world.finish()
        began = time.perf_counter()
        call()
        world.finish()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:])


def rank_main(pipe: Connection, folder: Path, options: argparse.Namespace, rank: int, port: int) -> None:
    """Runs one member.  The clock of rank 0 counts, because all end a step together."""
    device = prepare_process(job_of(folder, options, 1, True))
    found: dict[str, Any] = {"steps": []}
    half = options.world // 2
    layouts = [Layout(1, options.world)] + ([Layout(2, half)] if half * 2 == options.world else [])
    for number, layout in enumerate(layouts, start=1):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        world = World.form(store, generation=number, layout=layout, rank=rank, device=device, form_s=120)
        world.connect(120, 120)
        if number == 1:
            found["exchanges"] = exchanges(world, options)
        found["steps"] += steps(world, folder, options)
        if rank == 0:
            pipe.send(found)  # after each layout, in case that time runs out
        world.close()
    if rank == 0:
        pipe.send(None)


def show(found: dict[str, Any]) -> None:
    for row in found["steps"][-len(ROUNDS) :]:
        ratios = "; ".join(f"{key} {value:.3f}" for key, value in row.items() if ":" in key)
        times = "; ".join(
            f"{key} {1000 * value:.1f}" for key, value in row.items() if "," in key and ":" not in key
        )
        print(f"{row['layout']}, rounds {row['rounds']}: {ratios}\n    ms a step: {times}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--world", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.world < 1:
        parser.error("--world: this machine has no GPU; say how many CPU processes")
    return options


def main() -> None:
    options, context = arguments(), multiprocessing.get_context("spawn")
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    about = f"{options.world} x {device}, torch {torch.__version__}, {options.size}"
    print(about, flush=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(Path(sysconfig.get_path("stdlib")) / "asyncio", str(folder / "tokens"), (".py",))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe, theirs = context.Pipe()
        processes = []
        for rank in range(options.world):
            # of the process that starts next: one device each, as for a worker
            os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
            processes.append(
                context.Process(
                    target=rank_main, args=(theirs, folder, options, rank, store.port), daemon=True
                )
            )
            processes[-1].start()
        while (found := pipe.recv()) is not None:
            if len(found["steps"]) == len(ROUNDS):
                for row in found["exchanges"]:
                    print(
                        "; ".join(
                            f"{key} {value if key == 'mib' else round(value, 5)}"
                            for key, value in row.items()
                        )
                    )
            show(found)
            (options.out / f"fold-{options.size}-{options.world}.json").write_text(
                json.dumps({"about": about, **found}, indent=1) + "\n"
            )
        for process in processes:
            process.join(30)


if __name__ == "__main__":
    main()
