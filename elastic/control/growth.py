"""Growth decides whether it pays to take newcomers into the world.

Growth costs the world a pause.  When the newcomers' node leaves again, it costs another pause and the step
that breaks.  Growth brings the newcomers' share of the work while they stay.  The run learns from its own
nodes how long newcomers stay: a machine that comes and goes is recognised by its host name, and waits as a
spare until it has stayed long enough.  Survivors never wait: a world that must be formed anew takes all
workers that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt

from elastic.control.rules import Rules
from elastic.control.run import RunState, Worker
from elastic.ids import WorkerId

UNKNOWN_S = 3600.0
"""Prior for how long a host stays, in seconds; its observed stays are averaged in."""
SHORTEST_S = 1.0
"""A stay counts as at least this many seconds, so that its logarithm stays finite."""
PAUSES = 2
"""Number of pauses that newcomers cost: one to let them in, one when they are gone."""
HOSTS = 256
"""Number of hosts whose stays are remembered: those that left last."""


@dataclass(frozen=True)
class GrowthVerdict:
    """The newcomers to take in and those to decline, with the reasons."""

    welcome: tuple[WorkerId, ...]
    declined: tuple[WorkerId, ...]
    """These newcomers would cost more than they bring."""
    why_welcome: str
    """The reason for the first host that is welcome."""
    why_declined: str
    """The reason for the first host that is declined."""


def judge(
    run: RunState, members: Sequence[WorkerId], newcomers: Sequence[WorkerId], now: float
) -> GrowthVerdict:
    """Judges the newcomers host by host: workers of one host come and go together, so they cost the pauses
    once.
    """
    costs_s, usual_s = PAUSES * run.watch.reform_s + run.watch.step_s, _usual_s(run)
    hosts: dict[str, list[WorkerId]] = {}
    for worker in newcomers:
        hosts.setdefault(host_of(run.workers[worker]), []).append(worker)
    sorts: dict[bool, list[WorkerId]] = {True: [], False: []}
    why = {True: "", False: ""}
    for host, group in hosts.items():
        age_s = now - max(run.workers[worker].joined_at for worker in group)
        # a host that has stayed for some time is expected to stay as long again
        stay_s = max(run.cluster.stays.get(host, usual_s), age_s)
        brings_s = stay_s * len(group) / (len(members) + len(group))
        pays = brings_s >= costs_s
        sorts[pays] += group
        why[pays] = why[pays] or (
            f"an expected stay of {stay_s:.0f} s saves {brings_s:.1f} s, and joining and leaving "
            f"cost {costs_s:.1f} s"
        )
    return GrowthVerdict(tuple(sorts[True]), tuple(sorts[False]), why[True], why[False])


def expects_more(run: RunState, there: Sequence[WorkerId], now: float, rules: Rules) -> bool:
    """Returns whether more workers are needed, some are starting, and the last one joined less than
    ``grow_debounce_s`` ago.
    """
    newest_s = now - max((run.workers[worker].joined_at for worker in there), default=now)
    needed = len(there) < rules.max_workers
    return needed and bool(run.members.starting) and newest_s < rules.grow_debounce_s


def after_leaving(stays: Mapping[str, float], host: str, stayed_s: float) -> dict[str, float]:
    """Returns the expected stay of each host in seconds, after ``host`` has left.

    For ``host`` it is the geometric mean of the stay expected before and the stay observed now.
    """
    before = stays.get(host, UNKNOWN_S)
    after = {each: stay_s for each, stay_s in stays.items() if each != host}
    after[host] = sqrt(before * max(stayed_s, SHORTEST_S))
    return dict(list(after.items())[-HOSTS:])


def host_of(worker: Worker) -> str:
    """Returns the name of the worker's machine; it stays the same when the machine comes back under another
    node id.
    """
    return worker.host or worker.node


def _usual_s(run: RunState) -> float:
    """Returns the expected stay of an unknown host in seconds: the geometric mean over all hosts, including
    those that have never left.
    """
    steady = {host_of(worker) for worker in run.workers.values()} - run.cluster.stays.keys()
    stays = [UNKNOWN_S] * max(len(steady), 1) + list(run.cluster.stays.values())
    return exp(fsum(map(log, stays)) / len(stays))
