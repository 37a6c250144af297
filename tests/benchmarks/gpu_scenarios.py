"""The scenarios of ``gpu_recovery``: what they do to its runs, and what must hold afterwards beyond the bits."""

from __future__ import annotations

import re
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors import cluster
from elastic.job import Job
from elastic.report.story import StepLine
from tests.support.chaos import Trial, Witness
from tests.support.mischief import STEP

LEAD_S = 6.0
"""Seconds from a notice until the machine would be taken."""


@dataclass
class Kill:
    """One kill, with what the survivors' counters showed after it."""

    generation: int
    at: float
    step: int
    microbatch: int
    stepped_at: float = 0.0
    asked: bool = False
    """True if the survivors were asked where they stand, because they took long."""


class Killer:
    """Strikes the newest worker each time all ``workers`` have stepped together, in the middle of a step's
    microbatches.
    """

    def __init__(
        self,
        workers: int,
        kills: int,
        after: int,
        until: int,
        kind: signal.Signals = signal.SIGKILL,
        *,
        spares: int = 0,
        copy_every: int = 1,
    ) -> None:
        self.workers, self.wanted, self.after, self.until, self.kind, self.spares = (
            workers,
            kills,
            after,
            until,
            kind,
            spares,
        )
        self.copy_every = copy_every
        """Number of steps between copies.  A strike falls into a step that began with a copy."""
        self.kills: list[Kill] = []
        self.ready: Callable[[], bool] = lambda: True
        """Returns whether the state from which the scenario heals is there."""
        self.whole = (0, 0)
        """Moment (generation, step) at which the world was first seen whole."""

    def __call__(self, witness: Witness, view: Any) -> bool:
        if self.kills and not self.kills[-1].stepped_at:
            self._await(witness, view)
            return False
        if len(self.kills) == self.wanted or view.step >= self.until:
            return True
        members = self._members(witness, view)
        if (
            view.state != "Running"
            or len(members) != self.workers
            or len(view.workers) != self.workers + self.spares
        ):
            return False
        if self.whole[0] != view.generation:
            self.whole = (view.generation, view.step)
        victim = witness.seen[max(members, key=lambda name: int(name[1:]))]
        counters = victim.counters
        if view.unprotected_since is not None or not self.ready():
            return False
        middle = (
            counters["microbatch"] >= 1
            and counters["collective"] == 0
            and counters["generation"] == view.generation
        )
        if (
            middle
            and counters["step"] % self.copy_every == 0
            and view.step >= max(self.whole[1] + 3, self.after)
        ):
            self.kills.append(
                Kill(view.generation, time.time(), counters["step"] + 1, counters["microbatch"])
            )
            victim.process.kill(self.kind)
        return False

    def _await(self, witness: Witness, view: Any) -> None:
        """Waits until every member of the next world steps.

        A member that has not left after 3 s writes its threads' stacks into its log.
        """
        if not self.kills[-1].asked and time.time() > self.kills[-1].at + 3:
            self.kills[-1].asked = True
            for each in witness.seen.values():
                if each.process.running and each.counters["generation"] <= self.kills[-1].generation:
                    each.process.kill(signal.SIGUSR1)
        members = self._members(witness, view)
        if view.generation > self.kills[-1].generation and view.state == "Running" and members:
            since = [witness.seen[name].counters["stepping_since_ns"] / 1e9 for name in members]
            if min(since) > self.kills[-1].at:
                self.kills[-1].stepped_at = max(since)

    def _members(self, witness: Witness, view: Any) -> list[str]:
        """Returns the members of the present world without spares, or none before all were seen."""
        seen = [witness.seen.get(name) for name in view.workers]
        if not all(seen):
            return []
        return [
            each.worker
            for each in seen
            if each is not None and each.counters["generation"] == view.generation
        ]


class Noticer(Killer):
    """Gives notice for the newest worker's node each time all ``workers`` have stepped together, and takes the
    notice back when the others have made ``after`` steps without it: nobody is struck.
    """

    def __init__(self, workers: int, times: int, after: int, until: int) -> None:
        super().__init__(workers, times, after, until, signal.SIGSTOP)
        self.given = 0
        self._keeper: Any = None

    def __call__(self, witness: Witness, view: Any) -> bool:
        members = self._members(witness, view)
        if view.state != "Running" or not members:
            return False
        if self.whole[0] != view.generation:
            self.whole = (view.generation, view.step)
        if view.step < self.whole[1] + self.after:
            return False
        if self._keeper is not None and len(members) < self.workers:
            self._keeper.announce.remote("benchmark", None)
            self._keeper = None
        elif self._keeper is None and len(members) == self.workers:
            if self.given == self.wanted or view.step >= self.until:
                return True
            home = view.workers[max(members, key=lambda name: int(name[1:]))]
            self._keeper = cluster.named(f"{view.token}/keeper-")[home[:12]]
            self._keeper.announce.remote("benchmark", LEAD_S)
            self.given += 1
        return False


