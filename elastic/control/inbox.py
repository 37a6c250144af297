"""The inbox of a coordinator: events in the order in which they arrived, and how far the coordinator is
behind them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, get_args

from elastic.protocol.events import Beat, Crowded, Event, Together

MANY, BEATS, AT_ONCE = 8, 64, 128
"""Events are taken together from ``MANY`` messages of workers and nodes or ``BEATS`` beats in line on, and at
most ``AT_ONCE`` of them.  A decision about many messages costs little more than one about a single message; of a
few messages, each gets a record, which is easier to read.
"""
AHEAD = 8 * AT_ONCE
"""Number of events in line among which those that are alike are looked for.  In a large world there are several
beats between two messages, and with the messages alone a batch would be small.
"""
CROWDED, BEAT = frozenset(get_args(Crowded)), frozenset({Beat})


class Inbox:
    """Any thread puts events; one thread takes them."""

    def __init__(self, clock: Callable[[], float], many: int = MANY) -> None:
        """Messages of workers and nodes, or beats, are taken together if there are at least ``many``."""
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

        Many messages of workers and nodes, or many beats of keepers, are returned as one :class:`Together`.
        Messages and beats may overtake each other, since they come from other processes or tell nothing about
        each other; nothing overtakes any other event.
        """
        with self._there:
            if not self._there.wait_for(lambda: self._waiting, timeout_s):
                return None
            if said := self._said():
                return Together(said), None
            _, event, shard = self._waiting.popleft()
            return event, shard

    def _said(self) -> tuple[Crowded | Beat, ...]:
        """Takes from the line what is like its head and can be decided together with it; returns () and takes
        nothing if that is too little.
        """
        beats = isinstance(self._waiting[0][1], Beat)
        alike, others = (BEAT, CROWDED) if beats else (CROWDED, BEAT)
        said: list[Crowded | Beat] = []
        passed: list[tuple[float, Event, Any]] = []
        for each in islice(self._waiting, AHEAD):
            if type(event := each[1]) in alike and len(said) < AT_ONCE:
                said.append(event)  # type: ignore[arg-type]
            elif type(event) in others:
                passed.append(each)
            else:
                break
        if len(said) < (max(BEATS, self._many) if beats else self._many):
            return ()
        for _ in range(len(said) + len(passed)):
            self._waiting.popleft()
        self._waiting.extendleft(reversed(passed))
        return tuple(said)

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
