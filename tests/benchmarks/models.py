"""Sizes of the models whose speed is measured, and the arithmetic of a token."""

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

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        head = self.dim // self.heads
        block = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * head + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + (1 if self.tied else 2) * self.vocab * self.dim + self.dim

    def flops(self, seq: int, *, half: bool = False) -> float:
        """Floating-point operations of one token in forward and backward (Chowdhery et al. 2022, appendix B).

        ``half`` counts the half of the attention matrix that a causal mask leaves, as Megatron does.
        """
        matrices = self.parameters - (0 if self.tied else self.vocab * self.dim)  # an embedding is looked up
        return 6 * matrices + (6 if half else 12) * self.layers * self.dim * seq


SIZES = {
    "1b": Size(2048, 16, 32, 8, 8192),
    "3b": Size(3072, 28, 24, 8, 8192),
    "8b": Size(4096, 32, 32, 8, 14336, tied=False),
    "1b-untied": Size(2048, 16, 32, 8, 8192, tied=False),  # for TorchTitan, whose Llama ties nothing
    "3b-untied": Size(3072, 28, 24, 8, 8192, tied=False),
    "tiny": Size(64, 2, 4, 2, 128, vocab=257),
    "tiny-untied": Size(64, 2, 4, 2, 128, vocab=257, tied=False),
}
