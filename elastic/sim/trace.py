"""Reads spot traces, makes them longer, draws them, and turns them into schedules of faults.  A trace records
when each machine came and went.

A trace begins with the line ``seconds,event,node``.  Its rows have these fields, in the order of time; the
event is "add" or "remove".  Lines that begin with # name the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from random import Random

from elastic.protocol.faults import Fault, Kind
from elastic.sim.scenario import LAYOUTS, Scenario, small_rules

STEPS_A_SECOND = 0.5
"""Target number of steps for each second of a trace: half of what a run without faults makes, whose steps
take a second.
"""
HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True)
class Row:
    """The machine ``node`` comes or goes ``at`` a time in seconds."""

    at: float
    comes: bool
    node: str


def rows_of(text: str) -> tuple[Row, ...]:
    """Returns the rows of a trace.  Raises ValueError, with the number of the line, for a line that is not
    part of a trace.
    """
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line and not line.startswith("#")]
    if not lines or lines[0][1] != "seconds,event,node":
        raise ValueError("a trace begins with the line seconds,event,node")
    if len(lines) == 1:
        raise ValueError("a trace has a row for each machine that comes or goes, and this one has none")
    there: set[str] = set()
    rows: list[Row] = []
    for number, line in lines[1:]:
        seconds, event, node = (*line.split(","), "", "")[:3]
        try:
            at = float(seconds)
        except ValueError:
            raise ValueError(f"line {number}: {line}: {seconds!r} is no number of seconds") from None
        if line.count(",") != 2 or not node or not isfinite(at):
            raise ValueError(f"line {number}: {line}: a row is a time in seconds, an event and a node")
        if rows and at < rows[-1].at:
            raise ValueError(f"line {number}: {line}: the row before is later, at {rows[-1].at:g}")
        if event not in ("add", "remove"):
            raise ValueError(f"line {number}: {line}: {event!r} is no event; it must be add or remove")
        if event == "add" and node in there:
            raise ValueError(f"line {number}: {line}: this node is there already")
        if event == "remove" and node not in there:
            raise ValueError(f"line {number}: {line}: no such node is there; a row before must add it")
        there.symmetric_difference_update((node,))
        rows.append(Row(at, event == "add", node))
    return tuple(rows)


def repeated(rows: Sequence[Row], seconds: float) -> tuple[Row, ...]:
    """Returns a trace of at least ``seconds`` that repeats ``rows`` until it is as long.

    A repetition begins just before the first removal.  If other numbers of machines are there at the end of
    ``rows`` and at the beginning of a repetition, as many machines as are missing come, or as many as are too
    many go.
    """
    found, begun_s = list(rows), rows[0].at
    first = next((i for i, row in enumerate(rows) if not row.comes), None)
    if first is None:
        return tuple(rows)
    since_s, period_s = rows[first].at, rows[-1].at - rows[first].at
    at_first = _there(rows[:first])
    # the names at the end of a repetition, in place of those in the trace
    there, number = _there(rows), 0
    while period_s > 0 and found[-1].at < begun_s + seconds:
        number += 1
        shift_s = found[-1].at - since_s
        new = [f"{node}/{number}" for node in at_first[len(there) :]]
        found += [Row(since_s + shift_s, False, node) for node in there[len(at_first) :]]
        found += [Row(since_s + shift_s, True, node) for node in new]
        names = dict(zip(at_first, [*there[: len(at_first)], *new], strict=True))
        for row in rows[first:]:
            if row.comes:
                names[row.node] = f"{row.node}/{number}+"
            found.append(Row(row.at + shift_s, row.comes, names[row.node]))
        there = [names[node] for node in _there(rows)]
    return tuple(found)


def thinned(rows: Sequence[Row], nodes: int) -> tuple[Row, ...]:
    """Returns a trace of at most ``nodes`` machines at one time: of the machines of ``rows``, in the order in
    which they come, evenly spread ones.  Each of them comes and goes as it did, so losses that come together
    stay together, and a machine stays as long as it did.
    """
    most, there, kept, chosen = 0, 0, set[str](), list[Row]()
    for row in rows:
        there += 1 if row.comes else -1
        most = max(most, there)
    number = 0
    for row in rows:
        if not row.comes:
            if row.node in kept:
                kept.remove(row.node)
                chosen.append(row)
            continue
        number += 1
        due = number * min(nodes, most) // most > (number - 1) * min(nodes, most) // most
        if due and len(kept) < nodes:
            kept.add(row.node)
            chosen.append(row)
    return tuple(chosen)


def sped_up(rows: Sequence[Row], speed: float) -> tuple[Row, ...]:
    """Returns a trace that begins at 0 and is ``speed`` times as fast as ``rows``."""
    return tuple(Row((row.at - rows[0].at) / speed, row.comes, row.node) for row in rows)


def text_of(rows: Sequence[Row], about: str) -> str:
    """Returns a trace as a file, whose first line is ``about`` it."""
    lines = [f"{row.at:.3f},{'add' if row.comes else 'remove'},{row.node}" for row in rows]
    return "\n".join([f"# {about}", "seconds,event,node", *lines]) + "\n"


def numbers_of(rows: Sequence[Row]) -> list[tuple[float, int]]:
    """Returns the number of machines that are there, from each time on."""
    found, there = list[tuple[float, int]](), 0
    for row in rows:
        there += 1 if row.comes else -1
        found.append((row.at, there))
    return found


def _there(rows: Sequence[Row]) -> list[str]:
    """Returns the machines that are there after ``rows``, in the order in which they came."""
    there: dict[str, None] = {}
    for row in rows:
        if row.comes:
            there[row.node] = None
        else:
            del there[row.node]
    return list(there)


def drawn(nodes: int, days: float, mtbf_h: float, back_s: float, seed: int = 0) -> tuple[Row, ...]:
    """Returns a trace of ``nodes`` machines, each of which is lost after ``mtbf_h`` hours on average, with an
    exponential distribution.  A new machine comes ``back_s`` seconds later in its place.
    """
    rng, rows = Random(seed), list[Row]()
    for place in range(nodes):
        at, number = 0.0, 0
        while at < days * DAY_S:
            node = f"m{place}.{number}" if number else f"m{place}"
            rows.append(Row(at, True, node))
            at += rng.expovariate(1 / (mtbf_h * HOUR_S))
            if at < days * DAY_S:
                rows.append(Row(at, False, node))
            at, number = at + back_s, number + 1
    return tuple(sorted(rows, key=lambda row: (row.at, row.comes)))


def from_trace(text: str, pace: float = 1.0) -> tuple[int, tuple[Fault, ...]]:
    """Returns the number of nodes at the beginning, and the faults.  Faults come ``pace`` times as fast as
    they were recorded.

    Raises ValueError for a line that is not part of a trace.
    """
    rows = rows_of(text)
    there: list[str] = []
    begun_s = rows[0].at
    faults = []
    for row in rows:
        at = (row.at - begun_s) / pace
        if row.comes:
            there.append(row.node)
            faults += [Fault(at, Kind.NODE_ADD)] if at else []
        else:
            faults.append(Fault(at, Kind.NODE_KILL, there.index(row.node)))
            there.remove(row.node)
    return sum(row.comes and row.at == begun_s for row in rows), tuple(faults)


def scenario_of(text: str, pace: float = 1.0) -> Scenario:
    """Returns a run that lasts as long as the trace, with one worker on each node."""
    nodes, faults = from_trace(text, pace)
    there = peak = nodes
    for fault in faults:
        there += 1 if fault.kind is Kind.NODE_ADD else -1
        peak = max(peak, there)
    last_s = max((fault.at for fault in faults), default=0.0)
    rules = small_rules(1, peak, LAYOUTS[0], target_step=max(10, int(STEPS_A_SECOND * last_s)), save_every=20)
    return Scenario(rules=rules, faults=faults, nodes=nodes, per_node=1)
