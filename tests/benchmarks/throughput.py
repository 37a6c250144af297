"""Measures tokens a second of Elastic, with all of its fault tolerance on, of a plain loop and of TorchTitan,
in one run on the same GPUs.

    python -m tests.benchmarks.throughput --size 1b [--seq 8192] [--microbatches 4] [--world 1] [NAME ...]
    python -m tests.benchmarks.throughput --size 8b --plain=--recompute --ours '{"recompute": "block"}' plain
    free python -m tests.benchmarks.throughput --size 1b-untied plain torchtitan free

NAME is one of ``plain``, ``plain-deterministic`` (FlexAttention), ``torchtitan`` (0.2.2; only where it is
named), ``free``, ``reproducible``, ``again`` (reproducible once more, to compare the bits of every loss and
norm), ``free-zero-3``, ``free-zero-2`` and ``zero-2``, ``free-fp8`` (also ``free-fp8-zero-2`` and
``free-fp8-zero-3``) and ``fp8``, ``free-fp8-rowwise`` and ``fp8-rowwise``, and ``bare`` (free, without
copies).  Prints a line of JSON for each and a table at the end; exits with 1 if bits differ, or could not be
compared because a run failed.  MFU is of the GPU's peak in bf16, and counts operations as Chowdhery et al.
(2022) do, and with the causal half as Megatron does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
import torch

from actors import cluster
from actors.launch import launch
from elastic.data.prepare import prepare
from elastic.job import Job
from elastic.models import llama
from elastic.models.flops import flops_of
from elastic.report.story import Line, Sentence, StepLine
from elastic.train.machine.peaks import peak_flops
from tests.benchmarks.models import SIZES
from tests.benchmarks.plain_loop import SETTLED

PLAIN = ("plain", "plain-deterministic")
LOOPS = {
    "plain": ["tests.benchmarks.plain_loop"],
    "plain-deterministic": ["tests.benchmarks.plain_loop", "--deterministic", "--attention", "flex"],
    "torchtitan": ["tests.benchmarks.peers.torchtitan_row"],
}
"""The module of each loop without fault tolerance, and its arguments."""
OURS: dict[str, dict[str, Any]] = {
    "free": {"reproducible": False},
    "reproducible": {},
    "again": {},
    "free-zero-3": {"reproducible": False, "parallel": {"zero": 3}},
    "free-zero-2": {"reproducible": False, "parallel": {"zero": 2}},
    "zero-2": {"parallel": {"zero": 2}},
    "free-fp8": {"reproducible": False, "precision": "fp8"},
    "free-fp8-zero-2": {"reproducible": False, "precision": "fp8", "parallel": {"zero": 2}},
    "free-fp8-zero-3": {"reproducible": False, "precision": "fp8", "parallel": {"zero": 3}},
    "fp8": {"precision": "fp8"},
    "free-fp8-rowwise": {"reproducible": False, "precision": "fp8-rowwise"},
    "fp8-rowwise": {"precision": "fp8-rowwise"},
    "free-offload": {"reproducible": False, "offload": "optimizer", "parallel": {"zero": 2}},
    "free-offload-weights": {"reproducible": False, "offload": "weights", "parallel": {"zero": 2}},
    "bare": {"reproducible": False, "copies": {"copy_every": 0, "buddy_every": 0}},
}
COMPARED = ("reproducible", "again")
"""The rows whose bits must be the same."""
Row = dict[str, Any]


def loop(name: str, options: argparse.Namespace) -> Row:
    """Runs a loop without fault tolerance in processes of its own."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.world),
        "-m",
        *LOOPS[name],
    ]
    command += [
        "--size",
        options.size,
        "--seq",
        str(options.seq),
        "--microbatches",
        str(options.microbatches),
        *options.plain.split(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": done.stderr[-6000:]}
    found: Row = json.loads(lines[-1])
    return found


def job_of(folder: Path, name: str, options: argparse.Namespace) -> Job:
    values: dict[str, Any] = {
        "name": f"{name}-{options.size}",
        "bucket": str(folder / "bucket"),
        "model_args": SIZES[options.size].arguments(),
        "data": {"args": {"path": str(folder / "tokens"), "seq_len": options.seq}},
        "steps": options.steps,
        "global_batch": options.world * options.microbatches,
        "microbatch": 1,
        "precision": "bf16" if options.gpus else "fp32",
        "compile": bool(options.gpus),
        "optim": {"lr": 3e-4},
        "schedule": {"warmup_steps": 5},
        "checkpoint": {"save_every": 10_000},
        "copies": {"copy_every": 1, "buddy_every": 0},
        "workers": {"min": options.world, "max": options.world, "gpus": options.gpus, "cpus": 1},
        "deadlines": {"form_s": 300},
    }
    return Job(**(values | OURS[name] | options.ours))


class Enough(Exception):
    """All steps of a run are there.  Its last checkpoint, which takes longer than the steps of a large model,
    tells nothing more.
    """


def ours(name: str, folder: Path, options: argparse.Namespace) -> Row:
    """Runs a job to its last step, and ends its cluster."""
    lines: list[Line] = []

    def show(line: Line) -> None:
        lines.append(line)
        if isinstance(line, Sentence):
            print(f"{time.time() - began:8.1f} s  {line.text}", file=sys.stderr, flush=True)
        elif isinstance(line, StepLine) and line.step == options.steps:
            raise Enough

    began = time.time()
    cluster.connect("local")
    with suppress(Enough):
        launch(job_of(folder, name, options), show=show)
    ray.shutdown()
    steps = [line for line in lines if isinstance(line, StepLine)]
    if not steps or steps[-1].step < options.steps:
        return {"failed": "\n".join(line.text for line in lines if isinstance(line, Sentence))[-1500:]}
    took = [
        after.at - before.at
        for before, after in pairwise(steps[SETTLED:])
        if after.generation == before.generation
    ]
    seconds = statistics.median(took)
    tokens = options.microbatches * options.seq
    bits = [(line.step, line.loss.hex(), line.norm.hex()) for line in steps]
    return {
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "first_step_s": steps[0].at - began,
        "peak_bytes": max(line.peak_bytes for line in steps),
    } | {
        "bits": bits,
        "loss": steps[-1].loss,
    }


def complaint(output: str) -> str:
    """Returns the last error in what a failed program printed, but not that of the launcher, in one line."""
    errors = [line for line in output.splitlines() if "rror: " in line and "ChildFailedError" not in line]
    return (errors or output.splitlines() or [""])[-1].strip()[:160].replace("|", "/")


def table(rows: dict[str, Row], options: argparse.Namespace) -> str:
    """Returns the rows as a Markdown table.  The share of the device's peak is told where that is known."""
    with torch.device("meta"):
        flops = flops_of(llama.build(**SIZES[options.size].arguments()))
    peak_flops_s = peak_flops(torch.cuda.get_device_name(), "bf16") if torch.cuda.is_available() else 0.0
    lines = [
        "| what | step | tokens/s a GPU | to `plain` | to `plain-deterministic` | MFU; causal half | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {complaint(row['failed'])} | | | | | |")
            continue
        rate = row["tokens_per_s"]
        shares = [
            f"{rate / rows[other]['tokens_per_s']:.3f}" if "tokens_per_s" in rows.get(other, {}) else ""
            for other in PLAIN
        ]
        used = (
            "; ".join(f"{flops(options.seq, half) * rate / peak_flops_s:.1%}" for half in (False, True))
            if peak_flops_s
            else ""
        )
        took, peak = f"{row['step_s'] * 1e3:.1f} ms", f"{row['peak_bytes'] / 1e9:.1f} GB"
        lines.append(f"| {name} | {took} | {rate:,.0f} | {shares[0]} | {shares[1]} | {used} | {peak} |")
    return "\n".join(lines)


def compared(rows: dict[str, Row]) -> tuple[int, str]:
    """Returns what to exit with, and what to say of the bits of the reproducible runs; nothing if no row is
    one.
    """
    there = [name for name in COMPARED if name in rows]
    if failed := [name for name in there if "bits" not in rows[name]]:
        return 1, f"bits are not compared: {' and '.join(failed)} failed"
    if len(there) < len(COMPARED):
        return 0, f"bits are not compared: name both {' and '.join(COMPARED)}" if there else ""
    differ = rows[there[0]]["bits"] != rows[there[1]]["bits"]
    return int(differ), f"the bits of {' and '.join(there)} {'differ' if differ else 'are equal'}"


def main() -> int:
    """Returns 1 if the bits of two reproducible runs differ, or could not be compared because one failed;
    else 0.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*PLAIN, *OURS])
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument(
        "--microbatches", type=int, default=4, help="of one sample each, by each rank in each step"
    )
    parser.add_argument("--world", type=int, default=1, help="ranks, one on each GPU")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--plain", default="", help="more arguments of the plain loop and of TorchTitan")
    parser.add_argument("--ours", type=json.loads, default={}, help="more settings of our jobs, as JSON")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    if options.steps < SETTLED + 2:
        parser.error(
            f"--steps {options.steps}: the first {SETTLED} settle, and two more make one time; take "
            f"{SETTLED + 2} or more"
        )
    options.gpus = int(torch.cuda.is_available())
    folder, rows = Path(mkdtemp()), dict[str, Row]()
    prepare(Path(torch.__file__).parent / "nn", str(folder / "tokens"), (".py",))
    for name in options.names:
        rows[name] = loop(name, options) if name in LOOPS else ours(name, folder, options)
        shutil.rmtree(folder / "bucket", ignore_errors=True)  # checkpoints of several rows would fill a disk
        print(json.dumps({"name": name, **rows[name]}), flush=True)
        (options.out / f"throughput-{options.size}-{options.world}.json").write_text(
            json.dumps(rows, indent=1) + "\n"
        )
    card = torch.cuda.get_device_name() if options.gpus else "CPU"
    print(
        (
            f"{card}, torch {torch.__version__}, {options.world} × {options.size}, sequence "
            f"{options.seq}\n{table(rows, options)}"
        ),
        flush=True,
    )
    code, said = compared(rows)
    print(said, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
