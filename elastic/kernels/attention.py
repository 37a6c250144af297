"""Causal attention, by torch's default on the device or by FlexAttention; over whole samples, or within each
document of a sample.

The default is the fastest that torch has.  Where the backward pass must add in a fixed order, torch's own
kernel (flash-2, deterministic) takes twice the time of FlexAttention, whose order is fixed anyway.
FlexAttention must be compiled, has no dropout, and no backward pass on CPUs.  Flash-attention 4 (the package
flash-attn-4) is faster than both, also in a fixed order; it takes the place of torch's flash-2.

Within documents the default needs a mask of [batch, 1, seq, seq], which flash kernels do not take: it is
correct everywhere, and slow on a GPU.  FlexAttention skips the blocks between documents.
"""

from __future__ import annotations

from enum import Enum
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class Kernel(Enum):
    """A way to attend.  The engine chooses one for a model that has the attribute ``attends``."""

    TORCH = "torch's default"
    FLEX = "FlexAttention"
    FLASH_4 = "flash-attention 4"


TILES: Any = {
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4,
    "bwd_num_stages": 3,
}
"""Tiles of FlexAttention's backward kernel for heads of up to 64, the fastest of those tried on an H100.
They are part of what makes the bits.
"""

BLOCK = 128
"""Number of queries, and of keys, of a block of a mask of FlexAttention."""
Mask = BlockMask | Tensor | Kernel | None
"""A mask of FlexAttention, one of torch's default, or None for the default without documents; flash-attention
4 needs none.
"""
PACKAGE = "flash-attn-4==4.0.0b10"
"""The package of flash-attention 4, in a version that torch 2.11 to 2.13 can call."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float, scale: float | None = None
) -> Tensor:
    """Attends causally: q [batch, heads, seq, dim], k and v [batch, fewer heads, seq, dim] -> as q.

    ``mask`` is what :func:`attention_mask` returns.  FlexAttention has no dropout.  ``scale`` is 1 /
    sqrt(dim) if it is None.
    """
    shared = q.shape[1] != k.shape[1]
    if isinstance(mask, Kernel):
        return _by_flash_4(q, k, v, scale)
    if not isinstance(mask, BlockMask):
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=shared
        )
    options = TILES if q.shape[-1] <= 64 else None
    out = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=shared, kernel_options=options)
    assert isinstance(out, Tensor)
    return out


def _by_flash_4(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attends by torch's flash backend, for which :func:`open_flash_4` has put in the package's kernels.

    Its backward pass adds the gradients of shared keys and values by atomic operations, also if it is told to
    be deterministic.  So each head gets keys and values of its own then, and torch adds their gradients in a
    fixed order.
    """
    share = q.shape[1] // k.shape[1]
    if share > 1 and torch.are_deterministic_algorithms_enabled():
        k, v = (each[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2) for each in (k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


@cache
def open_flash_4() -> None:
    """Puts the kernels of flash-attention 4 in the place of torch's flash-2, for this process, and tries
    them.

    Raises whatever the package does, which compiles itself, or ImportError if it is not there.
    """
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA4")
    q = torch.zeros(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.grad(_by_flash_4(q, q, q, None).sum(), q)


@lru_cache(maxsize=256)
def causal_mask(seq: int, device: torch.device) -> BlockMask:
    """Returns the mask by which FlexAttention attends causally.  It is made once in a process for each of the
    newest lengths: all those of samples of any length would fill the device."""
    return create_block_mask(_causal, None, None, seq, seq, device=str(device))


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def attention_mask(tokens: Tensor, documents: Tensor | None, kernel: Kernel) -> Mask:
    """Returns the mask by which all layers attend to ``tokens`` [batch, seq]: causally, and within
    ``documents``, if there are any.

    ``documents`` is [batch, seq]: integers that are equal where tokens belong together, which follow each
    other.  Flash-attention 4 does not know of documents.
    """
    seq = tokens.shape[1]
    if documents is None:
        return (
            causal_mask(seq, tokens.device)
            if kernel is Kernel.FLEX
            else kernel
            if kernel is Kernel.FLASH_4
            else None
        )
    if kernel is Kernel.FLEX:
        return document_mask(documents)
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def document_mask(documents: Tensor) -> BlockMask:
    """Returns the mask by which FlexAttention attends causally within ``documents``, integers of shape
    [batch, seq].

    It equals that of torch's ``create_block_mask``, which makes tensors of seq × seq.  This one only looks at
    the smallest and the largest document of each block, and never waits for the device.
    """
    seq = documents.shape[1]
    # what pads the last block is no document of it
    padded = F.pad(documents, (0, -seq % BLOCK), value=torch.iinfo(torch.int32).max)
    low, high = padded.unflatten(1, (-1, BLOCK)).aminmax(dim=2)
    at = torch.arange(low.shape[1], device=documents.device)
    overlap = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None]) & (at[:, None] >= at)
    one = (low[:, :, None] == high[:, None]) & (low[:, None] == high[:, :, None]) & (at[:, None] > at)

    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return BlockMask.from_kv_blocks(
        *_listed(overlap & ~one), *_listed(one), BLOCK_SIZE=BLOCK, mask_mod=within, seq_lengths=(seq, seq)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of chosen blocks of keys for each block of queries, and a list that begins with
    them: int32 [batch, 1, ...].

    ``blocks`` is bool [batch, blocks of queries, blocks of keys].
    """
    chosen = blocks[:, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


def positions_of(documents: Tensor) -> Tensor:
    """Returns the position of each token within its document: int64, of the shape of ``documents``, [batch,
    seq].
    """
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return at - torch.where(begins, at, 0).cummax(1).values