@dataclass
class Scenario:
    """A scenario: what is changed in the job, what strikes from outside, and what must hold afterwards beyond
    the bits.
    """

    about: str
    changes: dict[str, Any] = field(default_factory=dict)
    act: Killer | None = None
    check: Callable[[Trial], dict[str, Any]] = lambda _: {}
    harmful: bool = False
    """True for a control, which must show what the others must not."""
    from_bucket: bool = False
    """True if it heals from a checkpoint, so that nobody is struck before there is one."""


def faults(world: int) -> tuple[list[dict[str, Any]], ...]:
    """Returns schedules of faults.

    They are a chain of one in each generation, the same one again and again, a rank that freezes in the
    commit, and one that is killed in forward.
    """
    last = world - 1

    def fault(point: str, step: int, generation: int, rank: int, kind: str = "SIGKILL") -> dict[str, Any]:
        return {"point": point, "step": step, "generation": generation, "world_rank": rank, "kind": kind}

    chain = [
        fault("forward", 6, 1, 0, "exception"),
        fault("before_commit", 8, 2, last),
        *(fault("forming", step, 3, 0) for step in (5, 8)),  # from live replicas, or from the save of step 4
        *(fault("healing", step, 4, 0) for step in (5, 8)),
        fault("save", 12, 5, 0),
        fault("backward", 16, 6, 0, "SIGSEGV"),
        fault("before_update", 18, 7, 0, "exit"),
        fault("in_update", 22, 8, 0),
    ]
    again = [
        fault("backward", 5 * number + 5, number + 1, number % world, "exception") for number in range(AGAIN)
    ]
    frozen = [fault("before_commit", STEP, 1, last, "SIGSTOP")]
    # while rank 0 holds the GIL: the victim's replica needs nothing of rank 0 yet
    killed = [fault("forward", STEP, 1, last)]
    return chain, again, frozen, killed


