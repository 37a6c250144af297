"""Who may act for a run, as pure rules: facts and the time come in, requests and answers come out.

At most one coordinator may begin or settle something, although one that is cut off does not know whether another has followed it.
Two things make that so:

* **A majority.**  A decision that must not be lost is acted on once more than half of the keepers hold its record, or once the bucket
  has it.  A follower attaches the keepers it reaches, and from then on they refuse the coordinator before it.  With half of them attached
  the follower knows that the other one finds no majority, and that it has read everything that was acted on.
* **A lease.**  A coordinator acts on its keepers' answers only while it knows, or knew less than ``lease_s`` ago, that nobody has
  followed it: the cluster's head or the claims in the bucket tell it.  A follower that reaches fewer than half of the keepers waits until
  that lease is over.

The coordinator's side is :class:`Authority`, a keeper's side :class:`Replica`; ``furthest``, ``has_read_all`` and ``waits_s`` are the
follower's.  :class:`Audience` says for whom a run goes on at all.  Nothing here waits, locks, or reads a clock: the actors
(``actors/journal_replicas.py``) and the simulator (``elastic/sim/journals.py``) drive the same values.

Source: majorities as in Paxos made simple (Lamport, 2001) with one record in flight, leases as in Gray and Cheriton (1989).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from elastic.ids import NodeId

COPY_S = 1.0
"""Seconds for which a keeper's answer is waited for before the bucket is asked to take the journal instead."""
DEPOSED = -1
"""A keeper's answer to a coordinator that was followed by another one."""
MARKS = 64
"""Records whose majority is awaited one by one.  When no majority is in reach for long there are more, and only the newest is kept."""

Says = TypeVar("Says")


