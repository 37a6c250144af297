"""Counts the files that a recovery passes: from the SIGKILL of a worker to the first commit of the next
world.

    python -m tests.architecture.flow                  # three replicas; the survivors hold the state
    python -m tests.architecture.flow --shards         # the state is cut over three workers; the dead one's part comes from its keeper

It runs a small job on a local Ray cluster with one node, kills the worker of the highest world rank, and
reads from ``tests/support/recorder.py`` which functions ran in the coordinator, the keeper and each survivor.

**The window** is the same for all processes.  It begins immediately before the signal is sent, since the
kernel closes the sockets of a dying process before it calls it dead: survivors were seen to react 4 ms
earlier.  It ends when the coordinator first answers that a step of the next world is committed.  So it may
include some milliseconds of ordinary steps, and whatever else the run does meanwhile, such as the start of a
replacement.  The replacement's own process is left out.

**A file is passed** by a process in which one of its functions runs.  Importing a file does not count.  A
file of which only instances are made (by an ``__init__`` that ``@dataclass`` generates) counts too, and is
marked ``types``; an instance that arrives by pickle does not.

**The steady state** is what the same process does in some quiet seconds of steps before the kill; the lease
is short, so that renewals are among it.  Four numbers follow: ``all`` files; files with a function that does
not run in the steady state (``own``: these are what somebody reads who follows a recovery from its first line
to its last); files that the steady state does not touch at all (``new``); files with a function that had
never run in that process before the kill (``only``: what a recovery adds to the start of the run, which forms
a world by the same code.  A function that runs seldom is not among them by chance).
"""

from __future__ import annotations

import argparse
import os
import select
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.recorder import Call, recorded, seam

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 3
QUIET_S = 6.0
LEASE_S = 20
"""Seconds of a lease, which is renewed four times: at least once in the quiet seconds."""
THREADS = {
    "Worker.train": "training",
    "Worker.obey": "control",
    "Worker._keep_lease": "lease",
    "Coordinator._run": "loop",
    "Coordinator.view": "view",
    "Coordinator.post": "inbox",
    "Coordinator._watch_cluster": "cluster",
    "Keeper._beat": "beat",
    "Keeper._watch": "watch",
}
"""Names of threads: a thread that has run one of these functions has its name, another that of the first
function that it ran.
"""


@dataclass
class Strike:
    """The times of one strike, in monotonic seconds, and the workers that it concerns."""

    quiet_at: float = 0.0
    sent_at: float = 0.0
    dead_at: float = 0.0
    committed_at: float = 0.0
    victim: str = ""
    survivors: tuple[str, ...] = ()
    generation: int = 0
    """The generation that the victim was in."""


@dataclass(frozen=True)
class Passed:
    """One file in one process."""

    file: str
    after_s: float
    """Seconds between the signal and the first use."""
    threads: Mapping[str, str]
    """The thread that first ran each function, in order of first use."""
    own: tuple[str, ...]
    """Functions that do not run in the steady state."""
    steady: bool
    """True if the steady state touches the file."""
    only: tuple[str, ...]
    """Functions that had not run before the signal."""

    @property
    def types(self) -> bool:
        """True if only instances are made of what is in the file."""
        return all(each.endswith(" made") for each in self.threads)


class Striker:
    """Watches the run through the witness, kills, and notes the times."""

    def __init__(self) -> None:
        self.strike = Strike()
        self.polls: list[tuple[float, int, int]] = []
        """Each answer of the coordinator after the kill, as (time, generation, step)."""
        self.whole = self.first = 0
        """The generation of the first step of a world of all workers; the first step committed by the world
        after the kill.
        """

    def tell(self, line: Any) -> None:
        """Hears the story, in which each step line carries its world."""
        if getattr(line, "world", 0) == WORKERS and not self.whole:
            self.whole = line.generation
        if self.strike.sent_at and not self.first and getattr(line, "generation", 0) > self.strike.generation:
            self.first = line.step

    def act(self, witness: Any, view: Any) -> bool:
        """Returns True once all is measured."""
        now, strike = time.monotonic(), self.strike
        if not self.whole or len(witness.seen) < WORKERS:
            return False
        if not strike.quiet_at:
            strike.quiet_at = now
        elif not strike.sent_at and now - strike.quiet_at >= QUIET_S:
            self._kill(witness, view)
        elif strike.sent_at:
            self.polls.append((now, view.generation, view.step))
            done = [
                at
                for at, generation, step in self.polls
                if self.first and generation > strike.generation and step >= self.first
            ]
            if done:
                strike.committed_at = done[0]
                _stop(witness.job_name)
                return True
        return False

    def _kill(self, witness: Any, view: Any) -> None:
        from tests.support.processes import Watched

        strike, members = self.strike, sorted(view.workers, key=lambda worker: int(worker[1:]))
        assert view.generation == self.whole and len(members) == WORKERS, "the quiet seconds were not quiet"
        *survivors, strike.victim = members
        strike.survivors, strike.generation = tuple(survivors), view.generation
        process: Watched = witness.seen[strike.victim].process
        strike.sent_at = time.monotonic()
        process.kill()
        select.select([process.fd], [], [])
        strike.dead_at = time.monotonic()


