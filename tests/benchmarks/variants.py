"""Trains one Llama of 100 M parameters on 20 M bytes of real English text in many ways, and plots the losses.

    python -m tests.benchmarks.variants --text FOLDER [--world 2] [--out FOLDER] [NAME ...]
    python -m tests.benchmarks.variants --draw FILE ...                              # the figure of some results

NAME is one of ``fp32``, ``bf16``, ``free`` (bf16 that rounds in another order, to see how far apart two runs
end), ``fp16``, ``fp8``; ``frozen`` (fp8 with one scale for all tensors, which must be wrong); ``zero-0`` to
``zero-3``; ``offload``; and the optimizers ``adam``, ``sgd``, ``adagrad``, ``rmsprop`` and ``muon``.  If
there are fewer GPUs than ``--world``, workers share them.  Several of these programs may run at once, with
other names. All begin with the same weights and see the same samples.  Exits with 1 if stages of ZeRO or
offloading gave other bits than the first of them, if fp8 ended more than 1 % from bf16, or if ``frozen`` did
not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

from actors.launch import launch
from elastic.data.prepare import prepare
from elastic.engine import fp8, fp8_weights
from elastic.job import Job
from elastic.models import llama
from elastic.report.story import Line, Sentence, StepLine
from tests.benchmarks.unattended import start

ONE_SCALE = 2.0**-6
"""The scale of every tensor of ``frozen``: weights of 0.02 become numbers that E4M3 does not have."""
LAST = 20
"""Number of steps at the end whose mean loss is compared."""
MODEL = {"dim": 768, "layers": 14, "heads": 12, "hidden": 2048}
SEQ = 1024
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {},
    "free": {"reproducible": False},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "frozen": {"precision": "fp8", "model": "tests.benchmarks.variants:frozen"},
    "zero-0": {"parallel": {"zero": 0}},
    "zero-1": {"parallel": {"zero": 1}},
    "zero-2": {"parallel": {"zero": 2}},
    "zero-3": {"parallel": {"zero": 3}},
    "offload": {"offload": "optimizer", "parallel": {"zero": 2}},
    "adam": {"optim": {"lr": 6e-4, "decay": "l2", "weight_decay": 0.01}},
    "sgd": {"optim": {"kind": "sgd", "lr": 0.3, "weight_decay": 1e-4}},
    "adagrad": {"optim": {"kind": "adagrad", "lr": 5e-3, "weight_decay": 0.01}},
    "rmsprop": {"optim": {"kind": "rmsprop", "lr": 3e-4, "weight_decay": 0.01}},
    "muon": {"optim": {"kind": "muon", "lr": 6e-4, "momentum": 0.95}},
}
SAME_BITS = ("bf16", "zero-0", "zero-1", "zero-2", "zero-3", "offload")
FIGURES = {
    "number formats": ("fp32", "bf16", "free", "fp16", "fp8", "frozen"),
    "stages of ZeRO and offloaded state": SAME_BITS,
    "optimizers": ("bf16", "adam", "sgd", "adagrad", "rmsprop", "muon"),
}


def frozen(**args: Any) -> nn.Module:
    """Returns the model of a worker whose scales of fp8 are all the same."""

    for module in (fp8, fp8_weights):
        module.power_of = lambda largest, _: torch.full_like(largest, ONE_SCALE)  # type: ignore[attr-defined]
    return llama.build(**args)


def job_of(folder: Path, name: str, options: argparse.Namespace) -> Job:
    gpus = int(torch.cuda.is_available())
    values: dict[str, Any] = {
        "name": name,
        "bucket": str(folder / "bucket"),
        "model_args": MODEL if gpus else {"dim": 64, "layers": 2, "heads": 2},
        "data": {"args": {"path": str(folder / "tokens"), "seq_len": SEQ if gpus else 64}},
        "steps": options.steps,
        "global_batch": 64,
        "microbatch": 16,
        "precision": "bf16",
        "compile": bool(gpus),
        "optim": {"lr": 6e-4},
        "schedule": {"warmup_steps": 30},
        "checkpoint": {"save_every": 10_000},
        "copies": {"copy_every": 1, "buddy_every": 0},
        "workers": {"min": options.world, "max": options.world, "gpus": gpus, "cpus": 1},
        "deadlines": {"form_s": 240},
    }
    return Job(**(values | VARIANTS[name]))


def train(job: Job) -> dict[str, Any]:
    steps: list[StepLine] = []

    def show(line: Line) -> None:
        if isinstance(line, StepLine):
            steps.append(line)
            if line.step % 20 == 1:
                print(
                    f"{time.time() - began:8.1f} s  {job.name}: step {line.step}, loss {line.loss:.4f}",
                    file=sys.stderr,
                    flush=True,
                )
        elif isinstance(line, Sentence):
            print(f"{time.time() - began:8.1f} s  {job.name}: {line.text[:300]}", file=sys.stderr, flush=True)

    began = time.time()
    result = launch(job, show=show)
    losses = [line.loss for line in steps]
    if result.state != "Finished":
        return {"failed": str(result.state)}
    return {"seconds": round(time.time() - began, 1), "last": statistics.mean(losses[-LAST:]), "loss": losses}


def check(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Returns what is wrong."""
    wrong = [f"{name} failed: {row['failed']}" for name, row in rows.items() if "failed" in row]
    rows = {name: row for name, row in rows.items() if "failed" not in row}
    same = [name for name in SAME_BITS if name in rows]
    wrong += [
        f"{name} differs from {same[0]}" for name in same[1:] if rows[name]["loss"] != rows[same[0]]["loss"]
    ]
    if "bf16" in rows:
        apart = {
            name: abs(rows[name]["last"] / rows["bf16"]["last"] - 1)
            for name in ("fp8", "frozen")
            if name in rows
        }
        wrong += [
            f"{name} ends {far:.2%} from bf16"
            for name, far in apart.items()
            if (far <= 0.01) is (name == "frozen")
        ]
    return wrong


