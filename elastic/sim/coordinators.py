"""The coordinators of a run, one after the other and sometimes two at once: inbox -> advance -> journal -> perform, as in production.

A coordinator that dies or is taken for dead is followed by one of the next incarnation, which reads what the journal still says.  The
one before may not know it: frozen or cut off, it acts on, until somebody refuses what it says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from elastic.control import actions as do
from elastic.control import codec, lineage
from elastic.control.events import Attached, Event, Recovered, Renewed, Saved, SaveFailed, StopRequested, Stumbled, Tick
from elastic.control.machine import Transition
from elastic.control.rules import Rules
from elastic.control.states import RunState
from elastic.ids import Version, WorkerId
from elastic.sim.faults import Kind
from elastic.sim.network import Way
from elastic.sim.worker import Worker

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation

Advance = Callable[[RunState, Event, float, Rules], Transition]
TICK_S = 1.0
STUMBLES = 0.3
"""Share of the coordinators that die because they could not handle an event, and still say so."""
ATTACH_S = 0.5
"""How often a coordinator that took over calls a worker that has not answered."""


class Coordinator:
    """One incarnation.  ``on_disk``: the run as the last record of its journal says it."""

    def __init__(self, sim: Simulation, advance: Advance, run: RunState, ahead_s: float = 0.0) -> None:
        self.sim, self.advance, self.run = sim, advance, run
        self.ahead_s = ahead_s
        """Of its clock before the true time."""
        self.incarnation = run.incarnation
        self.alive, self.frozen_until, self.cut_until = True, 0.0, 0.0
        self.on_disk = run
        self.copied = [run]
        """What the keepers may have: as of the last record that had to be durable, and of those after it."""
        self.attached: set[WorkerId] = set()
        """Who has answered it."""
        self._backlog: list[Event] = []

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.sim.clock.now + self.ahead_s

    @property
    def acts(self) -> bool:
        return self.alive and self.frozen_until <= self.sim.clock.now and not self.run.over

    def receive(self, event: Event) -> str:
        if not self.alive or (self.run.over and self is not self.sim.coordinators.present):
            return ""
        sim, before, now = self.sim, self.run, self.sim.clock.now
        if self.frozen_until > now:
            self._backlog.append(event)
            return ""
        if isinstance(event, Attached):
            self.attached.add(event.worker)
        coordinators = sim.coordinators
        state = type(before.state).__name__
        transition = self.advance(before, event, self.now, sim.rules)
        sim.lines.append((now, event, transition.reason))
        if transition.durable and not coordinators.may_record(self):
            return self.depose()
        coordinators.events += 1
        coordinators.visited[state, type(event).__name__] += 1
        self.run = transition.run
        sim.oracle.judge(before, event, transition, self)
        self._record(transition)
        for action in transition.actions:
            self.perform(action)
        if transition.run.state is not before.state:
            sim.strikes.entered(type(transition.run.state).__name__)
        if transition.run.last is not before.last:
            sim.strikes.recovered()
        return transition.reason

    def _record(self, transition: Transition) -> None:
        if transition.run is self.on_disk:
            return
        if self is not self.sim.coordinators.present:  # the keepers will refuse it, once it reaches them again
            self.sim.clock.after(max(0.0, self.cut_until - self.sim.clock.now) + self.sim.rng.random(), self.depose)
        self.on_disk = transition.run
        if transition.durable:
            self.copied = []
        self.copied.append(transition.run)

    def depose(self) -> str:
        """Somebody holds its journal: it is followed by another, and leaves."""
        if not self.alive:
            return ""
        self.alive = False
        self.sim.oracle.occasions["a coordinator finds itself deposed"] += 1
        self.sim.tell(f"coordinator {self.incarnation} is deposed")
        return ""

    def thaw(self) -> None:
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.receive(event)

    def tick(self) -> None:
        if self.alive:
            if self.frozen_until <= self.sim.clock.now:
                self.receive(Tick())
            self.sim.clock.after(TICK_S, self.tick)

    # -- taking over ------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Its first event: whose actors it has found."""
        cluster = self.sim.cluster
        found = tuple(worker.name for worker in cluster.running if worker.node not in cluster.given_up)
        keepers = tuple(sorted(node.name for node in cluster.nodes.values() if node.keeper and not node.declared_dead))
        self.receive(Recovered(self.incarnation, found, keepers))
        for name in found:
            self.attach(cluster.workers[name])
        for node in keepers:
            cluster.say_surely(node, cluster.introduction(node))
        cluster.look_at_misfits()
        if self.sim.stop_asked:
            self.receive(StopRequested("Ctrl-C"))

    def attach(self, worker: Worker) -> None:
        """Again and again, until it answers, or somebody else decides."""
        if self.acts and worker.alive and worker.name not in self.attached:
            self.sim.network.send(Way.TO, worker.node, worker.receive, worker.order, self.incarnation, worker.attached)
            self.sim.clock.after(ATTACH_S, self.attach, worker)

    # -- performing -------------------------------------------------------------------------------------------------

    def renew(self, worker: Worker, generation: int, asked_at: float) -> None:
        """A lease runs from the moment it was asked for, so that the member's end is never later than the coordinator's."""
        granted = worker.name in self.on_disk.workers and self.on_disk.grants_lease(generation)
        if granted:
            self.receive(Renewed(worker.name, generation))
        self._tell(worker, worker.answered, generation, asked_at, granted, self.copied[0].recorded_step)

    def _tell(self, worker: Worker, call: Callable[..., object], *args: object) -> None:
        if self.cut_until > self.sim.clock.now and self.sim.rng.random() < 0.5:
            return
        self.sim.network.send(Way.TO, worker.node, worker.receive, worker.order, self.incarnation, call, *args)

    def perform(self, action: do.Action) -> None:
        cluster = self.sim.cluster
        match action:
            case do.StartWorkers() | do.Kill() if self.cut_until > self.sim.clock.now:
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
                self._each(action.members, Worker.fence, action.generation)
            case do.Settle():
                self._each(action.members, Worker.settle, action.generation, action.outcome)
            case do.Kill():
                cluster.kill(action.workers)
            case do.CommitManifest():
                self.sim.clock.after(0.1 + 0.9 * self.sim.rng.random(), self._commit_manifest, action.version)
            case do.TakeStock():
                cluster.order(self.incarnation, action.keepers, cluster.take_stock, action.generation)
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

    def _commit_manifest(self, version: Version) -> None:
        """The manifest of a coordinator that is gone may still come to be; nobody is told, and it counts for nothing."""
        done = self.sim.cluster.commit_manifest(version)
        self.receive(Saved(version, f"digest of {version}") if done else SaveFailed(version, "store unavailable"))


