"""The golden jobs: what they are, on which kind of machine their bits are known, and processes that run them.

A golden hash says what a job ends with, byte for byte.  Bits depend on the kernels that torch picks for a
CPU, so the jobs run in child processes whose environment pins those kernels (:data:`PINNED`).  On some
machines that is not enough: the same operations in plain torch, without Elastic, give another digest there.
:func:`kind_of` then returns another kind, and the tests skip.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.ranks import Ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOCAL = "local"
ASYNCIO = "ASYNCIO"
"""Name of the text of ``examples/quickstart.py``: it consists of Python's own sources, so another Python
gives other bits.
"""
COMMON = {
    "name": "golden",
    "model_args": {"vocab": 29, "dim": 32, "layers": 4, "heads": 2, "dropout": 0.1},
    "steps": 8,
    "global_batch": 16,
    "microbatch": 2,
    "data": {"dataset": "tests.support.toys:Sums"},
    "optim": {"lr": 0.01},
    "schedule": {"warmup_steps": 2},
    "checkpoint": {"save_every": 1000},
    "numerics": 6,
}
"""Settings of every golden job that ``jobs.json`` does not replace.  They are written out, so that a default
that changes is noticed.
"""
PINNED = {
    # torch's own kernels without AVX2 and AVX-512: every hash changes with it
    "ATEN_CPU_CAPABILITY": "default",
    # products of float32 matrices: every hash but that of small bfloat16 models changes with it
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",  # products of bfloat16 matrices, and GELU: those hashes change with it
    "OMP_NUM_THREADS": "1",
}
Request = tuple[str, str, dict[str, Any]]
"""A golden job, a layout ("local" or "replicas x shards"), and settings that replace the job's own."""


def settings_of(name: str) -> dict[str, Any]:
    """Returns the settings of a golden job, without its bucket."""
    jobs: dict[str, dict[str, Any]] = json.loads((HERE / "jobs.json").read_text(encoding="utf-8"))
    return {**COMMON, **jobs[name]}


def golden(numerics: int = 6) -> Any:
    """Returns the golden hashes of one ``numerics`` number: {"commit", "environment", "kinds": {kind: {job:
    {"hash", "seen"}}}}.
    """
    return json.loads((HERE / "hashes.json").read_text(encoding="utf-8"))[str(numerics)]


@contextmanager
def kernels(count: int, **environment: str) -> Iterator[Ranks]:
    """Yields processes with pinned kernels: they are forks of one that has torch and has not computed
    anything with it.
    """
    from tests.support.ranks import Ranks

    pool = Ranks(count, environment=PINNED | environment)
    try:
        yield pool
    finally:
        pool.close()


def ask(requests: Sequence[Request], **environment: str) -> Any:
    """Runs the jobs in processes with pinned kernels; returns {"kinds": {job: kind}, "hashes": [hash of each
    run]}.
    """
    most = max(1 if layout == LOCAL else prod(_degrees(layout)) for _, layout, _ in requests)
    with kernels(most, **environment) as pool:
        return answered(pool, requests)


def answered(pool: Ranks, requests: Sequence[Request]) -> Any:
    """Returns what :func:`ask` does."""
    from elastic.plan.layout import Layout

    hashes = [run_one(request, pool) for request in requests]
    (kinds,) = pool.run(Layout(1, 1), kinds_of, sorted({name for name, _, _ in requests}))
    return {"kinds": kinds, "hashes": hashes}


