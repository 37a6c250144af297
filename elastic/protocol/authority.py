"""Authority: the pure rules that decide which coordinator may act for a run.  Facts and the time come in;
requests and answers come out.

At most one coordinator may begin or settle a generation.  But a coordinator that is cut off cannot know
whether another one has taken over. Two rules keep the run safe:

* **A majority.**  A coordinator acts on a decision only when more than half of the keepers, or the bucket,
  hold its record.  A follower (a coordinator that takes over) attaches every keeper that it reaches; from
  then on these keepers refuse all earlier coordinators.  Once half of the keepers are attached, no earlier
  coordinator finds a majority, and the follower has read every record that was acted on.
* **A lease.**  A coordinator acts on its keepers' answers only if it learned less than ``lease_s`` ago that
  nobody has taken over.  It learns this from the cluster's head or from the claims in the bucket.  A follower
  that reaches fewer than half of the keepers waits until that lease is over.

:class:`Authority` is the coordinator's side and :class:`Replica` a keeper's side; ``furthest``,
``has_read_all`` and ``waits_s`` are the follower's side.  :class:`Audience` decides whether the run's drivers
still want it to go on.  Nothing here waits, locks or reads a clock:
the actors (``actors/journal_replicas.py``) and the simulator (``elastic/sim/journals.py``) drive the same
values.

Source: majorities as in Paxos made simple (Lamport, 2001) with one record in flight, leases as in Gray and
Cheriton (1989).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from elastic.ids import NodeId

COPY_S = 1.0
"""Seconds to wait for a keeper's answer before the bucket is asked to take the journal instead."""
DEPOSED = -1
"""The answer of a keeper that has heard a later coordinator than the one that asks."""
WITNESSES = 15
"""Number of keepers that hold the journal: the first ones by name.  More would cost the coordinator a call
for each keeper and record, and the run survives the loss of seven of them at once without asking the bucket.
"""
MARKS = 64
"""Number of records whose majority is awaited one by one.  If more are waiting, only the newest of the others
is kept.
"""

Says = TypeVar("Says")


def witnesses(keepers: Sequence[NodeId]) -> tuple[NodeId, ...]:
    """Returns those of the run's ``keepers``, which are in order, that hold its journal."""
    return tuple(keepers[:WITNESSES])


