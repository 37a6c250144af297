"""Computes the digests of a copy: for each block of a tensor's bytes, the sum of the block's 64-bit words
modulo 2^64.

The device that has the bytes computes them, in one pass at the speed of memory, so every copy can have
digests.  A digest detects torn, stale and corrupted bytes, but no change that keeps the sum of its block,
such as two words that change places.  It does not resist an attacker.
"""

from __future__ import annotations

import torch

from elastic.state.region import BLOCK

WORD = 8


def digests(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the digests of a contiguous tensor, int64 [ceil(bytes / BLOCK)], in ``out`` if given.  Zeros
    fill up the last word.
    """
    raw = data.reshape(-1).view(torch.uint8)
    whole, rest = divmod(raw.numel(), BLOCK)
    found = torch.empty(whole + bool(rest), dtype=torch.int64, device=data.device) if out is None else out
    if whole:
        torch.sum(_words(raw[: whole * BLOCK]).view(whole, -1), 1, out=found[:whole])
    if rest:
        torch.sum(_words(raw[whole * BLOCK :]), 0, out=found[whole])
    return found


def _words(raw: torch.Tensor) -> torch.Tensor:
    if missing := -raw.numel() % WORD:
        raw = torch.cat((raw, raw.new_zeros(missing)))
    return (raw if raw.storage_offset() % WORD == 0 else raw.clone()).view(torch.int64)