def scenarios(world: int, steps: int, kills: int) -> dict[str, Scenario]:
    """Returns the scenarios for that many GPUs.  Live healing needs replicas: 2 × world/2."""
    last, half = world - 1, max(world // 2, 1)
    replicas = {"parallel": {"dp_replicate": "auto", "min_shard": half}}
    shards = {"parallel": {"dp_replicate": 1}}
    # no smaller world: its shards would be larger, and so would every slot
    few = {"min": max(last, 1), "max": world}
    copies = shards | {"workers": few}
    none = {"copies": {"copy_every": 0}}
    saves = none | {"checkpoint": {"save_every": max(steps // 4, 1)}}
    spare = {"workers": {"min": max(last - 1, 1), "max": max(last, 1), "spares": 1}}
    seldom = {"deadlines": DEADLINES | {"stall_s": 5, "fence_s": 3}}
    early, late = steps // 4 + 4, steps - 5
    chain, again, frozen, killed = faults(world)
    return {
        "undisturbed": Scenario(f"2×{half}, nothing happens", replicas),
        "fewer": Scenario(
            f"{max(last, 1)} of {world} workers, nothing happens",
            {"workers": {"min": max(last, 1), "max": max(last, 1)}},
        ),
        "replicas": Scenario(
            f"2×{half}, SIGKILL, healed live, and back", replicas, Killer(world, kills, 5, late)
        ),
        "shards": Scenario(
            f"1×{world}, SIGKILL, healed from the bucket, and back",
            shards | saves,
            Killer(world, kills, early, late),
            from_bucket=True,
        ),
        **beside(world, steps, copies),
        "host": Scenario(
            f"1×{world}, SIGKILL, healed from copies in host memory, and back",
            copies,
            Killer(world, kills, 5, late),
        ),
        "noticed": Scenario(
            f"1×{world}, a node is out {LEAD_S:g} s after its notice, and comes back",
            shards | {"notices": {"sources": []}},
            Noticer(world, kills, 5, late),
            check=paused,
        ),
        "spare": Scenario(
            f"1×{max(last, 1)} and a spare, SIGKILL, healed from host memory",
            shards | spare,
            Killer(max(last, 1), kills, 5, late, spares=1),
        ),
        "freeze": Scenario(
            f"2×{half}, SIGSTOP", replicas | seldom, Killer(world, min(kills, 2), 5, late, signal.SIGSTOP)
        ),
        "points": Scenario(
            "one fault in each of eight generations",
            replicas | {"faults": chain, "checkpoint": {"save_every": 4}},
        ),
        "staggered": Scenario(
            "a frozen rank; rank 0 aborts 0.3 s before the others hear of it",
            replicas | seldom | {"faults": frozen, "loss": "tests.support.mischief:early_abort"},
            check=nobody_applied,
        ),
        "believed": Scenario(
            "the control: the same, but members do not check what a commit record says",
            replicas | seldom | {"faults": frozen, "loss": "tests.support.mischief:early_abort_believed"},
            check=somebody_applied,
            harmful=True,
        ),
        "again": Scenario(
            f"1×{world}, copies after every step, {AGAIN} recoveries in place",
            shards | {"faults": again},
            check=no_more_memory,
        ),
        "gil": Scenario(
            "a rank is killed while rank 0 keeps the GIL for 3 s",
            replicas | {"faults": killed, "loss": "tests.support.mischief:holding_the_gil"},
        ),
    }


def beside(world: int, steps: int, copies: dict[str, Any]) -> dict[str, Scenario]:
    """Returns scenarios that show what copies and saves cost the steps beside them.

    ``copies`` changes a job whose world is one replica.
    """
    return {
        "copied": Scenario(
            f"1×{world}, nothing happens, copies to host memory after every step", copies, check=buddied
        ),
        "unbuddied": Scenario(
            f"1×{world}, nothing happens, copies after every step, none to another node",
            copies | {"copies": {"buddy_every": 0}},
        ),
        "uncopied": Scenario(
            f"1×{world}, nothing happens, no copies",
            {"parallel": {"dp_replicate": 1}, "copies": {"copy_every": 0}},
        ),
        "alternate": Scenario(
            f"1×{world}, copies after every other step",
            copies | {"copies": {"copy_every": 2}},
            check=beside_copies,
        ),
        "saved": Scenario(
            f"1×{world}, copies after every step, a save to the bucket after every {SAVES}",
            copies | {"checkpoint": {"save_every": SAVES}},
            check=beside_saves,
        ),
        "both": Scenario(
            f"1×{world}, copies after every other step, at the end SIGKILL, healed from host memory",
            copies | {"copies": {"copy_every": 2}},
            Killer(world, 1, steps - 8, steps - 5, copy_every=2),
            check=beside_copies,
        ),
    }


AGAIN = 20
SAVES = 6
"""Number of steps between saves of the scenario "saved"."""
DEADLINES = {"grow_debounce_s": 1, "form_s": 240, "fence_s": 10, "stop_s": 300}


def paused(done: Trial) -> dict[str, Any]:
    """Returns the seconds between two commits of different worlds, and the steps that were committed twice."""
    lines = [line for line in done.lines if isinstance(line, StepLine)]
    return {
        "pauses_s": [b.at - a.at for a, b in pairwise(lines) if a.generation != b.generation],
        "worlds": [b.world for a, b in pairwise(lines) if a.generation != b.generation],
        "committed_twice": len(lines) - len({line.step for line in lines}),
    }


def beside_saves(done: Trial) -> dict[str, Any]:
    """Returns the seconds of each step right after a save began, and the median of all others, without the
    first twelve steps.
    """
    lines = [line for line in done.lines if isinstance(line, StepLine)]
    after: dict[bool, list[float]] = {True: [], False: []}
    for one, other in pairwise(lines[12:]):
        if one.generation == other.generation and other.step == one.step + 1:
            after[one.step % SAVES == 0].append(other.at - one.at)
    with_s, without_s = (statistics.median(after[saved]) for saved in (True, False))
    return {"after_a_save_s": after[True], "other_steps_s": without_s, "a_save_costs": with_s / without_s - 1}


def beside_copies(done: Trial) -> dict[str, Any]:
    """Returns the seconds of each step of one world beside which the state was copied, and of the others,
    without the first twelve.
    """
    lines = [line for line in done.lines if isinstance(line, StepLine)]
    beside: dict[bool, list[float]] = {True: [], False: []}
    for one, other in pairwise(lines[12:]):
        if (
            lines[12].generation == one.generation == other.generation
            and other.step == one.step + 1
            and other.step in done.ledger
        ):
            beside[done.ledger[other.step].copied_through == one.step].append(other.at - one.at)
    with_s, without_s = (statistics.median(beside[copied]) for copied in (True, False))
    return {"beside_a_copy_s": beside[True], "without_s": beside[False], "throughput": without_s / with_s}


def buddied(done: Trial) -> dict[str, Any]:
    """Returns the steps whose copies were complete on another node too, as the commits report."""
    return {"buddied": sorted({outcome.buddied_through for outcome in done.ledger.values()} - {-1})}


def said_of(job: Job) -> dict[str, list[list[int]]]:
    """Returns what ``mischief.watched`` has written, by worker.

    A row has bytes allocated and reserved on the device, resident on the host, and allocated at most so far,
    and graphs compiled so far.
    """
    found: dict[str, list[list[int]]] = {}
    words = r"allocated (\d+) reserved (\d+) resident (\d+) peak (\d+) compiled (\d+)"
    said = re.compile(rf"^memory: (\S+) generation \d+ step \d+ {words}", re.MULTILINE)
    for log in logs_of(job):
        for worker, *amounts in said.findall(log):
            found.setdefault(worker, []).append([int(amount) for amount in amounts])
    return found


def logs_of(job: Job) -> list[str]:
    return [
        log.read_text(errors="replace") for log in sorted(Path(job.bucket).glob(f"{job.name}/logs/*/*.log"))
    ]


def memory_of(job: Job) -> dict[str, list[list[int]]]:
    """Returns the memory of each process in MiB."""
    return {
        worker: [[amount >> 20 for amount in row[:4]] for row in rows]
        for worker, rows in said_of(job).items()
    }


def compiled_of(job: Job) -> dict[str, list[int]]:
    """Returns the number of graphs that each process had compiled at its first step and at its last."""
    return {worker: [rows[0][4], rows[-1][4]] for worker, rows in said_of(job).items()}


def transports_of(job: Job) -> dict[str, int]:
    """Returns the number of channels that NCCL says it has opened, by transport, if it was asked
    (NCCL_DEBUG).
    """
    ways = [way for log in logs_of(job) for way in re.findall(r" via (NET/\w+|P2P|SHM)", log)]
    return {way: ways.count(way) for way in sorted(set(ways))}


def no_more_memory(done: Trial) -> dict[str, Any]:
    """Returns by how many MiB the last three worlds of a run take more than the third to the fifth, in any
    process: allocated, reserved, resident.
    """
    taken = [rows for rows in memory_of(done.job).values() if len(rows) > 5]
    more = [
        max(max(row[kind] for row in rows[-3:]) - max(row[kind] for row in rows[2:5]) for rows in taken)
        for kind in range(3)
    ]
    return {"more_memory_mib": more, "worlds": done.witness.generation}


def deaths(done: Trial) -> dict[str, Any]:
    """Returns the number of processes that ended otherwise than at the end of the run, by the way in which
    they ended.

    An exception that was survived does not count, and neither does the exit, or the kill, of a newcomer that
    was still opening when the last step was told.
    """
    last = max(line.at for line in done.lines if isinstance(line, StepLine))
    ways = []
    for each in done.witness.seen.values():
        if (end := each.ended) is not None:
            crashed = end.signal not in (None, signal.SIGKILL)
            if crashed or each.final["generation"] > 0 or each.ended_at < last:
                ways.append(end.signal.name if end.signal else f"exit {end.exit_code}")
    return {"deaths": {way: ways.count(way) for way in sorted(set(ways) - {"exit 0"})}}


def somebody_applied(done: Trial) -> dict[str, Any]:
    """Returns how often garbage was taken for a commit."""
    return {"believed": sum(log.count("what was none") for log in logs_of(done.job))}


def nobody_applied(done: Trial) -> dict[str, Any]:
    """Checks that nobody applied the step.

    By the counters of the first world, a member that did not survive it had not applied that step, and the
    others applied each step once. By the journal, a later generation committed it.
    """
    first = [each for each in done.witness.seen.values() if int(each.worker[1:]) <= done.job.workers.max]
    gone = done.witness.killed()
    applied = {each.worker: each.final["updates_applied"] for each in first}
    right = all(applied[each.worker] == (STEP - 1 if each in gone else done.job.steps) for each in first)
    return {
        "updates_applied": applied,
        "replaced": [each.worker for each in gone],
        "committed_by": done.ledger[STEP].generation,
        "nobody_applied": right and bool(gone) and done.ledger[STEP].generation > 1,
    }
