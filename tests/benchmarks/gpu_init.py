"""Measures how long a new run takes from the start of its process to its first step, on one GPU.

    python -m tests.benchmarks.gpu_init [--layers 28] [--seq 2048]

The model is a Llama of 3.2 B parameters (fewer with fewer layers), trained in bfloat16 with float32 weights
and moments: about 52 GB. The process trains as ``--local`` does and ends after its first step.  ``init_s`` is
the time in which memory gets its values.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
LIMIT_S = 280


def child(folder: str, layers: int, seq: int, began: float) -> None:
    """Trains one step in this process, prints the row, and ends the process."""
    import torch

    from elastic.job import Job
    from elastic.report.story import Line, StepLine
    from elastic.train import heal
    from elastic.train.alone.local import run_local

    init_s, peaks, initialise = list[float](), list[int](), heal.initialise

    def timed(*arguments: object) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        initialise(*arguments)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        init_s.append(time.perf_counter() - start)
        peaks.append(torch.cuda.max_memory_allocated())  # each step counts anew

    heal.initialise = timed  # type: ignore[assignment]

    def show(line: Line) -> None:
        if isinstance(line, StepLine):
            row = {
                "gpu": torch.cuda.get_device_name(),
                "layers": layers,
                "first_step_s": round(time.time() - began, 2),
                "init_s": round(init_s[0], 2),
                "peak_allocated_bytes": max(*peaks, line.peak_bytes),
            }
            print(json.dumps(row), flush=True)
            os._exit(0)

    job = Job(
        name="init",
        bucket=f"{folder}/bucket",
        model_args={
            "vocab": 128256,
            "dim": 3072,
            "layers": layers,
            "heads": 24,
            "kv_heads": 8,
            "hidden": 8192,
        },
        steps=2,
        global_batch=1,
        microbatch=1,
        precision="bf16",
        data={"dataset": "tests.support.toys:Sums", "args": {"samples": 64, "seq_len": seq, "masked": False}},
        workers={"gpus": 1, "max": 1},
    )
    run_local(job, show)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--seq", type=int, default=2048)
    known = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    with TemporaryDirectory() as folder:
        call = (
            f"import tests.benchmarks.gpu_init as b; b.child({folder!r}, {known.layers}, {known.seq}, "
            f"{time.time()!r})"
        )
        done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit("it failed")


if __name__ == "__main__":
    main()