class Authority(Generic[Says]):
    """What one coordinator knows about its right to act: its lease, its keepers' copies of its journal, the bucket's copy.

    Positions (``end``, ``at``) count whatever the journal consists of: bytes in production, records in the simulator.  ``Says`` is what a
    record says about the run.
    """

    def __init__(
        self, incarnation: int, lease_s: float, asked_at: float, keepers: tuple[NodeId, ...], says: Says, *, follows: bool = False
    ) -> None:
        """``asked_at``: when it claimed the run.  ``keepers`` and ``says``: what is known before its first record.

        ``follows``: another coordinator of the run may still be alive.  Then nothing counts before the bucket has the first records, so
        that the other one can write there no more.
        """
        self.incarnation, self.lease_s = incarnation, lease_s
        self.deposed = ""
        """Why this coordinator may not act any more, once that is known."""
        self.safe = says
        """What the newest record says that a majority of the keepers, or the bucket, is known to hold."""
        self.begun = not follows
        """May anything that it writes be acted on?"""
        self._until = asked_at + lease_s
        self._safe_end = self._bucket_end = 0
        self._marks: list[tuple[int, Says]] = []
        """Records beyond ``safe``: where the journal ended with each, and what it says."""
        self._lists: list[tuple[int, tuple[NodeId, ...]]] = [(0, keepers)]
        """Every list of keepers since ``safe``, and where the journal ended with the first record that has it."""
        self._held: dict[NodeId, int] = {}
        """Where each keeper's copy ends."""
        self._asked: dict[NodeId, float] = {}
        """Who has not answered its request yet, and when it was asked."""
        self._lost: set[NodeId] = set()
        """Whose last request failed: nobody waits for it until it answers again."""

    # ---- the lease

    def left_s(self, now: float) -> float:
        """Seconds for which the lease still holds."""
        return self._until - now

    def holds(self, now: float) -> bool:
        """Does this coordinator know that no other acts?  Only then does it grant leases, or act on what the keepers answer."""
        return not self.deposed and self.left_s(now) > 0

    def asks_bucket(self, now: float) -> bool:
        """Is it time to ask the bucket for claims?  As long as the cluster's head answers, it never is."""
        return not self.deposed and self.left_s(now) < self.lease_s / 2

    def confirmed(self, asked_at: float) -> None:
        """The cluster's head, asked at ``asked_at``, takes this process for the coordinator.  The lease counts from the question."""
        self._until = max(self._until, asked_at + self.lease_s)

    def claimed(self, asked_at: float, latest: int) -> None:
        """The bucket, asked at ``asked_at``, has ``latest`` as the highest incarnation that claimed the run."""
        if latest > self.incarnation:
            self.deposed = f"coordinator {latest} has claimed the run"
        else:
            self.confirmed(asked_at)

    # ---- the journal's copies

    def note(self, end: int, keepers: tuple[NodeId, ...], says: Says) -> None:
        """A record was appended: the journal now reaches to ``end``, and ``keepers`` are those that the run has from here on."""
        if keepers != self._lists[-1][1]:
            self._lists.append((end, keepers))
        del self._marks[MARKS:]
        self._marks.append((end, says))
        if not any(each for _, each in self._lists):  # without any keeper the coordinator's own disk is all there is
            self._all_safe(end, says)

    def requests(self, end: int, up: Collection[NodeId], now: float) -> list[tuple[NodeId, int]]:
        """Which keepers are to be sent the journal up to ``end``, each from which position on.  One request a keeper is under way.

        ``up``: keepers that can be called.
        """
        if not self.begun or self.deposed:
            return []
        due = [(node, self._held.get(node, 0)) for node in self._lists[-1][1] if node in up and node not in self._asked]
        due = [(node, held) for node, held in due if held < end]
        self._asked.update((node, now) for node, _ in due)
        return due

    def answered(self, node: NodeId, held: int) -> None:
        """The keeper's copy ends at ``held``, or it is :data:`DEPOSED` that it said."""
        self._asked.pop(node, None)
        self._lost.discard(node)
        if held == DEPOSED:
            self.deposed = f"the keeper of {node} has heard a later coordinator"
            return
        self._held[node] = held
        # of every list since ``safe``: keepers that were given up meanwhile may be the ones that a follower reaches
        end = min((self._majority_end(keepers) for _, keepers in self._lists if keepers), default=0)
        safe = [mark for mark in self._marks if mark[0] <= end]
        if safe:
            self._all_safe(*safe[-1])

    def failed(self, node: NodeId) -> None:
        """The request ended without an answer: the keeper is gone, and one that takes its place begins with nothing."""
        self._asked.pop(node, None)
        self._lost.add(node)
        self._held[node] = 0

    def waits_s(self, now: float) -> float:
        """Seconds for which an answer may still be worth waiting for; 0 where no keeper is expected to answer in time."""
        return max((asked_at + COPY_S - now for node, asked_at in self._asked.items() if node not in self._lost), default=0.0)

    def in_bucket(self, end: int, asked_at: float, latest: int) -> None:
        """The bucket has the journal up to ``end``; asked after that, at ``asked_at``, it has ``latest`` as the highest claim."""
        self.claimed(asked_at, latest)
        if self.deposed:
            return
        self.begun = self.begun or end > 0  # a record of its own is there, in the place of the other one's next
        self._bucket_end = max(self._bucket_end, end)
        covered = [mark for mark in self._marks if mark[0] <= end]
        if covered:
            self._all_safe(*covered[-1])

    def secured(self, end: int, now: float) -> bool:
        """May what the journal says up to ``end`` be acted on, so that whoever follows will know of it?"""
        if self.deposed or not self.begun:
            return False
        return end <= self._bucket_end or (end <= self._safe_end and self.holds(now))

    def holders(self, end: int) -> tuple[int, int]:
        """How many of the present keepers are known to hold all up to ``end``; how many there are."""
        keepers = self._lists[-1][1]
        return sum(self._held.get(node, -1) >= end for node in keepers), len(keepers)

    def _majority_end(self, keepers: tuple[NodeId, ...]) -> int:
        """How far more than half of ``keepers`` hold the journal."""
        ends = sorted((self._held.get(node, 0) for node in keepers), reverse=True)
        return ends[len(ends) // 2]

    def _all_safe(self, end: int, says: Says) -> None:
        self._safe_end, self.safe = end, says
        self._marks = [mark for mark in self._marks if mark[0] > end]
        before = [keepers for at, keepers in self._lists if at <= end]
        self._lists = [(end, before[-1]), *(each for each in self._lists if each[0] > end)]


# ---- a keeper's side


@dataclass
class Replica:
    """A keeper's copy of the end of the journal: what lies from ``begin`` on in the file that coordinator ``by`` writes."""

    data: MutableSequence[Any] = field(default_factory=bytearray)
    heeds: int = 0
    """The highest incarnation heard: orders and records of lower ones are refused.  A new keeper begins with the one that made it, or an
    earlier coordinator could find a majority among keepers that were made anew."""
    by: int = 0
    begin: int = 0

    @property
    def end(self) -> int:
        return self.begin + len(self.data)

    def heed(self, incarnation: int) -> bool:
        """Is this the latest coordinator heard of?  From now on earlier ones are refused."""
        if incarnation < self.heeds:
            return False
        self.heeds = incarnation
        return True

    def copy(self, incarnation: int, begin: int, at: int, data: Sequence[Any]) -> int:
        """Takes ``data``, which lies at ``at``, and lets go of what lies before ``begin``.  The answer is where the copy ends.

        What is held already is passed over; what would leave a gap is not taken.  :data:`DEPOSED` where a later coordinator was heard.
        """
        if not self.heed(incarnation):
            return DEPOSED
        if incarnation > self.by:
            if at != begin:  # the copy of an earlier one's journal is of use until this one's is here from its beginning
                return begin
            self.by, self.begin = incarnation, begin
            del self.data[:]
        if self.end < begin:
            self.begin = begin
            del self.data[:]
        if at <= self.end:
            self.data += data[self.end - at :]
        drop = max(begin - self.begin, 0)
        del self.data[:drop]
        self.begin += drop
        return self.end


# ---- a follower's side


@dataclass(frozen=True)
class Found:
    """A copy of the end of a journal: written by coordinator ``by``, with the records numbered ``first`` to ``last``."""

    by: int
    first: int
    last: int
    records: Any


def furthest(end: int, by: int, copies: Iterable[Found]) -> Found | None:
    """The copy to go on with where the bucket ends: at the record numbered ``end``, after one that coordinator ``by`` wrote.

    That is the latest writer's copy, of several the one that reaches furthest: an earlier writer may have been cut off and have written
    on, and nothing came of it.  None where no copy goes further than the bucket without a gap.
    """
    further = [each for each in copies if each.by >= by and each.first <= end <= each.last]
    return max(further, key=lambda each: (each.by, each.last), default=None)


def has_read_all(attached: Mapping[NodeId, int], keepers: Sequence[NodeId]) -> bool:
    """Has a follower read everything that coordinators before it acted on, and can none of them act any more?

    ``attached``: the keepers that answered it, and whose records each held (0: none yet; a keeper that was made anew proves nothing).
    ``keepers``: the newest list that the follower has read.  Half of it is enough, since none before finds a majority in the other half.
    """
    there = sum(attached.get(node, 0) > 0 for node in keepers)
    return there > 0 and 2 * there >= len(keepers)


def waits_s(claimed_at: float, lease_over_s: float, read_all: bool, now: float) -> float:
    """Seconds for which a follower that claimed the run at ``claimed_at`` waits before it reads once more and acts.

    ``lease_over_s``: after so long the lease of an earlier coordinator has run out, whatever its clock.
    """
    return 0.0 if read_all else max(0.0, claimed_at + lease_over_s - now)


# ---- the drivers


class Audience:
    """The drivers of a run: who started it, who attached later, and what becomes of the run when one of them goes.

    A driver is present while it asks how the run stands.  The one that started the run may stop it; an attached one merely detaches, unless
    it is the last.  With ``on_exit = "detach"`` the run needs none of them.
    """

    def __init__(self, owner: str, on_exit: Literal["stop", "detach"], driver_s: float, now: float) -> None:
        """``owner``: the driver that started the run, heard ``now``.  ``driver_s``: a driver that is silent for so long has vanished."""
        self.owner, self.on_exit, self.driver_s = owner, on_exit, driver_s
        self._heard = {owner: now}
        self._watchers: set[str] = set()
        """Drivers that only watch: they too are told the end, but nothing depends on them."""

    def hear(self, driver: str, now: float, *, only: bool = False) -> None:
        """``driver`` has asked.  ``only``: it only watches."""
        self._heard[driver] = now
        if only:
            self._watchers.add(driver)

    def leave(self, driver: str) -> None:
        """``driver`` has seen what it waited for, or was told to go."""
        self._heard.pop(driver, None)

    def present(self, now: float) -> list[str]:
        """The drivers that wait for the run."""
        return [driver for driver, at in list(self._heard.items()) if now - at <= self.driver_s]

    def _counted(self, now: float) -> set[str]:
        return set(self.present(now)) - self._watchers

    def stops_with(self, driver: str, now: float) -> bool:
        """Must the run stop when ``driver`` is told to go?"""
        if self.on_exit == "detach":
            return False
        return driver == self.owner or not self._counted(now) - {driver}

    def left_alone(self, now: float) -> bool:
        """Must the run stop because its drivers have vanished?"""
        return self.on_exit == "stop" and not self._counted(now)
