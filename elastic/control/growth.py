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
from itertools import accumulate
from math import exp, fsum, log, sqrt

from elastic.control.rules import Rules
from elastic.control.run import RunState, Worker
from elastic.ids import WorkerId
from elastic.plan.wager import Choice, Times, choose, pays, slower

UNKNOWN_S = 3600.0
"""Prior for how long a host stays, in seconds; its observed stays are averaged in."""
SHORTEST_S = 1.0
"""A stay counts as at least this many seconds, so that its logarithm stays finite."""
OVERDUE = 0.5
"""Part of the usual time of a start that a worker which takes longer is expected to take still."""
HOSTS = 256
"""Least number of hosts whose stays are remembered: those that left last.  A run with more machines remembers as
many, so that a wave of notices, which may take a quarter of them at once, does not make it forget the hosts that
come and go.
"""


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
    run: RunState, members: Sequence[WorkerId], newcomers: Sequence[WorkerId], now: float, rules: Rules
) -> GrowthVerdict:
    """Judges the newcomers host by host: workers of one host come and go together, so they cost the pauses
    once.  Hosts of which none would shorten a step alone are judged together, those first that stay longest.
    """
    times = times_of(run, rules)
    full = len(members) + len(newcomers)
    if newcomers and times.tells(full) and not slower(len(members), full, times.microbatches):
        return GrowthVerdict((), tuple(newcomers), "", "with them a step has as many rounds")
    usual_s = _usual_s(run)
    hosts: dict[str, list[WorkerId]] = {}
    for worker in newcomers:
        hosts.setdefault(host_of(run.workers[worker]), []).append(worker)
    stays = {
        # a host that has stayed for some time is expected to stay as long again
        host: max(
            run.cluster.stays.get(host, usual_s), now - max(run.workers[worker].joined_at for worker in group)
        )
        for host, group in hosts.items()
    }

    def why_of(some: Sequence[str], here: int) -> str:
        stay_s, spares = min(stays[host] for host in some), sum(len(hosts[host]) for host in some)
        brings_s = stay_s * slower(here, here + spares, times.microbatches)
        return (
            f"an expected stay of {stay_s:.0f} s saves {brings_s:.1f} s, and joining and leaving "
            f"cost {times.join_s + len(some) * times.leave_s:.1f} s"
        )

    sorts: dict[bool, list[str]] = {True: [], False: []}
    why = {True: "", False: ""}
    for host, group in hosts.items():
        good = pays(times, len(members), len(group), 1, stays[host])
        sorts[good].append(host)
        why[good] = why[good] or why_of([host], len(members))
    here = len(members) + sum(len(hosts[host]) for host in sorts[True])
    left = sorted(sorts[False], key=lambda host: -stays[host])
    together = list(accumulate(len(hosts[host]) for host in left))
    for number in range(2, len(left) + 1) if times.tells(here + 2) else ():
        if pays(times, here, together[number - 1], number, stays[left[number - 1]]):
            why[True] = why[True] or why_of(left[:number], here)
            sorts = {True: [*sorts[True], *left[:number]], False: left[number:]}
            break
    welcome, declined = (
        tuple(each for host in sorts[pays] for each in hosts[host]) for pays in (True, False)
    )
    return GrowthVerdict(welcome, declined, why[True], why[False])


def at_the_end(run: RunState, rules: Rules, members: Sequence[WorkerId], now: float) -> Choice | None:
    """Returns whether ``members``, who can form a world after the last one has ended and have its state, do so at
    once or wait for workers that are starting.  Returns None if there is nothing to choose: nobody is starting,
    nothing was measured yet, the run ends, or machines will be taken, and copies with them.
    """
    starting, group = run.members.starting, rules.layout.group
    coming = min(len(starting), rules.max_workers - len(members)) // group * group
    known = rules.may_wait and run.watch.start_s and run.watch.reform_s and run.watch.step_s
    if not known or coming <= 0 or run.cluster.notices or run.stop or run.enough:
        return None
    usual_s, last = run.watch.start_s, sorted(starting.values())[coming - 1]
    left_s = last + usual_s - now
    here = len(frozenset(members).intersection(run.members.seats))
    return choose(
        times_of(run, rules),
        here,
        spares=len(members) - here,
        stay_s=_usual_s(run),
        coming=coming,
        coming_s=left_s if left_s > 0 else OVERDUE * usual_s,
        ended=True,
    )


def times_of(run: RunState, rules: Rules) -> Times:
    """Returns the times that the run has measured."""
    watch, shared = run.watch, rules.microbatches * rules.layout.group
    return Times(watch.reform_s, watch.join_s or watch.reform_s, watch.step_s, shared)


def expects_more(run: RunState, there: Sequence[WorkerId], now: float, rules: Rules) -> bool:
    """Returns whether more workers are needed, some are starting, and the last one joined less than
    ``grow_debounce_s`` ago.
    """
    newest_s = now - max((run.workers[worker].joined_at for worker in there), default=now)
    needed = len(there) < rules.max_workers
    return needed and bool(run.members.starting) and newest_s < rules.grow_debounce_s


def after_leaving(
    stays: Mapping[str, float], host: str, stayed_s: float, machines: int = 0
) -> dict[str, float]:
    """Returns the expected stay of each host in seconds, after ``host`` has left a run of ``machines``.

    For ``host`` it is the geometric mean of the stay expected before and the stay observed now.
    """
    before = stays.get(host, UNKNOWN_S)
    after = {each: stay_s for each, stay_s in stays.items() if each != host}
    after[host] = sqrt(before * max(stayed_s, SHORTEST_S))
    return dict(list(after.items())[-max(HOSTS, machines) :])


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
