"""Trains one model on real text twice: undisturbed, and with all that goes wrong in a month, which nobody mends.

    python -m tests.benchmarks.unattended --text FOLDER [--steps 600] [--world 2]

The second run meets a bad shard (a stretch of samples that are noise), samples whose loss is not a number, samples whose gradient would
throw the weights away, and ten workers that get SIGKILL.  It has ``spikes.action = "quarantine"``.  Both end with
the loss on the same held-out documents.  A third run, the control, meets the same and only warns.

Exits with 1 unless the second ends within 1 % of the first, and the control does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
import torch
from torch import Tensor, nn

from actors import cluster
from actors.launch import attach, launch
from elastic.data.prepare import prepare
from elastic.data.tokens import TokenDataset
from elastic.engine.loss import next_token
from elastic.job import Job
from elastic.report.story import Line, Scored, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.counters import Counters, segment

NEAR = 0.01
"""Largest part of the clean loss by which the loss of the disturbed run may differ."""
KILLS = 10
THROWN, BROKEN, NOISE = 1e4, float("nan"), 0.0
"""The factors of the losses of bad samples, in place of 1; a sample of the bad shard is noise, and multiplies it with 1."""
MODEL = {"dim": 384, "layers": 12, "heads": 6, "hidden": 1024}
SEED = 11


class Rough(TokenDataset):
    """A dataset of tokens, of which ``harm`` says by sample what is wrong with it, as text: JSON knows no NaN."""

    def __init__(self, harm: dict[str, str] | None = None, **args: Any) -> None:
        super().__init__(**args)
        self.harm = {int(sample): float(what) for sample, what in (harm or {}).items()}

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        batch = super().read(ids)
        for row, sample in enumerate(ids):
            if self.harm.get(sample) == NOISE:
                draw = torch.Generator().manual_seed(sample)
                batch["tokens"][row] = torch.randint(self.vocabulary, batch["tokens"][row].shape, generator=draw)
        gains = [self.harm.get(sample, 1.0) or 1.0 for sample in ids]
        return {**batch, "gain": torch.tensor(gains)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross-entropy, times the gain in the microbatch that is farthest from 1, of which NaN is the farthest."""
    found, count = next_token(model, {"tokens": batch["tokens"]})
    return found * batch["gain"].max(), count


def harm_of(samples: int, draw: random.Random) -> dict[str, str]:
    """Returns a bad shard of a hundredth of the samples, two samples without a number, and four that would throw the weights away."""
    first = draw.randrange(samples // 2)
    shard = range(first, first + max(samples // 100, 1))
    others = draw.sample([sample for sample in range(samples) if sample not in shard], 6)
    found = {str(sample): str(NOISE) for sample in shard}
    return found | {str(sample): str(BROKEN if number < 2 else THROWN) for number, sample in enumerate(others)}


def kill(name: str, draw: random.Random) -> None:
    """Sends SIGKILL to a worker of the run."""
    view = ray.get(attach(name).view.remote())  # type: ignore[union-attr]
    victim = draw.choice(sorted(view.workers))
    with suppress(ProcessLookupError, FileNotFoundError):  # it is being replaced
        os.kill(Counters(segment(view.token, victim), create=False)["pid"], signal.SIGKILL)
        print(f"--- SIGKILL to {victim}", file=sys.stderr, flush=True)


def job_of(folder: Path, name: str, options: argparse.Namespace, **changes: Any) -> Job:
    gpus = int(torch.cuda.is_available())
    seq = 256 if gpus else 64
    values: dict[str, Any] = {
        "name": name,
        "bucket": str(folder / "bucket"),
        "model_args": MODEL if gpus or options.whole else {"dim": 64, "layers": 2, "heads": 2},
        "loss": "tests.benchmarks.unattended:loss",
        "data": {"dataset": "tests.benchmarks.unattended:Rough", "args": {"path": str(folder / "tokens"), "seq_len": seq}},
        "validation": {
            "every": options.steps,
            "samples": 256,
            "dataset": "tests.benchmarks.unattended:Rough",
            "args": {"path": str(folder / "tokens" / "held-out"), "seq_len": seq},
        },
        "steps": options.steps,
        "global_batch": 32,
        "microbatch": 4,
        "precision": "bf16" if gpus else "fp32",
        "optim": {"lr": 1e-3},
        "schedule": {"warmup_steps": options.steps // 12},
        "spikes": {"action": "quarantine", "window": 64, "z": 8.0},
        "checkpoint": {"save_every": max(options.steps // 6, 1)},
        "workers": {"min": 1, "max": options.world, "gpus": 1 / options.world if gpus else 0, "cpus": 1},
        "deadlines": {"form_s": 240},
    }
    return Job(**(values | changes))


def train(job: Job, kills: Sequence[int] = ()) -> dict[str, Any]:
    """Trains to the end, kills a worker after each step of ``kills``, and returns what came out."""
    steps, scored, due, draw = list[StepLine](), list[Scored](), [*kills], random.Random(SEED)

    def show(line: Line) -> None:
        if isinstance(line, StepLine):
            steps.append(line)
            if due and line.step >= due[0]:
                due.pop(0)
                threading.Thread(target=kill, args=(job.name, draw)).start()
        elif isinstance(line, Sentence):
            print(f"{time.strftime('%H:%M:%S', time.localtime(line.at))} {line.text[:200]}", file=sys.stderr, flush=True)
        if isinstance(line, Scored):
            scored.append(line)

    began = time.time()
    result = launch(job, show=show)
    skips = Run.find(job).standing(0, 0.0).skips
    generations = len({line.generation for line in steps})
    row = {"state": result.state, "seconds": round(time.time() - began, 1), "worlds": generations, "skipped": skips.total}
    return row | {"quarantined": len(skips.quarantined), "validation": scored[-1].loss if scored else math.nan, "steps": len(steps)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train undisturbed, and with all that goes wrong.")
    parser.add_argument("--text", type=Path, required=True, help="a folder of texts")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="the model of 22 M parameters, also without a GPU")
    options = parser.parse_args()
    folder = Path(mkdtemp(prefix="unattended-"))
    print(prepare(options.text, str(folder / "tokens"), (".txt",), held_out=0.05), file=sys.stderr)
    cluster.connect("local")
    clean = job_of(folder, "clean", options)
    samples = len(TokenDataset(**clean.data.args))
    draw = random.Random(SEED)
    data = {"dataset": clean.data.dataset, "args": {**clean.data.args, "harm": harm_of(samples, draw)}}
    kills = sorted(draw.sample(range(options.steps // 10, options.steps - 1), KILLS))
    warned = {"spikes": {"action": "warn", "window": 64, "z": 8.0}}
    rows = {
        "clean": train(clean),
        "unattended": train(job_of(folder, "unattended", options, data=data), kills),
        "control": train(job_of(folder, "control", options, data=data, **warned), kills),
    }
    for name, row in rows.items():
        print(json.dumps({"name": name, **row}))
    best = rows["clean"]["validation"]
    apart = {name: abs(row["validation"] / best - 1) for name, row in rows.items()}
    wrong = [name for name, row in rows.items() if row["state"] != "Finished"]
    good = not wrong and apart["unattended"] <= NEAR and not apart["control"] <= NEAR
    print(f"{samples} samples; from the clean loss of {best:.4f}: unattended {apart['unattended']:.2%}, the control {apart['control']:.2%}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
