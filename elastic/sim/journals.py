"""Models the places of a coordinator's records (its disk, its keepers, the bucket) and the messages between
them.

The rules are the product's (``elastic/protocol/authority.py``).  This file has the part of
``actors/journal_replicas.py``: it carries requests to keepers, which may be dead, frozen, cut off or slow,
writes records to the bucket, and asks which incarnation has claimed the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from elastic.control.run import RunState
from elastic.ids import NodeId
from elastic.protocol import authority
from elastic.protocol.authority import JournalCopy, Replica

if TYPE_CHECKING:
    from elastic.sim.cluster import Node
    from elastic.sim.coordinator import Coordinator
    from elastic.sim.simulation import Simulation

SHIP_S = 5.0
"""Time in seconds between two regular writes of the journal to the bucket."""
AGAIN_S = 0.5
"""Time in seconds after which a call is tried again if its keeper could not be reached."""
SLOW, SLOW_S = 0.05, 1.5
"""Share of the calls to keepers that are slow, and the longest time in seconds that they take."""
UNSENT = 0.3
"""Probability that records are not sent before the next event comes."""


class Record(NamedTuple):
    """A record of the journal.  ``n`` is its number, without gaps over all coordinators of the run, and
    ``run`` its content.
    """

    n: int
    run: RunState


@dataclass
class InBucket:
    """The journal in the bucket.

    ``end`` is the number of its next record.  ``by`` is the incarnation that wrote the last record, and
    ``run`` is that record's content.
    """

    run: RunState
    end: int = 0
    by: int = 0

    def create(self, records: Sequence[Record], by: int) -> bool:
        """Adds ``records``.  Returns False, and adds none, if another coordinator has already written a
        record with the number of the first.
        """
        if records and records[0].n != self.end:
            return False
        for each in records:
            self.run, self.end, self.by = each.run, each.n + 1, by
        return True


class Read(NamedTuple):
    """The result of a follower's reading.

    ``run`` is the content of the newest record.  ``ahead`` has the records that the bucket does not have.
    """

    run: RunState
    ahead: Sequence[Record]
    all: bool
    """True if the follower has read every record on which earlier coordinators acted."""


@dataclass
class Disk:
    """The records that one coordinator has written on its own disk, the first ``in_bucket`` of which are in
    the bucket.
    """

    first: int
    records: list[Record] = field(default_factory=list)
    in_bucket: int = 0

    @property
    def end(self) -> int:
        return len(self.records)

    def append(self, run: RunState) -> None:
        self.records.append(Record(self.first + len(self.records), run))

    def tail(self, at: int) -> tuple[int, int, list[Record]]:
        """Returns the first place that the bucket lacks, the place from which records follow, and these
        records (``storage.journal.Journal.tail``).

        The second place is ``at``, or the first place if ``at`` is smaller.
        """
        at = max(at, self.in_bucket)
        return self.in_bucket, at, self.records[at:]


class Journal:
    """The journal of one coordinator.  It carries out the requests of the coordinator's
    :class:`Authority`.
    """

    def __init__(
        self,
        sim: Simulation,
        coordinator: Coordinator,
        read: Read,
        first: int,
        asked_at: float,
        *,
        follows: bool,
    ) -> None:
        """``first`` is the number of the next record in the bucket.  ``asked_at`` is the time at which the
        run was claimed.
        """
        self.sim, self.coordinator = sim, coordinator
        self.disk = Disk(first, list(read.ahead))
        self.run = read.run
        self.read_to = 0
        """Number of records on this journal's disk that a follower has read."""
        self.authority = authority.Authority(
            coordinator.incarnation,
            sim.rules.coordinator_lease_s,
            asked_at,
            read.run.cluster.keepers,
            read.run,
            follows=follows,
        )
        self._unheard: list[tuple[NodeId, int | None]] = []
        """Answers that came while the coordinator was frozen.  None means that the call failed."""
        self._bucket_cut_until = 0.0
        sim.clock.after(SHIP_S, self._ship_again)

    # -- the coordinator's side
    # ---------------------------------------------------------------------------------------

    def append(self, run: RunState) -> None:
        self.run = run
        self.disk.append(run)
        self.authority.note(self.disk.end, run.cluster.keepers, run)

    def send(self) -> None:
        """Sends the appended records to the keepers, except with probability ``UNSENT``."""
        if self.sim.rng.random() >= UNSENT:
            self._send()

    def secured(self) -> bool:
        """Returns whether the coordinator may act on all appended records.  Asks the keepers first, and then
        the bucket if necessary.
        """
        self._send()
        self._send()  # a new keeper answers the first call with the place from which it needs the journal
        if not self._is_secured() and self.authority.waits_s(self.sim.clock.now) <= 0:
            self.ship()
        return self._is_secured()

    def _is_secured(self) -> bool:
        return self.authority.secured(self.disk.end, self.sim.clock.now)

    def holds(self) -> bool:
        """Returns whether the coordinator's lease holds."""
        return self.authority.holds(self.sim.clock.now)

    def keep_lease(self) -> None:
        """Asks the cluster's head, and also the bucket if that is due, which incarnation is the latest."""
        now, claimed = self.sim.clock.now, self.sim.coordinators.claimed
        if not self.coordinator.cut and claimed == self.coordinator.incarnation:
            self.authority.confirmed(now)
        if self.authority.asks_bucket(now) and self._bucket_answers():
            self.authority.claimed(now, claimed)
        self._heed()

    def _heed(self) -> None:
        if self.authority.deposed:
            self.coordinator.depose()

    # -- the keepers
    # ------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        rng, nodes = self.sim.rng, self.sim.cluster.nodes
        for name, at in self.authority.requests(self.disk.end, self.run.cluster.keepers, self.sim.clock.now):
            node = nodes.get(name)
            # this call must not reach a later keeper of the node
            replica = node.replica if node is not None else None
            if rng.random() < SLOW:
                self.sim.clock.after(
                    SLOW_S * rng.random(), self._arrive_late, name, replica, *self.disk.tail(at)
                )
            else:
                self._arrive(name, replica, *self.disk.tail(at))
        self._heed()

    def _arrive_late(
        self, name: NodeId, replica: Replica | None, begin: int, at: int, records: list[Record]
    ) -> None:
        self._arrive(name, replica, begin, at, records)
        self._heed()
        if self._is_secured():
            self.coordinator.go_through_with_it()

    def _arrive(
        self, name: NodeId, replica: Replica | None, begin: int, at: int, records: list[Record]
    ) -> None:
        """Delivers a call to its keeper.  The call fails if the keeper is gone, and is repeated if the keeper
        cannot be reached.
        """
        node = self.sim.cluster.nodes.get(name)
        if node is None or not node.keeper or node.replica is not replica:
            return self._hear(name, None)
        if node.frozen_until > self.sim.clock.now or not self.coordinator.reaches(name):
            if self.coordinator.alive:
                self.sim.clock.after(AGAIN_S, self._arrive_late, name, replica, begin, at, records)
            return None
        return self._hear(name, replica.copy(self.coordinator.incarnation, begin, at, records))

    def _hear(self, name: NodeId, held: int | None) -> None:
        if not self.coordinator.alive:
            return
        if self.coordinator.frozen_until > self.sim.clock.now:
            self._unheard.append((name, held))
        elif held is None:
            self.authority.failed(name)
        else:
            self.authority.answered(name, held)

    def thaw(self) -> None:
        """Handles the answers that came while the coordinator was frozen."""
        unheard, self._unheard = self._unheard, []
        for name, held in unheard:
            self._hear(name, held)
        self._heed()

    # -- the bucket
    # ---------------------------------------------------------------------------------------------------

    @property
    def reaches_bucket(self) -> bool:
        return self._bucket_cut_until <= self.sim.clock.now

    def cut_off(self, until: float, bucket: bool) -> None:
        self._bucket_cut_until = until if bucket else 0.0

    def _bucket_answers(self) -> bool:
        """Draws whether one call to the bucket succeeds."""
        return self.reaches_bucket and not self.sim.cluster.bucket_fails()

    def _put(self) -> bool:
        """Writes all records to the bucket.  Returns False if the bucket fails or has records of another
        coordinator.
        """
        if not self._bucket_answers():
            return False
        if not self.sim.coordinators.in_bucket.create(
            self.disk.records[self.disk.in_bucket :], self.coordinator.incarnation
        ):
            self.coordinator.depose()
            return False
        self.disk.in_bucket = self.disk.end
        return True

    def ship(self) -> None:
        """Writes all records to the bucket, and then asks which incarnation has claimed the run."""
        if self._put() and self._bucket_answers():
            self.authority.in_bucket(self.disk.end, self.sim.clock.now, self.sim.coordinators.claimed)
            self._heed()

    def _ship_again(self) -> None:
        """Writes records regularly, like the thread of ``storage.journal.Journal``, without asking for
        claims.
        """
        if self.coordinator.acts:
            self._put()
        if self.coordinator.alive:
            self.sim.clock.after(SHIP_S, self._ship_again)

    # -- for a follower
    # ------------------------------------------------------------------------------------

    def read_by(self, incarnation: int, disk: bool) -> Read:
        """Returns the journal as far as the coordinator of ``incarnation`` can read it.  From now on the
        keepers in reach obey that incarnation.

        If ``disk`` is True, that coordinator also reads the records on this journal's disk.
        """
        bucket = self.sim.coordinators.in_bucket
        attached, copies = {}, []
        for node in self._reachable():
            node.replica.heed(incarnation)
            attached[node.name] = node.replica.by
            copies.append((node.replica.by, list(node.replica.data)))
        if disk:
            copies.append((self.coordinator.incarnation, self.disk.records[self.disk.in_bucket :]))
        parsed = [JournalCopy(by, records[0].n, records[-1].n, records) for by, records in copies if records]
        found = authority.furthest(bucket.end, bucket.by, parsed)
        ahead = [each for each in found.records if each.n >= bucket.end] if found is not None else []
        run = ahead[-1].run if ahead else bucket.run
        return Read(run, ahead, disk or run.over or authority.has_read_all(attached, run.cluster.keepers))

    def _reachable(self) -> list[Node]:
        cut = {node for each in self.sim.coordinators.all if each.cut for node in each.side}
        now = self.sim.clock.now
        there = (node for node in self.sim.cluster.nodes.values() if node.keeper and not node.declared_dead)
        return [node for node in there if node.frozen_until <= now and node.name not in cut]

    def was_read(self, ahead: Sequence[Record]) -> None:
        """Notes that a follower has read the records in the bucket and ``ahead``."""
        known = {id(each) for each in ahead}
        read = [
            each.n - self.disk.first + 1
            for each in self.disk.records[self.disk.in_bucket :]
            if id(each) in known
        ]
        self.read_to = max(self.read_to, self.disk.in_bucket, *read)
