"""Many seeds: run, summed up, and held against what must have been seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import get_args

from elastic.control import machine
from elastic.control.events import Event
from elastic.control.states import State
from elastic.sim.coordinators import Advance
from elastic.sim.simulation import Report, simulate

OVER = ("Finished", "Stopped", "Failed")
STATES = tuple(state.__name__ for state in get_args(State))
EVENTS = tuple(event.__name__ for event in get_args(Event))
CHUNK = 250
"""Seeds that a process takes at once."""

Pairs = Counter[tuple[str, str]]


@dataclass
class Coverage:
    """Many seeds, summed up."""

    seeds: int = 0
    events: int = 0
    generations: int = 0
    virtual_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    visited: Pairs = field(default_factory=Counter)
    struck: Pairs = field(default_factory=Counter)
    overlaps: Pairs = field(default_factory=Counter)
    occasions: Counter[str] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.events += report.events
        self.generations += report.generations
        self.virtual_s += report.virtual_s
        self.ends[report.end] += 1
        self.visited.update(report.visited)
        self.struck.update(report.struck)
        self.overlaps.update(report.overlaps)
        self.occasions.update(report.occasions)

    def merge(self, other: Coverage) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.generations += other.generations
        self.virtual_s += other.virtual_s
        for mine, theirs in (
            (self.ends, other.ends),
            (self.visited, other.visited),
            (self.struck, other.struck),
            (self.overlaps, other.overlaps),
            (self.occasions, other.occasions),
        ):
            mine.update(theirs)  # type: ignore[arg-type]


def run_many(seeds: Iterable[int], advance: Advance = machine.advance) -> Coverage:
    """Every seed with its own scenario; stops at the first :class:`Violation`."""
    coverage = Coverage()
    for seed in seeds:
        coverage.add(simulate(seed, advance=advance))
    return coverage


def run_in_processes(seeds: range, jobs: int) -> Coverage:
    """As ``run_many``, over ``jobs`` processes."""
    coverage = Coverage()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(run_many, chunks):
            coverage.merge(part)
    return coverage
