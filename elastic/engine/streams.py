"""Streams of an accelerator, kept for the life of the process.

torch's allocator keeps what is free for the stream that it was used on: with streams of its own every world would take more of the device,
until that is full and all is given back at once, which takes a second.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def stream(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """The one for ``purpose``."""
    return torch.cuda.Stream(device, priority=priority)
