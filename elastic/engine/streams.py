"""Streams of an accelerator, kept for the life of the process, and ways to wait for them without blocking other threads.

torch's allocator keeps freed memory for the stream on which it was used.  If every world had streams of its own, each would take more of
the device, until the device is full and torch gives everything back at once, which takes a second.
"""

from __future__ import annotations

import time
from functools import cache

import torch

POLL_S = 0.0002
"""Seconds between two looks at an event: short beside a step, long beside the look itself."""


@cache
def stream(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Return this process's one stream for ``purpose``."""
    return torch.cuda.Stream(device, priority=priority)


def wait_for(event: torch.cuda.Event) -> None:
    """Wait by polling, which stops no other thread: the work before ``event`` may hang until another thread aborts it."""
    while not event.query():
        time.sleep(POLL_S)


def finish() -> None:
    """Wait for everything that was launched on the present stream."""
    event = torch.cuda.Event()
    event.record()
    wait_for(event)
