"""One run in virtual time, and many: the coordinator's loop is the product's, all it talks to is a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from elastic.control import actions as do
from elastic.control import lineage, machine
from elastic.control.events import Event, KeeperUp, Renewed, Saved, SaveFailed, StopRequested, Tick
from elastic.control.machine import Transition
from elastic.control.rules import Rules
from elastic.control.states import RunState, State, Stopped
from elastic.ids import Version, WorkerId
from elastic.plan.plan import Plan
from elastic.sim.clock import Clock
from elastic.sim.cluster import Cluster
from elastic.sim.network import Network
from elastic.sim.oracle import Oracle, Violation
from elastic.sim.scenario import Scenario
from elastic.sim.worker import Worker
from elastic.sim.world import World

Advance = Callable[[RunState, Event, float, Rules], Transition]
Line = tuple[float, Event | None, str]
"""When, what happened (None: a fault), and what was said."""
TICK_S = 1.0
EPILOGUE_S = 3.0
"""For which late words still come in after the end, and must change nothing."""
STORY_LINES = 30


def told(lines: Iterable[Line]) -> str:
    return "\n".join(f"{at:9.3f}  {reason or '.':<80}  {event or ''}" for at, event, reason in lines)


@dataclass(frozen=True)
class Report:
    """How one seed ended."""

    seed: int
    scenario: Scenario
    end: str
    virtual_s: float
    events: int
    generations: int
    visited: Counter[tuple[str, str]]
    """(state, event): how often the event came in the state."""
    occasions: Counter[str]
    lines: tuple[Line, ...]

    def story(self) -> str:
        """Every event, fault and reason: the same for the same seed."""
        return told(self.lines)


@dataclass
class Coverage:
    """Many seeds, summed up."""

    seeds: int = 0
    events: int = 0
    generations: int = 0
    virtual_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    visited: Counter[tuple[str, str]] = field(default_factory=Counter)
    occasions: Counter[str] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.events += report.events
        self.generations += report.generations
        self.virtual_s += report.virtual_s
        self.ends[report.end] += 1
        self.visited.update(report.visited)
        self.occasions.update(report.occasions)


class Coordinator:
    """Inbox -> advance -> perform, as in production, less the journal."""

    def __init__(self, sim: Simulation, advance: Advance) -> None:
        self.sim, self.advance = sim, advance
        self.run = RunState.begin(1, 0.0)
        self.events = 0
        self.visited: Counter[tuple[str, str]] = Counter()

    def receive(self, event: Event) -> str:
        sim, before = self.sim, self.run
        self.events += 1
        self.visited[type(before.state).__name__, type(event).__name__] += 1
        transition = self.advance(before, event, sim.clock.now, sim.rules)
        sim.lines.append((sim.clock.now, event, transition.reason))
        self.run = transition.run
        sim.oracle.judge(before, event, transition)
        for action in transition.actions:
            self.perform(action)
        return transition.reason

    def hear(self, worker: Worker, event: Event) -> None:
        """A worker's word; with the worker dies what had not quite left it."""
        if worker.alive or self.sim.rng.random() < 0.5:
            self.receive(event)

    def resume(self) -> None:
        """A new incarnation, after a stop: it knows what the newest manifest says, and which numbers were used."""
        sim, run = self.sim, self.run
        version = run.saved[-1] if run.saved else Version(0, 0)
        known = lineage.cut(run.lineage, version)
        self.run = RunState.begin(run.incarnation + 1, sim.clock.now, run.saved, known, run.generation, run.next_worker)
        sim.oracle.resumed()
        for node in sim.cluster.keepers:
            sim.network.send_surely(node, self.receive, KeeperUp(node))
        sim.cluster.look_at_misfits()

    def tick(self) -> None:
        self.receive(Tick())
        self.sim.clock.after(TICK_S, self.tick)

    def renew(self, worker: Worker, generation: int, asked_at: float) -> None:
        """A lease runs from the moment it was asked for, so that the member's end is never later than the coordinator's."""
        if self.run.grants_lease(generation):
            self.receive(Renewed(worker.name, generation))
            lease_until = asked_at + self.sim.rules.lease_s
            self.sim.network.send(worker.node, worker.receive, worker.renewed, generation, lease_until)

    def perform(self, action: do.Action) -> None:
        match action:
            case do.StartWorkers():
                self.sim.cluster.start(action.workers, action.avoid)
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
                self.sim.cluster.kill(action.workers)
            case do.CommitManifest():
                self.sim.clock.after(0.1 + 0.9 * self.sim.rng.random(), self._commit_manifest, action.version, self.run.incarnation)
            case do.Exit():
                self.sim.cluster.exit(action.workers)

    def _each(self, names: Iterable[WorkerId], call: Callable[..., None], *args: object) -> None:
        for name in names:
            worker = self.sim.cluster.workers[name]
            self.sim.network.send(worker.node, worker.receive, call, worker, *args)

    def _commit_manifest(self, version: Version, incarnation: int) -> None:
        """The manifest of a coordinator that is gone may still come to be; nobody is told, and it counts for nothing."""
        done = self.sim.cluster.commit_manifest(version)
        if incarnation == self.run.incarnation:
            self.receive(Saved(version, f"digest of {version}") if done else SaveFailed(version, "store unavailable"))


