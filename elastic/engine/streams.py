"""Streams of an accelerator, kept for the life of the process, and ways to wait for them without blocking
other threads.

torch's allocator keeps freed memory for the stream on which it was used.  If every world had its own streams,
each would take more memory until the device is full.  Then torch gives everything back at once, which takes a
second.
"""

from __future__ import annotations

import time
from functools import cache

import torch

POLL_S = 0.0002
"""Seconds between two queries of an event.  It is short compared with a step and long compared with a query.
"""


@cache
def stream(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Returns this process's one stream for ``purpose``."""
    return torch.cuda.Stream(device, priority=priority)


def wait_for(event: torch.cuda.Event) -> None:
    """Waits by polling, which blocks no other thread.  The work before ``event`` may hang until another
    thread aborts it.
    """
    while not event.query():
        time.sleep(POLL_S)


def finish() -> None:
    """Waits for everything that was launched on the current stream."""
    event = torch.cuda.Event()
    event.record()
    wait_for(event)
