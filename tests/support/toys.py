"""Small jobs that train in seconds and still learn: a dataset with structure, a model of the user's own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from elastic.data.tokens import TokenDataset
from elastic.job import Job
from tests.support.patience import PATIENCE_S


def pass_gate(gates: Mapping[int, Path], sample: int) -> None:
    """Returns once the gate of ``sample``, if it has one, is open."""
    until = time.monotonic() + PATIENCE_S
    while sample in gates and not gates[sample].exists():
        if time.monotonic() > until:
            raise TimeoutError(f"the gate {gates[sample]} was not opened within {PATIENCE_S} s")
        time.sleep(0.005)


class Sums:
    """A dataset with something to learn: sample i walks through the vocabulary from word i, five words on
    after each multiple of seven, else three.

    ``masked``: every third sample ends in masked targets, so microbatches differ in their number of valid
    tokens. ``gates``: samples that cannot be read before their file exists, so that a test can hold the run
    at an exact step.
    """

    def __init__(
        self,
        samples: int = 64,
        seq_len: int = 16,
        vocab: int = 29,
        masked: bool = True,
        read_s: float = 0.0,
        gates: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.samples, self.seq_len, self.vocab, self.masked, self.read_s = (
            samples,
            seq_len,
            vocab,
            masked,
            read_s,
        )
        self.gates = {int(sample): Path(path) for sample, path in gates.items()}

    def __len__(self) -> int:
        return self.samples

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        time.sleep(self.read_s)  # a slow disk: paces a run without taking a core
        rows = []
        for i in ids:
            pass_gate(self.gates, i)
            row = [i % self.vocab]
            while len(row) <= self.seq_len:
                row.append((row[-1] + (5 if row[-1] % 7 == 0 else 3)) % self.vocab)
            if self.masked and i % 3 == 0:
                row[-(1 + i % 7) :] = [-1] * (1 + i % 7)
            rows.append(row)
        return {"tokens": torch.tensor(rows, dtype=torch.int64)}

    def fingerprint(self) -> str:
        return f"sums-{self.samples}-{self.seq_len}-{self.vocab}-{self.masked}"


class Ragged(Sums):
    """Samples of many lengths, which it tells; they are padded with -1 to the longest of a microbatch."""

    def lengths(self, ids: tuple[int, ...]) -> list[int]:
        return [4 + 5 * i % (self.seq_len - 3) for i in ids]

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        sizes = torch.tensor(self.lengths(ids))
        tokens = super().read(ids)["tokens"][:, : int(sizes.max())]
        return {"tokens": tokens.masked_fill(torch.arange(tokens.shape[1]) >= sizes[:, None], -1)}

    def fingerprint(self) -> str:
        return f"ragged-{super().fingerprint()}"


class Packed(TokenDataset):
    """A prepared dataset of just so many ``samples``, with gates, as those of :class:`Sums`."""

    def __init__(self, samples: int, gates: Mapping[str, str] = MappingProxyType({}), **args: Any) -> None:
        super().__init__(**args)
        self.gates = {int(sample): Path(path) for sample, path in gates.items()}
        assert len(self) == samples, "the gates are of other samples"

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        for sample in ids:
            pass_gate(self.gates, sample)
        return super().read(ids)


class Paced(Sums):
    """A slow dataset, so that faults find a run that has not ended.  It is slow until ``calm`` exists."""

    def __init__(self, calm: str, pace_s: float, **args: Any) -> None:
        super().__init__(**args)
        self.calm, self.pace_s = Path(calm), pace_s

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        if not self.calm.exists():
            time.sleep(self.pace_s)
        return super().read(ids)


class Held(Sums):
    """A dataset that cannot be opened while ``hold`` exists, so a test can hold workers between their making
    and their joining.
    """

    def __init__(self, hold: str, **args: Any) -> None:
        super().__init__(**args)
        if Path(hold).exists():
            time.sleep(PATIENCE_S)


class Late(Sums):
    """A dataset whose first reader of ``sample`` needs ``late_s``.

    ``mark`` then holds the pid of that reader, so the next one is not the first.
    """

    def __init__(self, sample: int, late_s: float, mark: str, **args: Any) -> None:
        super().__init__(**args)
        self.sample, self.late_s, self.mark = sample, late_s, Path(mark)

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        if self.sample in ids:
            with suppress(FileExistsError):
                with self.mark.open("x") as mark:
                    mark.write(str(os.getpid()))
                time.sleep(self.late_s)
        return super().read(ids)


class Own(nn.Module):
    """A user's own model: no sharding table, odd sizes, a bias, uneven shards at every degree, a buffer that
    is not saved.
    """

    def __init__(self, vocab: int = 29, dim: int = 19, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(layers)
        )
        self.mix = nn.Linear(dim, dim)
        # a table, as rotary embeddings have one
        self.register_buffer("scale", torch.linspace(0.9, 1.1, dim), persistent=False)
        self.head = nn.Linear(dim, vocab)

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale.to(self.embed.weight.dtype)
        previous = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        x = x + self.mix(previous)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def own(**args: Any) -> nn.Module:
    return Own(**args)


class Residual(nn.Module):
    """A block that normalises each feature over a microbatch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # a norm after a bias leaves it no gradient
        self.norm, self.mix = nn.BatchNorm1d(dim), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(torch.relu(self.norm(x.flatten(0, 1)))).view(x.shape)


