"""The six assertions of a chaos test, and the witness that collects what they need from the operating system while the run is on."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from actors import cluster
from actors.launch import Result, attach, launch
from elastic.control.commit import Outcome
from elastic.job import Job
from elastic.report.ledger import ledger
from elastic.report.story import Line
from elastic.runs import Run
from elastic.train.counters import FIELDS, Counters, segment
from tests.support.processes import Ended, Watched
from tests.support.state_hash import state_hash


@dataclass
class Seen:
    """One worker: its process held by pidfd, its shared memory mapped, from its first moments until after its death."""

    worker: str
    process: Watched
    counters: Counters
    final: dict[str, int] = field(default_factory=dict)
    ended: Ended | None = None

    def follow(self) -> None:
        if self.ended is None and not self.process.running:
            self.ended = self.process.wait(1)
            self.final = self.counters.as_dict()


class Witness(threading.Thread):
    """Follows every worker process of a run.  ``act(witness, view)`` may interfere; it is called until it returns True."""

    def __init__(self, name: str, act: Any = None) -> None:
        super().__init__(daemon=True)
        self.job_name, self.act, self.seen, self.done = name, act, {}, threading.Event()  # type: ignore[var-annotated]
        self.token = ""
        self.generation = 0
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            while not self.done.is_set():
                self._look()
                time.sleep(0.005)
        except BaseException as error:  # shown by ``close``
            self.errors.append(error)

    def _look(self) -> None:
        coordinator = attach(self.job_name)
        if coordinator is not None:
            try:
                view = ray.get(coordinator.view.remote(10**9), timeout=5)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                view = None
            if view is not None:
                self.token, self.generation = view.token, max(self.generation, view.generation)
                if self.act is not None and self.act(self, view):
                    self.act = None
        if self.token:
            self._find_workers()
        for each in self.seen.values():
            each.follow()

    def _find_workers(self) -> None:
        prefix = segment(self.token, "").name
        for path in segment(self.token, "").parent.glob(f"{prefix}*"):
            worker = path.name.removeprefix(prefix)
            if worker in self.seen or path.stat().st_size < 8 * len(FIELDS):
                continue
            counters = Counters(path, create=False)
            if counters["pid"]:
                self.seen[worker] = Seen(worker, Watched(counters["pid"]), counters)

    def close(self) -> None:
        self.done.set()
        self.join(10)
        deadline = time.monotonic() + 10
        for each in self.seen.values():
            each.ended = each.ended or each.process.wait(max(deadline - time.monotonic(), 0.1))
            each.final = each.final or each.counters.as_dict()
        if self.errors:
            raise self.errors[0]

    def total(self, field_name: str) -> int:
        """A counter summed over all workers, dead ones too."""
        return sum(each.final[field_name] for each in self.seen.values())

    def killed(self, by: signal.Signals = signal.SIGKILL) -> list[Seen]:
        return [each for each in self.seen.values() if each.ended is not None and each.ended.signal is by]


@dataclass
class Trial:
    """A run and everything that is known of it."""

    job: Job
    result: Result
    witness: Witness
    lines: list[Line]
    ledger: dict[int, Outcome]
    hash: str
    losses: list[float]


def trial(job: Job, act: Any = None, *, hash_it: bool = True) -> Trial:
    """Run ``job`` on the cluster of this process; export and hash its last state."""
    witness, lines = Witness(job.name, act), []  # type: ignore[var-annotated]
    witness.start()
    try:
        result = launch(job, show=lines.append)
    finally:
        witness.close()
    steps = ledger(Run.open(job).records())
    return Trial(job, result, witness, lines, steps, exported_hash(job) if hash_it else "", [steps[step].loss for step in sorted(steps)])


def exported_hash(job: Job) -> str:
    """sha256 of the newest checkpoint, exported as plain safetensors; "" without one."""
    run = Run.open(job)
    version = run.newest()
    if version is None:
        return ""
    with TemporaryDirectory() as folder:
        run.checkpoints.export(version, Path(folder))
        return state_hash(sorted(Path(folder).glob("*.safetensors")))


def samples(steps: dict[int, Outcome]) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """The ledger id by id, step by step."""
    return [(step, outcome.samples) for step, outcome in sorted(steps.items())]


def assert_survived(chaos: Trial, reference: Trial | Any, *, victims: int, generations: int, lost_steps: int, tier: str) -> None:
    """The six assertions, for SIGKILLs.  ``lost_steps``: committed steps that may be done again, for each fault."""
    job, witness = chaos.job, chaos.witness
    # 0: it ended well, and it learned
    assert chaos.result.state == "Finished", chaos.result
    assert chaos.losses[-1] <= 0.8 * chaos.losses[0]
    # 1: the fault happened, inside the run, by the word of the kernel
    killed = [seen for seen in witness.killed() if seen.final["generation"] < witness.generation]
    assert len(killed) == victims, {seen.worker: (seen.ended, seen.final) for seen in witness.seen.values()}
    assert all(0 < seen.final["step"] < job.steps - 1 for seen in killed)
    # 2: the bits
    assert chaos.hash == reference.hash
    assert chaos.losses == reference.losses
    # R14: exactly once
    assert samples(chaos.ledger) == samples(reference.ledger)
    assert sorted(chaos.ledger) == list(range(1, job.steps + 1))
    # 3: the work: a run that began again from step 0 would show here
    undisturbed = job.steps * job.microbatches
    work = witness.total("microbatches_run")
    assert undisturbed <= work + victims * job.microbatches and work <= undisturbed + victims * (lost_steps + 1) * job.microbatches, work
    # 4: the path: survivors are the same processes, and nothing was re-formed beyond what was due
    assert witness.generation == generations
    first_world = [seen for seen in witness.seen.values() if int(seen.worker[1:]) <= job.workers.max]
    survivors = [seen for seen in first_world if seen not in killed]
    assert len(survivors) == job.workers.max - victims
    assert all(seen.final["generation"] == generations and seen.final["updates_applied"] > 0 for seen in survivors)
    # 5: the tier, counted where the bytes arrived
    live, bucket = witness.total("healed_live_bytes"), witness.total("healed_bucket_bytes")
    assert (bucket == 0 and live > 0) if tier == "live" else bucket > 0, (live, bucket)
    # 6: nothing is left
    assert_nothing_left(chaos)


def assert_nothing_left(chaos: Trial) -> None:
    """No process, no segment, no actor of the run."""
    assert all(not seen.process.running for seen in chaos.witness.seen.values())
    assert not list(segment(chaos.witness.token, "").parent.glob(f"{segment(chaos.witness.token, '').name}*"))
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == cluster.NAMESPACE]
    assert not [name for name in names if name.startswith((f"{chaos.job.name}/", chaos.witness.token))]
    assert not os.path.exists(f"/tmp/elastic/{chaos.witness.token}")
