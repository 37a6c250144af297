"""The digest of a copy: for each block of a tensor's bytes the sum of its 64-bit words, modulo 2^64, on whichever device the bytes are.

One pass at the speed of memory, so that it can be taken of every copy.  It is there to notice bytes that are torn, stale, bent or of
another tensor, not to resist anybody.
"""

from __future__ import annotations

import torch

from elastic.state.region import BLOCK

WORD = 8


def digests(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [ceil(bytes / BLOCK)] of a contiguous tensor's bytes, in ``out`` if given; the last word is filled up with zeros."""
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
