"""Small models that do what many models do, and the loop of plain torch with which the engine is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from elastic.data.cursor import Cursor
from elastic.engine import paged
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.checks.trial import compare_with_torch
from elastic.train.gauges.counters import Counters
from elastic.train.session import make_session
from tests.support.row_datasets import WORDS
from tests.support.toys import toy_job

CPU = torch.device("cpu")
WIDTH, STEPS = 6, 4
Batch = dict[str, Tensor]
TWO, HALVES = Layout(2, 1), Layout(1, 2)


class Numbers:
    """Samples with something to learn: whole numbers, and a class for each."""

    def __len__(self) -> int:
        return 48

    def read(self, ids: tuple[int, ...]) -> Batch:
        t = torch.tensor([[(i * 3 + k * (1 + i % 5)) % WORDS for k in range(6)] for i in ids])
        return {"t": t, "y": (t * t + t) % 3}

    def fingerprint(self) -> str:
        return "numbers-1"


class Net(nn.Module):
    """A model with blocks; others change a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def before(self, t: Tensor) -> None:
        """Comes first in the forward pass."""

    def forward(self, t: Tensor) -> Tensor:
        self.before(t)
        x = self.embed(t)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: Batch) -> Any:
    return F.cross_entropy(
        model(batch["t"]).flatten(0, 1).float(), batch["y"].flatten(), reduction="sum"
    ), batch["y"].numel()


class Assigned(Net):
    """A model that gives a parameter other memory in each forward pass, as margin losses do."""

    def before(self, t: Tensor) -> None:
        self.head.weight.data = F.normalize(self.head.weight.data, dim=1)


def job_of(folder: Path, kind: type | Callable[..., Any], **changes: Any) -> Job:
    """Returns a job with the model ``kind``, of the module that has it."""
    values: dict[str, Any] = {
        "model": f"{kind.__module__}:{kind.__name__}",
        "model_args": {},
        "loss": f"{loss.__module__}:loss",
        "data": {"dataset": f"{Numbers.__module__}:Numbers"},
        "global_batch": 12,
        "microbatch": 2,
        "steps": STEPS,
        "optim": {"kind": "sgd", "lr": 0.3, "momentum": 0.5, "weight_decay": 0.0, "clip_norm": 1e9},
        "schedule": {"kind": "constant"},
    }
    return toy_job(folder, **values | changes)


def plainly(
    kind: type[nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], loss: Any = loss
) -> dict[str, Tensor]:
    """Trains in plain torch, and returns the values after the last step."""
    with paged.seeded(0):
        model: Any = kind()
        with torch.no_grad():
            model.init_weights()
    steps, samples, cursor = (
        optimizer([each for each in model.parameters() if each.requires_grad]),
        Numbers(),
        Cursor(48, 12, 0),
    )
    for step in range(1, STEPS + 1):
        steps.zero_grad()
        count = 0
        for index in range(6):
            summed, terms = loss(model, samples.read(cursor.microbatch_ids(step, index, 2)))
            summed.backward()
            count += int(terms)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        steps.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def values_of(job: Job) -> dict[str, Tensor]:
    """Returns the parameters of the exported state of a job's last step."""
    return {
        name.removeprefix("parameter."): value
        for file in (Path(job.bucket) / f"export-{STEPS}").glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [each for each in parameters if (each.dim() >= 2) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999))


ADAMW = {"lr": 1e-2, "betas": [0.9, 0.999], "weight_decay": 0.1, "clip_norm": 1e9}


def tried(job: Job) -> str:
    with counting() as counters, closing(make_session(job, counters)) as session:
        return compare_with_torch(session, CPU)


@contextmanager
def counting() -> Iterator[Counters]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        yield Counters(Path(folder) / "counters", create=True)


BF16 = {"precision": "bf16"}
