"""Growth: decides whether it pays to take newcomers into a world that steps.

A growth costs the world one pause now, and a second pause and a broken step when the newcomers' node leaves again.  It brings the
newcomers' share of the work while they stay.  How long they will stay is learned from the run's own nodes: a machine that comes and goes
is recognised by its host when it is back, and waits as a spare until it has been there for long enough.  Survivors never wait: a world
that is formed anew takes all workers that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt

from elastic.control.rules import Rules
from elastic.control.run import RunState, Worker
from elastic.ids import WorkerId

UNKNOWN_S = 3600.0
"""Prior in seconds for how long a host stays; its observed stays are averaged in."""
SHORTEST_S = 1.0
PAUSES = 2
"""Number of pauses that a growth costs: one to let the newcomers in, and one when they are gone."""
HOSTS = 256
"""Largest number of hosts whose stays are remembered; the hosts that left last are kept."""


@dataclass(frozen=True)
class Verdict:
    """The newcomers that pay and those that do not: ``declined`` would cost more than they bring.

    Each reason is that of the first host of its group.
    """

    welcome: tuple[WorkerId, ...]
    declined: tuple[WorkerId, ...]
    why_welcome: str
    why_declined: str


def judge(run: RunState, members: Sequence[WorkerId], newcomers: Sequence[WorkerId], now: float) -> Verdict:
    """Judges the newcomers host by host: workers of one host come and go together, and cost their pauses once."""
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
    """Returns whether other workers that are needed are about to join, and the last newcomer joined only just now."""
    newest_s = now - max((run.workers[worker].joined_at for worker in there), default=now)
    needed = len(there) < rules.max_workers
    return needed and bool(run.members.starting) and newest_s < rules.grow_debounce_s


def after_leaving(stays: Mapping[str, float], host: str, stayed_s: float) -> dict[str, float]:
    """Returns the stay expected of each host, in seconds, once ``host`` has left after ``stayed_s``.

    The new value for ``host`` is the geometric mean of the old value and the stay just seen, so that orders of magnitude are averaged.
    """
    before = stays.get(host, UNKNOWN_S)
    after = {each: stay_s for each, stay_s in stays.items() if each != host}
    after[host] = sqrt(before * max(stayed_s, SHORTEST_S))
    return dict(list(after.items())[-HOSTS:])


def host_of(worker: Worker) -> str:
    """Returns the host of a worker, which stays the same when a machine was away and comes back under another node id."""
    return worker.host or worker.node


def _usual_s(run: RunState) -> float:
    """Returns the stay expected of an unknown host: the geometric mean over all hosts, including those that are there and never left."""
    steady = {host_of(worker) for worker in run.workers.values()} - run.cluster.stays.keys()
    stays = [UNKNOWN_S] * max(len(steady), 1) + list(run.cluster.stays.values())
    return exp(fsum(map(log, stays)) / len(stays))
