"""Rehearses what can go wrong: trains a job under faults, and judges the run by an undisturbed one.

Both runs are runs like any other, in the bucket of the job, under names of their own: ``toy-calm-1`` and
``toy-chaos-1`` for a job ``toy``.  So a rehearsal never touches a run of the job itself, and ``elastic
replay``, ``report`` and ``checkpoint`` tell more of what happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import ray

from actors import leftovers, living
from actors.chaos import CALL_S, Chaos, Strike
from actors.fleet import Fleet
from actors.launch import launch
from actors.local_nodes import LocalNodes
from actors.onlooker import Onlooker
from actors.result import Result
from actors.screen import screen_for
from actors.view import View
from elastic.control.run import Finished
from elastic.errors import ElasticError, JobError, PlatformGaveUp
from elastic.job import Job
from elastic.protocol.faults import FATAL, Fault, Kind
from elastic.report import judgement
from elastic.report.judgement import Blow, Evidence, Finding, RecoveryRow
from elastic.report.ledger import ledger
from elastic.report.timeline import Timeline
from elastic.runs.run import Run
from elastic.sim.minimise import minimised
from elastic.state.difference import compare
from storage.checkpoints import content_digest
from storage.errors import StorageError
from storage.objects import ObjectStore

LOOK_S = 0.02
"""Seconds between two looks at the run."""
SPAN = 0.7
"""Part of the undisturbed run's time in which faults strike; what they cost makes the run longer."""
LEAST_S, TIMES = 600.0, 10.0
"""A run under faults that has not ended after ``LEAST_S`` seconds and ``TIMES`` times the time of the
undisturbed run does not end.
"""


class Disturbance(Protocol):
    """Something that happens to a run.  It is told each look at the run; None means that nobody answered."""

    blows: list[Blow]

    def look(self, view: View | None) -> None: ...

    def deaths(self, onlooker: Onlooker) -> Mapping[str, str | None]:
        """Returns the processes that it must have ended, and in words how they ended; None if one lives."""


class ScheduledFaults:
    """A schedule of faults, whose times count from the first committed step.  A node that dies is replaced if
    the cluster is of this process.
    """

    def __init__(
        self, job: Job, faults: Sequence[Fault], nodes: LocalNodes | None, tell: Callable[[str], None]
    ) -> None:
        self.job, self.planned, self.nodes, self.tell = job, tuple(faults), nodes, tell
        self.blows: list[Blow] = []
        self.chaos: Chaos | None = None

    def look(self, view: View | None) -> None:
        if self.nodes is not None:
            for _ in range(self.nodes.bury()):
                self.nodes.add()
        if view is None or view.over:
            return
        if self.chaos is None and view.step > 0:
            self.chaos = Chaos(self.job, self.planned, self._note)
        if self.chaos is not None and self.chaos.pending:
            self.chaos.heed(view)

    def _note(self, strike: Strike) -> None:
        self.tell(str(strike))
        if not strike.failed:
            victims = tuple(each.removeprefix("node ") for each in strike.victim.split(","))
            said = f"{strike.fault['kind']} of {strike.victim.replace(',', ', ')}"
            self.blows.append(Blow(strike.at, strike.step, said, victims))

    def deaths(self, onlooker: Onlooker) -> Mapping[str, str | None]:
        """Returns the workers that were told to die, of those that were seen.  A fault at a point of the work may
        never have come, so its worker is none of them.
        """
        due = [
            worker
            for strike in (self.chaos.performed if self.chaos is not None else ())
            if Kind(strike.fault["kind"]) in FATAL and "point" not in strike.fault
            for worker in strike.victim.split(",")
        ]
        return {each: onlooker.ended(each) for each in due if each in onlooker.workers}

    def close(self) -> None:
        if self.chaos is not None:
            self.chaos.close()


@dataclass(frozen=True)
class Judged:
    """A run under faults, judged."""

    job: Job
    evidence: Evidence
    findings: tuple[Finding, ...]
    rows: tuple[RecoveryRow, ...]
    timeline: Timeline

    @property
    def agrees(self) -> bool:
        return judgement.agrees(self.findings)

    @property
    def differs(self) -> bool:
        """True if something is not as in the undisturbed run, whether or not a fault has struck."""
        return not judgement.agrees([each for each in self.findings if each.name != judgement.HAPPENED])


