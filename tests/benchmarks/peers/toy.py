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


def model() -> nn.Module:
    torch.manual_seed(0)
    made = build(**MODEL)
    made.init_weights()  # type: ignore[operator]
    return made


def optimizer(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def loss(module: nn.Module, data: Sums, step: int, microbatch: int) -> Tensor:
    """Returns the part of one microbatch in the mean loss of a step; reading the microbatch takes ``READ_S``."""
    first = (step * 2 * MICROBATCHES + 2 * microbatch) % len(data)
    total, count = next_token(module, data.read((first, first + 1)))
    return total / count / MICROBATCHES


@dataclass(frozen=True)
class Mark:
    """One line of the log.  ``what`` is "begin", "commit" or, by torchft, "dropped".

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
