"""Lets the nodes of a spot trace come and go, for real, while a run trains on them.

The nodes of the first moment are there before the run begins.  The clock of the trace begins with the first
committed step: what comes before is the start of the run, which is no part of the trace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from actors.chaos import SOURCE, keepers_of
from actors.local_nodes import LocalNodes
from actors.onlooker import Onlooker
from actors.view import View
from elastic.ids import NodeId
from elastic.report.judgement import Blow
from elastic.sim.trace import Row


@dataclass
class FleetNode:
    """A node of a trace, and the time of the trace at which it goes; infinity if it stays."""

    name: str
    goes_at: float
    asked: Future[NodeId]
    told: tuple[float, int] | None = None
    """The wall-clock time of its notice, and the step; None before."""


@dataclass
class Stay:
    """A stay of a node: it comes when Ray's head knows it.  Times are those of the wall clock."""

    name: str
    came_at: float
    gone_at: float = float("inf")


@dataclass
class Fleet:
    """The nodes of a trace.  ``rows`` are in seconds of this machine from 0; each removal has a notice
    ``lead_s`` before, unless that is 0.  ``least`` nodes come back after the trace if fewer are left, so that
    the run can end.
    """

    rows: Sequence[Row]
    nodes: LocalNodes
    lead_s: float
    least: int
    tell: Callable[[str], None]
    stays: dict[NodeId, Stay] = field(default_factory=dict)
    """The stays of nodes as they were, in the order in which they came."""
    blows: list[Blow] = field(default_factory=list)
    ended: dict[str, str | None] = field(default_factory=dict)
    """The end of the raylet of each node that was taken, in words of the kernel."""
    began_at: float = 0.0
    """The time of the first committed step, by the monotonic clock; 0 before."""

    def __post_init__(self) -> None:
        self.due = deque(self.rows)
        self.there: dict[str, FleetNode] = {}
        self.known: set[str] = set()
        self.more = 0

    def start(self) -> None:
        """Starts the nodes of the first moment, and returns once they are part of the cluster."""
        while self.due and self.due[0].at <= 0.0 and self.due[0].comes:
            self._come(self.due.popleft())
        for each in self.there.values():
            each.asked.result()
        self._note_known()

    def look(self, view: View | None) -> None:
        """Performs what is due."""
        self._note_known()
        if not self.began_at:
            if view is None or view.step < 1:
                return
            self.began_at = time.monotonic()
        now = time.monotonic() - self.began_at
        while self.due and self.due[0].at <= now:
            row = self.due.popleft()
            if row.comes:
                self._come(row)
        for each in [*self.there.values()]:
            if each.goes_at <= now and each.asked.done():
                self._take(each, view)
            elif view is not None and 0 < each.goes_at - now <= self.lead_s and each.told is None:
                self._warn(each, each.goes_at - now, view)
        if not self.due and not any(each.goes_at < float("inf") for each in self.there.values()):
            while len(self.there) < self.least:
                self.more += 1
                self._come(Row(now, True, f"after the trace {self.more}"))

    def deaths(self, onlooker: Onlooker) -> Mapping[str, str | None]:
        return self.ended

    def paid(self) -> list[Row]:
        """Returns the trace as it was performed."""
        return self._rows({node: each.came_at for node, each in self.stays.items()})

    def present(self, joined: Mapping[str, float]) -> list[Row]:
        """Returns the trace in which a node comes when its worker could step: ``joined`` has the time at which
        the first worker of each node joined.
        """
        return self._rows(joined)

    def _rows(self, since: Mapping[Any, float]) -> list[Row]:
        found = list[Row]()
        for node, each in self.stays.items():
            if (came_at := since.get(node)) is not None and came_at < each.gone_at:
                found.append(Row(came_at, True, each.name))
                found += [Row(each.gone_at, False, each.name)] if each.gone_at < float("inf") else []
        return sorted(found, key=lambda row: (row.at, row.comes))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first committed step; 0 before."""
        return time.monotonic() - self.began_at if self.began_at else 0.0

    def _come(self, row: Row) -> None:
        goes_at = next(
            (each.at for each in self.due if each.node == row.node and not each.comes), float("inf")
        )
        self.there[row.node] = FleetNode(row.node, goes_at, self.nodes.add())

    def _note_known(self) -> None:
        for name, each in self.there.items():
            if name not in self.known and each.asked.done():
                self.known.add(name)
                self.stays[each.asked.result()] = Stay(name, time.time())
                self.tell(f"node {each.asked.result()[:8]} ({name}) has come")

    def _warn(self, each: FleetNode, left_s: float, view: View) -> None:
        if not each.asked.done() or (keeper := keepers_of(view.token).get(each.asked.result())) is None:
            return  # nobody of the run is there yet
        keeper.announce.remote(SOURCE, left_s)
        each.told = time.time(), view.step
        self.tell(f"node {each.asked.result()[:8]} ({each.name}) will be taken in {left_s:.1f} s")

    def _take(self, each: FleetNode, view: View | None) -> None:
        node, gone_at = each.asked.result(), time.time()
        self.ended[f"node {node[:8]}"] = self.nodes.kill(node)
        # what a notice does begins with it
        at, step = each.told or (time.time(), view.step if view is not None else 0)
        notice = "without notice" if each.told is None else "with notice"
        said = f"node {node[:8]} ({each.name}) was taken {notice}"
        del self.there[each.name]
        self.known.discard(each.name)
        self.stays[node].gone_at = gone_at
        self.blows.append(Blow(at, step, said, (node[:8],)))
        self.tell(said)
