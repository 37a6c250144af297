"""Datasets of rows for the tests of :mod:`elastic.data.rows` and :mod:`elastic.data.readers`.

A reader process imports this file, so it imports little besides torch.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

WORDS = 17
"""Size of the vocabulary of :mod:`tests.support.plain_models`."""


class Classes(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset whose rows have a tensor, a numpy array and a number."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        t = torch.tensor([(i * 3 + k * (1 + i % 5)) % WORDS for k in range(6)])
        return {"t": t, "y": ((t * t + t) % 3).numpy(), "i": i}


class Drawing(Classes):
    """Its rows have noise from torch's default generator, as augmentations do."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return super().__getitem__(i) | {"noise": torch.randn(6)}


class Padded(Classes):
    """Rows of many lengths, which its own function pads to the longest of a batch."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"t": torch.arange(1 + i % 5)}

    @staticmethod
    def collate_fn(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "t": nn.utils.rnn.pad_sequence([row["t"] for row in rows], batch_first=True, padding_value=-1)
        }


class Columns:
    """The documented interface of ``datasets.Dataset`` with the format "torch".  That library is not needed
    here.
    """

    def __init__(self, count: int = 48) -> None:
        rows = [Classes()[i] for i in range(count)]
        self.columns = {
            "t": torch.stack([row["t"] for row in rows]),
            "y": torch.stack([torch.as_tensor(row["y"]) for row in rows]),
        }
        self._fingerprint = "5c1f0d4a8f6b2e97"

    def __len__(self) -> int:
        return len(self.columns["t"])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}


class Batched(Columns):
    """Newer versions of that library also read several rows at once for a DataLoader."""

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        batch = self[keys]
        return [{name: column[place] for name, column in batch.items()} for place in range(len(keys))]


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Classes()[i] for i in range(48))


class Texts(Classes):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"text": f"line {i}"}


def listed() -> list[dict[str, Any]]:
    return list(Stream())


def pairs() -> TensorDataset:
    rows = default_collate(listed())
    return TensorDataset(rows["t"], rows["y"])


here = Classes()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    t, y = (batch["t"], batch["y"]) if "t" in batch else batch.values()
    out = model(t) + 0.1 * batch.get("noise", torch.zeros(6))[..., None]
    return nn.functional.cross_entropy(out.flatten(0, 1).float(), y.flatten(), reduction="sum"), y.numel()


def stream() -> Iterator[dict[str, Any]]:
    yield from listed()


def loader() -> DataLoader[dict[str, Any]]:
    return DataLoader(Classes())


def splits() -> dict[str, Any]:
    return {"train": Classes(), "test": Classes(8)}


def broken() -> Any:
    class Broken(Classes):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"t": 1 // i}

    return Broken()


def numbered() -> Any:
    class Numbered(torch.utils.data.Dataset[int]):
        def __getitem__(self, i: int) -> int:
            return i

    return Numbered()


class Varied(Classes):
    """Its rows have many types, and noise of all generators."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = {
            "torch": torch.rand(3).to(torch.bfloat16),
            "python": random.random(),
            "flag": torch.rand(2) > 0.5,
            "none": torch.zeros(0),
        }
        return super().__getitem__(i) | drawn


class Slow(Classes):
    def __getitem__(self, i: int) -> dict[str, Any]:
        time.sleep(0.02)
        return super().__getitem__(i)


class Deadly(Classes):
    """A row that ends the process which reads it, the first time or each time, and writes down who read."""

    def __init__(self, folder: str, deadly: int = -1, times: int = 1, endless: int = -1) -> None:
        super().__init__()
        self.folder, self.deadly, self.times, self.endless = Path(folder), deadly, times, endless

    def fingerprint(self) -> str:
        return "deadly"

    def __getitem__(self, i: int) -> dict[str, Any]:
        (self.folder / f"pid-{os.getpid()}").touch()
        if i == self.deadly and len([*self.folder.glob("died-*")]) < self.times:
            (self.folder / f"died-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if i == self.endless:
            (self.folder / f"in-{os.getpid()}").touch()
            time.sleep(600)
        return super().__getitem__(i)


def mistaken() -> Any:
    class Mistaken(Classes):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"t": 1 // (i - 5)}

    return Mistaken()
