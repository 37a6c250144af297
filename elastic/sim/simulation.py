"""Runs one job in virtual time.  The coordinator's decisions are the product's; everything else is a
model.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from elastic.control import machine
from elastic.control.run import Stopped
from elastic.protocol.events import Event, StopRequested
from elastic.protocol.plan import Plan
from elastic.sim.clock import Clock
from elastic.sim.cluster import Cluster
from elastic.sim.coordinator import Advance
from elastic.sim.coordinators import Coordinators
from elastic.sim.flips import Flips
from elastic.sim.liars import Liars
from elastic.sim.network import Network
from elastic.sim.oracle import Oracle
from elastic.sim.scenario import Scenario
from elastic.sim.spikes import SpikeTruth
from elastic.sim.strikes import Strikes
from elastic.sim.violation import Violation
from elastic.sim.world import World

Line = tuple[float, Event | None, str]
"""One line of the story: the time, the event (None for a fault), and the reason."""
EPILOGUE_S = 3.0
"""Time in seconds after the end in which late messages still arrive.  These must change nothing."""
SLOW, SLOW_S = 0.25, 0.5
"""Share of the runs whose coordinators read workers' messages late, so that several are taken together, and
the longest delay in seconds.
"""
STORY_LINES = 30
"""Number of lines of the story that a violation shows."""


def told(lines: Iterable[Line]) -> str:
    return "\n".join(f"{at:9.3f}  {reason or '.':<80}  {event or ''}" for at, event, reason in lines)


@dataclass(frozen=True)
class Report:
    """The result of one seed."""

    seed: int
    scenario: Scenario
    end: str
    virtual_s: float
    events: int
    generations: int
    visited: Counter[tuple[str, str]]
    """Number of times that each event came in each state, by (state, event)."""
    struck: Counter[tuple[str, str]]
    """Number of times that each kind of fault struck in each state, by (kind, state)."""
    overlaps: Counter[tuple[str, str]]
    """Number of times that the second kind struck before the first was recovered from, by (first, second)."""
    axes: Counter[tuple[str, str]]
    """Number of times that a world with both axes of a pair met a blow, by (pair, blow)."""
    occasions: Counter[str]
    lines: tuple[Line, ...]

    def story(self) -> str:
        """Returns every event, fault and reason as text, the same for the same seed."""
        return told(self.lines)


class Simulation:
    """One simulated run, and everything that its parts share."""

    def __init__(self, seed: int, scenario: Scenario | None, advance: Advance) -> None:
        self.seed, self.rng, self.clock = seed, random.Random(seed), Clock()
        self.scenario = scenario or Scenario.drawn(seed)
        self.rules = self.scenario.rules
        self.network = Network(self.clock, random.Random(seed + 1))
        self.slow = random.Random(seed + 2)
        self.slow_s = SLOW_S if self.slow.random() < SLOW else 0.0
        """The longest time in seconds for which the coordinators of this run let the messages of workers
        wait.
        """
        self.lines: list[Line] = []
        self.worlds: dict[int, World] = {}
        self.stop_asked = False
        self.coordinators = Coordinators(self, advance)
        self.oracle = Oracle(self)
        self.spikes = SpikeTruth(self)
        self.flips = Flips(self)
        self.liars = Liars(self)
        self.cluster = Cluster(self)
        self.strikes = Strikes(self)

    def world(self, plan: Plan) -> World:
        """Returns the world of the plan's generation.  The first member that asks creates it."""
        if plan.generation not in self.worlds:
            self.worlds[plan.generation] = World(self, plan)
        return self.worlds[plan.generation]

    def tell(self, line: str) -> None:
        self.lines.append((self.clock.now, None, line))

    @property
    def state_name(self) -> str:
        return type(self.coordinators.present.run.state).__name__

    def tell_coordinator(self, event: Event) -> None:
        self.coordinators.tell(event)

    def run(self) -> str:
        """Runs until the job ends, and returns the name of the end."""
        self.coordinators.present.tick()
        if self.scenario.stop_at_s is not None:
            for again_s in (0.0, 2.0):
                self.clock.after(self.scenario.stop_at_s + again_s, self._ask_to_stop)
        self._until_the_end()
        if self.scenario.resumes and isinstance(self.coordinators.present.run.state, Stopped):
            self.stop_asked = False
            self.coordinators.resume()
            self._until_the_end()
        self.oracle.judge_ledger(self.coordinators.present.run)
        self.spikes.judge(self.coordinators.present.run)
        return self.state_name

    def _ask_to_stop(self) -> None:
        self.stop_asked = True
        self.oracle.stop_asked = True
        self.coordinators.present.receive(StopRequested("Ctrl-C"))

    @property
    def _patience_s(self) -> float:
        """Time in seconds after the last fault within which the run must end.  A run with slow steps has
        longer: when it stands still, this is noticed later.
        """
        return self.scenario.patience_s + 3 * self.coordinators.present.run.watch.step_s

    def _until_the_end(self) -> None:
        """Runs until the job ends, and ``EPILOGUE_S`` longer.  Raises :class:`Violation` if it ends too late
        or goes on.
        """
        begun, clock, coordinators = self.clock.now, self.clock, self.coordinators
        last_s = 0.0
        while not coordinators.present.run.over:
            if clock.now > last_s and clock.now > (
                last_s := max(self.strikes.calm_at, begun) + self._patience_s
            ):
                raise Violation(f"no end after {last_s:.0f} s: {coordinators.present.run.state}")
            clock.step()
        end, until_s, present = coordinators.present.run.state, clock.now + EPILOGUE_S, coordinators.present
        while clock.now < until_s:
            clock.step()
            if not coordinators.present.whole and coordinators.present is not present:
                # the next coordinator could not read the record of this end, which therefore does not count
                return self._until_the_end()
            if coordinators.present.run.state != end:
                raise Violation(f"{end} was not the end: {coordinators.present.run.state}")


def simulate(seed: int, scenario: Scenario | None = None, advance: Advance = machine.advance) -> Report:
    """Simulates one run.  The same seed and scenario give the same run; ``scenario`` is drawn from ``seed``
    unless given.  Raises :class:`Violation`.
    """
    sim = Simulation(seed, scenario, advance)
    try:
        end = sim.run()
    except Violation as violation:
        where = f"seed {seed}, {sim.clock.now:.3f} s; the story ends:\n{told(sim.lines[-STORY_LINES:])}"
        raise Violation(f"{violation}\n{where}") from None
    coordinators = sim.coordinators
    return Report(
        seed=seed,
        scenario=sim.scenario,
        end=end,
        virtual_s=sim.clock.now,
        events=coordinators.events,
        generations=coordinators.present.run.generation,
        visited=coordinators.visited,
        struck=sim.strikes.struck,
        overlaps=sim.strikes.overlaps,
        axes=sim.oracle.met,
        occasions=sim.oracle.occasions,
        lines=tuple(sim.lines),
    )
