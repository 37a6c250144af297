"""Measures what each step takes on this member: seconds by the host's clock, bytes by the counters of torch's
allocator.

Nothing here waits for the device, and nothing is launched on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from elastic.protocol.commit_record import Usage


class Meter:
    """Measures one step after the other, each from the commit record before it to its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._generation, self._since, self._waited_s = 0, 0.0, 0.0
        self.first = False
        """True in the first step of a generation."""
        self.held: dict[str, int] = {}
        """Bytes by class that this member held in the first step of the generation: see
        ``train/gauges/inventory.py``.
        """

    def begin(self, generation: int, waited_s: float, device: torch.device) -> None:
        """Begins a step.  Only the first step of a generation begins now; any other began at the record of
        the step before.

        ``waited_s`` is the time that the training thread has waited for data in all steps so far.
        """
        self.first = generation != self._generation
        if self.first:
            self._generation, self._since, self._waited_s = generation, self._clock(), waited_s
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

    def now(self) -> float:
        """Returns the time by this meter's clock."""
        return self._clock()

    def leave_out(self, seconds: float) -> None:
        """Leaves out ``seconds`` that passed between two steps and belong to neither."""
        self._since += seconds

    def usage(self, waited_s: float, device: torch.device, forward_s: float = 0.0) -> Usage:
        """Returns what the step took until now, and begins the next one.  ``forward_s`` is the time of a
        forward pass (``engine/pace.py``).
        """
        now, peak, reserved = self._clock(), 0, 0
        if device.type == "cuda":
            counters = torch.cuda.memory_stats_as_nested_dict(device)
            peak, reserved = (
                counters["allocated_bytes"]["all"]["peak"],
                counters["reserved_bytes"]["all"]["current"],
            )
            torch.cuda.reset_peak_memory_stats(device)
        found = Usage(now - self._since, waited_s - self._waited_s, peak, reserved, forward_s)
        self._since, self._waited_s = now, waited_s
        return found
