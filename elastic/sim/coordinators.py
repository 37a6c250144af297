"""Models the coordinators of a run, one after the other.

A coordinator that dies or is taken for dead is followed by a coordinator of the next incarnation, which reads
as much of the journal as it can reach.  The old coordinator may be alive, frozen or cut off, alone or with
some nodes, and may not know of its follower.  Then there are two coordinators at once, and the old one acts
as long as its authority allows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.control.run import RunState
from elastic.ids import NodeId, Version
from elastic.journal import codec
from elastic.protocol import authority, lineage
from elastic.protocol.events import Beat, Event, KeeperLost, KeeperUp, Stumbled
from elastic.protocol.faults import Kind
from elastic.sim.coordinator import AGAIN_S, Advance, Coordinator
from elastic.sim.journals import InBucket, Journal, Read, Record
from elastic.sim.notices import Word, in_time_of
from elastic.sim.worker import Worker

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation

STUMBLES = 0.3
"""Share of the killed coordinators that fail to handle an event and report this before they die."""
UNREACHED, UNREACHED_S = 0.5, 3.0
"""Share of the cut-off coordinators that give up the keepers that they cannot reach, and the longest time in
seconds before they give up.
"""


class Coordinators:
    """All coordinators of the run.

    ``present`` is the latest incarnation, to which every message goes by default.  ``acting`` is the latest
    incarnation that has begun to act.
    """

    def __init__(self, sim: Simulation, advance: Advance) -> None:
        self.sim, self.advance = sim, advance
        self.events = 0
        self.visited: Counter[tuple[str, str]] = Counter()
        self.disk_lost = False
        self.ahead_s = 0.0
        self.all: list[Coordinator] = []
        self.acting: Coordinator
        self.claimed = 1
        """The highest incarnation that is claimed in the bucket."""
        self.in_bucket = InBucket(RunState.begin(0, 0.0))
        self._begin(Read(RunState.begin(1, 0.0), (), True), 1, 0.0, follows=False)

    @property
    def present(self) -> Coordinator:
        return self.all[-1]

    def begins(self, coordinator: Coordinator) -> None:
        """Makes ``coordinator`` the acting one.  The waiting decisions of older coordinators become valid if
        it has read their records.
        """
        for each in self.all[: self.all.index(coordinator)]:
            each.is_read()
        self.sim.oracle.judge_reading(self.acting, coordinator)
        self.acting = coordinator

    def hear(self, worker: Worker, event: Event) -> None:
        """Delivers a worker's event to the coordinators that it addresses.

        If the worker is dead, the event is lost with probability 0.5.
        """
        if worker.alive or self.sim.rng.random() < 0.5:
            for each in self._heard_by(worker):
                if each.reaches(worker.node):
                    each.receive(event)
                else:  # the worker is on the other side of a cut, and repeats its message
                    self.sim.clock.after(AGAIN_S, self.hear, worker, event)

    def renew(self, worker: Worker, generation: int, asked_at: float) -> None:
        for each in self._heard_by(worker):
            if each.alive and each.frozen_until <= self.sim.clock.now and each.reaches(worker.node):
                each.renew(worker, generation, asked_at)

    def _heard_by(self, worker: Worker) -> list[Coordinator]:
        """Returns the coordinators that a worker's message addresses.

        If the worker obeys an older coordinator that acts, this is that coordinator.  Else these are the
        older coordinators that are cut off together with the worker's node, or, without any, the present
        coordinator.
        """
        known = [
            each for each in self.all[:-1] if each.acts and each.incarnation == worker.member.incarnation
        ]
        beside = [each for each in self.all[:-1] if each.acts and each.cut and worker.node in each.side]
        return known or beside or [self.present]

    def tell(self, event: Event) -> None:
        """Delivers an event to every coordinator in reach of its sender: of the node if the node itself sends
        the event, else of the cluster's head.
        """
        own = event.node if isinstance(event, Beat | KeeperUp | Word) else None
        for each in self.all:
            if each.reaches(own) if own is not None else not each.cut:
                each.receive(in_time_of(event, each.ahead_s) if isinstance(event, Word) else event)
            # repeated until the present coordinator hears it
            elif each is self.present and not isinstance(event, Beat):
                self.sim.clock.after(AGAIN_S, self._tell_present, event)

    def _tell_present(self, event: Event) -> None:
        present, nodes = self.present, self.sim.cluster.nodes
        if isinstance(event, Word):
            return self.sim.cluster.notices.say(event.node, event.source)
        if isinstance(event, KeeperLost) and event.node in nodes and nodes[event.node].keeper:
            return  # a new keeper runs by now, and no call of ``present`` to the old keeper has failed
        if present.cut or (isinstance(event, KeeperUp) and not present.reaches(event.node)):
            self.sim.clock.after(AGAIN_S, self._tell_present, event)
        else:
            present.receive(event)

    # -- faults and followers
    # -----------------------------------------------------------------------------------------

    def suffer(self, kind: Kind, duration_s: float, amount: float) -> None:
        """Applies a fault to the present coordinator or the next one.  Nothing happens if a dead coordinator
        is to be killed, frozen or cut off.
        """
        present, now = self.present, self.sim.clock.now
        match kind:
            case Kind.COORDINATOR_CLOCK:
                self.ahead_s += amount
                return
            case Kind.DISK_LOSS:
                self.disk_lost = True
                return
            case _ if not present.alive:
                return
            case Kind.COORDINATOR_KILL:
                if self.sim.rng.random() < STUMBLES:
                    present.receive(
                        Stumbled(
                            f"{self.sim.rng.choice(('Beat', 'Joined', 'Tick'))}: KeyError at cluster.py:7"
                        )
                    )
                present.alive = False
                self.sim.clock.after(duration_s, self.follow, present, not self.disk_lost)
                self.disk_lost = False
            case Kind.COORDINATOR_FREEZE:
                present.frozen_until = max(present.frozen_until, now + duration_s)
                self.sim.clock.after(duration_s * self.sim.rng.random(), self.follow, present)
                self.sim.clock.after(duration_s, present.thaw)
            case Kind.COORDINATOR_CUT:
                self._cut(present, now + duration_s, amount)
                self.sim.clock.after(0.3 * duration_s * self.sim.rng.random(), self.follow, present)

    def _cut(self, present: Coordinator, until: float, share: float) -> None:
        """Cuts off ``present`` from the head, together with a ``share`` of the nodes.  All members of its
        world may be on these nodes.
        """
        cluster, rng = self.sim.cluster, self.sim.rng
        there = [node for node in cluster.nodes.values() if not node.declared_dead]
        beside = rng.sample(there, round(share * len(there)))
        present.journal.cut_off(until, rng.random() < 0.5)
        present.cut_until, present.side = until, frozenset(node.name for node in beside)
        for node in beside:
            cluster.silent(node, until - self.sim.clock.now)
        if len(beside) == len(there):
            cluster.add_node()  # the run can go on there: all other nodes are cut off
        if rng.random() < UNREACHED:
            for node in there:
                self.sim.clock.after(UNREACHED_S * rng.random(), self._cannot_reach, present, node.name)

    def _cannot_reach(self, coordinator: Coordinator, node: NodeId) -> None:
        """Makes ``coordinator`` give up a keeper that it cannot reach, without asking the cluster's head."""
        if not coordinator.reaches(node):
            coordinator.receive(KeeperLost(node, "its process cannot be reached"))

    def follow(self, before: Coordinator, disk: bool = False, claimed_at: float | None = None) -> None:
        """Begins the next incarnation after ``before``, if none has begun yet.

        ``disk`` is True if the next incarnation starts on the machine of ``before``, so that it finds the
        records on that disk.  It waits as long as ``before`` may act on records that nobody else can read.
        """
        if before is not self.present:
            return
        if self.sim.cluster.bucket_fails():
            return self.sim.clock.after(AGAIN_S, self.follow, before, disk, claimed_at)
        if claimed_at is None:
            claimed_at, self.claimed = self.sim.clock.now, self.claimed + 1
        read = before.journal.read_by(self.claimed, disk)
        if wait_s := authority.waits_s(
            claimed_at, self.sim.rules.coordinator_lease_over_s, read.all, self.sim.clock.now
        ):
            return self.sim.clock.after(wait_s, self.follow, before, disk, claimed_at)
        for each in self.all:
            each.was_read(read.ahead)
        how = "" if disk else " with what the keepers have" if read.all else " without what was written last"
        self.sim.oracle.occasions[f"a coordinator takes over{how}"] += 1
        self._begin(
            read._replace(run=codec.decode_run(codec.encode(read.run))),
            self.claimed,
            claimed_at,
            follows=True,
        )
        self.sim.clock.after(0.0, self.present.tick)  # after the event Recovered
        return self.present.take_over(read.all)

    def resume(self) -> None:
        """Resumes the run after a stop.  The new coordinator knows the newest manifest and which numbers were
        used for generations and workers.
        """
        sim, run = self.sim, self.present.run
        version = run.history.saved[-1] if run.history.saved else Version(0, 0)
        known = lineage.cut(run.history.lineage, version)
        incarnation = self.claimed = self.claimed + 1
        begun = RunState.begin(
            incarnation,
            sim.clock.now + self.ahead_s,
            run.history.saved,
            known,
            run.next_generation - 1,
            run.members.next_worker,
        )
        begun = replace(begun, skips=run.skips.resume(begun.step))
        self.in_bucket.create([Record(self.in_bucket.end, begun)], incarnation)
        self._begin(Read(begun, (), True), incarnation, sim.clock.now, follows=False)
        sim.clock.after(0.0, self.present.tick)
        sim.oracle.resumed()
        for node in sim.cluster.nodes.values():
            if node.keeper:
                sim.cluster.introduce(node.name)
        sim.cluster.look_at_misfits()

    def _begin(self, read: Read, incarnation: int, claimed_at: float, *, follows: bool) -> None:
        sim, first = self.sim, self.in_bucket.end

        def journal(coordinator: Coordinator) -> Journal:
            return Journal(sim, coordinator, read, first, claimed_at, follows=follows)

        self.all.append(Coordinator(sim, self.advance, incarnation, journal, self.ahead_s))
        if not follows:
            self.acting = self.present
        sim.tell(f"coordinator {incarnation} begins")
