"""Trains one model on real text twice: undisturbed, and with all that goes wrong in a month, which nobody
mends.

    python -m tests.benchmarks.unattended --text FOLDER [--steps 1200] [--world 2] [--only clean unattended
    control]

The second run meets a bad shard (a stretch of the text that is noise), samples whose loss is not a number,
samples whose gradient is 10,000 times too large, and ten workers that get SIGKILL.  It has ``spikes.action =
"quarantine"`` and ``spikes.microbatch_z``.  The third run, the control, meets the same with ``"none"``.  All
else is equal.  All end with the loss on the same held-out documents.

No run clips its gradient.  Clipping bounds what one huge gradient does to the weights, with or without a
quarantine, so with it nothing would tell the two apart.  ``--clip 1`` shows that.

The samples that are not noise are drawn from those that are read first when the window of ``[spikes]`` is
full, because before that no step is a spike.  In a run of a month the window is a moment; here it is a tenth
of the steps.

Exits with 1 unless the second run ends within 1 % of the first, and the control does not.
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
from actors.launch import launch
from actors.living import attach
from elastic.data.cursor import Cursor
from elastic.data.prepare import prepare
from elastic.data.tokens import TokenDataset
from elastic.engine.loss import next_token
from elastic.job import Job
from elastic.report.story import Line, Scored, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.gauges.counters import Counters, segment
from tests.benchmarks.gpu_recovery import start as begin

NEAR = 0.01
"""Largest part of the clean loss by which the loss of the disturbed run may differ."""
KILLS = 10
THROWN, BROKEN, NOISE = 1e4, float("nan"), 0.0
"""The factors of the losses of bad samples, in place of 1; a sample of the bad shard is noise, and multiplies
it with 1.
"""
SHARDS = 256
"""Number of shards of the text, of which one is bad."""
DOCUMENT = 4_000
"""Least number of characters of a document.  Poems and plays are cut into such pieces, so that the held-out
ones are like the others.
"""
WINDOW = 64
"""Steps with which a step is compared."""
MODEL = {"dim": 384, "layers": 12, "heads": 6, "hidden": 1024}
SEED = 11
RUNS = ("clean", "unattended", "control")


class Rough(TokenDataset):
    """A dataset of tokens, of which ``harm`` says by sample what is wrong with it, as text: JSON knows no
    NaN.
    """

    def __init__(self, harm: dict[str, str] | None = None, **args: Any) -> None:
        super().__init__(**args)
        self.harm = {int(sample): float(what) for sample, what in (harm or {}).items()}

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        batch = super().read(ids)
        for row, sample in enumerate(ids):
            if self.harm.get(sample) == NOISE:
                draw = torch.Generator().manual_seed(sample)
                batch["tokens"][row] = torch.randint(
                    self.vocabulary, batch["tokens"][row].shape, generator=draw
                )
        gains = [self.harm.get(sample, 1.0) or 1.0 for sample in ids]
        return {**batch, "gain": torch.tensor(gains)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross-entropy, times the gain in the microbatch that is farthest from 1, of which NaN is the
    farthest.
    """
    found, count = next_token(model, {"tokens": batch["tokens"]})
    return found * batch["gain"].max(), count


def documents_of(text: Path, destination: Path) -> Path:
    """Writes the text below the folder ``text``, cut at ends of lines into documents, as JSON lines."""
    with destination.open("w") as out:
        for path in sorted(text.rglob("*.txt")):
            piece = ""
            for line in path.read_text(errors="replace").splitlines(keepends=True):
                piece += line
                if len(piece) >= DOCUMENT:
                    out.write(json.dumps({"text": piece}) + "\n")
                    piece = ""
            out.write(json.dumps({"text": piece}) + "\n" if piece.strip() else "")
    return destination