def pinned(*arguments: str, timeout_s: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python with ``arguments``, in an environment that pins the kernels, and waits for its end."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command, variables = [sys.executable, *arguments], ours | PINNED | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )


# ---- in the child processes


def kind_of(name: str) -> str:
    """Returns the kind of this machine for a golden job: processor, torch, and a digest of what its kernels
    make of a fixed calculation.

    The calculation trains a small network in plain torch, with the operations of the golden jobs.  Where its
    digest is the one that was recorded, a golden hash that differs is the fault of our code.
    """
    import torch

    settings = settings_of(name)
    # in bf16 some products are float32's
    precisions = ("fp32",) if settings.get("precision", "fp32") == "fp32" else ("fp32", "bf16")
    kernels = ", ".join(f"{each} kernels {_kernels(each)[:16]}" for each in precisions)
    text = (
        f", text of Python {platform.python_version()}"
        if settings["data"].get("args", {}).get("path") == ASYNCIO
        else ""
    )
    return f"{platform.machine()}, torch {torch.__version__.partition('+')[0]}, {kernels}{text}"


@cache
def _kernels(precision: str) -> str:
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 29, (2, 17), generator=generator)
    shapes = {
        "embedding": (29, 32),
        "qkv": (96, 32),
        "wide": (96, 32),
        "gate": (96, 32),
        "back": (32, 96),
        "bias": (32,),
        "head": (29, 32),
    }
    parameters = {
        name: torch.empty(shape).normal_(std=0.1, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, foreach=False)
    for step in range(3):
        torch.manual_seed(step)
        p = {name: value.to(dtype) for name, value in parameters.items()}
        x = F.embedding(words[:, :-1], p["embedding"])
        q, k, v = (
            F.linear(F.rms_norm(x, (32,), eps=1e-5), p["qkv"]).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        )
        x = x + F.dropout(
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).transpose(1, 2).flatten(2),
            0.1,
        )
        x = x + F.scaled_dot_product_attention(q.sin(), k.cos(), v, is_causal=True).transpose(1, 2).flatten(2)
        y = F.layer_norm(x, (32,))
        x = x + F.linear(
            F.silu(F.linear(y, p["wide"])) * F.gelu(F.linear(y, p["gate"])), p["back"], p["bias"]
        )
        loss = F.cross_entropy(
            F.linear(x, p["head"]).float().flatten(0, 1), words[:, 1:].flatten(), reduction="sum"
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return hashlib.sha256(
        b"".join(value.detach().numpy().tobytes() for value in parameters.values())
    ).hexdigest()


def final_hash(job: Any) -> str:
    """Returns the hash of the state after the last step of ``job``, exported as plain safetensors."""
    from elastic.runs.run import Run
    from tests.support.state_hash import state_hash

    run = Run.open(job)
    with TemporaryDirectory() as folder:
        run.checkpoints.export(run.version_at(job.steps), Path(folder))
        return state_hash(sorted(Path(folder).glob("*.safetensors")))


def job_in(bucket: Path, name: str, changes: dict[str, Any]) -> Any:
    """Returns the golden job with ``bucket``; a text that it reads is prepared beside the bucket."""
    from elastic.job import Job

    settings = {**settings_of(name), "bucket": str(bucket), **changes}
    args = settings["data"].get("args", {})
    if "path" in args:
        settings["data"] = {
            **settings["data"],
            "args": {**args, "path": _prepared(bucket.parent / "data", args["path"])},
        }
    return Job(**settings)


def _prepared(folder: Path, text: str) -> str:
    from elastic.data.prepare import prepare

    if text == ASYNCIO:
        prepare(Path(sysconfig.get_path("stdlib")) / "asyncio", str(folder), (".py",))
    else:
        folder.with_suffix(".txt").write_text(
            "\n".join(f"the square of {n} is {n * n}" for n in range(400)), encoding="utf-8"
        )
        prepare(str(folder.with_suffix(".txt")), str(folder), (".txt",))
    return str(folder)


def run_one(request: Request, pool: Ranks) -> str:
    """Returns the hash of one run."""
    from elastic.plan.layout import Layout
    from tests.support.segments import train

    name, layout, changes = request
    with TemporaryDirectory() as folder:
        job = job_in(Path(folder) / "bucket", name, changes)
        if layout != LOCAL:
            return train(pool, job, Layout(*_degrees(layout)), job.steps).hash
        pool.run(Layout(1, 1), run_alone, job)
        return final_hash(job)


def run_alone(world: Any, job: Any) -> None:
    from elastic.train.alone.local import run_local

    world.close()  # a local run forms its own
    state, reason, _ = run_local(job, lambda line: None)
    assert state == "Finished", reason


def kinds_of(_world: Any, names: Sequence[str]) -> dict[str, str]:
    return {name: kind_of(name) for name in names}


def _degrees(layout: str) -> tuple[int, int]:
    replicas, shards = layout.split("x")
    return int(replicas), int(shards)