class Authority(Generic[Says]):
    """The facts that one coordinator has about its right to act: its lease, and how much of its journal the
    keepers and the bucket hold.

    Positions (``end``, ``at``) count the units of the journal: bytes in production, records in the simulator.
    ``Says`` is the type of what a record says about the run.
    """

    def __init__(
        self,
        incarnation: int,
        lease_s: float,
        asked_at: float,
        keepers: tuple[NodeId, ...],
        says: Says,
        *,
        follows: bool = False,
    ) -> None:
        """``asked_at`` is the time just before this coordinator claimed the run.  ``keepers`` and ``says``
        are the keepers and the content known before its first record; of the keepers, only the
        :func:`witnesses` count.

        ``follows`` means that an earlier coordinator may still be alive.  Then no record counts before the
        bucket holds the first ones, because only then can the earlier coordinator no longer write there.
        """
        self.incarnation, self.lease_s = incarnation, lease_s
        self.deposed = ""
        """The reason why this coordinator may not act any more; empty while it may."""
        self.safe = says
        """The content of the newest record that a majority of the keepers, or the bucket, is known to hold.
        """
        self.begun = not follows
        """True once the coordinator's records may count: see ``follows``."""
        self._until = asked_at + lease_s
        self._safe_end = self._bucket_end = 0
        self._marks: list[tuple[int, Says]] = []
        """The records after ``safe``, each as the journal's end after it and its content."""
        self._lists: list[tuple[int, tuple[NodeId, ...]]] = [(0, witnesses(keepers))]
        """Every list of keepers since ``safe``, each with the journal's end after the first record that has
        it.
        """
        self._held: dict[NodeId, int] = {}
        """The end of each keeper's copy."""
        self._asked: dict[NodeId, float] = {}
        """The keepers that have not answered their request yet, and when each was asked."""
        self._lost: set[NodeId] = set()
        """The keepers whose last request failed.  Nobody waits for them until they answer again."""

    # ---- the lease

    def left_s(self, now: float) -> float:
        """Returns the seconds for which the lease still holds."""
        return self._until - now

    def holds(self, now: float) -> bool:
        """Returns whether the lease holds, so that no other coordinator can act.

        Only then does this coordinator grant leases or act on its keepers' answers.
        """
        return not self.deposed and self.left_s(now) > 0

    def asks_bucket(self, now: float) -> bool:
        """Returns whether it is time to ask the bucket for claims.  While the cluster's head answers, it
        never is.
        """
        return not self.deposed and self.left_s(now) < self.lease_s / 2

    def confirmed(self, asked_at: float) -> None:
        """Notes that the cluster's head, asked at ``asked_at``, names this process as the coordinator.  The
        lease counts from the question.
        """
        self._until = max(self._until, asked_at + self.lease_s)

    def claimed(self, asked_at: float, latest: int) -> None:
        """Notes that the bucket, asked at ``asked_at``, has ``latest`` as the highest incarnation that
        claimed the run.
        """
        if latest > self.incarnation:
            self.deposed = f"coordinator {latest} has claimed the run"
        else:
            self.confirmed(asked_at)

    # ---- the journal's copies

    def note(self, end: int, keepers: tuple[NodeId, ...], says: Says) -> None:
        """Notes that a record was appended: the journal now ends at ``end``, and ``keepers`` are the run's
        keepers from here on.
        """
        keepers = witnesses(keepers)
        if keepers != self._lists[-1][1]:
            self._lists.append((end, keepers))
        del self._marks[MARKS:]
        self._marks.append((end, says))
        # without keepers the journal exists only on the coordinator's own disk
        if not any(each for _, each in self._lists):
            self._all_safe(end, says)

    def requests(self, end: int, up: Collection[NodeId], now: float) -> list[tuple[NodeId, int]]:
        """Returns the keepers to send the journal to, up to ``end``, each with the position to send from.

        A keeper has at most one request under way.  ``up`` are the keepers that can be called.
        """
        if not self.begun or self.deposed:
            return []
        due = [
            (node, self._held.get(node, 0))
            for node in self._lists[-1][1]
            if node in up and node not in self._asked
        ]
        due = [(node, held) for node, held in due if held < end]
        self._asked.update((node, now) for node, _ in due)
        return due

    def answered(self, node: NodeId, held: int) -> None:
        """Notes the answer of a keeper: its copy ends at ``held``, or ``held`` is :data:`DEPOSED`."""
        self._asked.pop(node, None)
        self._lost.discard(node)
        if held == DEPOSED:
            self.deposed = f"the keeper of {node} has heard a later coordinator"
            return
        self._held[node] = held
        # The least of all lists since ``safe`` counts: a follower may reach keepers that were given up
        # meanwhile.
        end = min((self._majority_end(keepers) for _, keepers in self._lists if keepers), default=0)
        safe = [mark for mark in self._marks if mark[0] <= end]
        if safe:
            self._all_safe(*safe[-1])

    def failed(self, node: NodeId) -> None:
        """Notes that a request ended without an answer: the keeper is gone, and the one that replaces it
        starts with an empty copy.
        """
        self._asked.pop(node, None)
        self._lost.add(node)
        self._held[node] = 0

    def waits_s(self, now: float) -> float:
        """Returns the seconds for which an answer may still be worth waiting for; 0 if no keeper is expected
        to answer in time.
        """
        return max(
            (asked_at + COPY_S - now for node, asked_at in self._asked.items() if node not in self._lost),
            default=0.0,
        )

    def in_bucket(self, end: int, asked_at: float, latest: int) -> None:
        """Notes that the bucket holds the journal up to ``end`` and that, asked later at ``asked_at``, it has
        ``latest`` as the highest claim.
        """
        self.claimed(asked_at, latest)
        if self.deposed:
            return
        # this record lies where the earlier coordinator would have put its next one
        self.begun = self.begun or end > 0
        self._bucket_end = max(self._bucket_end, end)
        covered = [mark for mark in self._marks if mark[0] <= end]
        if covered:
            self._all_safe(*covered[-1])

    def secured(self, end: int, now: float) -> bool:
        """Returns whether the journal up to ``end`` may be acted on, because every follower will know of it."""
        if self.deposed or not self.begun:
            return False
        return end <= self._bucket_end or (end <= self._safe_end and self.holds(now))

    def holders(self, end: int) -> tuple[int, int]:
        """Returns how many of the present keepers hold the whole journal up to ``end``, and how many keepers
        there are.
        """
        keepers = self._lists[-1][1]
        return sum(self._held.get(node, -1) >= end for node in keepers), len(keepers)

    def _majority_end(self, keepers: tuple[NodeId, ...]) -> int:
        """Returns the position up to which more than half of ``keepers`` hold the journal."""
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
    """A keeper's copy of the end of the journal: the part from ``begin`` on of the file that coordinator
    ``by`` writes.
    """

    data: MutableSequence[Any] = field(default_factory=bytearray)
    heeds: int = 0
    """The highest incarnation heard; orders and records of lower ones are refused.

    A new keeper starts with the incarnation that made it.  Otherwise an earlier coordinator could find a
    majority among replaced keepers.
    """
    by: int = 0
    begin: int = 0

    @property
    def end(self) -> int:
        return self.begin + len(self.data)

    def heed(self, incarnation: int) -> bool:
        """Returns whether no later coordinator than ``incarnation`` was heard.  If so, earlier ones are
        refused from now on.
        """
        if incarnation < self.heeds:
            return False
        self.heeds = incarnation
        return True

    def copy(self, incarnation: int, begin: int, at: int, data: Sequence[Any]) -> int:
        """Takes ``data``, which lies at ``at``, and drops what lies before ``begin``.  Returns where the copy
        ends now.

        Data that the copy already has is skipped; data that would leave a gap is not taken.  Returns
        :data:`DEPOSED` if a later coordinator was heard.
        """
        if not self.heed(incarnation):
            return DEPOSED
        if incarnation > self.by:
            # keep the copy of the earlier journal until the new one arrives from its beginning
            if at != begin:
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
class JournalCopy:
    """A copy of the end of a journal: written by coordinator ``by``, with the records numbered ``first`` to
    ``last``.
    """

    by: int
    first: int
    last: int
    records: Any


