"""Virtual time: a queue of calls, performed in the order of their times.  Calls with equal times are
performed in the order in which they were made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """The clock of a simulation.  ``now`` moves only when the next call is performed."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._made = 0

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self._made += 1
        heapq.heappush(self._calls, (self.now + delay_s, self._made, call, args))

    def step(self) -> None:
        """Performs the next call.  Raises IndexError if none is left."""
        self.now, _, call, args = heapq.heappop(self._calls)
        call(*args)