def draw(rows: dict[str, dict[str, Any]], about: str, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.8), dpi=120, sharey=True)
    for place, (title, names) in zip(axes, FIGURES.items(), strict=True):
        for number, name in enumerate(name for name in names if "loss" in rows.get(name, {})):
            losses = rows[name]["loss"]
            smooth = [statistics.mean(losses[max(0, at - 9) : at + 1]) for at in range(len(losses))]
            place.plot(
                range(1, len(smooth) + 1),
                smooth,
                linewidth=6 - number if names is SAME_BITS else 1.3,
                label=name,
                alpha=0.9,
            )
        place.set_title(title)
        place.set_xlabel("step")
        place.grid(alpha=0.25)
        place.legend()
    axes[0].set_ylabel("loss, nats a byte (mean of ten steps)")
    axes[0].set_ylim(0.9, 3.2)
    figure.suptitle(about)
    figure.tight_layout()
    figure.savefig(target)


def main() -> int:
    """Returns 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(VARIANTS)}; or files with --draw")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--steps", type=int, default=306, help="65,536 tokens each")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    )
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.draw:
        found = [json.loads(Path(name).read_text()) for name in options.names]
        rows = {name: {"world": each["world"]} | row for each in found for name, row in each["rows"].items()}
        (options.out / "variants.json").write_text(
            json.dumps({"about": found[0]["about"], "rows": rows}) + "\n"
        )
        draw(rows, found[0]["about"], options.out / "variants.png")
    else:
        folder, rows = Path(mkdtemp()), {}
        summary = prepare(options.text, str(folder / "tokens"))
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        made = f"{card}, torch {torch.__version__}, {date.today()} {commit}"
        about = f"Llama, 99.5 M parameters, {summary.made.tokens / 1e6:.1f} M bytes of text; {made}"
        start(options.world)
        for name in options.names:
            rows[name] = train(job_of(folder, name, options))
            print(
                (
                    f"{name:8} {rows[name].get('last', rows[name].get('failed'))} "
                    f"{rows[name].get('seconds', '')}"
                ),
                flush=True,
            )
            said = {"about": about, "world": options.world, "rows": rows}
            (options.out / f"variants-{options.world}-{options.names[0]}.json").write_text(
                json.dumps(said) + "\n"
            )
    for name, row in rows.items():
        print(f"| {name} | {row.get('last', float('nan')):.4f} |")
    wrong = check(rows)
    print("\n".join(wrong) or "nothing is wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
