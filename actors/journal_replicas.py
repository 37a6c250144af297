"""The journal's tail, on the keepers: a decision that must be durable is on a majority of them before it is performed.

Of every list of keepers since the last time, that is: those that are given up meanwhile may be the ones that another coordinator hears, and
half of a list is enough for it to be sure that this one finds no majority any more.  Where no majority can be had, or the mandate
(``lease.py``) is over, the bucket will do, if nobody has claimed the run since.  With neither the coordinator stands still: what it began
might never be known.  A keeper that does not answer within ``COPY_S`` is not waited for again until it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from actors.coordinator_lease import CoordinatorLease
from elastic.control.run import RunState
from elastic.ids import NodeId
from storage.errors import Deposed
from storage.journal import Journal
from storage.journal.replicas import DEPOSED

COPY_S = 1.0
SHIP_S = 2.0
"""For the bucket, before the keepers are heard again."""
MARKS = 64
"""The newest one takes the place of the one before it when there are more: a majority may be out of reach for long."""


class JournalReplicas:
    """Used by the coordinator's loop alone.  ``keepers``: changes as nodes come and go."""

    def __init__(self, journal: Journal, lease: CoordinatorLease, keepers: Mapping[NodeId, Any], run: RunState) -> None:
        self.journal, self.lease, self.keepers = journal, lease, keepers
        self.safe = run
        """As far as a majority of the keepers could tell it, or the bucket."""
        self._held: dict[NodeId, int] = {}
        """Where each one's copy ends."""
        self._asked: dict[Any, NodeId] = {}
        """Calls under way, one a keeper."""
        self._late: set[NodeId] = set()
        """Who did not answer in time, or at all: not waited for until it does."""
        self._marks: list[tuple[int, RunState]] = []
        """Where the journal ended when it told this much."""
        self._lists: list[tuple[int, tuple[NodeId, ...]]] = [(0, run.cluster.keepers)]
        """Every list of keepers since ``safe``, and where the journal ended when it first told of it."""

    def note(self, run: RunState) -> None:
        """A record was appended that says this."""
        if run.cluster.keepers != self._lists[-1][1]:
            self._lists.append((self.journal.end, run.cluster.keepers))

    def send(self, run: RunState) -> None:
        """What the journal tells by now, up to ``run``, to every keeper that is up; and hear what they have."""
        self._mark(run)
        self._send(run)
        self._listen(0.0)

    def secure(self, run: RunState, say: Callable[[str], None]) -> None:
        """Wait until a majority has all that the journal tells, or the bucket.  ``say``: what could not be had."""
        if not (self._by_keepers(run) and self.lease.holds):
            have = sum(self._held.get(node, -1) >= self.journal.end for node in run.cluster.keepers)
            place = self._by_bucket(run, say)
            say(f"{have} of {len(run.cluster.keepers)} keepers took a copy of the journal, which is {place}")

    def begin(self, run: RunState, say: Callable[[str], None]) -> None:
        """As :meth:`secure`, where one coordinator follows another: in the bucket, so that the other one can write no more there."""
        said = False
        while not self._ship(run):
            if not said:
                say("the bucket does not take the journal: nothing is begun or ended until it does")
            said = True

    def _by_bucket(self, run: RunState, say: Callable[[str], None]) -> str:
        """Wait until the bucket has all that the journal tells, or the keepers after all: which."""
        said = False
        while not self._ship(run):
            if self._by_keepers(run) and self.lease.holds:
                return "on a majority of the keepers by now"
            if not said:
                say("neither a majority of the keepers nor the bucket takes the journal: nothing is begun or ended until one of them does")
            said = True
        return "in the bucket"

    def _ship(self, run: RunState) -> bool:
        """Everything to the bucket, and nobody has claimed the run since.  Raises :class:`Deposed`."""
        if not (self.journal.ship(SHIP_S) and self.lease.ask_bucket()):
            return False
        self._all_safe(self.journal.end, run)
        return True

    def _by_keepers(self, run: RunState) -> bool:
        self._mark(run)
        deadline = time.monotonic() + COPY_S
        while self.safe is not run:
            self._listen(0.0)  # first: whoever has answered to what was asked before is asked for the rest
            if self.safe is run:
                break
            self._send(run)
            left_s = deadline - time.monotonic()
            if not set(self._asked.values()) - self._late or left_s <= 0:
                self._late |= set(self._asked.values())
                return False
            self._listen(left_s)
        return True

    def _mark(self, run: RunState) -> None:
        if run is not self.safe and not (self._marks and self._marks[-1][1] is run):
            del self._marks[MARKS:]
            self._marks.append((self.journal.end, run))

    def _send(self, run: RunState) -> None:
        for node in run.cluster.keepers:
            held, keeper = self._held.get(node, 0), self.keepers.get(node)  # other threads take out who is lost
            if keeper is not None and node not in self._asked.values() and held < self.journal.end:
                self._asked[keeper.copy.remote(self.lease.incarnation, *self.journal.tail(held))] = node

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
                raise Deposed(f"the journal of coordinator {self.lease.incarnation}")
        held = [(end, run) for end, run in self._marks if self._has_majority(end)]
        if held:
            self._all_safe(*held[-1])

    def _all_safe(self, end: int, run: RunState) -> None:
        self.safe = run
        self._marks = [mark for mark in self._marks if mark[0] > end]
        before = [keepers for at, keepers in self._lists if at <= end]
        self._lists = [(end, before[-1]), *(each for each in self._lists if each[0] > end)]

    def _has_majority(self, end: int) -> bool:
        having = {node for node, held in self._held.items() if held >= end}
        return all(2 * len(having.intersection(keepers)) > len(keepers) for _, keepers in self._lists if keepers)
