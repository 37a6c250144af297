"""Runs the command ``elastic`` as its users do: a process of its own, in a folder of its own, with code of
their own.

Every process that it starts, directly or not, has the folder in its environment.  Tests find what is left by
that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray

from actors.living import attach
from actors.view import View
from elastic.job import Job
from tests.support import warm
from tests.support.clusters import NICENESS, TUNED
from tests.support.job_file import to_toml
from tests.support.left import left_of
from tests.support.patience import PATIENCE_S
from tests.support.processes import Ended, frozen, kill_all, wait_gone

ROOT = Path(__file__).resolve().parents[2]
FORK = warm.__file__
"""The program that has a fork do what ``python`` with the arguments after it would do."""
MARK = "STARTED_BY_TEST"


def user_package(folder: Path, package: str, seen: Path | None = None) -> None:
    """Writes a user's own code outside of the repository: a model without a sharding table, a dataset, a loss
    that records what it saw.

    ``<pid>`` in ``seen``, by default a folder beside the package, gets a line for every microbatch: the
    CRC-32 of its tokens, and the bits of the loss.
    """
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[module]  # of another test, which gave its package the same name
    (folder / package).mkdir(parents=True)
    seen = seen or folder / "seen"
    seen.mkdir(exist_ok=True)
    (folder / package / "__init__.py").touch()
    (folder / package / "code.py").write_text(_CODE.replace("SEEN", repr(str(seen))))


_CODE = """
import os, time, zlib
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(dim), nn.Linear(dim, 31), nn.Linear(31, dim)

    def forward(self, x):
        return x + self.back(torch.relu(self.wide(self.norm(x))))

class Net(nn.Module):
    def __init__(self, dim=19):
        super().__init__()
        self.embed = nn.Embedding(29, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, 29)

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens):
        if (tokens == 28).any():
            raise ValueError("this model cannot read the word 28")
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def build(**args):
    return Net(**args)

class Walks:
    def __init__(self, poisoned=-1, read_s=0.0):
        self.poisoned, self.read_s = poisoned, read_s

    def __len__(self):
        return 96

    def read(self, ids):
        time.sleep(self.read_s)
        rows = [[28 if i == self.poisoned else (i + (3 + i // 28) * at) % 28 for at in range(17)] for i in ids]
        return {"tokens": torch.tensor(rows)}

    def fingerprint(self):
        return f"walks-{self.poisoned}"

def loss(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    total = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    if model.training and logits.any():  # else the process tries the loss, or warms up over zeros
        with open(os.path.join(SEEN, str(os.getpid())), "a") as file:
            file.write(f"{zlib.crc32(tokens.numpy().tobytes()):08x} {total.item().hex()}\\n")
    return total, torch.tensor(tokens[:, 1:].numel())
"""


def user_job(folder: Path, package: str, **changes: object) -> Job:
    """Returns a job of that code with 8 microbatches a step, and writes it as ``job.toml``."""
    values = {
        "name": package,
        "bucket": str(folder / "bucket"),
        "model": f"{package}.code:build",
        "loss": f"{package}.code:loss",
        "steps": 16,
        "optim": {"lr": 1e-2},
        "data": {"dataset": f"{package}.code:Walks"},
        "checkpoint": {"save_every": 4},
        # so that the first world has every worker for which there is room
        "deadlines": {"grow_debounce_s": 30},
    }
    job = Job(**(values | changes))  # type: ignore[arg-type]
    (folder / "job.toml").write_text(to_toml(job))
    return job


def seen(folder: Path) -> list[str]:
    """Returns the lines that the user's loss has written, in all processes."""
    return [line for file in sorted((folder / "seen").iterdir()) for line in file.read_text().splitlines()]


class Command:
    """A process ``python -m elastic <arguments>`` in ``folder``, in a session of its own like that of a
    terminal.

    If it is ``warm``, it is a fork of the process that the tests' cluster has its workers from; it gets the
    signals that this one gets.
    """

    def __init__(self, folder: Path, *arguments: str, warm: bool = False, **environment: str) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        ours[NICENESS] = TUNED[NICENESS]  # of the workers of a cluster that it starts
        self.output = folder / f"output-{time.time_ns()}"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *[FORK] * warm, "-m", "elastic", *arguments],
                cwd=folder,
                env={
                    **ours,
                    "PYTHONPATH": str(ROOT),
                    "PYTHONUNBUFFERED": "1",
                    MARK: str(folder),
                    **environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, true: Callable[[], object], deadline_s: float = PATIENCE_S) -> None:
        """Waits for something while the command runs."""
        end = time.monotonic() + deadline_s
        while not true():
            assert self.process.poll() is None, (
                f"the command ended with code {self.process.returncode} before what the test waits for had "
                f"happened:\n{self.text}"
            )
            if time.monotonic() > end:
                self.kill_everything()
                raise AssertionError(
                    f"what the test waits for did not happen within {deadline_s:g} s:\n{self.text}"
                )
            time.sleep(0.005)

    def wait(self, deadline_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill_everything()
            raise AssertionError(f"still running after {deadline_s} s:\n{self.text}") from None

    def interrupt(self) -> None:
        """Sends Ctrl-C: SIGINT to everything in the session's foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill_everything(self) -> list[Ended]:
        """Kills the whole tree of processes by SIGKILL, frozen first so that none can react to the death of
        another.
        """
        watched = frozen(self.process.pid)
        kill_all(watched)
        self.process.wait(PATIENCE_S)
        return wait_gone(watched, PATIENCE_S)


def view_of(name: str) -> View | None:
    """Returns the state of the run ``name``, if it lives in the cluster of this process."""
    coordinator = attach(name)
    try:
        return ray.get(coordinator.view.remote()) if coordinator is not None else None
    except ray.exceptions.RayActorError:
        return None


def assert_no_actor_left(name: str) -> None:
    """Checks that nothing of the run ``name`` is left: no actor in this cluster, and no process, memory,
    segment or log on this machine.
    """
    assert not (left := left_of(name)), left
