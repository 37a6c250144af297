"""Sizes of the models whose speed is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """A Llama-type decoder, as the arguments of ``elastic.models.llama``."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128_256
    tied: bool = True

    def arguments(self) -> dict[str, Any]:
        return asdict(self)


SIZES = {
    "1b": Size(2048, 16, 32, 8, 8192),
    "3b": Size(3072, 28, 24, 8, 8192),
    "8b": Size(4096, 32, 32, 8, 14336, tied=False),
    "1b-untied": Size(2048, 16, 32, 8, 8192, tied=False),  # for TorchTitan, whose Llama ties nothing
    "3b-untied": Size(3072, 28, 24, 8, 8192, tied=False),
    "22m": Size(384, 12, 6, 6, 1024, vocab=257),  # its steps are the host's work
    "tiny": Size(64, 2, 4, 2, 128, vocab=257),
    "tiny-untied": Size(64, 2, 4, 2, 128, vocab=257, tied=False),
}
