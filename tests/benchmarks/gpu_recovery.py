"""On real GPUs: a 1 B-parameter Llama shape, bf16, compiled, loses a rank and ends with the same bits.

    python -m tests.benchmarks.gpu_recovery [scenario ...]                                      # default: all; needs 4 GPUs
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 python -m tests.benchmarks.gpu_recovery '2x2 kill'    # over sockets, as between hosts

Each scenario is a whole run under Ray; its hash is compared with the undisturbed run's.  Times are the journal's, the killer's and the
survivors' clocks on one machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
import torch
from blake3 import blake3

from actors import cluster
from elastic.data.prepare import prepare
from elastic.job import Job
from elastic.report.recoveries import recoveries
from elastic.report.story import StepLine
from elastic.runs import Run
from tests.support.chaos import Trial, Witness, trial

SMALL = {"dim": 256, "layers": 4, "heads": 4}
LARGE = {"dim": 2048, "layers": 20, "heads": 16}


def job_of(folder: Path, name: str, **changes: Any) -> Job:
    large = os.environ.get("SIZE", "large") == "large"
    values: dict[str, Any] = {
        "name": name,
        "bucket": str(folder / "bucket"),
        "model_args": LARGE if large else SMALL,
        "data": {"args": {"path": str(folder / "tokens"), "seq_len": 2048 if large else 256}},
        "steps": int(os.environ.get("STEPS", "40")),
        "global_batch": 16,
        "microbatch": 1,
        "precision": "bf16",
        "compile": True,
        "optim": {"lr": 3e-4},
        "schedule": {"warmup_steps": 5},
        "workers": {"min": 1, "max": 4, "gpus": 1, "cpus": 1},
        "parallel": {"min_shard": 2},
        "checkpoint": {"save_every": 1000},
        "deadlines": {"grow_debounce_s": 20, "form_s": 240, "fence_s": 10},
    }
    return Job(**(values | changes))


class KillAt:
    """SIGKILL the worker in the last seat once ``step`` is committed; wait for the survivors to step again."""

    def __init__(self, step: int, kind: signal.Signals = signal.SIGKILL) -> None:
        self.step, self.kind = step, kind
        self.killed_at = 0.0
        self.stepped_at = 0.0
        self.generation = 0
        self.asked = False

    def __call__(self, witness: Witness, view: Any) -> bool:
        if not self.killed_at:
            if view.step >= self.step and view.state == "Running" and all(worker in witness.seen for worker in view.workers):
                victim = max(view.workers, key=lambda name: int(name[1:]))
                self.generation, self.killed_at = view.generation, time.time()
                os.kill(witness.seen[victim].counters["pid"], self.kind)
            return False
        if os.environ.get("STACKS") and not self.asked and time.time() > self.killed_at + 3:
            self.asked = True
            for seen in [each for each in witness.seen.values() if each.process.running][:2]:
                subprocess.run([os.environ["STACKS"], "dump", "--native", "--pid", str(seen.process.pid)], check=False)
        since = [s.counters["stepping_since_ns"] / 1e9 for s in witness.seen.values() if s.counters["generation"] > self.generation]
        self.stepped_at = max((each for each in since if each > self.killed_at), default=0.0)
        return bool(self.stepped_at)


def content_hash(job: Job) -> str:
    """blake3 over every tensor of the newest checkpoint, in order of name, whatever shards it lies in."""
    run, digest = Run.open(job), blake3()
    reader = run.checkpoints.open(run.version_at(job.steps))
    for tensor in sorted(reader.tensors()):
        for _, data in reader.read([tensor.whole()]):
            digest.update(f"{tensor.kind}/{tensor.name}".encode() + data)
    return str(digest.hexdigest())[:16]


def show(name: str, job: Job, done: Trial, act: KillAt | None) -> dict[str, Any]:
    for line in done.lines:
        if not isinstance(line, StepLine):
            print(f"    {line.at:.2f} {line.text[:400]}", flush=True)
    if done.result.state != "Finished":
        raise SystemExit(f"{name}: {done.result}")
    lines = [line for line in done.lines if isinstance(line, StepLine)]
    steady = sorted(b.at - a.at for a, b in pairwise(lines[4:]))
    found: dict[str, Any] = {
        "scenario": name,
        "hash": content_hash(job),
        "loss": [round(done.losses[0], 4), round(done.losses[-1], 4)],
        "step_s": round(steady[len(steady) // 2], 3) if steady else None,
        "generations": done.witness.generation,
        "healed_live_gb": round(done.witness.total("healed_live_bytes") / 1e9, 2),
        "healed_bucket_gb": round(done.witness.total("healed_bucket_bytes") / 1e9, 2),
        "microbatches": done.witness.total("microbatches_run"),
    }
    if act is not None:
        changes = recoveries(Run.open(job).records())
        loss = next(each for each in changes if not each.planned and each.known_at >= act.killed_at)
        found |= {
            "detect_s": round(loss.known_at - act.killed_at, 3),
            **{key: round(value, 3) for key, value in asdict(loss).items() if key.endswith("_s")},
            "kill_to_first_microbatch_s": round(act.stepped_at - act.killed_at, 3),
            "kill_to_next_commit_s": round(loss.committed_at - act.killed_at, 3),
            "growth": [round(each.committed_at - each.known_at, 3) for each in changes[1:] if each.planned],
        }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    folder = Path(mkdtemp(dir=os.environ.get("WORK")))
    prepare(Path(sysconfig.get_path("stdlib")) / "asyncio", str(folder / "tokens"), (".py",))
    scenarios: dict[str, tuple[dict[str, Any], KillAt | None]] = {
        "2x2 undisturbed": ({}, None),
        "1x3 undisturbed": ({"workers": {"min": 3, "max": 3, "gpus": 1}}, None),
        "2x2 kill": ({}, KillAt(10)),
        "1x4 kill": ({"parallel": {"dp_replicate": 1}, "checkpoint": {"save_every": 8}}, KillAt(12)),
        "2x2 freeze": ({"deadlines": {"grow_debounce_s": 20, "form_s": 240, "fence_s": 2, "stall_s": 5}}, KillAt(10, signal.SIGSTOP)),
    }
    chosen = sys.argv[1:] or list(scenarios)
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, ray {ray.__version__}", flush=True)
    cluster.connect("local")
    table = []
    for number, name in enumerate(chosen):
        changes, act = scenarios[name]
        job = job_of(folder, f"run{number}", **changes)
        table.append(show(name, job, trial(job, act, hash_it=False), act))
    out = Path(os.environ.get("OUT", "tests/benchmarks/results")) / "gpu_recovery.json"
    out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
