"""The toy job of the recovery benchmark, as plain PyTorch, and the log of its steps.

A Llama of four layers learns the walks of ``tests.support.toys.Sums``: eight microbatches of two samples a
step over all workers, each of which takes 20 ms to read.  A trainer writes one line as it begins a step and
one when the step is committed, with the wall clock.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.models.llama import build
from tests.support.toys import Sums

MODEL: dict[str, Any] = {"vocab": 29, "dim": 32, "layers": 4, "heads": 2, "dropout": 0.1}
MICROBATCHES = 8
READ_S = 0.02
SAVE_EVERY = 10
WORKERS = 2


@dataclass(frozen=True)
class Size:
    """The size of a toy job, and how often it saves."""

    layers: int = MODEL["layers"]
    microbatches: int = MICROBATCHES
    read_s: float = READ_S
    save_every: int = SAVE_EVERY
    steps: float = inf


def model(layers: int = MODEL["layers"]) -> nn.Module:
    torch.manual_seed(0)
    made = build(**MODEL | {"layers": layers})
    made.init_weights()  # type: ignore[operator]
    return made


def optimizer(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def loss(
    module: nn.Module, data: Sums, step: int, microbatch: int, microbatches: int = MICROBATCHES
) -> Tensor:
    """Returns the part of one microbatch in the mean loss of a step; reading it takes ``data.read_s``."""
    first = (step * 2 * microbatches + 2 * microbatch) % len(data)
    total, count = next_token(module, data.read((first, first + 1)))
    return total / count / microbatches


@dataclass(frozen=True)
class Mark:
    """One line of the log.  ``what`` is "begin", "commit" or, by torchft, "dropped"; a worker of Ray Train
    writes "joined" first.

    ``epoch`` grows with every change of the world; it is 0 where it is not known yet.
    """

    at: float
    what: str
    step: int
    epoch: int
    world: int
    rank: int
    pid: int
    node: str = ""


class StepLog:
    """One file a process; readers take whole lines only."""

    def __init__(self, folder: str | Path, rank: int, node: str = "") -> None:
        self.rank, self.node = rank, node
        self.descriptor = os.open(
            Path(folder) / f"{os.getpid()}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def write(self, what: str, step: int, epoch: int, world: int) -> None:
        mark = Mark(time.time(), what, step, epoch, world, self.rank, os.getpid(), self.node)
        os.write(self.descriptor, (json.dumps(asdict(mark)) + "\n").encode())


def read_marks(folder: str | Path) -> list[Mark]:
    """Returns the marks of all processes, ordered by time."""
    found = []
    for path in Path(folder).glob("*.steps"):
        whole, _, _ = path.read_text().rpartition("\n")
        found += [Mark(**json.loads(line)) for line in whole.splitlines()]
    return sorted(found, key=lambda mark: mark.at)
