"""Watches one source of notices, tells when its notice changes, and bears whatever the source does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.notices.port import Notice, NoticeSource, Unreadable
from elastic.code.imports import failure

SAID_S = 3600.0
"""Seconds in which a source that fails is told once."""
SHORTEST_S = 0.05
"""Shortest pause in seconds from one look to the next."""
JITTER_S = 1.0
"""A deadline that moves by less, in seconds, is the same one: some sources count the seconds that are left."""

Tell = Callable[[str, Notice | None], None]


class SourceWatch:
    """Looks at a source again and again.

    ``tell`` gets the name of the source and the notice in force when this changes; None if there is none any
    more, or if an advice has expired.  A look that fails changes nothing, and ``say`` gets a sentence about
    it once an hour.
    """

    def __init__(self, name: str, source: NoticeSource, tell: Tell, say: Callable[[str], None]) -> None:
        self.name, self._source, self._tell, self._say = name, source, tell, say
        self._pause_s = max(float(source.every_s), SHORTEST_S)
        self._told: Notice | None = None
        self._said_at: float | None = None

    def run(self, closed: threading.Event) -> None:
        """Looks until ``closed`` is set."""
        while not closed.is_set():
            self.look()
            closed.wait(self._pause_s)

    def look(self) -> None:
        found = self._told
        with self._borne():
            found = _checked(self._source.look())
        if found is not None and found.advice and found.deadline <= time.time():
            found = None
        if not _same(found, self._told):
            self._tell(self.name, found)
            self._told = found

    def left(self) -> None:
        """Tells the source that the node has left the run."""
        with self._borne():
            self._source.left()

    @contextmanager
    def _borne(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the user's source raises: the next look may succeed
            now = time.monotonic()
            if self._said_at is None or now - self._said_at >= SAID_S:
                self._said_at = now
                why = f"{error}" if isinstance(error, OSError | Unreadable) else failure(error)
                self._say(f"the source of notices {self.name!r} fails, and is asked again: {why}")


def _checked(found: object) -> Notice | None:
    if found is None:
        return None
    if not isinstance(found, Notice):
        raise Unreadable(f"look() has returned {found!r:.80}, which is no Notice")
    deadline: object = found.deadline
    if not isinstance(deadline, int | float) or not math.isfinite(deadline):
        raise Unreadable(f"the deadline of a notice is {deadline!r:.80}, not a number of Unix seconds")
    return Notice(float(deadline), bool(found.advice), str(found.text))


def _same(one: Notice | None, other: Notice | None) -> bool:
    if one is None or other is None:
        return one is other
    moved_s = abs(one.deadline - other.deadline)
    return (one.advice, one.text) == (other.advice, other.text) and moved_s < JITTER_S
