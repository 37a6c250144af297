"""Strikes a training system again and again, always in the same way, and measures from its own steps what
that cost.

The measures are:

    kill -> next commit     from the SIGKILL to the first step committed by the next world
    first microbatch        from the SIGKILL to the beginning of that step
    lost steps              committed before, done again after
    growth: pause           the longest time between two commits, from the last one of the smaller world to the first one of the whole world
    growth: joined          from the coming of the worker's process or node to the first commit of the whole world
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any, Protocol, TypeVar

from tests.benchmarks.peers.toy import WORKERS, Mark

SETTLED = range(10, 20)
"""Numbers of steps that a world may take undisturbed before the next strike.  One is drawn, so that strikes
do not keep time with checkpoints."""
DEADLINE_S = 240.0
LEAD_S = 8.0
"""Seconds from a notice until the machine is taken."""
POLL_S = 0.02

T = TypeVar("T")


class System(Protocol):
    """A system that is measured.  A node is a raylet or a launcher, with all its processes."""

    settings: str

    def start(self) -> None: ...
    def marks(self) -> Sequence[Mark]: ...
    def kill_process(self) -> None: ...
    def kill_node(self) -> None: ...
    def give_notice(self, lead_s: float) -> Callable[[], None]: ...
    def add_node(self) -> None: ...
    def phases(self, killed_at: float) -> dict[str, Any]: ...
    def close(self) -> None: ...


def until(found: Callable[[], T | None], what: str) -> T:
    """Polls until ``found`` returns something true, and returns it.  Raises :class:`TimeoutError` after
    ``DEADLINE_S``.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(POLL_S)
    raise TimeoutError(f"{what}: nothing after {DEADLINE_S:g} s")


def commits(system: System) -> list[Mark]:
    return [mark for mark in system.marks() if mark.what == "commit"]


def settled(system: System, workers: int, draw: Random) -> int:
    """Waits until a world of ``workers`` members has taken a drawn number of steps undisturbed.  Returns its
    epoch.
    """
    peace = draw.choice(SETTLED)

    def look() -> int:
        done = commits(system)
        last = [mark.step for mark in done if mark.epoch == done[-1].epoch and mark.world == workers]
        return done[-1].epoch if last and max(last) - min(last) >= peace else 0

    return until(look, f"a settled world of {workers}")


def change(system: System, epoch: int, moment: float) -> dict[str, float]:
    """Measures the change from the world ``epoch`` to the next one, after an event at ``moment``."""
    after = until(
        lambda: next((mark for mark in commits(system) if mark.epoch > epoch and mark.at > moment), None),
        "the next commit",
    )
    load = os.getloadavg()[0]
    marks = system.marks()
    before = [mark for mark in marks if mark.what == "commit" and mark.epoch <= epoch]
    begun = [
        mark.at for mark in marks if mark.what == "begin" and mark.pid == after.pid and mark.at <= after.at
    ]
    return {
        "first_microbatch_s": max(begun, default=after.at) - moment,
        "next_commit_s": after.at - moment,
        "pause_s": after.at - before[-1].at,
        "lost_steps": max(0, max(mark.step for mark in before) - after.step + 1),
        "world": after.world,
        "load": load,
    }


def whole_again(system: System, epoch: int, moment: float) -> dict[str, float]:
    """Measures growth: the time until the world is whole, and the longest pause on the way from the world
    ``epoch`` to it.
    """

    def look() -> Mark | None:
        return next((mark for mark in commits(system) if mark.epoch > epoch and mark.world == WORKERS), None)

    joined = until(look, "a whole world")
    found = change(system, epoch, moment)
    done = commits(system)
    last = max(mark.at for mark in done if mark.epoch <= epoch)
    pauses = [b.at - a.at for a, b in pairwise(mark for mark in done if last <= mark.at <= joined.at)]
    return {"joined_s": joined.at - moment, "pause_s": max(pauses), "lost_steps": found["lost_steps"]}