@dataclass
class Rehearsal:
    """Rehearsals of one job on the cluster of this process, whose nodes are ``nodes`` if it is a local one of
    several nodes.  ``tell`` gets sentences.
    """

    job: Job
    nodes: LocalNodes | None
    tell: Callable[[str], None]
    quiet: bool = False
    calm_job: Job = field(init=False)
    calm: Evidence = field(init=False)
    calm_s: float = 0.0
    """Seconds from the undisturbed run's first committed step to its end."""

    def __post_init__(self) -> None:
        metrics = self.job.metrics.model_copy(update={"sinks": {}})  # nobody's dashboard is to have them
        self.job = self.job.replace(metrics=metrics, on_driver_exit="stop")
        self.number = _next_number(self.job)

    def name(self, kind: str) -> str:
        return f"{self.job.name}-{kind}-{self.number}"

    # ---- the undisturbed run

    def undisturbed(self) -> None:
        """Trains the job without faults, to have what all else is judged by.  Raises :class:`PlatformGaveUp`
        if it does not finish.
        """
        self.calm_job = self.job.replace(name=self.name("calm"), faults=())
        onlooker = Onlooker(self.calm_job.name)
        onlooker.start()
        try:
            result = self._train(self.calm_job)
        finally:
            onlooker.end()
        if result.state != "Finished":
            raise PlatformGaveUp(
                f"{self.calm_job.name}: the undisturbed run did not finish ({result.state}: {result.reason}), so "
                "there is nothing to compare with"
            )
        self.calm = _evidence(self.calm_job, _end_of(result), _counted(onlooker))
        self._take_time()

    def as_before(self, reference: str) -> None:
        """Takes a run that has finished as the undisturbed one.  Raises :class:`JobError` if there is none of
        that name in the bucket, if it is of another job, or if it has not finished.
        """
        self.calm_job = self.job.replace(name=reference, faults=())
        run = Run.begun(self.calm_job, of_the_file=False)
        what = f"--reference {reference}"
        if run.job.digest != self.calm_job.digest:
            raise JobError(
                f"{what}: that run is of another job: a setting that defines its weights differs; leave "
                "--reference out, and the job is trained undisturbed first"
            )
        if not isinstance(end := run.end(), Finished):
            raise JobError(f"{what}: that run has not finished; `elastic train` finishes it")
        steps = end.step or run.job.steps
        self.calm = _evidence(self.calm_job, f"Finished at step {steps}", None)
        self._take_time()

    def _take_time(self) -> None:
        timeline = Timeline().read(Run.begun(self.calm_job).segments())
        self.calm_s = timeline.account.since_first.figures.seconds

    @property
    def span_s(self) -> float:
        """Seconds in which faults strike unless the user says otherwise."""
        return SPAN * self.calm_s

    # ---- a run under faults

    def under(self, faults: Sequence[Fault], name: str) -> Judged:
        """Trains the job under a schedule of faults, and judges the run."""
        job = self.job.replace(name=name)
        disturbance = ScheduledFaults(job, faults, self.nodes, self.tell)
        try:
            return self._judged(job, disturbance, len(faults))
        finally:
            disturbance.close()

    def on_trace(self, fleet: Fleet, name: str) -> Judged:
        """Trains the job on the nodes of a trace, and judges the run."""
        fleet.start()
        removals = sum(not row.comes for row in fleet.rows)
        return self._judged(self.job.replace(name=name), fleet, removals)

    def _judged(self, job: Job, disturbance: Disturbance, planned: int) -> Judged:
        one_machine = self.nodes is not None
        before = leftovers.left_of(job.name, one_machine=one_machine, deadline_s=0.0)
        onlooker = Onlooker(job.name)
        beside = Beside(job.name, disturbance, max(LEAST_S, TIMES * self.calm_s))
        onlooker.start()
        try:
            end = _end_of(self._train(job))
        except (ElasticError, StorageError) as error:
            end = f"ended by {type(error).__name__}: {error}"
        finally:
            hung = beside.end()
            there = leftovers.left_of(job.name, one_machine=one_machine)
            left = [each for each in there if each not in before]
            onlooker.end()
        end = f"did not end within {beside.limit_s:.0f} s" if hung else end
        return self._compare(job, end, left, onlooker, disturbance, planned)

    def _compare(
        self,
        job: Job,
        end: str,
        left: Sequence[str],
        onlooker: Onlooker,
        disturbance: Disturbance,
        planned: int,
    ) -> Judged:
        blows, deaths = disturbance.blows, disturbance.deaths(onlooker)
        segments = Run.find(job).segments()
        timeline = Timeline().read(segments)
        worlds = [*timeline.worlds.values()]
        members = _members(segments)
        everybody_seen = {each for world in members for each in world} <= onlooker.workers.keys()
        struck = _evidence(job, end, _counted(onlooker) if everybody_seen else None)
        apart = _apart(self.calm_job, job) if struck.digest != self.calm.digest else ""
        findings = (
            judgement.faults_struck(planned, blows, deaths, max(self.calm.steps, default=0)),
            judgement.same_end(self.calm, struck),
            judgement.same_bits(self.calm, struck, apart),
            judgement.same_samples(self.calm, struck),
            judgement.same_losses(self.calm, struck),
            judgement.work_done(self.calm, struck, worlds, _microbatches(struck), len(blows)),
            judgement.lived_on(onlooker.changed, members, onlooker.workers.keys()),
            judgement.sources_of(onlooker.healed if everybody_seen else None, worlds),
            judgement.nothing_left(left),
        )
        rows = judgement.rows_of(blows, timeline.recoveries, timeline.worlds)
        return Judged(job, struck, findings, tuple(rows), timeline)

    def _train(self, job: Job) -> Result:
        screen = screen_for(job, quiet=self.quiet)
        return launch(job, show=screen.show, look=screen.look)

    # ---- a smaller schedule

    def minimised(self, faults: Sequence[Fault], tries: int) -> tuple[Fault, ...]:
        """Returns as few of ``faults`` as still make the run differ, after at most ``tries`` runs.  Returns
        none if the run differs without any fault, too.
        """
        made = 0

        def differs(part: Sequence[Fault]) -> bool:
            nonlocal made
            if made >= tries:
                return False
            made += 1
            name = f"{self.name('chaos')}-try-{made}"
            self.tell(f"try {made} of at most {tries}: {len(part)} of {len(faults)} faults, as {name}")
            return self.under(part, name).differs

        return () if differs(()) else minimised(faults, differs)


