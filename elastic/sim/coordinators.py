"""Models the coordinators of a run.  Each works as in production: inbox -> advance -> journal -> perform.

A coordinator that dies or is taken for dead is followed by a coordinator of the next incarnation, which reads the journal as far as it
can.  The old coordinator may be alive, frozen or cut off alone or with some nodes, and may not know of its follower.  Then there are two
coordinators at once, and the old one acts as long as its authority allows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from elastic.control import codec
from elastic.control.machine import Transition
from elastic.control.rules import Rules
from elastic.control.run import RunState
from elastic.control.takeover import STOOD_S
from elastic.ids import NodeId, Version, WorkerId
from elastic.protocol import actions as do
from elastic.protocol import authority, lineage
from elastic.protocol.events import (
    Attached,
    Beat,
    Event,
    KeeperLost,
    KeeperUp,
    Recovered,
    Renewed,
    ShardSaved,
    StopRequested,
    Stumbled,
    Tick,
)
from elastic.sim.faults import Kind
from elastic.sim.journals import InBucket, Journal, Read, Record
from elastic.sim.network import Way
from elastic.sim.worker import Worker

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation

Advance = Callable[[RunState, Event, float, Rules], Transition]
TICK_S = 1.0
STUMBLES = 0.3
"""Share of the killed coordinators that fail to handle an event and report this before they die."""
AGAIN_S = 0.5
"""Time in seconds between two attempts of an operation that is not possible yet."""
ATTACH_S = 0.5
"""Time in seconds between two calls of a new coordinator to a worker that has not answered."""
UNREACHED, UNREACHED_S = 0.5, 3.0
"""Share of the cut-off coordinators that give up the keepers they cannot reach, and the longest time in seconds before they do."""


class Coordinator:
    """One incarnation of the coordinator."""

    def __init__(
        self, sim: Simulation, advance: Advance, incarnation: int, journal: Callable[[Coordinator], Journal], ahead_s: float
    ) -> None:
        self.sim, self.advance, self.incarnation = sim, advance, incarnation
        self.ahead_s = ahead_s
        """Seconds by which its clock is ahead of the true time."""
        self.alive, self.frozen_until, self.cut_until = True, 0.0, 0.0
        self.side: frozenset[NodeId] = frozenset()
        """Nodes that are cut off together with this coordinator."""
        self.journal = journal(self)
        self.run = self.journal.run
        self.whole = True
        """True if it has read every record on which earlier coordinators may have acted."""
        self.acted_to = 0
        """Number of its records that its follower must know, because this coordinator has acted on them."""
        self.attached: set[WorkerId] = set()
        """Workers that have answered this coordinator."""
        self.receipts: set[tuple[Version, int, WorkerId]] = set()
        """The parts of saves that were reported to this coordinator: version, generation that wrote it, worker."""
        self.uploads = 0
        """Number of times that it has told keepers which saves are on their way."""
        self._backlog: list[Event] = []
        self._decided: tuple[RunState, Event, Transition] | None = None
        """The decision that may not be performed yet, because a follower would not find its record."""
        self._judged: tuple[RunState, Event, Transition] | None = None
        """The decision that the oracle has judged before it was performed, because a follower has read its record."""
        self._decided_at = 0.0
        self._tries_again = False

    @property
    def now(self) -> float:
        """The time by its own clock."""
        return self.sim.clock.now + self.ahead_s

    @property
    def counts_from(self) -> float:
        """The time, by its own clock, from which the deadlines of the present actions count.

        This is the time of the decision, or the present time if more than ``STOOD_S`` have passed since the decision.
        """
        stood_s = self.sim.clock.now - self._decided_at
        return self.now - (stood_s if stood_s <= STOOD_S else 0.0)

    @property
    def acts(self) -> bool:
        return self.alive and self.frozen_until <= self.sim.clock.now and not self.run.over

    @property
    def cut(self) -> bool:
        """True if it is cut off from the cluster's head.  If it has nodes on its side, it is also cut off from all other nodes."""
        return self.cut_until > self.sim.clock.now

    def reaches(self, node: NodeId) -> bool:
        """Returns whether it reaches ``node``.

        A cut coordinator that has nodes on its side reaches only these, and no other coordinator reaches them.
        """
        for each in self.sim.coordinators.all:
            if each.cut and ((node in each.side) if each is not self else (each.side and node not in each.side)):
                return False
        return True

    def receive(self, event: Event) -> str:
        if not self.alive or (self.run.over and self is not self.sim.coordinators.present):
            return ""
        sim, before, now = self.sim, self.run, self.sim.clock.now
        if self.frozen_until > now or self._decided is not None:
            self._backlog.append(event)
            return ""
        if isinstance(event, Attached):
            self.attached.add(event.worker)
        elif isinstance(event, ShardSaved):
            self.receipts.add((event.version, event.by, event.worker))
        transition = self.advance(before, event, self.now, sim.rules)
        sim.lines.append((now, event, transition.reason))
        if codec.worth_recording(event, before, transition):
            self.journal.append(transition.run)
        self._decided, self._decided_at = (before, event, transition), now
        self.go_through_with_it()
        return transition.reason

    def go_through_with_it(self) -> None:
        """Performs the waiting decision if that is allowed now, or else tries again later."""
        if self._decided is None or not self.alive or self.frozen_until > self.sim.clock.now:
            return
        before, event, transition = decided = self._decided
        if transition.durable and not self.journal.secured():
            self.sim.oracle.occasions["a coordinator stands still, for nobody would know what it did"] += self.alive
            return self._try_again()
        self._decided, self.run = None, transition.run
        sim, coordinators = self.sim, self.sim.coordinators
        coordinators.events += 1
        coordinators.visited[type(before.state).__name__, type(event).__name__] += 1
        if isinstance(event, Recovered):
            coordinators.begins(self)
        if decided is not self._judged:
            sim.oracle.judge(before, event, transition, self)
        if transition.durable:
            self.acted_to = self.journal.disk.end
        for action in transition.actions:
            self.perform(action)
        if transition.run.state is not before.state:
            sim.strikes.entered(type(transition.run.state).__name__)
        if transition.run.history.last is not before.history.last:
            sim.strikes.recovered()
        if isinstance(event, Recovered):
            self._greet(event)
        if (stood_s := sim.clock.now - self._decided_at) > STOOD_S:
            self.receive(Tick(stood_s))
        self._catch_up()
        self.journal.send()

    def _try_again(self) -> None:
        """Schedules one more attempt after ``AGAIN_S``."""
        if not self._tries_again:
            self._tries_again = True
            self.sim.clock.after(AGAIN_S, self._tried_again)

    def _tried_again(self) -> None:
        self._tries_again = False
        self.go_through_with_it()

    def was_read(self, ahead: Sequence[Record]) -> None:
        """Notes that a follower has read the records in the bucket and ``ahead``: from now on workers may forget what these tell."""
        self.journal.was_read(ahead)
        if self._decided is not None and self.journal.read_to == self.journal.disk.end:
            self.sim.oracle.hears(self._decided[1])

    def is_read(self) -> None:
        """Notes that a follower has read its journal.

        If the follower has read the last record, the decision that waits to be performed is valid, and the oracle judges it now.
        """
        if self._decided is not None and self._decided is not self._judged and self.journal.read_to == self.journal.disk.end:
            self._judged = self._decided
            if isinstance(self._decided[1], Recovered):
                self.sim.coordinators.begins(self)
            self.sim.oracle.judge(*self._decided, self)

    def depose(self) -> None:
        """Ends this coordinator, because another one owns the journal."""
        if self.alive:
            self.alive = False
            self.sim.oracle.occasions["a coordinator finds itself deposed"] += 1
            self.sim.tell(f"coordinator {self.incarnation} is deposed")
            if self is self.sim.coordinators.present:  # an older coordinator, which did not know of this one, wrote once more
                self.sim.clock.after(AGAIN_S, self.sim.coordinators.follow, self)

    def thaw(self) -> None:
        self.journal.thaw()
        self.go_through_with_it()
        self._catch_up()

    def _catch_up(self) -> None:
        """Handles the events that came while it could not."""
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.receive(event)

    def tick(self) -> None:
        if self.alive:
            if self.frozen_until <= self.sim.clock.now:
                self.journal.keep_lease()
                self.receive(Tick())
            self.sim.clock.after(TICK_S, self.tick)

    # -- taking over ------------------------------------------------------------------------------------------------

    def take_over(self, whole: bool) -> None:
        """Handles its first event, which names the workers and keepers that it has found."""
        self.whole = whole
        cluster = self.sim.cluster
        found = tuple(worker.name for worker in cluster.running if worker.node not in cluster.given_up)
        keepers = tuple(sorted(node.name for node in cluster.nodes.values() if node.keeper and not node.declared_dead))
        self.receive(Recovered(self.incarnation, found, keepers, whole))

    def _greet(self, event: Recovered) -> None:
        """Calls the workers and keepers that it has found, because it may act from now on."""
        cluster = self.sim.cluster
        for name in event.workers:
            self.attach(cluster.workers[name])
        for node in event.keepers:
            cluster.say_surely(node, cluster.introduction(node))
        cluster.look_at_misfits()
        if self.sim.stop_asked:
            self.receive(StopRequested("Ctrl-C"))

    def attach(self, worker: Worker) -> None:
        """Calls ``worker`` repeatedly until it answers, or until one of the two no longer acts."""
        if self.acts and worker.alive and worker.name not in self.attached:
            if self.reaches(worker.node):
                self.sim.network.send(Way.TO, worker.node, worker.receive, worker.order, self.incarnation, worker.attached)
            self.sim.clock.after(ATTACH_S, self.attach, worker)

    # -- performing -------------------------------------------------------------------------------------------------

    def renew(self, worker: Worker, generation: int, asked_at: float) -> None:
        """Answers a request for a lease.

        The lease counts from the moment of the request, so it never ends later for the member than for the coordinator.
        """
        known = self.journal.run
        granted = worker.name in known.workers and known.grants_lease(generation) and self.journal.holds()
        if granted:
            self.sim.oracle.granted(worker, asked_at)
            self.receive(Renewed(worker.name, generation))
        safe = self.journal.authority.safe
        if self._decided is not None and safe is self._decided[2].run:
            self.sim.oracle.hears(self._decided[1])  # recorded where the next coordinator finds it, although nothing is performed yet
        recorded_step = safe.history.recorded_step if safe.generation == generation else 0
        dismissed = not known.knows(worker.name) and self.journal.holds()
        self._tell(worker, worker.renewed, generation, asked_at, granted, recorded_step, dismissed)

    def _tell(self, worker: Worker, call: Callable[..., object], *args: object) -> None:
        if not self.reaches(worker.node) or (self.cut and self.sim.rng.random() < 0.5):
            return
        self.sim.network.send(Way.TO, worker.node, worker.receive, worker.order, self.incarnation, call, *args)

    def perform(self, action: do.Action) -> None:
        cluster = self.sim.cluster
        match action:
            case do.StartWorkers() | do.Kill() if self.cut:
                pass
            case do.StartWorkers():
                cluster.start(action.workers, action.avoid)
            case do.Form():
                self._each(action.plan.members, Worker.form, action.plan)
            case do.Go():
                self._each(action.members, Worker.go, action.generation)
            case do.Pause():
                self._each(action.members, Worker.pause, action.generation, action.save)
            case do.Fence():
                self._each(action.members, Worker.fence, action.generation, action.whole)
            case do.Settle():
                self._each(action.members, Worker.settle, action.generation, action.outcome)
            case do.Kill():
                cluster.kill(action.workers)
            case do.CommitManifest():
                self.sim.clock.after(0.1 + 0.9 * self.sim.rng.random(), self._commit_manifest, action)
            case do.Upload():
                self.uploads += 1
                cluster.order_surely(self.incarnation, action.keepers, cluster.upload, (self.incarnation, self.uploads), action)
            case do.ListCopies():
                cluster.order(self.incarnation, action.keepers, cluster.list_copies, action.generation)
            case do.Release():
                cluster.order(self.incarnation, action.keepers, cluster.release, action.copied, action.buddied)
            case do.Pair():
                for node, buddy, _ in action.buddies:
                    cluster.order(self.incarnation, (node,), cluster.pair, buddy)
            case do.Exit():
                cluster.exit(action.workers)

    def _each(self, names: Iterable[WorkerId], call: Callable[..., None], *args: object) -> None:
        for name in names:
            if (worker := self.sim.cluster.workers.get(name)) is not None:
                self._tell(worker, call.__get__(worker), *args)

    def _commit_manifest(self, action: do.CommitManifest) -> None:
        """Writes the manifest and reports the result.  If the coordinator is gone, the manifest may still appear, but it has no effect.

        A manifest is made of the receipts that this coordinator was told, unless it is there already.
        """
        known, by = self.run.saves.find(action.version), action.by or action.version.generation
        reported = known is not None and all((action.version, by, each) in self.receipts for each in known.members)
        self.receive(self.sim.cluster.commit_manifest(action.version, action.by, reported, self.journal.reaches_bucket))


