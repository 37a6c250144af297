"""A Llama-type decoder: RMSNorm before each part, rotary positions, SwiGLU, no biases (Touvron et al. 2023, section 2.2).

It is written for one device; ``sharding()`` names the blocks that may be wrapped.  Dropout draws from torch's default generator, which
the engine seeds by (seed, step, microbatch).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from elastic.kernels.attention import causal_attention, causal_mask
from elastic.kernels.cross_entropy import cross_entropy
from elastic.models.spec import ShardingTable


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, dim] -> [batch, seq, dim].  ``heads`` query heads share ``kv_heads`` keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, dim // heads, dropout
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor, mask: BlockMask | None) -> Tensor:
        batch, seq, _ = x.shape
        q = rotate(self.wq(x).view(batch, seq, self.heads, self.head_dim), rope).transpose(1, 2)
        k = rotate(self.wk(x).view(batch, seq, self.kv_heads, self.head_dim), rope).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        out = causal_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The SwiGLU layer, w2(silu(w1 x) * w3 x): [batch, seq, dim] -> [batch, seq, dim]."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One decoder block: attention and feed-forward, each after a norm and added to its input.  [batch, seq, dim] -> the same shape."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads, dropout)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = FeedForward(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor, mask: BlockMask | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    """The decoder: tokens, int64 [batch, seq] -> logits [batch, seq, vocab].  With targets, int64 [batch, seq], it returns the sum of their
    cross-entropies instead, a float32 scalar, and never makes the logits.
    """

    fuses_loss = flexes = False
    """The engine sets both.  The first lets :func:`elastic.engine.loss.next_token` give the targets to the model, the second lets it attend
    by FlexAttention.
    """

    def __init__(
        self,
        vocab: int = 257,
        dim: int = 128,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        tied: bool = True,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        self.head_dim, rest = divmod(dim, heads)
        if rest or self.head_dim % 2:
            raise ValueError(
                f"dim = {dim} must be a multiple of 2 × heads = {2 * heads}: each head has an even number of dimensions, rotated in pairs"
            )
        if heads % kv_heads:
            raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}: equal numbers of heads share keys and values")
        self.rope_base, self.depth, self.vocab = rope_base, layers, vocab
        hidden = hidden or -(-8 * dim // 3 // 32) * 32
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv_heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def init_weights(self) -> None:
        """Sets the weights of norms to 1, and draws all others from a normal distribution with standard deviation 0.02.

        For projections into the residual stream the deviation is divided by sqrt(2 × layers) (GPT-2, section 2.3).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.depth) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        rope = rotary(tokens.shape[1], self.head_dim, self.rope_base, tokens.device)
        mask = causal_mask(tokens.shape[1], tokens.device) if self.flexes else None
        for layer in self.layers:
            x = layer(x, rope, mask)
        x = self.norm(x)
        return self.output(x) if targets is None else cross_entropy(x, self.output.weight, targets)

    def sharding(self) -> ShardingTable:
        return ShardingTable(blocks=tuple(f"layers.{i}" for i in range(self.depth)))


def rotary(seq: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Returns cosines and sines of the rotary embedding, float32 [2, seq, head_dim // 2] (Su et al. 2021, section 3.2.2)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates the two halves of each head by position.  ``x`` is [batch, seq, heads, head_dim]; so is the result."""
    cos, sin = rope[0][:, None, :].to(x.dtype), rope[1][:, None, :].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def build(**args: object) -> nn.Module:
    """Builds the model of a job from the keyword arguments of :class:`Llama`."""
    return Llama(**args)  # type: ignore[arg-type]
