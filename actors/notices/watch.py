"""Watches sources of notices, tells when a notice changes, and bears whatever a source does."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actors.notices.port import ClusterSource, Notice, NoticeSource, Unreadable
from elastic.code.imports import failure
from elastic.ids import NodeId

if TYPE_CHECKING:
    from elastic.control.run import Cluster

SAID_S = 3600.0
"""Seconds in which a source that fails is told once."""
SHORTEST_S = 0.05
"""Shortest pause in seconds from one look to the next."""
FAR_S = 365 * 86400.0
"""Seconds from now after which no notice can be meant: a number of milliseconds looks like this."""
JITTER_S = 1.0
"""A deadline that moves by less, in seconds, is the same one: some sources count the seconds that are left."""

Tell = Callable[[str, Notice | None], None]
TellOf = Callable[[str, NodeId, Notice | None], None]


class Watching(ABC):
    """Looks again and again.  Of errors ``say`` gets a sentence once an hour."""

    def __init__(self, name: str, every_s: float, say: Callable[[str], None]) -> None:
        self.name, self._say = name, say
        self._pause_s = max(float(every_s), SHORTEST_S)
        self._said_at: float | None = None

    @abstractmethod
    def look(self) -> None:
        """Asks the source once.  A look that fails changes nothing."""

    def run(self, closed: threading.Event) -> None:
        """Looks until ``closed`` is set."""
        while not closed.is_set():
            self.look()
            closed.wait(self._pause_s)

    @contextmanager
    def borne(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the user's source raises: the next look may succeed
            now = time.monotonic()
            if self._said_at is None or now - self._said_at >= SAID_S:
                self._said_at = now
                why = f"{error}" if isinstance(error, OSError | Unreadable) else failure(error)
                self._say(f"the source of notices {self.name!r} fails, and is asked again: {why}")


class SourceWatch(Watching):
    """Watches a source of this machine.

    ``tell`` gets the name of the source and the notice in force when this changes; None if there is none any
    more, or if an advice has expired.  It gets the first answer in any case, unless the source does not
    remember: a keeper before this one may have told a notice that was withdrawn since.
    """

    def __init__(self, name: str, source: NoticeSource, tell: Tell, say: Callable[[str], None]) -> None:
        super().__init__(name, source.every_s, say)
        self._source, self._tell = source, tell
        self._told: Notice | None = None
        self._answers = not getattr(source, "remembers", True)
        """True once an answer was told."""
        self._leaves = False
        """True as long as the source has not heard that the node has left the run."""

    def look(self) -> None:
        found, answered = self._told, False
        with self.borne():
            found, answered = _checked(self._source.look()), True
        if found is not None and found.advice and found.deadline <= time.time():
            found = None
        if not _same(found, self._told) or (answered and not self._answers):
            self._tell(self.name, found)
            self._told = found
        self._answers |= answered
        if self._leaves:
            self.left()

    def left(self) -> None:
        """Tells the source that the node has left the run, after each look again until it has heard that or
        its machine is taken.
        """
        self._leaves = self._told is not None and time.time() < self._told.deadline
        with self.borne():
            self._source.left()
            self._leaves = False


class ClusterWatch(Watching):
    """Watches a source that speaks of all nodes, for a run whose nodes are those of ``cluster``.

    ``tell`` gets the name of the source, a node of the run and its notice when this changes.  At first it gets
    a withdrawal for each node of which an earlier coordinator was told by this source, and which has no
    notice any more.
    """

    def __init__(
        self,
        name: str,
        source: ClusterSource,
        cluster: Callable[[], Cluster],
        tell: TellOf,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name, source.every_s, say)
        self._source, self._cluster, self._tell = source, cluster, tell
        self._told: dict[NodeId, Notice] | None = None

    def look(self) -> None:
        found: dict[NodeId, Notice] | None = None
        with self.borne():
            found = dict(self._source.look())
        if found is None:
            return
        cluster, told = self._cluster(), self._told or {}
        doubtful = set[NodeId]()
        if self._told is None:
            doubtful = {
                node
                for node, notices in cluster.notices.items()
                if any(each.source == self.name for each in notices)
            }
        for node in sorted({*found, *told, *doubtful}.intersection(cluster.nodes)):
            notice = found.get(node)
            if not _same(notice, told.get(node)) or node in doubtful:
                self._tell(self.name, node, notice)
                told = {each: known for each, known in told.items() if each != node}
                told |= {node: notice} if notice is not None else {}
        self._told = told


def _checked(found: object) -> Notice | None:
    if found is None:
        return None
    if not isinstance(found, Notice):
        raise Unreadable(f"look() has returned {found!r:.80}, which is no Notice")
    deadline: object = found.deadline
    if not isinstance(deadline, int | float) or not math.isfinite(deadline):
        raise Unreadable(f"the deadline of a notice is {deadline!r:.80}, not a number of Unix seconds")
    if deadline > time.time() + FAR_S:
        raise Unreadable(
            f"the deadline of a notice is {deadline:.0f}, more than a year from now; it is in Unix seconds"
        )
    return Notice(float(deadline), bool(found.advice), str(found.text))


def _same(one: Notice | None, other: Notice | None) -> bool:
    if one is None or other is None:
        return one is other
    moved_s = abs(one.deadline - other.deadline)
    return (one.advice, one.text) == (other.advice, other.text) and moved_s < JITTER_S