class Simulation:
    """What the parts of one run share."""

    def __init__(self, seed: int, scenario: Scenario | None, advance: Advance) -> None:
        self.seed, self.rng, self.clock = seed, random.Random(seed), Clock()
        self.scenario = scenario or Scenario.drawn(self.rng)
        self.rules = self.scenario.rules
        self.network = Network(self.clock, self.rng, self.scenario.weather)
        self.lines: list[Line] = []
        self.worlds: dict[int, World] = {}
        self.coordinator = Coordinator(self, advance)
        self.oracle = Oracle(self)
        self.cluster = Cluster(self)

    def world(self, plan: Plan) -> World:
        """The one of the plan's generation; its first member brings it into being."""
        if plan.generation not in self.worlds:
            self.worlds[plan.generation] = World(self, plan)
        return self.worlds[plan.generation]

    def tell(self, line: str) -> None:
        self.lines.append((self.clock.now, None, line))

    def run(self) -> str:
        """Until an end; its name."""
        self.coordinator.tick()
        if self.scenario.stop_at_s is not None:
            for again_s in (0.0, 2.0):
                self.clock.after(self.scenario.stop_at_s + again_s, self.coordinator.receive, StopRequested("Ctrl-C"))
        self._until_the_end()
        if self.scenario.resumes and isinstance(self.coordinator.run.state, Stopped):
            self.coordinator.resume()
            self._until_the_end()
        self.oracle.judge_ledger(self.coordinator.run)
        return type(self.coordinator.run.state).__name__

    def _until_the_end(self) -> None:
        """And a little longer."""
        last_s = max(self.scenario.weather.until_s, self.clock.now) + self.scenario.patience_s
        while not self.coordinator.run.over:
            if self.clock.now > last_s:
                raise Violation(f"no end after {last_s:.0f} s: {self.coordinator.run.state}")
            self.clock.step()
        end, until_s = self.coordinator.run.state, self.clock.now + EPILOGUE_S
        while self.clock.now < until_s:
            self.clock.step()
            if self.coordinator.run.state != end:
                raise Violation(f"{end} was not the end: {self.coordinator.run.state}")


def simulate(seed: int, scenario: Scenario | None = None, advance: Advance = machine.advance) -> Report:
    """One run, decided by ``seed`` alone; ``scenario`` is drawn from it unless given.  Raises :class:`Violation`."""
    sim = Simulation(seed, scenario, advance)
    try:
        end = sim.run()
    except Violation as violation:
        where = f"seed {seed}, {sim.clock.now:.3f} s; the story ends:\n{told(sim.lines[-STORY_LINES:])}"
        raise Violation(f"{violation}\n{where}") from None
    coordinator = sim.coordinator
    return Report(
        seed=seed,
        scenario=sim.scenario,
        end=end,
        virtual_s=sim.clock.now,
        events=coordinator.events,
        generations=coordinator.run.generation,
        visited=coordinator.visited,
        occasions=sim.oracle.occasions,
        lines=tuple(sim.lines),
    )


def run_many(seeds: Iterable[int], advance: Advance = machine.advance) -> Coverage:
    """Every seed with its own scenario; stops at the first :class:`Violation`."""
    coverage = Coverage()
    for seed in seeds:
        coverage.add(simulate(seed, advance=advance))
    return coverage


STATES = tuple(state.__name__ for state in get_args(State))
EVENTS = tuple(event.__name__ for event in get_args(Event))


def coverage_table(coverage: Coverage, states: Sequence[str] = STATES, events: Sequence[str] = EVENTS) -> str:
    """How often each event came in each state: a row an event, a column a state."""
    width = max(map(len, events)) + 1
    head = " " * width + "".join(f"{s:>11}" for s in states)
    rows = [f"{e:<{width}}" + "".join(f"{coverage.visited[s, e] or '-':>11}" for s in states) for e in events]
    hours = coverage.virtual_s / 3600
    total = f"{coverage.seeds} seeds, {coverage.events} events, {coverage.generations} generations, {hours:.1f} hours"
    ends = ", ".join(f"{n} {end}" for end, n in sorted(coverage.ends.items()))
    occasions = [f"{n:>9}  {what}" for what, n in sorted(coverage.occasions.items())]
    return "\n".join([head, *rows, total, ends, *occasions])
