"""The journal's tail, on the keepers: a decision that must be durable is on a majority of them before it is performed.

A keeper that does not answer within ``COPY_S`` is not waited for again until it does.  Where no majority can be had the run goes on all the
same, and says so: the record is on the coordinator's own disk, and soon in the bucket.  Should that disk be lost first, the next
coordinator finds members in a later generation than its journal knows, fences that one, and goes on from what they hold.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray

from elastic.control.states import RunState
from elastic.ids import NodeId
from storage.errors import Deposed
from storage.journal import Journal
from storage.tails import DEPOSED

COPY_S = 1.0
MARKS = 64
"""The newest one takes the place of the one before it when there are more: a majority may be out of reach for long."""


class Copies:
    """Used by the coordinator's loop alone.  ``keepers``: changes as nodes come and go."""

    def __init__(self, journal: Journal, incarnation: int, keepers: Mapping[NodeId, Any], run: RunState) -> None:
        self.journal, self.incarnation, self.keepers = journal, incarnation, keepers
        self.safe = run
        """As far as a majority of the keepers could tell it."""
        self._held: dict[NodeId, int] = {}
        """Where each one's copy ends."""
        self._asked: dict[Any, NodeId] = {}
        """Calls under way, one a keeper."""
        self._late: set[NodeId] = set()
        """Who did not answer in time, or at all: not waited for until it does."""
        self._marks: list[tuple[int, RunState]] = []
        """Where the journal ended when it told this much."""

    def send(self, run: RunState) -> None:
        """What the journal tells by now, up to ``run``, to every keeper that is up; and hear what they have."""
        self._mark(run)
        self._send(run)
        self._listen(0.0)

    def secure(self, run: RunState) -> str:
        """Wait until a majority has all that the journal tells.  "", or what could be had in its place."""
        self._mark(run)
        deadline = time.monotonic() + COPY_S
        while self.safe is not run:
            self._send(run)
            self._listen(0.0)
            if self.safe is run:  # at once: there is no keeper yet
                break
            left_s = deadline - time.monotonic()
            if not set(self._asked.values()) - self._late or left_s <= 0:
                self._late |= set(self._asked.values())
                have = sum(self._held.get(node, -1) >= self.journal.end for node in run.keepers)
                return f"{have} of {len(run.keepers)} keepers took a copy of the journal, which is on this node's disk"
            self._listen(left_s)
        return ""

    def _mark(self, run: RunState) -> None:
        if run is not self.safe and not (self._marks and self._marks[-1][1] is run):
            del self._marks[MARKS:]
            self._marks.append((self.journal.end, run))

    def _send(self, run: RunState) -> None:
        for node in run.keepers:
            held = self._held.get(node, 0)
            if node in self.keepers and node not in self._asked.values() and held < self.journal.end:
                tail = self.journal.tail(held)
                self._asked[self.keepers[node].copy.remote(self.incarnation, *tail)] = node

    def _listen(self, timeout_s: float) -> None:
        """Take the answers that are there; wait for one."""
        for ref in ray.wait(list(self._asked), timeout=timeout_s)[0] if self._asked else []:
            node = self._asked.pop(ref)
            self._late.discard(node)
            try:
                self._held[node] = ray.get(ref)
            except ray.exceptions.RayError:  # it is gone; should another take its place, that one begins with nothing
                self._held[node] = 0
                self._late.add(node)
            if self._held[node] == DEPOSED:
                raise Deposed(f"the journal of coordinator {self.incarnation}")
        held = [(end, run) for end, run in self._marks if self._has_majority(end, run)]
        if held:
            self.safe = held[-1][1]
            self._marks = [mark for mark in self._marks if mark[0] > held[-1][0]]

    def _has_majority(self, end: int, run: RunState) -> bool:
        return not run.keepers or 2 * sum(self._held.get(node, -1) >= end for node in run.keepers) > len(run.keepers)
