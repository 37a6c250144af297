"""Does it pay to take newcomers in?

A growth costs the world a pause, and another one, with the step that breaks, when the newcomers' node is gone again; it brings their
share of the work while they stay.  How long that will be is learned from the run's own nodes: a machine that comes and goes is known by
its host when it is back, and waits as a spare until it has been there for long enough.  Survivors never wait: a world formed anew
takes whoever is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt

from elastic.control.rules import Rules
from elastic.control.run import RunState, Worker
from elastic.ids import WorkerId

UNKNOWN_S = 3600.0
"""How long a host stays that has never gone; also where the first time it was gone is averaged into."""
SHORTEST_S = 1.0
PAUSES = 2
"""To let them in, and when they are gone."""
HOSTS = 256
"""So many are remembered, the latest that have gone."""


@dataclass(frozen=True)
class Verdict:
    """``declined``: newcomers who would cost more than they bring; why, of the first host of each sort."""

    welcome: tuple[WorkerId, ...]
    declined: tuple[WorkerId, ...]
    why_welcome: str
    why_declined: str


def judge(run: RunState, members: Sequence[WorkerId], newcomers: Sequence[WorkerId], now: float) -> Verdict:
    """Host by host: what comes together goes together, and costs its pauses once."""
    costs_s, usual_s = PAUSES * run.watch.reform_s + run.watch.step_s, _usual_s(run)
    hosts: dict[str, list[WorkerId]] = {}
    for worker in newcomers:
        hosts.setdefault(host_of(run.workers[worker]), []).append(worker)
    sorts: dict[bool, list[WorkerId]] = {True: [], False: []}
    why = {True: "", False: ""}
    for host, group in hosts.items():
        age_s = now - max(run.workers[worker].joined_at for worker in group)
        stay_s = max(run.cluster.stays.get(host, usual_s), age_s)  # what has stayed for so long will for as long again
        brings_s = stay_s * len(group) / (len(members) + len(group))
        pays = brings_s >= costs_s
        sorts[pays] += group
        why[pays] = why[pays] or f"a stay of {stay_s:.0f} s brings {brings_s:.1f} s, coming and going cost {costs_s:.1f} s"
    return Verdict(tuple(sorts[True]), tuple(sorts[False]), why[True], why[False])


def expects_more(run: RunState, there: Sequence[WorkerId], now: float, rules: Rules) -> bool:
    """Are others about to join that will be needed, and did the last newcomer join just now?"""
    newest_s = now - max((run.workers[worker].joined_at for worker in there), default=now)
    needed = len(there) < rules.max_workers
    return needed and bool(run.members.starting) and newest_s < rules.grow_debounce_s


def after_leaving(stays: Mapping[str, float], host: str, stayed_s: float) -> dict[str, float]:
    """What is expected of each host once ``host`` has gone: half of it, by order of magnitude, is what was seen last."""
    before = stays.get(host, UNKNOWN_S)
    after = {each: stay_s for each, stay_s in stays.items() if each != host}
    after[host] = sqrt(before * max(stayed_s, SHORTEST_S))
    return dict(list(after.items())[-HOSTS:])


def host_of(worker: Worker) -> str:
    """The same for a machine that was away and came back under another node id."""
    return worker.host or worker.node


def _usual_s(run: RunState) -> float:
    """Of a host of which nothing is known: the geometric mean of all, of those too that are there and have never gone."""
    steady = {host_of(worker) for worker in run.workers.values()} - run.cluster.stays.keys()
    stays = [UNKNOWN_S] * max(len(steady), 1) + list(run.cluster.stays.values())
    return exp(fsum(map(log, stays)) / len(stays))
