"""Causal attention, by torch's default on the device or by FlexAttention.

The default is the fastest.  Where the backward pass must add in a fixed order, torch's own kernel (flash-2, deterministic) takes twice the
time of FlexAttention, whose order is fixed anyway.  FlexAttention must be compiled, has no dropout, and no backward pass on CPUs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

TILES: Any = {
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4,
    "bwd_num_stages": 3,
}
"""Tiles of FlexAttention's backward kernel for heads of up to 64, the fastest of those tried on an H100.  They are part of what makes the
bits.
"""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, dropout: float) -> Tensor:
    """Attends causally: q [batch, heads, seq, dim], k and v [batch, fewer heads, seq, dim] -> as q.

    With ``mask``, :func:`causal_mask`, it uses FlexAttention, which has no dropout.
    """
    shared = q.shape[1] != k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=shared)
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=shared, kernel_options=TILES if q.shape[-1] <= 64 else None)
    assert isinstance(out, Tensor)
    return out


@cache
def causal_mask(seq: int, device: torch.device) -> BlockMask:
    """Returns the mask by which FlexAttention attends causally; it is made once in a process."""
    return create_block_mask(_causal, None, None, seq, seq, device=str(device))


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
