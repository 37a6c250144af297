"""Streams of an accelerator, kept for the life of the process; and how they are waited for.

torch's allocator keeps what is free for the stream that it was used on: with streams of its own every world would take more of the device,
until that is full and all is given back at once, which takes a second.
"""

from __future__ import annotations

import time
from functools import cache

import torch

POLL_S = 0.0002


@cache
def stream(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """The one for ``purpose``."""
    return torch.cuda.Stream(device, priority=priority)


def wait_for(event: torch.cuda.Event) -> None:
    """By polling, which stops no other thread: what comes before may hang until somebody aborts."""
    while not event.query():
        time.sleep(POLL_S)


def finish() -> None:
    """Wait for all that the present stream was told."""
    event = torch.cuda.Event()
    event.record()
    wait_for(event)
