"""Lemons are nodes on which workers fail again and again.  Such a node gets no worker for a time that doubles.

A worker fails if its process dies, does not start, hangs, loses its device, or is evicted because it is slow
(``evicting.py``).  All that fails on a node within
``grow_debounce_s`` is one incident, since one cause ends all workers of a node at once.  A node with
``lemon_after`` incidents within ``lemon_window_s`` is closed for ``lemon_cool_s``; after that one incident more
closes it for twice as long, and so on.  A node that goes without an incident for ``lemon_window_s`` has a clean
slate, and so has a machine that comes back under another node id: how long such a machine stays is remembered
in ``growth.py``.

Two things are no reason to close a node.  If the other nodes fail nearly as often, the job is rather to blame.
And workers that still live there keep their seats: they hold state.  If a run has no world and nothing else can
come, the closed node whose time is over first is used after all: a bad node is better than none.

The idea is that of a circuit breaker (Nygard, Release It!, chapter 5), and of the suspect nodes of NVIDIA's
resiliency extension, which counts short cycles of a node.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low

from elastic.control.decision import Decision
from elastic.control.rules import Rules
from elastic.control.run import Cluster, Lemon
from elastic.ids import NodeId

TYPICAL = 2
"""A node is closed only if it had more than this many times the incidents of the other nodes' median."""
DOUBLINGS = 7
"""Number of times that the time doubles at most: to 21 hours, if it is 10 minutes at first."""


def failed(decision: Decision, node: NodeId, why: str, *, closed_after: int = 0) -> None:
    """Notes that a worker has failed on the node, and closes the node if workers fail there too often.

    ``closed_after`` is the number of incidents that is too often, if it is not that of the job.
    """
    cluster, rules, now = decision.run.cluster, decision.rules, decision.now
    if not rules.lemon_after or decision.run.over or cluster.deadline(node) is not None:
        return
    known = cluster.lemons.get(node, Lemon())
    failures = _recent(known, now, rules)
    if known.closed or (failures and now - failures[-1] < rules.grow_debounce_s):
        return
    failures = (*failures, now)
    times = known.times if now < known.until + rules.lemon_window_s else 0
    found = replace(known, failures=failures, times=times)
    if len(failures) >= (1 if times else closed_after or rules.lemon_after) and _stands_out(
        cluster, node, failures, now, rules
    ):
        cool_s = rules.lemon_cool_s * 2 ** min(times, DOUBLINGS)
        found = replace(found, times=times + 1, since=now, until=now + cool_s)
        before = (
            f", and was closed {times} times before"
            if times > 1
            else ", and was closed before"
            if times
            else ""
        )
        decision.say(
            f"node {node[:8]} gets no worker for {cool_s:g} s: its workers failed {len(failures)} times within "
            f"{now - failures[0]:.0f} s{before} (the last time: {why})"
        )
        decision.know("cluster", slots=0)  # perhaps they were there; the next ``Capacity`` tells
    decision.open("cluster", "lemons")[node] = found


def _recent(known: Lemon, now: float, rules: Rules) -> tuple[float, ...]:
    return tuple(at for at in known.failures if now - at < rules.lemon_window_s)


def _stands_out(
    cluster: Cluster, node: NodeId, failures: tuple[float, ...], now: float, rules: Rules
) -> bool:
    others = [
        len(_recent(cluster.lemons.get(each, Lemon()), now, rules))
        for each in cluster.keepers
        if each != node
    ]
    return len(failures) > TYPICAL * median_low(others or [0])


def go_on(decision: Decision) -> None:
    """Says that a closed node may have workers again, and forgets incidents that are long over."""
    lemons, now, window_s = decision.run.cluster.lemons, decision.now, decision.rules.lemon_window_s
    for node, known in lemons.items():
        if known.closed and decision.due(known.until):
            decision.open("cluster", "lemons")[node] = replace(known, since=known.until)
            decision.say(f"node {node[:8]} may have workers again, on trial")
        elif now >= max(known.until, *known.failures) + window_s:
            del decision.open("cluster", "lemons")[node]


def gone(decision: Decision, node: NodeId) -> None:
    """Forgets a node that is gone."""
    if node in decision.run.cluster.lemons:
        del decision.open("cluster", "lemons")[node]


def pardon(decision: Decision, waits_since: float) -> None:
    """Uses a closed node before its time is over if nothing else can come, and nothing else came for
    ``refused_s``.  The run has no world since ``waits_since``.
    """
    run, now = decision.run, decision.now
    closed = [node for node, known in run.cluster.lemons.items() if known.closed]
    if not closed or run.members.starting or run.cluster.slots:
        return
    # what a new coordinator knows of room counts from its beginning, at which the watch begins anew; and the room
    # of a worker that has failed is heard of a moment later
    changes = (
        *(at for known in run.cluster.lemons.values() for at in (known.since, *known.failures[-1:])),
        *(known.joined_at for known in run.workers.values()),
    )
    last = max(waits_since, run.watch.moved_at, run.members.start_after, *changes)
    if now - last < decision.rules.refused_s:
        return
    node = min(closed, key=lambda each: run.cluster.lemons[each].until)
    known = run.cluster.lemons[node]
    decision.open("cluster", "lemons")[node] = replace(known, since=now, until=now)
    decision.say(
        f"node {node[:8]} is used {known.until - now:.0f} s before its time: the run has {len(run.workers)} of "
        f"at least {decision.rules.min_workers} workers, and no other node has room for one"
    )