def _stop(name: str) -> None:
    from actors.living import attach

    attach(name).stop.remote("all is measured")  # type: ignore[union-attr]


@dataclass(frozen=True)
class Flow:
    """The result of one strike; ``processes`` maps the name of a process to its files in order of first use."""

    strike: Strike
    processes: Mapping[str, Sequence[Passed]]
    quiet: Mapping[str, frozenset[str]]
    """The files of the steady state, by process."""

    def all(self) -> frozenset[str]:
        return self._union(lambda each: True)

    def own(self) -> frozenset[str]:
        """Files with a function that the steady state of the process does not run."""
        return self._union(lambda each: bool(each.own))

    def only(self) -> frozenset[str]:
        """Files with a function that the process had not run before the signal."""
        return self._union(lambda each: bool(each.only))

    def new(self) -> frozenset[str]:
        """Files that the steady state of the process does not touch."""
        return self._union(lambda each: not each.steady)

    def types(self) -> frozenset[str]:
        """Files of which no process ran more than a generated ``__init__``."""
        return self.all() - self._union(lambda each: not each.types)

    def _union(self, counts: Any) -> frozenset[str]:
        return frozenset(each.file for passed in self.processes.values() for each in passed if counts(each))


def name_of(calls: Iterable[Call], workers: Mapping[int, str], pid: int) -> str:
    """Returns the name of the actor that this process is, or ""."""
    made = {call.function for call in calls if call.function.endswith(".__init__")}
    return workers.get(pid) or next(
        (kind.lower() for kind in ("Coordinator", "Keeper") if f"{kind}.__init__" in made), ""
    )


def passed(calls: Sequence[Call], strike: Strike) -> list[Passed]:
    """Returns the files that one process passed, in order of first use."""
    threads: dict[int, str] = {}
    for call in calls:
        if call.function in THREADS or call.thread not in threads:
            threads[call.thread] = THREADS.get(call.function, threads.get(call.thread, call.function))
    quiet = {(call.file, call.function) for call in calls if strike.quiet_at <= call.at < strike.sent_at}
    before = {(call.file, call.function) for call in calls if call.at < strike.sent_at}
    files: dict[str, list[Call]] = {}
    for call in calls:
        if strike.sent_at <= call.at <= strike.committed_at:
            files.setdefault(call.file, []).append(call)
    found = []
    for file, there in files.items():
        ran: dict[str, str] = {}
        for call in there:
            ran.setdefault(call.function, threads[call.thread])
        own = tuple(each for each in ran if (file, each) not in quiet)
        only = tuple(each for each in ran if (file, each) not in before)
        found.append(
            Passed(file, there[0].at - strike.sent_at, ran, own, any(file == each for each, _ in quiet), only)
        )
    return found


def measure(shards: bool = False) -> Flow:
    """Runs the job, strikes, and reads the records.  It starts a Ray cluster in this process, and ends it."""
    import ray

    from actors import cluster
    from tests.support.chaos import trial

    striker = Striker()
    with tempfile.TemporaryDirectory(prefix="flow-") as there:
        before = os.environ.get("PYTHONPATH")
        # of the cluster's processes
        os.environ["PYTHONPATH"] = f"{seam(Path(there) / 'notes', ROOT)}{os.pathsep}{ROOT}"
        try:
            cluster.connect("local")
            chaos = trial(_job(Path(there), shards), striker.act, hash_it=False, tell=striker.tell)
        finally:
            ray.shutdown()
            os.environ.pop("PYTHONPATH")
            os.environ |= {} if before is None else {"PYTHONPATH": before}
        assert chaos.result.state == "Stopped" and striker.strike.committed_at, chaos.result
        workers = {each.process.pid: each.worker for each in chaos.witness.seen.values()}
        return flow_of(striker.strike, recorded(Path(there) / "notes"), workers)


