"""Runs many seeds, adds up what they covered, and names the pairs that must be covered and are not."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import get_args

from elastic.control.run import State
from elastic.protocol import faults
from elastic.protocol.events import Evaluated, Fact, NodeAdvised, NodeDraining, NodeStays
from elastic.protocol.faults import Kind
from elastic.sim.scenario import AXES
from elastic.sim.simulation import Report, simulate
from elastic.sim.truth import BLOWS
from elastic.sim.violation import Violation

OVER = ("Finished", "Stopped", "Failed")
STATES = tuple(state.__name__ for state in get_args(State))
EVENTS = tuple(event.__name__ for event in get_args(Fact) if event is not Evaluated)
"""The events that must occur.  ``Evaluated`` never does: no simulated worker validates, and a spare's
validation decides nothing in any state.
"""
NOTICES = tuple(event.__name__ for event in (NodeDraining, NodeAdvised, NodeStays))
AXIS_PAIRS = tuple(f"{first} × {second}" for first, second in combinations(sorted(AXES), 2))
"""All pairs of axes, as the oracle names them."""
CHUNK = 250
"""Number of seeds that a process takes at once."""

Pairs = Counter[tuple[str, str]]


@dataclass
class Coverage:
    """The totals of many seeds."""

    seeds: int = 0
    events: int = 0
    generations: int = 0
    virtual_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    visited: Pairs = field(default_factory=Counter)
    struck: Pairs = field(default_factory=Counter)
    overlaps: Pairs = field(default_factory=Counter)
    axes: Pairs = field(default_factory=Counter)
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
        self.axes.update(report.axes)
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
            (self.axes, other.axes),
            (self.occasions, other.occasions),
        ):
            mine.update(theirs)  # type: ignore[arg-type]


def run_many(seeds: Iterable[int]) -> tuple[Coverage, int | None]:
    """Runs every seed with its own scenario, up to the first that breaks a promise.  Returns the totals, and
    that seed or None.
    """
    coverage = Coverage()
    for seed in seeds:
        try:
            coverage.add(simulate(seed))
        except Violation:
            return coverage, seed
    return coverage, None


def run_in_processes(seeds: range, jobs: int) -> tuple[Coverage, int | None]:
    """Runs the seeds in ``jobs`` processes until one breaks a promise.  Returns the totals, and that seed or
    None.
    """
    coverage = Coverage()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    # a run has cycles of thousands of objects: collecting after every 700 takes a seventh of the time
    rarely = 100_000
    with ProcessPoolExecutor(jobs, initializer=gc.set_threshold, initargs=(rarely,)) as pool:
        for part, broken in pool.map(run_many, chunks):
            coverage.merge(part)
            if broken is not None:
                pool.shutdown(cancel_futures=True)
                return coverage, broken
    return coverage, None


# ---- pairs that must have been seen

IMPOSSIBLE: Mapping[tuple[str, str], str] = {
    ("Waiting", "Renewed"): "there is no world whose lease could be prolonged",
    ("Forming", "Renewed"): "a lease begins with Go",
    ("over", "Renewed"): "no lease is granted once the run is over",
}
"""Pairs (state, event) that cannot meet, with the reason.  "over" is any of the three ends."""


def missing(coverage: Coverage) -> list[str]:
    """Returns the possible pairs that never met: an event in a state, a fault in a state, a fault during
    another fault.  Nothing of notices is possible unless one was given.
    """
    met = {("over" if state in OVER else state, event) for state, event in coverage.visited}
    states = (*faults.STATES, "over")
    noticed = any(kind is Kind.NODE_NOTICE for kind, _ in coverage.struck)
    kinds = tuple(Kind) if noticed else faults.RECORDED
    events = [
        f"{event} in {state}"
        for state in states
        for event in EVENTS
        if (state, event) not in met | IMPOSSIBLE.keys() and (noticed or event not in NOTICES)
    ]
    struck = [
        f"{kind} in {state}" for state in faults.STATES for kind in kinds if not coverage.struck[kind, state]
    ]
    overlaps = [
        f"{second} upon {first}"
        for first in kinds
        for second in kinds
        if not coverage.overlaps[first, second]
    ]
    return events + struck + overlaps


def table(pairs: Pairs, rows: Sequence[str], columns: Sequence[str], *, transposed: bool = False) -> str:
    """Returns a table of how often each pair came.  Pairs are (row, column), or (column, row) if
    ``transposed``.
    """
    width, cell = max(map(len, rows)) + 1, max(9, *(len(column) + 2 for column in columns))
    head = " " * width + "".join(f"{column:>{cell}}" for column in columns)
    return "\n".join(
        [head, *(f"{row:<{width}}" + "".join(_cells(pairs, row, columns, cell, transposed)) for row in rows)]
    )


def _cells(pairs: Pairs, row: str, columns: Sequence[str], cell: int, transposed: bool) -> Iterable[str]:
    return (f"{pairs[(column, row) if transposed else (row, column)] or '-':>{cell}}" for column in columns)


def overlap_table(overlaps: Pairs) -> str:
    """Returns a table of pairs of faults: a row for the first, and a numbered column for the second, which
    struck before the first was recovered from.
    """
    names = {kind: f"{number:>2} {kind}" for number, kind in enumerate(Kind, 1)}
    numbers = {kind: str(number) for number, kind in enumerate(Kind, 1)}
    named = Counter(
        {(names[first], numbers[second]): overlaps[first, second] for first in Kind for second in Kind}
    )
    return table(named, tuple(names.values()), tuple(numbers.values()))


def coverage_table(coverage: Coverage) -> str:
    """Returns everything that was covered as text: the tables, the totals, the ends and the rare occasions."""
    hours = coverage.virtual_s / 3600
    total = (
        f"{coverage.seeds} seeds, {coverage.events} events, {coverage.generations} generations, {hours:.1f} "
        "hours"
    )
    ends = ", ".join(f"{n} {end}" for end, n in sorted(coverage.ends.items()))
    occasions = [f"{n:>9}  {what}" for what, n in sorted(coverage.occasions.items())]
    visited = table(coverage.visited, EVENTS, STATES, transposed=True)
    struck = table(coverage.struck, tuple(Kind), faults.STATES)
    tables = [visited, struck, overlap_table(coverage.overlaps)]
    if coverage.axes:
        tables.append(table(coverage.axes, AXIS_PAIRS, BLOWS))
    return "\n".join([*(line for each in tables for line in (each, "")), total, ends, *occasions])