class Beside:
    """Looks at a run from a thread beside the command that trains it, and lets a disturbance happen.  A run
    that has not ended after ``limit_s`` seconds is ended.
    """

    def __init__(self, name: str, disturbance: Disturbance, limit_s: float) -> None:
        self.name, self.disturbance, self.limit_s = name, disturbance, limit_s
        self._over, self._until = threading.Event(), time.monotonic() + limit_s
        self._thread = ThreadPoolExecutor(1, "beside")
        self._done: Future[bool] = self._thread.submit(self._look)

    def _look(self) -> bool:
        while not self._over.wait(LOOK_S):
            self.disturbance.look(_view(self.name))
            if time.monotonic() > self._until:
                living.reap(self.name)
                return True
        return False

    def end(self) -> bool:
        """Returns whether the run had to be ended.  Raises what has ended the thread."""
        self._over.set()
        hung = self._done.result()
        self._thread.shutdown()
        return hung


def _view(name: str) -> View | None:
    if not ray.is_initialized() or (coordinator := living.attach(name)) is None:
        return None
    try:
        view: View = ray.get(coordinator.view.remote(10**9), timeout=CALL_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        return None  # it may be on its way back
    return view


def _next_number(job: Job) -> int:
    """Returns the first number of which the bucket has no rehearsal."""
    store, number = ObjectStore.open(job.bucket), 1
    while any(store.list(f"{job.name}-{kind}-{number}/") for kind in ("calm", "chaos")):
        number += 1
    return number


def _end_of(result: Result) -> str:
    why = "" if result.state == "Finished" else f" ({result.reason})"
    return f"{result.state} at step {result.step}{why}"


def _counted(onlooker: Onlooker) -> int | None:
    return onlooker.total("microbatches_run") if onlooker.workers else None


def _evidence(job: Job, end: str, microbatches_run: int | None) -> Evidence:
    run = Run.find(job)
    digest = ""
    try:
        if (version := run.newest()) is not None:
            digest = content_digest(run.checkpoints.open(version))
    except StorageError:
        digest = ""
    return Evidence(end, digest, ledger(run.segments()), microbatches_run)


def _microbatches(struck: Evidence) -> int:
    return max((len(each.losses) for each in struck.steps.values()), default=0)


def _members(segments: Sequence[tuple[object, Sequence[object]]]) -> list[tuple[str, ...]]:
    """Returns the members of each world that was to be formed, in order."""
    found: dict[int, tuple[str, ...]] = {}
    for _, records in segments:
        for record in records:
            for action in record["actions"]:  # type: ignore[index]
                if action["$"] == "Form" and "plan" in action:
                    found[action["plan"]["generation"]] = tuple(action["plan"]["members"])
    return [*found.values()]


def _apart(calm: Job, struck: Job) -> str:
    """Returns in words by which tensors the last checkpoints of two runs differ."""
    runs = [Run.find(job) for job in (calm, struck)]
    versions = [run.newest() for run in runs]
    if None in versions:
        return ""
    first, second = (
        run.checkpoints.open(version)
        for run, version in zip(runs, versions, strict=True)
        if version is not None
    )
    found = compare(first, second, ("",))
    wrong = [each.tensor.name for each in found.moved if not each.equal]
    if not wrong:
        return "; the tensors of one are not those of the other"
    return f"; {len(wrong)} of {len(found.moved)} tensors differ, first {wrong[0]}"
