"""The inbox of a coordinator: events in the order in which they arrived, and how far the coordinator is
behind them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from typing import Any

from elastic.protocol.events import Beat, Event, Said, Together

MANY, BEATS, AT_ONCE = 8, 64, 128
"""Events are taken together from ``MANY`` workers' messages or ``BEATS`` beats in line on, and at most
``AT_ONCE`` of them.  A decision about many messages costs little more than one about a single message; of a
few messages, each gets a record, which is easier to read.
"""


class Inbox:
    """Any thread puts events; one thread takes them."""

    def __init__(self, clock: Callable[[], float], many: int = MANY) -> None:
        """Messages of workers, or beats, that follow each other are taken together if there are at least
        ``many``.
        """
        self._clock, self._many = clock, many
        self._there = threading.Condition()
        self._waiting: deque[tuple[float, Event, Any]] = deque()

    def put(self, event: Event, shard: Any = None) -> None:
        with self._there:
            self._waiting.append((self._clock(), event, shard))
            self._there.notify()

    def put_all(self, events: Iterable[Event]) -> None:
        with self._there:
            self._waiting.extend((self._clock(), event, None) for event in events)
            self._there.notify()

    def take(self, timeout_s: float) -> tuple[Event, Any] | None:
        """Returns the oldest event and its shard; None if none arrives within ``timeout_s``.

        Many messages of workers, or many beats of keepers, are returned as one :class:`Together`.
        """
        with self._there:
            if not self._there.wait_for(lambda: self._waiting, timeout_s):
                return None
            if len(said := self._said()) >= self._many and (
                len(said) >= BEATS or not isinstance(said[0], Beat)
            ):
                for _ in said:
                    self._waiting.popleft()
                return Together(said), None
            _, event, shard = self._waiting.popleft()
            return event, shard

    def _said(self) -> tuple[Said | Beat, ...]:
        """Returns the messages of workers at the head of the line, or the beats there."""
        alike = Beat if isinstance(self._waiting[0][1], Beat) else Said
        first = takewhile(lambda each: isinstance(each[1], alike), islice(self._waiting, AT_ONCE))
        return tuple(event for _, event, _ in first)  # type: ignore[misc]

    def empty(self) -> bool:
        with self._there:
            return not self._waiting

    def heard_until(self) -> tuple[float, float]:
        """Returns the present time, and the arrival time of the oldest event that waits; the present time
        twice if none waits.
        """
        with self._there:
            now = self._clock()
            return now, min(now, self._waiting[0][0]) if self._waiting else now