class Coordinators:
    """``present``: the latest incarnation, whom the world outside speaks to."""

    def __init__(self, sim: Simulation, advance: Advance) -> None:
        self.sim, self.advance = sim, advance
        self.events = 0
        self.visited: Counter[tuple[str, str]] = Counter()
        self.disk_lost = False
        self.ahead_s = 0.0
        self.all = [Coordinator(sim, advance, RunState.begin(1, 0.0))]

    @property
    def present(self) -> Coordinator:
        return self.all[-1]

    def may_record(self, coordinator: Coordinator) -> bool:
        """Do the keepers still take its records?  Not once a later one has spoken to them."""
        return coordinator is self.present

    def hear(self, worker: Worker, event: Event) -> None:
        """A worker's word; with the worker dies what had not quite left it.  Who is cut off still hears those that know no other."""
        if worker.alive or self.sim.rng.random() < 0.5:
            for each in self._heard_by(worker):
                each.receive(event)

    def renew(self, worker: Worker, generation: int, asked_at: float) -> None:
        for each in self._heard_by(worker):
            if each.alive and each.frozen_until <= self.sim.clock.now:
                each.renew(worker, generation, asked_at)

    def _heard_by(self, worker: Worker) -> list[Coordinator]:
        """Whom the worker means: the one it has heard last, as long as that lives."""
        known = [each for each in self.all[:-1] if each.acts and each.incarnation == max(worker.incarnation, 1)]
        return known or [self.present]

    def tell(self, event: Event) -> None:
        """What the cluster tells everybody who asks."""
        for each in self.all:
            if each.cut_until <= self.sim.clock.now or each is self.present:
                each.receive(event)

    # -- what happens to them -----------------------------------------------------------------------------------------

    def suffer(self, kind: Kind, duration_s: float, amount: float) -> None:
        """Where one starts already, the next fault waits for nobody: it strikes whoever is there."""
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
                self.sim.clock.after(duration_s, self.follow, present)
            case Kind.COORDINATOR_FREEZE:
                present.frozen_until = max(present.frozen_until, now + duration_s)
                self.sim.clock.after(duration_s * self.sim.rng.random(), self.follow, present)
                self.sim.clock.after(duration_s, present.thaw)
            case Kind.COORDINATOR_CUT:
                present.cut_until = now + duration_s
                self.sim.clock.after(0.3 * duration_s * self.sim.rng.random(), self.follow, present)

    def follow(self, before: Coordinator) -> None:
        """The next incarnation, unless there is one."""
        if before is not self.present:
            return
        run = self.sim.rng.choice(before.copied) if self.disk_lost else before.on_disk
        self.sim.oracle.occasions["a coordinator takes over" + (" with what the keepers have" if self.disk_lost else "")] += 1
        self.disk_lost = False
        run = codec.decode_run(codec.encode(run))
        self._begin(run, before.incarnation + 1)
        self.present.take_over()

    def resume(self) -> None:
        """The same command after a stop: it knows what the newest manifest says, and which numbers were used."""
        sim, run = self.sim, self.present.run
        version = run.saved[-1] if run.saved else Version(0, 0)
        known = lineage.cut(run.lineage, version)
        incarnation = self.present.incarnation + 1
        begun = RunState.begin(incarnation, sim.clock.now + self.ahead_s, run.saved, known, run.generation, run.next_worker)
        self._begin(begun, incarnation)
        sim.oracle.resumed()
        for node in sim.cluster.nodes.values():
            if node.keeper:
                sim.cluster.say_surely(node.name, sim.cluster.introduction(node.name))
        sim.cluster.look_at_misfits()

    def _begin(self, run: RunState, incarnation: int) -> None:
        coordinator = Coordinator(self.sim, self.advance, run, self.ahead_s)
        coordinator.incarnation = incarnation
        self.all.append(coordinator)
        self.sim.tell(f"coordinator {incarnation} begins")
        self.sim.clock.after(0.0, coordinator.tick)  # its first event is another
