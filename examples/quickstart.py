"""A language model trains on real text, loses a worker to SIGKILL, takes in a replacement, and ends with the same bits.

    python examples/quickstart.py

It trains one job three times on this machine.  The text is the source code of Python's ``asyncio``; the bucket is a folder.

1. Two workers train undisturbed.
2. One of two workers is killed with SIGKILL.  The other goes on in its process, and a new one joins.
3. The run is stopped half way, and resumed from the bucket with three workers.

All three must end with bit-identical weights and moments.  ``quickstart-out/result.json`` names the exported files, so that
everybody can compute the hashes again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from safetensors import safe_open

from actors.launch import launch
from actors.living import attach
from actors.screen import Screen
from elastic import Job
from elastic.data.prepare import prepare
from elastic.report.recoveries import Recovery, recoveries
from elastic.runs.run import Run
from elastic.train.gauges.counters import Counters, segment

OUT = Path("quickstart-out").absolute()
STEPS = 80


def job(name: str, workers: int = 2) -> Job:
    """Returns the job: a Llama-type decoder of 0.4 M parameters on bytes, 16 samples of 128 tokens a step, in 8 microbatches."""
    return Job(
        name=name,
        bucket=str(OUT / "bucket"),
        model_args={"dim": 96, "layers": 4, "heads": 4, "dropout": 0.1},
        data={"args": {"path": str(OUT / "data"), "seq_len": 128}},
        steps=STEPS,
        global_batch=16,
        microbatch=2,
        optim={"lr": 3e-3},
        schedule={"warmup_steps": 10},
        checkpoint={"save_every": 20},
        workers={"min": 1, "max": workers},
    )


def at_step(run: Job, step: int, act: Callable[[Any, Any], None]) -> None:
    """Calls ``act(coordinator, view)`` in another thread once the run has committed ``step``."""

    def watch() -> None:
        while True:
            coordinator = attach(run.name)
            view = ray.get(coordinator.view.remote()) if coordinator is not None else None
            if view is not None and view.step >= step:
                return act(coordinator, view)
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    print(prepare(Path(sysconfig.get_path("stdlib")) / "asyncio", str(OUT / "data"), (".py",)))
    undisturbed, killed, resumed = job("undisturbed"), job("killed"), job("resumed")

    print("\n=== 1. undisturbed, two workers")
    launch(undisturbed, address="local", show=Screen().show)

    print("\n=== 2. one of two workers is killed on the way; another takes its place")
    killed_at: list[float] = []

    def kill_one(_: Any, view: Any) -> None:
        victim = max(view.workers)
        pid = Counters(segment(view.token, victim), create=False)["pid"]
        killed_at.append(time.time())
        os.kill(pid, signal.SIGKILL)
        print(f"--- SIGKILL to {victim}, process {pid}")

    at_step(killed, STEPS // 5, kill_one)
    launch(killed, show=Screen().show)

    print("\n=== 3. stopped half way, then resumed from the bucket with three workers")
    at_step(resumed, STEPS // 2, lambda coordinator, _: coordinator.stop.remote("the quickstart asks for it"))
    launch(resumed, show=Screen().show)
    resumed = job("resumed", workers=3)
    launch(resumed, show=Screen().show)
    ray.shutdown()
    return report([undisturbed, killed, resumed], killed_at[0])


def report(runs: list[Job], killed_at: float) -> int:
    """Exports the three results, compares their hashes, and shows where the time of the recovery went.  Returns the exit code."""
    exports = {run.name: [str(path) for path in export(run)] for run in runs}
    hashes = {name: state_hash(paths) for name, paths in exports.items()}
    changes = recoveries(Run.open(runs[1]).records())
    print("\n=== where the time went, in seconds")
    for change in changes:
        print(phases(change, killed_at))
    same = len(set(hashes.values())) == 1
    result = {
        "same": same,
        "hashes": hashes,
        "exports": exports,
        "killed_at": killed_at,
        "recoveries": [asdict(c) for c in changes],
    }
    (OUT / "result.json").write_text(json.dumps(result, indent=2))
    print("\n=== sha256 of weights and moments")
    for name, value in hashes.items():
        print(f"{value}  {name}")
    print(
        f"{'bit-identical' if same else 'DIFFERENT'}; recompute them from the files in {OUT / 'result.json'}"
    )
    return 0 if same else 1


def export(run: Job) -> list[Path]:
    """Writes the last checkpoint as plain safetensors files of whole tensors, and returns the files."""
    stored = Run.open(run)
    return stored.checkpoints.export(stored.version_at(STEPS), OUT / "export" / run.name)


def state_hash(paths: list[str]) -> str:
    """Returns a sha256 over all tensors of the files: of each, in the order of their names, its name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        with safe_open(path, "np") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return digest.hexdigest()


def phases(change: Recovery, killed_at: float) -> str:
    """Returns one line: the seconds from the fault, or from the decision to form a world, to the first commit of that world."""
    detect = f"detect {change.known_at - killed_at:.3f}  " if not change.planned else ""
    kind = "loss" if not change.planned else "start" if change.generation == 1 else "growth"
    total = change.committed_at - (change.known_at if change.planned else killed_at)
    return (
        f"generation {change.generation} ({kind}): {detect}decide {change.decide_s:.3f}  "
        f"abort {change.abort_s:.3f}  re-form {change.form_s:.3f}  heal {change.heal_s:.3f}  first step {change.go_s + change.step_s:.3f}  "
        f"= {total:.3f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
