"""A Llama-type decoder: RMSNorm before each part, rotary positions, SwiGLU, no biases (Touvron et al. 2023,
section 2.2).

With other arguments it is Llama 3 (Grattafiori et al. 2024, section 3.2) or Qwen 3 (Yang et al. 2025, section
2), whose dense models also normalise each head's query and key; see :data:`PRESETS`.

It is written for one device; ``sharding()`` says how it may be cut.  Dropout draws from torch's
default generator, which the engine seeds by (seed, step, microbatch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.kernels.attention import Kernel, Mask, attention_mask, causal_attention, positions_of
from elastic.kernels.cross_entropy import cross_entropy
from elastic.models.flops import matrix_parameters
from elastic.models.spec import Equivalent, ShardingTable, with_preset


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, dim] -> [batch, seq, dim].  ``heads`` query heads share
    ``kv_heads`` keys and values.

    With ``qk_norm`` each head's query and key is normalised before it is rotated.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, dropout: float, qk_norm: bool, eps: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, head_dim, dropout
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, eps=eps) if qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, rope: Tensor, mask: Mask) -> Tensor:
        batch, seq, _ = x.shape
        q = rotate(self.q_norm(self.wq(x).view(batch, seq, self.heads, self.head_dim)), rope).transpose(1, 2)
        k = rotate(self.k_norm(self.wk(x).view(batch, seq, self.kv_heads, self.head_dim)), rope).transpose(
            1, 2
        )
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
    """One decoder block: attention and feed-forward, each after a norm and added to its input.  [batch, seq,
    dim] -> the same shape.
    """

    def __init__(self, dim: int, hidden: int, eps: float, attention: Attention, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=eps)
        self.attention = attention
        self.feed_forward_norm = nn.RMSNorm(dim, eps=eps)
        self.feed_forward = FeedForward(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    """The decoder: tokens, int64 [batch, seq] -> logits [batch, seq, vocab].  With targets, int64 [batch,
    seq], it returns the sum of their cross-entropies instead, a float32 scalar, and never makes the logits.

    With ``documents``, integers of shape [batch, seq], a token attends to its own document only, and its
    position is that within it.
    """

    fuses_loss = False
    attends = attends_in_documents = Kernel.TORCH
    """The engine sets them.  The first lets :func:`elastic.engine.loss.next_token` give the targets to the
    model, the others say how it attends, without and with documents.
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
        rope_scaling: Sequence[float] | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        """``head_dim`` is ``dim // heads`` if it is left out.  ``rope_scaling`` is as :func:`rotary` takes
        it.
        """
        super().__init__()
        kv_heads = kv_heads or heads
        if head_dim is None:
            head_dim, rest = divmod(dim, heads)
            if rest or head_dim % 2:
                raise ValueError(
                    f"dim = {dim} must be a multiple of 2 × heads = {2 * heads}: each head has an even "
                    "number of dimensions, rotated in pairs"
                )
        if head_dim % 2:
            raise ValueError(
                f"head_dim = {head_dim} must be even: the dimensions of a head are rotated in pairs"
            )
        self.head_dim = head_dim
        if rope_scaling is not None and len(rope_scaling) != 4:
            raise ValueError(
                f"rope_scaling = {rope_scaling} must be [factor, low, high, old length], as [8, 1, 4, 8192]"
            )
        if layers < 1:
            raise ValueError(f"layers = {layers} must be at least 1")
        if heads % kv_heads:
            raise ValueError(
                f"heads = {heads} must be a multiple of kv_heads = {kv_heads}: equal numbers of heads share "
                "keys and values"
            )
        self.rope_base, self.rope_scaling, self.depth, self.vocab = rope_base, rope_scaling, layers, vocab
        hidden = hidden or -(-8 * dim // 3 // 32) * 32
        self.embedding = nn.Embedding(vocab, dim)
        attentions = (
            Attention(dim, heads, kv_heads, self.head_dim, dropout, qk_norm, norm_eps) for _ in range(layers)
        )
        self.layers = nn.ModuleList(
            Block(dim, hidden, norm_eps, attention, dropout) for attention in attentions
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.output.weight = self.embedding.weight
        self._matrices, self._attention = matrix_parameters(self), layers * heads * self.head_dim

    def init_weights(self) -> None:
        """Sets the weights of norms to 1, and draws all others from a normal distribution with standard
        deviation 0.02.

        For projections into the residual stream the deviation is divided by sqrt(2 × layers) (GPT-2, section
        2.3).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.depth) ** 0.5 if residual else 0.02)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = self.embedding(tokens)
        rope = rotary(tokens.shape[1], self.head_dim, self.rope_base, tokens.device, self.rope_scaling)
        if documents is not None:
            rope = rope[:, positions_of(documents)]
        mask = attention_mask(
            tokens, documents, self.attends if documents is None else self.attends_in_documents
        )
        for layer in self.layers:
            x = layer(x, rope, mask)
        x = self.norm(x)
        return self.output(x) if targets is None else cross_entropy(x, self.output.weight, targets)

    def flops_per_token(self, seq: float, causal: bool) -> float:
        """Returns the operations of a token, as ``elastic/models/flops.py`` says."""
        return 6 * self._matrices + (6 if causal else 12) * self._attention * seq

    def sharding(self) -> ShardingTable:
        attention: Any = self.layers[0].attention
        head = self.head_dim
        sharing = head * (attention.heads // attention.kv_heads)  # the query heads of one key and value
        return ShardingTable(
            blocks=tuple(f"layers.{i}" for i in range(self.depth)),
            column={"*.wq": sharing, "*.wk": head, "*.wv": head, "*.w1": 1, "*.w3": 1},
            row={"*.wo": sharing, "*.w2": 1},
            vocabulary=("embedding", "output"),
            sequence=("*.attention_norm", "*.feed_forward_norm", "norm"),
            first=("embedding",),
            last=("norm", "output"),
        )

    def as_transformers(self) -> Equivalent:
        """Returns the Llama of transformers, or the Qwen 3 if queries and keys are normalised.  Dropout is
        that of attention there.
        """
        tied = self.output.weight is self.embedding.weight
        block: Any = self.layers[0]
        kind = "Llama" if isinstance(block.attention.q_norm, nn.Identity) else "Qwen3"
        config: dict[str, Any] = {
            "model_type": kind.lower(),
            "architectures": [f"{kind}ForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.embedding.embedding_dim,
            "intermediate_size": block.feed_forward.w1.out_features,
            "num_hidden_layers": self.depth,
            "num_attention_heads": block.attention.heads,
            "num_key_value_heads": block.attention.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_dropout": block.attention.dropout,
            "rms_norm_eps": self.norm.eps,
            "tie_word_embeddings": tied,
            "rope_theta": self.rope_base,
        }
        if self.rope_scaling is not None:
            factor, low, high, length = self.rope_scaling
            turns = {
                "low_freq_factor": float(low),
                "high_freq_factor": float(high),
                "original_max_position_embeddings": int(length),
            }
            config["rope_scaling"] = {"rope_type": "llama3", "factor": float(factor), **turns}
            # the library wants it to be more than the old length
            config["max_position_embeddings"] = int(factor * length)
        return Equivalent(config, TRANSFORMERS)


TRANSFORMERS = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
"""Our words in names of tensors, and those of transformers."""


def rotary(
    seq: int, head_dim: int, base: float, device: torch.device, scaling: Sequence[float] | None = None
) -> Tensor:
    """Returns cosines and sines of the rotary embedding, float32 [2, seq, head_dim // 2] (Su et al. 2021,
    section 3.2.2).

    ``scaling`` (factor, low, high, old length) divides slow frequencies by ``factor``, as Llama 3.1 does:
    those with fewer than ``low`` turns in the old length; those with more than ``high`` stay, and between the
    two the change is gradual.
    """
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if scaling is not None:
        factor, low, high, length = scaling
        kept = ((length * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / factor + kept * frequencies
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates the two halves of each head by position.  ``x`` is [batch, seq, heads, head_dim]; so is the
    result.

    ``rope`` is that of :func:`rotary`, or [2, batch, seq, head_dim // 2] if the samples have other positions.
    """
    cos, sin = rope[0][..., None, :].to(x.dtype), rope[1][..., None, :].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def _llama(
    dim: int, layers: int, heads: int, hidden: int, vocab: int = 128_256, **more: Any
) -> Mapping[str, Any]:
    shape = {"vocab": vocab, "dim": dim, "layers": layers, "heads": heads, "kv_heads": 8, "hidden": hidden}
    return {**shape, "tied": False, "rope_base": 500_000.0, **more}


def _qwen(dim: int, layers: int, heads: int, hidden: int, **more: Any) -> Mapping[str, Any]:
    own = {"rope_base": 1_000_000.0, "head_dim": 128, "qk_norm": True, "norm_eps": 1e-6}
    return _llama(dim, layers, heads, hidden, vocab=151_936, **own, **more)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": _llama(4096, 32, 32, 14_336),
    "llama3-70b": _llama(8192, 80, 64, 28_672),
    "llama3.1-8b": _llama(4096, 32, 32, 14_336, rope_scaling=(8, 1, 4, 8192)),
    "llama3.2-1b": _llama(2048, 16, 32, 8192, rope_scaling=(32, 1, 4, 8192), tied=True),
    "llama3.2-3b": _llama(3072, 28, 24, 8192, rope_scaling=(32, 1, 4, 8192), tied=True),
    "qwen3-0.6b": _qwen(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen(4096, 36, 32, 12_288),
    "qwen3-14b": _qwen(5120, 40, 40, 17_408),
    "qwen3-32b": _qwen(5120, 64, 64, 25_600),
}
"""The arguments of published models, by the name that ``model_args.preset`` takes."""


def build(preset: str | None = None, **args: Any) -> nn.Module:
    """Builds the model of a job from the keyword arguments of :class:`Llama`, which replace those of a
    :data:`PRESETS` entry.
    """
    return Llama(**with_preset(preset, PRESETS, args))