def furthest(end: int, by: int, copies: Iterable[JournalCopy]) -> JournalCopy | None:
    """Returns the copy to continue with after the bucket's part of the journal, which ends at record ``end``
    and was written by ``by``.

    It is the copy of the latest writer; if that writer has several copies, it is the one that reaches
    furthest.  An earlier writer may have been cut off and have written more, but nothing came of those
    records.  Returns None if no copy continues the bucket's part without a gap.
    """
    further = [each for each in copies if each.by >= by and each.first <= end <= each.last]
    return max(further, key=lambda each: (each.by, each.last), default=None)


def has_read_all(attached: Mapping[NodeId, int], keepers: Sequence[NodeId]) -> bool:
    """Returns whether a follower has read everything that earlier coordinators acted on, so that none of them
    can act any more.

    ``attached`` has the keepers that answered, with the number of records that each held (0: none yet; a
    replaced keeper proves nothing). ``keepers`` is the newest list that the follower has read.  Half of it is
    enough: the other half is no majority for an earlier coordinator.
    """
    keepers = witnesses(keepers)
    there = sum(attached.get(node, 0) > 0 for node in keepers)
    return there > 0 and 2 * there >= len(keepers)


def waits_s(claimed_at: float, lease_over_s: float, read_all: bool, now: float) -> float:
    """Returns the seconds for which a follower that claimed the run at ``claimed_at`` waits before it reads
    once more and acts.

    ``lease_over_s`` is the time after which the lease of any earlier coordinator has run out, whatever its
    clock says.
    """
    return 0.0 if read_all else max(0.0, claimed_at + lease_over_s - now)


# ---- the drivers


class Audience:
    """The drivers of a run: the one that started it and those that attached later.  It says whether the run
    stops when one of them goes.

    A driver is present while it asks for the run's status.  If the driver that started the run is told to go,
    the run stops.  If an attached driver is told to go, the run goes on unless that driver was the last.
    With ``on_exit = "detach"`` the run needs no driver.
    """

    def __init__(self, owner: str, on_exit: Literal["stop", "detach"], driver_s: float, now: float) -> None:
        """``owner`` is the driver that started the run, heard ``now``.  A driver that is silent for
        ``driver_s`` seconds has vanished.
        """
        self.owner, self.on_exit, self.driver_s = owner, on_exit, driver_s
        self._heard = {owner: now}
        self._watchers: set[str] = set()
        """The drivers that only watch.  They are told the end too, but the run does not depend on them."""

    def hear(self, driver: str, now: float, *, only: bool = False) -> None:
        """Notes that ``driver`` has asked.  ``only`` means that it only watches."""
        self._heard[driver] = now
        if only:
            self._watchers.add(driver)

    def leave(self, driver: str) -> None:
        """Notes that ``driver`` has seen what it waited for, or was told to go."""
        self._heard.pop(driver, None)

    def present(self, now: float) -> list[str]:
        """Returns the drivers that wait for the run."""
        return [driver for driver, at in list(self._heard.items()) if now - at <= self.driver_s]

    def _counted(self, now: float) -> set[str]:
        return set(self.present(now)) - self._watchers

    def stops_with(self, driver: str, now: float) -> bool:
        """Returns whether the run must stop when ``driver`` is told to go."""
        if self.on_exit == "detach":
            return False
        return driver == self.owner or not self._counted(now) - {driver}

    def left_alone(self, now: float) -> bool:
        """Returns whether the run must stop because its drivers have vanished."""
        return self.on_exit == "stop" and not self._counted(now)
