"""GPT-2 (Radford and others 2019): learned positions, LayerNorm before each part, GELU, biases.

With ``norm = "post"`` each part is normalised together with its input, as in the first Transformer (Vaswani
and others 2017, section 3.1) and in GPT (Radford and others 2018).

It is written for one device, as ``llama.py`` is; ``sharding()`` says how it may be cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.kernels.attention import Kernel, Mask, attention_mask, causal_attention, positions_of
from elastic.kernels.cross_entropy import cross_entropy
from elastic.models.flops import matrix_parameters
from elastic.models.spec import Equivalent, Fused, ShardingTable, with_preset


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, dim] -> [batch, seq, dim]."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        q, k, v = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=2)
        )
        found = causal_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One decoder block: attention and feed-forward, each added to its input.  [batch, seq, dim] -> the same
    shape.

    The norm is before each part, or after the sum if ``post``.
    """

    def __init__(self, dim: int, heads: int, dropout: float, post: bool) -> None:
        super().__init__()
        self.post = post
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if self.post:
            x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
            return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT2(nn.Module):
    """The decoder: tokens, int64 [batch, seq] -> logits [batch, seq, vocab]; with targets, the sum of their
    cross-entropies.

    ``documents`` and the three names below are as in :class:`elastic.models.llama.Llama`.
    """

    fuses_loss = False
    attends = attends_in_documents = Kernel.TORCH

    def __init__(
        self,
        vocab: int = 257,
        dim: int = 128,
        layers: int = 4,
        heads: int = 4,
        length: int = 1024,
        dropout: float = 0.0,
        norm: str = "pre",
    ) -> None:
        """``length`` is the longest sequence.  ``norm`` is "pre" or "post"; with "post" there is no norm
        before the output.
        """
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers = {layers} must be at least 1")
        if dim % heads:
            raise ValueError(f"dim = {dim} must be a multiple of heads = {heads}")
        if norm not in ("pre", "post"):
            raise ValueError(f"norm = {norm!r} must be 'pre' or 'post'")
        self.post = norm == "post"
        self.depth, self.vocab, self.length = layers, vocab, length
        self.embedding, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(dim, heads, dropout, self.post) for _ in range(layers))
        self.norm = nn.Identity() if self.post else nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.output.weight = self.embedding.weight
        self._matrices = matrix_parameters(self)

    def init_weights(self) -> None:
        """Sets norms to 1 and biases to 0, and draws all other weights from a normal distribution with
        standard deviation 0.02.

        For projections into the residual stream the deviation is divided by sqrt(2 × layers) (section 2.3),
        unless each sum is normalised.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                residual = name.endswith(("out.weight", "w2.weight")) and not self.post
                nn.init.normal_(parameter, std=0.02 / (2 * self.depth) ** 0.5 if residual else 0.02)

    @property
    def most_positions(self) -> int:
        """The longest sequence: positions are learned."""
        return self.length

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.length:
            raise ValueError(
                f"model_args.length = {self.length} is shorter than a sequence, {seq}; set it to {seq} or "
                "more"
            )
        positions = torch.arange(seq, device=tokens.device) if documents is None else positions_of(documents)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        mask = attention_mask(
            tokens, documents, self.attends if documents is None else self.attends_in_documents
        )
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return self.output(x) if targets is None else cross_entropy(x, self.output.weight, targets)

    def flops_per_token(self, seq: float, causal: bool) -> float:
        """Returns the operations of a token, as ``elastic/models/flops.py`` says."""
        return 6 * self._matrices + (6 if causal else 12) * self.depth * self.embedding.embedding_dim * seq

    def sharding(self) -> ShardingTable:
        block: Any = self.layers[0]
        dim = self.embedding.embedding_dim
        head = dim // block.attention.heads
        return ShardingTable(
            blocks=tuple(f"layers.{i}" for i in range(self.depth)),
            column={"*.qkv": Fused((dim, dim, dim), head), "*.w1": 1},
            row={"*.attention.out": head, "*.w2": 1},
            vocabulary=("embedding", "output"),
            sequence=("*_norm", "norm"),
            first=("embedding", "positions"),
            last=("norm", "output"),
        )

    def as_transformers(self) -> Equivalent:
        """Returns the GPT-2 of transformers, or its first GPT if norms come after the sums."""
        block: Any = self.layers[0]
        rates = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), self.dropout.p)
        config: dict[str, Any] = {
            "model_type": "openai-gpt" if self.post else "gpt2",
            "architectures": ["OpenAIGPTLMHeadModel" if self.post else "GPT2LMHeadModel"],
            "vocab_size": self.vocab,
            "n_positions": self.length,
            "n_embd": self.embedding.embedding_dim,
            "n_layer": self.depth,
            "n_head": block.attention.heads,
            "layer_norm_epsilon": block.attention_norm.eps,
            "tie_word_embeddings": True,
            **rates,
        }
        embeddings = ("tokens_embed", "positions_embed") if self.post else ("wte", "wpe")
        named = dict(
            zip(("embedding", "positions"), (f"transformer.{each}" for each in embeddings), strict=True)
        )
        return Equivalent(config, TRANSFORMERS | named, ("qkv", "out", "w1", "w2"))


TRANSFORMERS = {
    "layers": "transformer.h",
    "norm": "transformer.ln_f",
    "attention_norm": "ln_1",
    "feed_forward_norm": "ln_2",
    "attention": "attn",
    "qkv": "c_attn",
    "out": "c_proj",
    "w1": "mlp.c_fc",
    "w2": "mlp.c_proj",
}
"""Our words in names of tensors, and those of transformers; both of its models have these."""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"vocab": 50_257, "dim": 768, "layers": 12, "heads": 12},
    "gpt2-medium": {"vocab": 50_257, "dim": 1024, "layers": 24, "heads": 16},
    "gpt2-large": {"vocab": 50_257, "dim": 1280, "layers": 36, "heads": 20},
    "gpt2-xl": {"vocab": 50_257, "dim": 1600, "layers": 48, "heads": 25},
}
"""The arguments of the published models, by the name that ``model_args.preset`` takes."""


def build(preset: str | None = None, **args: Any) -> nn.Module:
    """Builds the model of a job from the keyword arguments of :class:`GPT2`, which replace those of a
    :data:`PRESETS` entry.
    """
    return GPT2(**with_preset(preset, PRESETS, args))
