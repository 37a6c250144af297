"""Turns spot traces into schedules of faults.  A trace records when each machine came and went.

A trace begins with the line ``seconds,event,node``.  Its rows have these fields, in the order of time; the
event is "add" or "remove".  Lines that begin with # name the source.
"""

from __future__ import annotations

from elastic.protocol.faults import Fault, Kind
from elastic.sim.scenario import LAYOUTS, Scenario, small_rules

STEPS_A_SECOND = 0.5
"""Target number of steps for each second of a trace: half of what a run without faults makes, whose steps
take a second.
"""


def from_trace(text: str, pace: float = 1.0) -> tuple[int, tuple[Fault, ...]]:
    """Returns the number of nodes at the beginning, and the faults.  Faults come ``pace`` times as fast as
    they were recorded.

    Raises ValueError for a line that is not part of a trace.
    """
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]
    if not rows or rows[0] != ["seconds", "event", "node"]:
        raise ValueError("a trace begins with the line seconds,event,node")
    if len(rows) == 1:
        raise ValueError("a trace has a row for each machine that comes or goes, and this one has none")
    there: list[str] = []
    begun_s = float(rows[1][0])
    faults = []
    for seconds, event, node in rows[1:]:
        at = (float(seconds) - begun_s) / pace
        if event == "add":
            there.append(node)
            faults += [Fault(at, Kind.NODE_ADD)] if at else []
        elif event == "remove" and node in there:
            faults.append(Fault(at, Kind.NODE_KILL, there.index(node)))
            there.remove(node)
        else:
            raise ValueError(f"{seconds},{event},{node}: no such event, or no such node is there")
    return sum(event == "add" and float(seconds) == begun_s for seconds, event, _ in rows[1:]), tuple(faults)


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