class Coordinators:
    """All coordinators of the run.

    ``present`` is the latest incarnation, to which everybody speaks by default.  ``acting`` is the latest one that has begun to act.
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
        """Makes ``coordinator`` the acting one.  Decisions of older coordinators that it has read are valid."""
        for each in self.all[: self.all.index(coordinator)]:
            each.is_read()
        self.sim.oracle.judge_reading(self.acting, coordinator)
        self.acting = coordinator

    def hear(self, worker: Worker, event: Event) -> None:
        """Delivers a worker's event.

        If the worker is dead, each event is lost with probability 0.5.  A coordinator that is cut off hears the workers that know no later
        one.
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

        This is the older coordinator that it obeys, if that one acts.  Otherwise these are the coordinators that are cut off together with
        its node, and if there are none, the present one.
        """
        known = [each for each in self.all[:-1] if each.acts and each.incarnation == worker.member.incarnation]
        beside = [each for each in self.all[:-1] if each.acts and each.cut and worker.node in each.side]
        return known or beside or [self.present]

    def tell(self, event: Event) -> None:
        """Delivers an event to every coordinator in reach: of the node if the node itself sends the event, else of the cluster's head."""
        own = event.node if isinstance(event, Beat | KeeperUp) else None
        for each in self.all:
            if each.reaches(own) if own is not None else not each.cut:
                each.receive(event)
            elif each is self.present and not isinstance(event, Beat):  # repeated until the present coordinator hears it
                self.sim.clock.after(AGAIN_S, self._tell_present, event)

    def _tell_present(self, event: Event) -> None:
        present, nodes = self.present, self.sim.cluster.nodes
        if isinstance(event, KeeperLost) and event.node in nodes and nodes[event.node].keeper:
            return  # a new keeper runs by now, and no call of this coordinator to the old keeper has failed
        if present.cut or (isinstance(event, KeeperUp) and not present.reaches(event.node)):
            self.sim.clock.after(AGAIN_S, self._tell_present, event)
        else:
            present.receive(event)

    # -- what happens to them -----------------------------------------------------------------------------------------

    def suffer(self, kind: Kind, duration_s: float, amount: float) -> None:
        """Applies a fault to the present coordinator or the next one.  A dead coordinator cannot be killed, frozen or cut off."""
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
                    present.receive(Stumbled(f"{self.sim.rng.choice(('Beat', 'Joined', 'Tick'))}: KeyError at cluster.py:7"))
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
        """Cuts off ``present`` from the head, together with a ``share`` of the nodes, which may include its whole world."""
        cluster, rng = self.sim.cluster, self.sim.rng
        there = [node for node in cluster.nodes.values() if not node.declared_dead]
        beside = rng.sample(there, round(share * len(there)))
        present.journal.cut_off(until, rng.random() < 0.5)
        present.cut_until, present.side = until, frozenset(node.name for node in beside)
        for node in beside:
            cluster.silent(node, until - self.sim.clock.now)
        if len(beside) == len(there):
            cluster.add_node()  # the run can go on there
        if rng.random() < UNREACHED:
            for node in there:
                self.sim.clock.after(UNREACHED_S * rng.random(), self._cannot_reach, present, node.name)

    def _cannot_reach(self, coordinator: Coordinator, node: NodeId) -> None:
        """Makes ``coordinator`` give up a keeper that its calls do not reach.  It does not ask the cluster's head."""
        if not coordinator.reaches(node):
            coordinator.receive(KeeperLost(node, "its process cannot be reached"))

    def follow(self, before: Coordinator, disk: bool = False, claimed_at: float | None = None) -> None:
        """Begins the next incarnation after ``before``, if none has begun yet.

        ``disk`` is True if it starts where ``before`` has ended, so that it finds the local records of ``before``.  As long as ``before``
        may act on records that nobody else can read, the next incarnation waits.
        """
        if before is not self.present:
            return
        if self.sim.cluster.bucket_fails():
            return self.sim.clock.after(AGAIN_S, self.follow, before, disk, claimed_at)
        if claimed_at is None:
            claimed_at, self.claimed = self.sim.clock.now, self.claimed + 1
        read = before.journal.read_by(self.claimed, disk)
        if wait_s := authority.waits_s(claimed_at, self.sim.rules.coordinator_lease_over_s, read.all, self.sim.clock.now):
            return self.sim.clock.after(wait_s, self.follow, before, disk, claimed_at)
        for each in self.all:
            each.was_read(read.ahead)
        how = "" if disk else " with what the keepers have" if read.all else " without what was written last"
        self.sim.oracle.occasions[f"a coordinator takes over{how}"] += 1
        self._begin(read._replace(run=codec.decode_run(codec.encode(read.run))), self.claimed, claimed_at, follows=True)
        self.sim.clock.after(0.0, self.present.tick)  # after the event Recovered
        return self.present.take_over(read.all)

    def resume(self) -> None:
        """Resumes the run after a stop.  The new coordinator knows the newest manifest and the numbers that were used."""
        sim, run = self.sim, self.present.run
        version = run.history.saved[-1] if run.history.saved else Version(0, 0)
        known = lineage.cut(run.history.lineage, version)
        incarnation = self.claimed = self.claimed + 1
        begun = RunState.begin(
            incarnation, sim.clock.now + self.ahead_s, run.history.saved, known, run.next_generation - 1, run.members.next_worker
        )
        self.in_bucket.create([Record(self.in_bucket.end, begun)], incarnation)
        self._begin(Read(begun, (), True), incarnation, sim.clock.now, follows=False)
        sim.clock.after(0.0, self.present.tick)
        sim.oracle.resumed()
        for node in sim.cluster.nodes.values():
            if node.keeper:
                sim.cluster.say_surely(node.name, sim.cluster.introduction(node.name))
        sim.cluster.look_at_misfits()

    def _begin(self, read: Read, incarnation: int, claimed_at: float, *, follows: bool) -> None:
        sim, first = self.sim, self.in_bucket.end

        def journal(coordinator: Coordinator) -> Journal:
            return Journal(sim, coordinator, read, first, claimed_at, follows=follows)

        self.all.append(Coordinator(sim, self.advance, incarnation, journal, self.ahead_s))
        if not follows:
            self.acting = self.present
        sim.tell(f"coordinator {incarnation} begins")