def harm_of(job: Job, samples: int, draw: random.Random) -> dict[str, str]:
    """Returns a bad shard, two samples without a number, and four with a gradient that is far too large."""
    first = draw.randrange(samples // 2)
    shard = range(first, first + max(samples // SHARDS, 1))
    cursor = Cursor.of(job.stretches(), samples)
    early = {sample for step in range(1, WINDOW + 1) for sample in cursor.ids(step)}
    later = {sample for step in range(WINDOW + 1, job.steps) for sample in cursor.ids(step)}
    others = draw.sample(sorted(later - early - {*shard}), 6)
    found = {str(sample): str(NOISE) for sample in shard}
    return found | {
        str(sample): str(BROKEN if number < 2 else THROWN) for number, sample in enumerate(others)
    }


def kill(name: str, draw: random.Random, killed: list[str]) -> None:
    """Sends SIGKILL to a worker of the run, and adds its name to ``killed``."""
    view = ray.get(attach(name).view.remote())  # type: ignore[union-attr]
    victim = draw.choice(sorted(view.workers))
    with suppress(ProcessLookupError, FileNotFoundError):  # it is being replaced
        os.kill(Counters(segment(view.token, victim), create=False)["pid"], signal.SIGKILL)
        killed.append(str(victim))
        print(f"--- SIGKILL to {victim}", file=sys.stderr, flush=True)


def job_of(folder: Path, name: str, options: argparse.Namespace, **changes: Any) -> Job:
    gpus = int(torch.cuda.is_available())
    seq = 256 if gpus else 64
    values: dict[str, Any] = {
        "name": name,
        "bucket": str(folder / "bucket"),
        "model_args": MODEL if gpus or options.whole else {"dim": 64, "layers": 2, "heads": 2},
        "loss": "tests.benchmarks.unattended:loss",
        "data": {
            "dataset": "tests.benchmarks.unattended:Rough",
            "args": {"path": str(folder / "tokens"), "seq_len": seq},
        },
        "validation": {
            "every": options.steps,
            "dataset": "tests.benchmarks.unattended:Rough",
            "args": {"path": str(folder / "tokens" / "held-out"), "seq_len": seq},
        },
        "steps": options.steps,
        "global_batch": 32,
        # the time of the host for one hardly depends on its size, and a GPU waits for it
        "microbatch": 8 if gpus else 4,
        "precision": "bf16" if gpus else "fp32",
        "optim": {"lr": 1e-3, "clip_norm": options.clip},
        "schedule": {"warmup_steps": options.steps // 12},
        "spikes": {"action": "quarantine", "window": WINDOW, "microbatch_z": 6.0},
        "checkpoint": {"save_every": max(options.steps // 6, 1)},
        "workers": {"min": 1, "max": options.world, "gpus": gpus, "cpus": 1},
        "deadlines": {"form_s": 240},
    }
    return Job(**(values | changes))


def start(world: int) -> None:
    """Starts Ray; if there are fewer GPUs than workers, on as many nodes as workers, since NCCL has no two
    ranks of a host on one GPU.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        return cluster.connect("local")
    begin(1 if world <= gpus else world, [rank % gpus for rank in range(world)])


def train(job: Job, kills: Sequence[int] = ()) -> dict[str, Any]:
    """Trains to the end, kills a worker after each step of ``kills``, and returns what came out."""
    steps, scored, killed, due, draw = (
        list[StepLine](),
        list[Scored](),
        list[str](),
        [*kills],
        random.Random(SEED),
    )

    def show(line: Line) -> None:
        if isinstance(line, StepLine):
            steps.append(line)
            if due and line.step >= due[0]:
                due.pop(0)
                threading.Thread(target=kill, args=(job.name, draw, killed)).start()
        elif isinstance(line, Sentence):
            print(
                f"{time.strftime('%H:%M:%S', time.localtime(line.at))} {line.text[:200]}",
                file=sys.stderr,
                flush=True,
            )
        if isinstance(line, Scored):
            scored.append(line)

    began = time.time()
    result = launch(job, show=show)
    skips = Run.find(job).state().skips
    generations = len({line.generation for line in steps})
    row = {
        "state": result.state,
        "seconds": round(time.time() - began, 1),
        "kills": len(killed),
        "worlds": generations,
        "skipped": skips.total,
    }
    return row | {
        "quarantined": len(skips.quarantined),
        "validation": scored[-1].loss if scored else math.nan,
        "steps": len(steps),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train undisturbed, and with all that goes wrong.")
    parser.add_argument("--text", type=Path, required=True, help="a folder of texts")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument(
        "--whole", action="store_true", help="the model of 22 M parameters, also without a GPU"
    )
    parser.add_argument(
        "--clip", type=float, default=1e9, help="optim.clip_norm; the default is larger than any norm"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=RUNS,
        default=RUNS,
        help="the runs to do, if all take too long for one command",
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    folder = Path(mkdtemp(prefix="unattended-"))
    text = documents_of(options.text, folder / "documents.jsonl")
    print(prepare(text, str(folder / "tokens"), held_out=0.05, unique=True), file=sys.stderr)
    start(options.world)
    clean = job_of(folder, "clean", options)
    samples, draw = len(TokenDataset(**clean.data.args)), random.Random(SEED)
    data = {"dataset": clean.data.dataset, "args": {**clean.data.args, "harm": harm_of(clean, samples, draw)}}
    kills = sorted(draw.sample(range(options.steps // 10, options.steps - 1), KILLS))
    jobs = {
        "clean": (clean, []),
        "unattended": (job_of(folder, "unattended", options, data=data), kills),
        "control": (job_of(folder, "control", options, data=data, spikes={"action": "none"}), kills),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name in options.only:
        rows[name] = train(*jobs[name])
        print(said := json.dumps({"name": name, "samples": samples, **rows[name]}), flush=True)
        with (options.out / "unattended.jsonl").open("a") as out:
            out.write(said + "\n")
    if {*rows} != {*RUNS}:
        return 0
    best = rows["clean"]["validation"]
    apart = {name: row["validation"] / best - 1 for name, row in rows.items()}
    wrong = [name for name, row in rows.items() if row["state"] != "Finished"]
    good = not wrong and abs(apart["unattended"]) <= NEAR < abs(apart["control"])
    print(
        f"above the clean loss of {best:.4f}: unattended {apart['unattended']:.2%}, the control "
        f"{apart['control']:.2%}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