def process_kills(system: System, kills: int) -> list[dict[str, Any]]:
    """Strikes one of two workers ``kills`` times; the system replaces it by itself.  Returns a row for each
    strike.
    """
    rows, draw = [], Random(kills)
    for _ in range(kills):
        epoch = settled(system, WORKERS, draw)
        moment = time.time()
        system.kill_process()
        row: dict[str, Any] = change(system, epoch, moment)
        if row["world"] < WORKERS:
            smaller = next(mark.epoch for mark in commits(system) if mark.epoch > epoch)
            row["growth"] = whole_again(system, smaller, moment)
        rows.append(row | system.phases(moment))
        print(rows[-1], flush=True)
    return rows


def node_kills(system: System, kills: int) -> list[dict[str, Any]]:
    """Strikes all processes of one of two nodes ``kills`` times; when the other node has settled, a new one
    comes.

    Returns a row for each strike.
    """
    rows, draw = [], Random(kills)
    for _ in range(kills):
        epoch = settled(system, WORKERS, draw)
        moment = time.time()
        system.kill_node()
        row: dict[str, Any] = change(system, epoch, moment) | system.phases(moment)
        epoch = settled(system, WORKERS - 1, draw)
        moment = time.time()
        system.add_node()
        row["growth"] = whole_again(system, epoch, moment)
        rows.append(row)
        print(row, flush=True)
    return rows


def notices(system: System, kills: int) -> list[dict[str, Any]]:
    """Says ``kills`` times that the machine of one of two nodes will be taken in ``LEAD_S`` seconds, and takes
    it then; when the other node has settled, a new one comes.

    Returns a row for each; ``pause_s`` is the longest time between two commits from the notice on until the
    smaller world has settled, and ``next_commit_s`` counts from the notice.
    """
    rows, draw = [], Random(kills)
    for _ in range(kills):
        epoch = settled(system, WORKERS, draw)
        moment = time.time()
        take = system.give_notice(LEAD_S)
        time.sleep(max(moment + LEAD_S - time.time(), 0))
        take()
        row: dict[str, Any] = change(system, epoch, moment)
        smaller = settled(system, WORKERS - 1, draw)
        done = [mark for mark in commits(system) if mark.at > moment - 1]
        row["pause_s"] = max(b.at - a.at for a, b in pairwise(done))
        row["redone"] = len(done) - len({mark.step for mark in done})
        moment = time.time()
        system.add_node()
        row["growth"] = whole_again(system, smaller, moment)
        rows.append(row)
        print(row, flush=True)
    return rows


def step_s(system: System, world: int) -> float:
    """Returns the median time in seconds between two commits of one world of ``world`` members; NaN if there
    are none.
    """
    first: dict[tuple[int, int], float] = {}
    for mark in commits(system):
        if mark.world == world:
            first.setdefault((mark.epoch, mark.step), mark.at)
    gaps = [first[b] - first[a] for a, b in pairwise(sorted(first)) if a[0] == b[0] and b[1] == a[1] + 1]
    return median(gaps) if gaps else float("nan")


def spans(marks: Sequence[Mark], microbatches: int) -> list[dict[str, Any]]:
    """Returns the time from the first step to the last commit, cut at each commit.

    A step of the same world takes from commit to commit.  The first step of a world begins with its own mark;
    the time before it is a re-form.
    """
    found: list[dict[str, Any]] = []

    def add(begin: float, end: float, bucket: str, steps: int, world: int) -> None:
        sizes = {"microbatches": microbatches, "data_ranks": world, "world_nodes": world}
        found.append({"begin": begin, "end": end, "bucket": bucket, "steps": steps, **sizes})

    begun = {(mark.pid, mark.epoch, mark.step): mark.at for mark in marks if mark.what == "begin"}
    commits = [mark for mark in marks if mark.what == "commit"]
    first, furthest = commits[0], commits[0].step
    add(begun[first.pid, first.epoch, first.step], first.at, "stepping", 1, first.world)
    for before, mark in pairwise(commits):
        begin = before.at
        if mark.epoch != before.epoch:
            begin = begun[mark.pid, mark.epoch, mark.step]
            add(before.at, begin, "re-form", 0, before.world)
        new = mark.step > furthest
        add(begin, mark.at, "stepping" if new else "redone", int(new), mark.world)
        furthest = max(furthest, mark.step)
    return found
