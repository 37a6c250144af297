"""Workers without torch, so that many of them fit on one machine: real processes under the product's
coordinator and keepers.

Each has the product's actor, member, lease and counters.  Only its training is made of files: a collective is
complete once a folder has a file of each member, and the state is a hash of all steps so far.  A newcomer
reads it from one of the holders that its plan names.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors import cluster, perform
from actors.coordinator import Coordinator
from actors.worker import Worker
from elastic.errors import FencedOff
from elastic.job import Job
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import GO_ON, Outcome
from elastic.protocol.events import Broken, Event, Here, Joined, Ready, StepDone
from elastic.protocol.plan import Plan
from elastic.threads import go_or_end
from elastic.train.apply_fence import ApplyFence
from elastic.train.gauges.counters import Counters
from elastic.train.orders import Controlled, Leave, Settled, Went
from storage.slices import Version
from tests.support.cells import classes

WRONG_STATE = 7
"""Exit code of a worker that was told to begin from a state that the holder does not have."""
POLL_S = 0.02
PACE_S = 0.05
"""Seconds that a step takes at least."""


def state_at(step: int) -> str:
    """Returns the state after ``step`` steps, as an undisturbed run has it."""
    state = "begin"
    for each in range(1, step + 1):
        state = _after(state, each)
    return state


def _after(state: str, step: int) -> str:
    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()


def shared(job: Job) -> Path:
    """Returns the folder of the run's files, which all nodes of this machine see."""
    return Path(job.bucket) / "hollow"


class HollowCoordinator(Coordinator):
    """Starts hollow workers.  All else is the product's."""

    def __init__(self, job: Job, reference: Build, *others: Any) -> None:
        perform.Worker = Hollow  # type: ignore[misc]
        shared(job).mkdir(exist_ok=True)
        (shared(job) / "build").write_bytes(pickle.dumps(reference))
        super().__init__(job, reference, *others)


class Hollow(Worker):
    """The worker actor.  What it does not take from the product is ``train``."""

    def train(self) -> None:
        if self._begun:
            return
        self._begun = True
        self.trainer = Training(self.job, self.counters, self.apply_fence, self.report)  # type: ignore[assignment]
        go_or_end(self._keep_lease, "lease")
        build = pickle.loads((shared(self.job) / "build").read_bytes())
        self._joined = Joined(
            self.worker,
            cluster.here(),
            "hollow",
            classes((7, 3)),
            replace(build, host=cluster.host()),
            (28, 12),
        )
        self.report(self._joined)
        self._end(self.trainer)  # type: ignore[arg-type]


class Training(Controlled):
    """Stands in for ``elastic.train.loop.Trainer``."""

    def __init__(
        self, job: Job, counters: Counters, fence: ApplyFence, report: Callable[[Event], None]
    ) -> None:
        super().__init__(fence, report)
        self.job, self.counters, self.folder, self.state = job, counters, shared(job), ""

    # ---- training thread

    def run(self) -> None:
        with suppress(Leave):
            while True:
                self._live(self._next_plan().plan)

    def _live(self, plan: Plan) -> None:
        with self.apply_fence as member:
            if not member.enter(plan):
                return
        order: Went | Settled | None = None
        try:
            self._form(plan)
            order = self._await(plan.generation, Went, Settled)
            if isinstance(order, Went):
                self._train(plan)
        except FencedOff as error:
            if error.lease:
                self._say(
                    Broken(self.worker, plan.generation, self.counters["step"] + 1, "lease", str(error))
                )
        if not isinstance(order, Settled):
            self._await(plan.generation, Settled)
        with self.apply_fence as member:
            outcome = member.settles()
        if outcome is not None:
            self._apply(outcome, settled=True)
        with self.apply_fence as member:
            answer = member.leave()
        self._answer(answer)

    def _form(self, plan: Plan) -> None:
        self.counters["generation"] = plan.generation
        self._say(Here(self.worker, plan.generation))
        with self.apply_fence as member:
            holds = any(each.version == plan.version for each in member.held)
        if not holds:
            self.state = self._read(plan)
        if self.state != state_at(plan.version.step):
            print(f"{self.worker}: the state is not that of {plan.version}", flush=True)
            os._exit(WRONG_STATE)
        cell = cell_of(plan.layout, plan.world_rank(self.worker))
        with self.apply_fence as member:
            member.healed(
                time.monotonic(),
                Holding(self.worker, plan.version, cell),
                SimpleNamespace(version=plan.version),
            )
        self.counters["step"] = plan.version.step
        self._write(plan.version)
        self._say(Ready(self.worker, plan.generation))

    def _read(self, plan: Plan) -> str:
        """Returns the state of a holder, which is to have exactly the plan's version."""
        if plan.tier == "init":
            return state_at(0)
        step, generation, state = (self.folder / plan.holders[0].worker).read_text().split()
        return state if Version(int(step), int(generation)) == plan.version else ""

    def _write(self, version: Version) -> None:
        new = self.folder / f"{self.worker}.new"
        new.write_text(f"{version.step} {version.generation} {self.state}")
        new.rename(self.folder / self.worker)

    def _train(self, plan: Plan) -> None:
        step = plan.version.step
        while True:
            step += 1
            time.sleep(PACE_S)
            with self.apply_fence as member:
                member.prepare(step)
                asked = member.boundary
            boundary = self._gather(plan, step, asked)
            samples = tuple(self.samples(step, each) for each in range(self.job.microbatches))
            ones = (1.0,) * self.job.microbatches
            counts = (1,) * self.job.microbatches
            outcome = Outcome(
                step, plan.generation, 1.0, ones, counts, samples, True, boundary=boundary, saves=False
            )
            self._apply(outcome)
            if plan.world_rank(self.worker) == 0:
                self.report(StepDone(self.worker, plan.generation, outcome))
            if boundary != GO_ON:
                return self.fence(plan.generation)

    def samples(self, step: int, microbatch: int) -> tuple[int, ...]:
        first = (step - 1) * self.job.global_batch + microbatch * self.job.microbatch
        return tuple(range(first, first + self.job.microbatch))

    def _gather(self, plan: Plan, step: int, asked: int) -> int:
        """Completes once all members are there.  Returns the most that one of them asks for at the boundary."""
        meeting = self.folder / f"g{plan.generation}" / str(step)
        meeting.mkdir(parents=True, exist_ok=True)
        (meeting / f"{plan.world_rank(self.worker)}-{asked}").touch()
        while len(there := os.listdir(meeting)) < len(plan.members):
            time.sleep(POLL_S)
            with self.apply_fence as member:
                member.go_on("stepped")
        return max(int(each.partition("-")[2]) for each in there)

    def _apply(self, outcome: Outcome, *, settled: bool = False) -> None:
        with self.apply_fence.applying(outcome, settled=settled):
            self.state = _after(self.state, outcome.step)
        self.counters["step"] = outcome.step
        self.counters["updates_applied"] += 1
        self._write(Version(outcome.step, outcome.generation))
