"""The inbox of a coordinator: events in the order in which they arrived, and how far the coordinator is behind them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from elastic.protocol.events import Event


class Inbox:
    """Any thread puts events; one thread takes them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._there = threading.Condition()
        self._waiting: deque[tuple[float, Event, Any]] = deque()

    def put(self, event: Event, shard: Any = None) -> None:
        with self._there:
            self._waiting.append((self._clock(), event, shard))
            self._there.notify()

    def take(self, timeout_s: float) -> tuple[Event, Any] | None:
        """Returns the oldest event and what came with it; None if none arrives within ``timeout_s``."""
        with self._there:
            if not self._there.wait_for(lambda: self._waiting, timeout_s):
                return None
            _, event, shard = self._waiting.popleft()
            return event, shard

    def empty(self) -> bool:
        with self._there:
            return not self._waiting

    def heard_until(self) -> tuple[float, float]:
        """Returns the time, and the time before which nothing has arrived that still waits: the same, if nothing waits."""
        with self._there:
            now = self._clock()
            return now, min(now, self._waiting[0][0]) if self._waiting else now
