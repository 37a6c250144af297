"""The digest of a copy: for each block of a tensor's bytes the sum of its 32-bit words, on whichever device the bytes are.

One pass at the speed of memory, so that it can be taken of every copy.  It is there to notice bytes that are torn, stale, bent or of
another tensor, not to resist anybody.
"""

from __future__ import annotations

import torch

from elastic.copies.region import BLOCK

WORD = 4


def digests(data: torch.Tensor) -> torch.Tensor:
    """int64 [ceil(bytes / BLOCK)] of a contiguous tensor's bytes; the last word is filled up with zeros."""
    raw = data.reshape(-1).view(torch.uint8)
    whole = raw.numel() // BLOCK * BLOCK
    parts = [_words(raw[:whole]).view(-1, BLOCK // WORD).sum(1, dtype=torch.int64)] if whole else []
    if rest := raw[whole:].numel():
        tail = raw[whole:]
        if rest % WORD:
            tail = torch.cat((tail, tail.new_zeros(WORD - rest % WORD)))
        parts.append(_words(tail).sum(dtype=torch.int64).view(1))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=data.device)


def _words(raw: torch.Tensor) -> torch.Tensor:
    return (raw if raw.storage_offset() % WORD == 0 else raw.clone()).view(torch.int32)