def _job(folder: Path, shards: bool) -> Any:
    from tests.support.toys import toy_job

    return toy_job(
        folder / "bucket",
        name="flow",
        steps=100_000,
        data={"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.02}},
        schedule={"kind": "constant"},
        workers={"min": 1, "max": WORKERS},
        parallel={"dp_replicate": 1} if shards else {},
        deadlines={"grow_debounce_s": 8, "lease_s": LEASE_S},
    )


def flow_of(strike: Strike, notes: Mapping[int, Sequence[Call]], workers: Mapping[int, str]) -> Flow:
    """Returns the flow of ``strike`` from the calls of each process; ``workers`` maps process ids to names."""
    processes, quiet, counted = {}, {}, {"coordinator", "keeper", *strike.survivors}
    for pid, calls in notes.items():
        if (name := name_of(calls, workers, pid)) in counted and (files := passed(calls, strike)):
            processes[name] = files
            quiet[name] = frozenset(
                call.file for call in calls if strike.quiet_at <= call.at < strike.sent_at
            )
    return Flow(strike, dict(sorted(processes.items())), quiet)


def listed(name: str, files: Sequence[Passed]) -> str:
    """Returns the files of one process, in order of first use."""
    lines = [
        f"\n{name}: {len(files)} files, {sum(bool(each.own) for each in files)} own, "
        f"{sum(not each.steady for each in files)} new"
    ]
    for each in files:
        kind = (
            "types"
            if each.types
            else "only"
            if each.only
            else "new"
            if not each.steady
            else "own"
            if each.own
            else ""
        )
        shown = each.only or each.own or tuple(each.threads)
        more = f" … {len(shown) - 4} more" if len(shown) > 4 else ""
        thread = each.threads[shown[0]]
        lines.append(
            f"  {1000 * each.after_s:7.1f} ms  {kind:<5} {each.file:<36} {thread:<14.14} "
            f"{', '.join(shown[:4])}{more}"
        )
    return "\n".join(lines)


def union(flow: Flow) -> str:
    """Returns every file with the processes that pass it: in capitals where with a function that the steady
    state does not run.
    """
    rows: dict[str, list[str]] = {}
    for name, files in flow.processes.items():
        for each in files:
            rows.setdefault(each.file, []).append(name.upper() if each.own else name)
    return "\n".join(
        [
            f"\ntogether: {len(rows)} files",
            *(f"  {file:<40} {' '.join(names)}" for file, names in sorted(rows.items())),
        ]
    )


def table(flow: Flow) -> str:
    """Returns the counts as Markdown: by process and together; then by room."""
    lines = [
        "| process | all | of them only types | own | new | only | steady state |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, files in flow.processes.items():
        counts = (
            len(files),
            sum(each.types for each in files),
            sum(bool(each.own) for each in files),
            sum(not each.steady for each in files),
            sum(bool(each.only) for each in files),
        )
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {len(flow.quiet[name])} |")
    steady = frozenset().union(*flow.quiet.values())
    sets = (flow.all(), flow.types(), flow.own(), flow.new(), flow.only(), steady)
    lines.append(f"| **together** | {' | '.join(f'**{len(each)}**' for each in sets)} |")
    rooms = [Counter(str(Path(file).parent) for file in each) for each in sets]
    lines += [
        f"| {room} | {' | '.join(str(each[room]) for each in rooms)} |"
        for room in sorted(frozenset().union(*rooms))
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", action="store_true", help="one replica, cut over the workers")
    flow = measure(parser.parse_args().shards)
    for name, files in flow.processes.items():
        print(listed(name, files))
    print(union(flow))
    strike = flow.strike
    print(
        (
            f"\n{strike.victim} was dead {1000 * (strike.dead_at - strike.sent_at):.1f} ms after the signal was "
            "sent, and the next world had "
        ),
        end="",
    )
    print(f"committed its first step after {1000 * (strike.committed_at - strike.sent_at):.0f} ms.\n")
    print(table(flow), flush=True)
    os._exit(0)  # Ray and torch leave threads that do not end


if __name__ == "__main__":
    main()
