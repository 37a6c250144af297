"""Models one coordinator of a run, which works as in production: inbox -> advance -> journal -> perform."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from elastic.control.inbox import Inbox
from elastic.control.machine import Transition
from elastic.control.rules import Rules
from elastic.control.run import RunState
from elastic.control.takeover import STOOD_S
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.protocol import actions as do
from elastic.protocol.events import (
    Attached,
    Event,
    Recovered,
    Renewed,
    Said,
    ShardSaved,
    StopRequested,
    Tick,
    Together,
    parts,
)
from elastic.sim.journals import Journal, Record
from elastic.sim.network import Way
from elastic.sim.worker import Worker

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation

Advance = Callable[[RunState, Event, float, Rules], Transition]
TICK_S = 1.0
AGAIN_S = 0.5
"""Time in seconds between two attempts of an operation that is not possible yet."""
ATTACH_S = 0.5
"""Time in seconds between two calls of a new coordinator to a worker that has not answered."""


class Coordinator:
    """One incarnation of the coordinator."""

    def __init__(
        self,
        sim: Simulation,
        advance: Advance,
        incarnation: int,
        journal: Callable[[Coordinator], Journal],
        ahead_s: float,
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
        """The parts of saves that were reported to this coordinator: version, generation that wrote it,
        worker.
        """
        self.uploads = 0
        """Number of times that it has told keepers which saves are on their way."""
        self._inbox = Inbox(lambda: self.now, many=2)
        self._reads_at = 0.0
        """The time at which it reads its inbox, if it is slow."""
        self._catches_up = False
        self._decided: tuple[RunState, Event, Transition] | None = None
        """The decision that waits to be performed, because a follower would not find its record yet."""
        self._judged: tuple[RunState, Event, Transition] | None = None
        """The waiting decision, if the oracle has judged it already: a follower has read its record."""
        self.decided_at = 0.0
        """The time of its last decision, which may have waited since to be performed."""
        self._tries_again = False

    @property
    def now(self) -> float:
        """The time by its own clock."""
        return self.sim.clock.now + self.ahead_s

    @property
    def counts_from(self) -> float:
        """The time, by its own clock, from which the deadlines of the present actions count.

        This is the time of the decision, or the present time if more than ``STOOD_S`` have passed since the
        decision.
        """
        stood_s = self.sim.clock.now - self.decided_at
        return self.now - (stood_s if stood_s <= STOOD_S else 0.0)

    @property
    def acts(self) -> bool:
        return self.alive and self.frozen_until <= self.sim.clock.now and not self.run.over

    @property
    def cut(self) -> bool:
        """True if it is cut off from the cluster's head.  A cut coordinator with nodes on its side is also
        cut off from all other nodes.
        """
        return self.cut_until > self.sim.clock.now

    def reaches(self, node: NodeId) -> bool:
        """Returns whether it reaches ``node``.

        A cut coordinator that has nodes on its side reaches only these, and no other coordinator reaches
        them.
        """
        for each in self.sim.coordinators.all:
            if each.cut and (
                (node in each.side) if each is not self else (each.side and node not in each.side)
            ):
                return False
        return True

    def receive(self, event: Event) -> str:
        if not self.alive or (self.run.over and self is not self.sim.coordinators.present):
            return ""
        if self._stands or self._is_slow(event):
            self._inbox.put(event)
            return ""
        return self._decide(event)

    @property
    def _stands(self) -> bool:
        return self.frozen_until > self.sim.clock.now or self._decided is not None

    def _is_slow(self, event: Event) -> bool:
        """Returns whether ``event`` waits because this coordinator is slow to read what workers say."""
        sim, now = self.sim, self.sim.clock.now
        if sim.slow_s and isinstance(event, Said) and self._reads_at <= now:
            self._reads_at = now + sim.slow_s * sim.slow.random()
            sim.clock.after(self._reads_at - now, self._catch_up)
        return self._reads_at > now

    def _decide(self, event: Event) -> str:
        sim, before, now = self.sim, self.run, self.sim.clock.now
        for each in parts(event):
            if isinstance(each, Attached):
                self.attached.add(each.worker)
            elif isinstance(each, ShardSaved):
                self.receipts.add((each.version, each.by, each.worker))
        transition = self.advance(before, event, self.now, sim.rules)
        sim.lines.append((now, event, transition.reason))
        if codec.worth_recording(event, before, transition):
            self.journal.append(transition.run)
        self._decided, self.decided_at = (before, event, transition), now
        self.go_through_with_it()
        return transition.reason

    def go_through_with_it(self) -> None:
        """Performs the waiting decision if its record is safe, or else tries again later."""
        if self._decided is None or not self.alive or self.frozen_until > self.sim.clock.now:
            return
        before, event, transition = decided = self._decided
        if transition.durable and not self.journal.secured():
            self.sim.oracle.occasions["a coordinator stands still, for nobody would know what it did"] += (
                self.alive
            )
            return self._try_again()
        self._decided, self.run = None, transition.run
        sim, coordinators = self.sim, self.sim.coordinators
        coordinators.events += 1
        coordinators.visited.update(
            (type(before.state).__name__, type(each).__name__) for each in parts(event)
        )
        sim.oracle.occasions["workers' messages are taken together"] += isinstance(event, Together)
        if isinstance(event, Recovered):
            coordinators.begins(self)
        if decided is not self._judged:
            sim.oracle.judge(before, event, transition, self)
        sim.spikes.hears(transition)
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
        if (stood_s := sim.clock.now - self.decided_at) > STOOD_S:
            self.receive(Tick(stood_s))
        self._catch_up()
        self.journal.send()

    def _try_again(self) -> None:
        """Schedules one more call of :meth:`go_through_with_it` after ``AGAIN_S``."""
        if not self._tries_again:
            self._tries_again = True
            self.sim.clock.after(AGAIN_S, self._tried_again)

    def _tried_again(self) -> None:
        self._tries_again = False
        self.go_through_with_it()

    def was_read(self, ahead: Sequence[Record]) -> None:
        """Notes that a follower has read the records in the bucket and those in ``ahead``.  From now on
        workers may forget the commits that these records report.
        """
        self.journal.was_read(ahead)
        if self._decided is not None and self.journal.read_to == self.journal.disk.end:
            self.sim.oracle.hears(self._decided[1])

    def is_read(self) -> None:
        """Notes that a follower has read its journal.

        If the follower has read the last record, the decision that waits to be performed is valid, and the
        oracle judges it now.
        """
        if (
            self._decided is not None
            and self._decided is not self._judged
            and self.journal.read_to == self.journal.disk.end
        ):
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
            # an older coordinator, which did not know of this one, wrote to the journal
            if self is self.sim.coordinators.present:
                self.sim.clock.after(AGAIN_S, self.sim.coordinators.follow, self)

    def thaw(self) -> None:
        self.journal.thaw()
        self.go_through_with_it()
        self._catch_up()

    def _catch_up(self) -> None:
        """Handles the events that arrived while this coordinator stood still or was slow."""
        if self._catches_up:  # the loop below goes on
            return
        self._catches_up = True
        while self.alive and not self._stands and (waiting := self._inbox.take(0.0)) is not None:
            self._decide(waiting[0])
        self._catches_up = False

    def tick(self) -> None:
        if self.alive:
            if self.frozen_until <= self.sim.clock.now:
                self.journal.keep_lease()
                self.receive(Tick())
            self.sim.clock.after(TICK_S, self.tick)

    # -- taking over
    # ------------------------------------------------------------------------------------------------

    def take_over(self, whole: bool) -> None:
        """Handles its first event, which names the workers and keepers that this coordinator has found."""
        self.whole = whole
        cluster = self.sim.cluster
        found = tuple(worker.name for worker in cluster.running if worker.node not in cluster.given_up)
        keepers = tuple(
            sorted(node.name for node in cluster.nodes.values() if node.keeper and not node.declared_dead)
        )
        self.receive(Recovered(self.incarnation, found, keepers, whole))

    def _greet(self, event: Recovered) -> None:
        """Calls the workers and keepers that this coordinator has found: it may act from now on."""
        cluster = self.sim.cluster
        for name in event.workers:
            self.attach(cluster.workers[name])
        for node in event.keepers:
            cluster.introduce(node)
        cluster.look_at_misfits()
        if self.sim.stop_asked:
            self.receive(StopRequested("Ctrl-C"))

    def attach(self, worker: Worker) -> None:
        """Calls ``worker`` repeatedly until it answers, or until one of the two no longer acts."""
        if self.acts and worker.alive and worker.name not in self.attached:
            if self.reaches(worker.node):
                self.sim.network.send(
                    Way.TO, worker.node, worker.receive, worker.order, self.incarnation, worker.attached
                )
            self.sim.clock.after(ATTACH_S, self.attach, worker)

    # -- performing
    # -------------------------------------------------------------------------------------------------

    def renew(self, worker: Worker, generation: int, asked_at: float) -> None:
        """Answers a request for a lease.

        The lease counts from the moment of the request, so it never ends later for the member than for the
        coordinator.
        """
        known = self.journal.run
        granted = worker.name in known.workers and known.grants_lease(generation) and self.journal.holds()
        if granted:
            self.sim.oracle.granted(worker, asked_at)
            self.receive(Renewed(worker.name, generation))
        safe = self.journal.authority.safe
        if self._decided is not None and safe is self._decided[2].run:
            # the next coordinator finds this decision, although it is not performed yet
            self.sim.oracle.hears(self._decided[1])
        recorded_step = safe.history.recorded_step if safe.generation == generation else 0
        dismissed = not known.knows(worker.name) and self.journal.holds()
        self._tell(worker, worker.renewed, generation, asked_at, granted, recorded_step, dismissed)

    def _tell(self, worker: Worker, call: Callable[..., object], *args: object) -> None:
        if not self.reaches(worker.node) or (self.cut and self.sim.rng.random() < 0.5):
            return
        self.sim.network.send(
            Way.TO, worker.node, worker.receive, worker.order, self.incarnation, call, *args
        )

    def perform(self, action: do.Action) -> None:
        cluster = self.sim.cluster
        match action:
            case do.StartWorkers() | do.Kill() if self.cut:
                pass
            case do.StartWorkers():
                cluster.start(action.workers, action.avoid)
            case do.Form():
                self._each(action.plan.members, Worker.form, action.plan)
            case do.ConnectAhead():
                self._each(action.plan.members, Worker.connect_ahead, action.plan)
            case do.Go():
                self._each(action.members, Worker.go, action.generation)
            case do.Pause():
                self._each(action.members, Worker.pause, action.generation, action.save, action.hand_over)
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
                cluster.order_surely(
                    self.incarnation, action.keepers, cluster.upload, (self.incarnation, self.uploads), action
                )
            case do.Retain():
                cluster.retain(action)
            case do.ListCopies():
                cluster.order(self.incarnation, action.keepers, cluster.list_copies, action.generation)
            case do.Release():
                cluster.order(
                    self.incarnation, action.keepers, cluster.release, action.copied, action.buddied
                )
            case do.Pair():
                for node, buddy, _ in action.buddies:
                    cluster.order(self.incarnation, (node,), cluster.pair, buddy)
            case do.LetGo():
                cluster.order(self.incarnation, action.nodes, cluster.notices.let_go)
            case do.Exit():
                cluster.exit(action.workers)

    def _each(self, names: Iterable[WorkerId], call: Callable[..., None], *args: object) -> None:
        for name in names:
            if (worker := self.sim.cluster.workers.get(name)) is not None:
                self._tell(worker, call.__get__(worker), *args)

    def _commit_manifest(self, action: do.CommitManifest) -> None:
        """Writes the manifest and reports the result.  If the coordinator is gone meanwhile, the manifest may
        still appear, but the report has no effect.

        A new manifest needs the receipts of all parts, reported to this coordinator.
        """
        known, by = self.run.saves.find(action.version), action.by or action.version.generation
        reported = known is not None and all(
            (action.version, by, each) in self.receipts for each in known.members
        )
        self.receive(
            self.sim.cluster.commit_manifest(action.version, action.by, reported, self.journal.reaches_bucket)
        )