class BatchNormed(Own):
    """A model with running statistics: in blocks, and in a norm of images that averages over all microbatches
    so far.
    """

    def __init__(self, layers: int = 2, **args: Any) -> None:
        super().__init__(layers=layers, **args)
        dim = self.mix.in_features
        del self.mix
        self.layers = nn.ModuleList(Residual(dim) for _ in range(layers))
        self.image = nn.BatchNorm2d(dim, momentum=None, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale.to(self.embed.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.image(x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2))


def batch_normed(**args: Any) -> nn.Module:
    return BatchNormed(**args)


SMALL: Mapping[str, Any] = {
    "model_args": {"vocab": 29, "dim": 16, "layers": 2, "heads": 2, "dropout": 0.1},
    "global_batch": 8,
}
"""Changes of :func:`toy_job` for a smaller model and half of the microbatches."""
LIGHT: Mapping[str, Any] = {
    "model_args": {"vocab": 29, "dim": 32, "layers": 2, "heads": 2, "dropout": 0.1},
    "microbatch": 4,
}
"""Settings of :func:`toy_job` with which a step takes a third of the time of the processor: two layers, and 4
microbatches a step.
"""
TINY: Mapping[str, Any] = {
    "model_args": {"vocab": 29, "dim": 16, "layers": 1, "heads": 2, "dropout": 0.1},
    "microbatch": 8,
}
"""Settings of :func:`toy_job` for tests of what is around the training, in which a step takes a tenth of the
time of the processor.
"""


def toy_job(bucket: Path | str, **changes: Any) -> Job:
    """Returns a job that learns: a 29-word vocabulary, 8 microbatches of 2 a step."""
    values: dict[str, Any] = {
        "name": "toy",
        "bucket": str(bucket),
        "model_args": {"vocab": 29, "dim": 32, "layers": 4, "heads": 2, "dropout": 0.1},
        "steps": 12,
        "global_batch": 16,
        "microbatch": 2,
        "data": {"dataset": "tests.support.toys:Sums"},
        "optim": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"save_every": 1000},
        # so that the first world has every worker for which there is room, however busy the machine
        "deadlines": {"grow_debounce_s": 30},
    }
    return Job(**(values | changes))


def small_job(bucket: Path | str, **changes: Any) -> Job:
    """Returns :func:`toy_job` with the changes of :data:`SMALL`, and others: the job of tests of the engine."""
    return toy_job(bucket, **{**SMALL, **changes})
