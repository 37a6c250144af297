"""Runs a job with ``--local``: one worker in this process, without Ray or threads.  Breakpoints work, and the
bits are the cluster's.

The session, the state and the step are those of any worker.  There are no other members and no keeper, so
this process writes its saves itself, slice for slice as an uploader does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from elastic.code.imports import users_traceback
from elastic.control.health import watch
from elastic.control.run import Finished, RunState, Stopped
from elastic.engine.optim.schedule import rate_for_readers
from elastic.engine.world import World
from elastic.errors import ElasticError, JobError, PlatformGaveUp, Refused, StateChanged
from elastic.ids import NodeId, Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.placement import written_by
from elastic.protocol import lineage
from elastic.protocol.actions import Retain
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import (
    ENDS,
    GO_ON,
    CommitShape,
    Outcome,
    Validated,
    out_of_patience,
    told_of,
)
from elastic.protocol.copy_schedule import due
from elastic.protocol.events import Work
from elastic.protocol.member import Member
from elastic.protocol.plan import Plan
from elastic.report.best import Loss, enough, newest_improvement, number_of
from elastic.report.metrics import Row, row_of, with_validation
from elastic.report.story import Scored, Show, Story, tell
from elastic.runs import alone, data, owed, validations
from elastic.runs import asked as recorded
from elastic.runs.metrics import Sinks, store_journaled, store_rows
from elastic.runs.resume import best_of, measured, over_fits
from elastic.runs.retention import Retention
from elastic.runs.run import Run
from elastic.state.streaming import look_at
from elastic.state.uploader import name_of
from elastic.threads import unbroken
from elastic.train.alone.only_member import WORKER, go
from elastic.train.apply_fence import ApplyFence
from elastic.train.checks.contract import check_loss
from elastic.train.checks.microbatch import decided
from elastic.train.checks.trial import compare_with_torch
from elastic.train.context import Context
from elastic.train.effects import Effects
from elastic.train.errands import WORK, pay
from elastic.train.gauges.counters import Counters
from elastic.train.gauges.inventory import decay_line
from elastic.train.gauges.own_metrics import Metrics
from elastic.train.gauges.profiler import Profiler
from elastic.train.heal import Healing, home_of
from elastic.train.machine.device import memory_of
from elastic.train.model import State, build_model, tensors_of
from elastic.train.session import (
    expect_same_samples,
    fingerprint_of,
    held_out_of,
    make_session,
    make_snapshots,
    prepare_process,
)
from elastic.train.step import Session, Step
from elastic.train.validation import validate
from storage.checkpoints import Checkpoints, ShardReceipt
from storage.errors import Damaged, Full, StorageError, Unavailable
from storage.slices import Tensor

LAST_WORDS = """
import json, os, shutil, sys
if not sys.stdin.read() and os.path.exists(sys.argv[2]):
    sys.path[:] = json.loads(sys.argv[1])
    from pathlib import Path
    from elastic.train.gauges.counters import Counters
    if reading := Counters(Path(sys.argv[2]), create=False).reading:
        print(f"elastic: the process died while it read {reading}: read these alone to see why", file=sys.stderr, flush=True)
    shutil.rmtree(os.path.dirname(sys.argv[2]), ignore_errors=True)
"""
"""Program that waits for the end of a process, and says which samples it was reading if it died without a
message of its own.
"""


def claimed(job: Job) -> tuple[Run, int]:
    """Returns the run of ``job``, and the incarnation that this process has claimed of it."""
    run = Run.open(job)
    return run, run.claim_here()


def run_local(
    job: Job,
    show: Show,
    begin: Callable[[Job], tuple[Run, int]] = claimed,
    build: Build | None = None,
) -> tuple[str, str, int]:
    """Trains to the end in this process; returns (state, reason, step).  Ctrl-C stops after a save of the
    last complete step.

    ``begin`` begins the run and claims it, once it is certain that the run can begin.  ``build`` is the build
    with which the job was checked.

    Raises :class:`JobError`, and :class:`PlatformGaveUp` if a save fails.
    """
    device = prepare_process(job, alone=True)
    job, why = decided(job, partial(memory_of, job, device), local=True)
    tell(show, why)
    if job.validation.by == "spares":  # there are none
        job = job.replace(validation=job.validation.model_copy(update={"by": "members"}))
    run, incarnation = begin(job)
    with alone.EndWriter(run.store, job.name, incarnation) as ending:
        state, reason, step = _train(run, incarnation, device, show, build, ending)
        if ending.how is None:
            ending.how = Finished() if state == "Finished" else Stopped(reason)
    return state, reason, step


def _train(
    run: Run,
    incarnation: int,
    device: torch.device,
    show: Show,
    build: Build | None,
    ending: alone.EndWriter,
) -> tuple[str, str, int]:
    job, start = run.job, run.state(incarnation, time.time())
    with TemporaryDirectory() as folder, _last_words(Path(folder) / "counters") as counters:
        session = make_session(job, Counters(counters, create=True), prefetch=None if job.data.readers else 0)
        if job.offloads:
            tensors = tensors_of(build_model(job, session.builder), session.rule)
            session.snapshots = make_snapshots(job, tensors, device, session.counters, session.faults)
        tell(show, run.passed_over(start, put_away=True))
        if build is not None:
            expect_same_samples(session, build)
        compared = compare_with_torch(session, device) if not start.history.saved else ""
        data.bind(run, fingerprint_of(job, session.loader.dataset), len(session.loader.dataset))
        world = World.alone(device, generation=start.generation + 1)
        local, ended = _Local(run, session, world, start, show, ending), False
        try:
            state, reason, step = local.train(compared)
            ended = True
            local.show_owed(state)
            tell(show, over_fits(run), local.story.speed.summary)
            if summary := local.skips.summary:
                reason = f"{reason}; {summary}"
            return state, reason, step
        except JobError as error:
            if error.__cause__ is not None and (trace := users_traceback(error.__cause__, or_ours=False)):
                local.show_sentence(trace.rstrip())
            raise
        finally:
            local.sinks.close()
            local.show_said()
            tell(show, "" if ended else local.skips.summary)
            world.close()
            session.close()


@contextmanager
def _last_words(counters: Path) -> Iterator[Path]:
    """Starts a process that says which samples were being read if this process dies without a message, as
    when a library crashes or exits.
    """
    command = [sys.executable, "-I", "-S", "-c", LAST_WORDS, json.dumps(sys.path), str(counters)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield counters
        finally:
            with suppress(BrokenPipeError):
                watcher.communicate(b"over")


def save_here(checkpoints: Checkpoints, state: State, hook: Callable[[], None] | None = None) -> ShardReceipt:
    """Writes this process's part of a save itself and returns the receipt; ``hook`` is called before each
    slice goes out.

    Raises :class:`StateDamaged` if the state is in a file that has changed.
    """
    layout, rank = state.world.layout, state.world.rank
    if state.shard.home is not None:
        for key in state.shard.home.values:
            look_at(state.shard.home, key)
    parts = [
        (tensor, box.slice, _raw(state.shard.part(tensor, box.slice)))
        for tensor, box in written_by(state.tensors, layout, rank)
    ]

    def done(tensor: Tensor) -> None:
        state.shard.let_go((tensor.kind, tensor.name))

    return checkpoints.write_shard(
        state.shard.version, name_of(layout, rank), parts, hook, state.tensors, done
    )


def _raw(value: torch.Tensor) -> memoryview:
    return memoryview(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


class _LocalStep(Step):
    """A step whose commit ends before a signal is handled, since the state after half an update cannot be
    saved.
    """

    def commit(self, metrics: Mapping[str, float] | None = None) -> Outcome:
        with unbroken():
            return super().commit(metrics)


class _Local:
    """Trains one run in this process."""

    def __init__(
        self,
        run: Run,
        session: Session,
        world: World,
        start: RunState,
        show: Show,
        ending: alone.EndWriter,
    ) -> None:
        self.ending = ending
        self.last, self.why = start.enough or run.job.steps, start.why
        """The last step of the run; and the reason, if the loop has ended the run before the job's last step.
        """
        self.left = False
        """True once the loop was left before the last step."""
        self.boundary, self.reason = GO_ON, ""
        """The request for the boundary after the next commit, and why."""
        self.run, self.session, self.world, self.show = run, session, world, show
        self.incarnation, self.lineage, self.saved = (
            start.incarnation,
            start.history.lineage,
            list(start.history.saved),
        )
        self.plan = Plan(
            start.incarnation,
            world.generation,
            Layout(),
            (WORKER,),
            Version(0, 0),
            "init",
            (),
            NodeId("local"),
        )
        self.apply_fence = ApplyFence(Member(WORKER))
        self.story = Story(run.job.steps, run.job.loss)
        self.health, self.skips, self.watched = start.health, start.skips, run.job.rules().watch
        self.retention = Retention(run, self.incarnation, self.show_sentence)
        self.asked = recorded.begin(run, start.generation, self.incarnation)
        self.step = 0
        """The last step that is done."""
        self.rows: list[Row] = []
        """The metrics of the steps since the last save."""
        self.said = deque[str]()
        """Sentences from the threads of the sinks that are not shown yet."""
        self.sinks = Sinks(run, self.said.append)
        self.found: tuple[int, Validated] | None = None
        """The newest validation, and the step after which it was made."""
        self.measured, self.enough = dict[Version, Loss](), 0
        """The validations by which ``validation.patience`` is judged, and the step at which the patience is
        over; 0 if it is not over.
        """
        self.profiler = Profiler(run.job, run.store, self.show_sentence)

    def train(self, compared: str) -> tuple[str, str, int]:
        """Trains to the end; returns (state, reason, step).  ``compared`` is the sentence about the comparison
        with plain torch, which is shown once the loss is known to keep its contract.
        """
        job = self.session.job
        state = self._healed()
        self._store_journaled()
        self.sinks.hand_on(self.lineage)  # rows of earlier processes that the sinks lack
        self._pay()
        self._judge(
            measured(self.run, self.lineage, held_out_of(self.session)) if job.validation.every else {}
        )
        go(self.apply_fence, self.plan, state.shard)
        for line in decay_line(state).splitlines():
            self.show_sentence(line)
        self.skips = self.skips.completed(*state.spikes.listed())
        self.step = state.shard.version.step
        if not self.step and not job.offloads:
            check_loss(self.session, state, initialised=True)
        tell(self.show, compared)
        effects = Effects(self.run.store, job.name, tells=True)
        assert self.session.loop is not None
        try:
            steps, leave = partial(self._steps, state, effects), partial(self._leave, state)
            Context(job, state, steps, effects, self._stop, leave).run(self.session.loop)
            if self.step < job.steps and not self._ends():
                self._end_early(state)
        except KeyboardInterrupt as interrupt:
            asked = str(interrupt) or "Ctrl-C"
            if self._is_harmed():
                return (
                    "Stopped",
                    f"{asked} in the middle of an update; a later start goes on from the last save",
                    self.step,
                )
            self.show_sentence(
                f"{asked}: the run stops after a save; press Ctrl-C again to end this command without a save"
            )
            self._save(state, stops=True)
            return "Stopped", f"{asked}; saved at step {self.step}", self.step
        except Exception as error:
            self._save_before(error, state)
            raise
        finally:
            self.profiler.finish()
            self.profiler.close()
        if not self.left:
            self._validated(state, self.step)
        rule = job.validation
        top, why = (
            newest_improvement(self.measured, rule.min_delta) if self._ends() else None,
            self.why or f"all {job.steps} steps are done",
        )
        return (
            "Finished",
            why
            if top is None
            else out_of_patience(rule.patience, rule.min_delta, top.version.step, self.step),
            self.step,
        )

    def _stop(self, why: str) -> None:
        self.boundary, self.reason = ENDS, self.reason or why

    def _leave(self, state: State) -> None:
        self.left = self.step < self.last and self.ending.how is None
        if self.step < self.session.job.steps and not self._ends():
            self._end_early(state)

    def _end_early(self, state: State) -> None:
        """Saves the newest step as the last one of the run.  The note of the end is written first, so that a
        reader who finds the save finds the note, too.

        A step after which the loop was left is not validated, as in a world of several members, where others
        may be in the next step.
        """
        self.why = self.why or ("" if self.left else self.reason) or "the loop was left"
        if not self.left:
            self._validated(state, self.step, last=True)
        self.ending.how = Finished(self.step, self.why)
        if self.rows:
            self.ending.write()
            self._save(state)

    def _steps(self, state: State, effects: Effects) -> Generator[Step, None, bool]:
        """Yields the steps of the run; the loop commits each step before it takes the next one.  Returns
        True, since the run ends with the last of them.
        """
        job, version = self.session.job, state.shard.version
        shape = CommitShape(
            self.incarnation, self.world.generation, job.microbatches, job.microbatch_size, self.plan.layout
        )

        def done(outcome: Outcome, metrics: Metrics) -> None:
            step = self.step = outcome.step
            with self.apply_fence as member:
                member.recorded(outcome.generation, step)  # no coordinator will ask for them
            self._committed(outcome, state.arithmetic.of(outcome), metrics)
            if outcome.boundary == ENDS and step < job.steps:
                self._end_early(state)
            elif due(step, job.checkpoint.save_every, job.steps) or self.skips.failed:
                # the validation is part of this step's metrics, which are stored with the save
                self._validated(state, step)
                self._save(state)
            if self.skips.failed:
                raise JobError(f"{self.skips.failed}; resumes from step {step}")
            effects.committed(step)

        for step in range(version.step, self.last):
            if self._ends():
                return True
            validated = self._validated(state, step)
            with self.profiler.watch(step + 1, self.world):
                doing = _LocalStep(
                    self.session,
                    state,
                    self.apply_fence,
                    shape,
                    step + 1,
                    lambda: self.boundary,
                    validated,
                    done,
                )
                yield doing
            if doing.outcome is not None and doing.outcome.boundary == ENDS:
                return True
        return True

    def _validated(self, state: State, step: int, *, last: bool = False) -> Validated | None:
        """Returns what the state after ``step`` loses on held-out samples, and shows it; None if no
        validation is due.  After the ``last`` step one is due if it is due at the job's end.
        """
        if not self.session.job.validates(self.session.job.steps if last else step):
            return None
        if self.found is None and self._is_known():
            return None
        if self.found is None or self.found[0] != step:
            self.found = step, validate(self.session, state, self.apply_fence, step)
            self.show(Scored(time.time(), told_of(step, self.found[1]), step, self.found[1].mean))
            self._note(self.found[1])
            self._judge({lineage.tip(self.lineage): Loss(self.found[1].mean)})
        return self.found[1]

    def _ends(self) -> bool:
        """Returns whether the run has no patience left at the newest step, or at the step from which it
        resumed.
        """
        return 0 < self.enough <= self.step

    def _judge(self, found: dict[Version, Loss]) -> None:
        self.measured |= found
        self.enough = enough(
            self.measured, self.session.job.validation.patience, self.session.job.validation.min_delta
        )

    def _is_known(self) -> bool:
        """Returns whether the state with which this process began was validated before on the same samples."""
        there = validations.stored(self.run.store, self.run.job.name).get(lineage.tip(self.lineage))
        return (
            not self.rows and there is not None and there[1].data in (0, number_of(held_out_of(self.session)))
        )

    def _note(self, found: Validated) -> None:
        """Adds a validation to the row of the last step, or stores it by itself if that row is stored."""
        held_out, version = held_out_of(self.session), lineage.tip(self.lineage)
        if self.rows:
            self.rows[-1] = with_validation(self.rows[-1], found, held_out)
        # a validation that is stored already stays as it is
        elif version not in validations.stored(self.run.store, self.run.job.name):
            validations.store_late(
                self.run.store, self.run.job.name, version, found.mean, found.count, held_out
            )

    def _healed(self) -> State:
        """Returns the state of the newest readable checkpoint.  A damaged checkpoint is quarantined, and
        never read again.
        """
        while True:
            version = max(self.saved, default=Version(0, 0))
            self.lineage = lineage.cut(self.lineage, version)
            self.plan = replace(
                self.plan, version=version, tier="bucket" if self.saved else "init", lineage=self.lineage
            )
            self.show_sentence(f"one worker in this process, from {version} ({self.plan.tier})")
            home = home_of(self.session, self.plan, WORKER)
            state = State(
                self.session.job, self.session.builder, self.session.rule, self.world, version, home
            )
            healing = Healing(state, self.plan, WORKER, self.session)
            try:
                healing.finish([], self.run.checkpoints)
            except Damaged as error:
                self.saved.remove(version)
                before = (
                    f"the checkpoint of {max(self.saved)} is used instead"
                    if self.saved
                    else "there is no earlier checkpoint"
                )
                self.show_sentence(f"the checkpoint of {version} is damaged ({error}): {before}")
                self.run.checkpoints.quarantine(version, str(error))
            else:
                healing.settle()
                return state

    def _store_journaled(self) -> None:
        """Stores the rows that are only in the journal of a cluster's coordinator: one that died, or that
        ended while its last row waited for a validation.
        """
        try:
            store_journaled(self.run, self.lineage)
        except Damaged as error:
            self.show_sentence(
                "the journal cannot be read, so metrics of earlier steps that are only in the journal "
                f"are lost: {error}"
            )

    def _committed(self, outcome: Outcome, work: Work, metrics: Metrics) -> None:
        self.lineage = lineage.extended(self.lineage, Version(outcome.step, outcome.generation))
        at, lr = time.time(), rate_for_readers(self.session.job, outcome.step, outcome.lr)
        self.rows.append(
            row_of(at, outcome, lr, work, 1, leaves_out=self.run.job.spikes.leaves_out) | dict(metrics)
        )
        self.show_said()
        self.story.step(at, outcome, (WORKER,), lr, work)
        self.show(self.story.lines[-1])
        ends = outcome.step == self.session.job.steps
        self.skips, self.health, sentences = watch(self.skips, self.health, outcome, self.watched, ends=ends)
        for each in sentences:
            self.show_sentence(each)

    def _save(self, state: State, *, stops: bool = False) -> None:
        """Saves the state, and pays what is owed.  If the run ``stops``, debts are paid when it goes on."""
        version = state.shard.version
        self._check_claim(version)
        while not self._is_written(state):
            pass
        self.rows.clear()
        self.saved = [version]
        self.sinks.hand_on(self.lineage, version.step)
        if not stops:
            self._pay()
        if self.session.job.checkpoint.keep_last:
            self._retain(version)

    def _is_written(self, state: State) -> bool:
        """Writes the state.  Returns False if the bucket was full and a deleted checkpoint has made room:
        then the caller tries again.
        """
        version = state.shard.version
        try:
            receipt = save_here(
                self.run.checkpoints,
                state,
                lambda: self.session.faults.strike("save", version.step, self.world),
            )
            # before the save counts, or else a crash in between loses them
            store_rows(self.run.store, self.run.job.name, self.rows)
            # writing takes long; another command may have claimed the run meanwhile, and gone back to an
            # earlier step
            self._check_claim(version)
            self.run.commit(version, [receipt], self.lineage, self.world.layout)
        except (StorageError, OSError) as error:
            if isinstance(error, Full) and self._retain(version, at_once=True):
                return False
            where = f"bucket = {self.session.job.bucket!r}"
            raise PlatformGaveUp(
                f"the save of {version} to {where} failed: {error}; correct this, and give the "
                "same command again to resume the run"
            ) from error
        return True

    def _retain(self, version: Version, *, at_once: bool = False) -> bool:
        """Deletes the checkpoints that no rule keeps: ``at_once`` if the save of ``version`` needs the room.
        Returns whether a checkpoint was deleted.
        """
        try:
            # without a journal the best checkpoint is found in the bucket
            best = best_of(self.run) if self.session.job.checkpoint.keep_best else None
        except (StorageError, OSError):
            return False  # the next save looks again
        asked = Retain(
            tuple(self.saved[-1:]), self.lineage, best and best.version, (self.plan.version, version), at_once
        )
        return self.retention.round(asked)

    def _is_harmed(self) -> bool:
        """Returns whether an update broke off in the middle."""
        with self.apply_fence as member:
            return not member.held

    def _save_before(self, error: Exception, state: State) -> None:
        """Saves the steps before an error of the job, unless it may have changed the state."""
        ours = isinstance(error, ElasticError) and (
            isinstance(error, StateChanged) or not isinstance(error, JobError)
        )
        if ours or not self.rows or self._is_harmed():
            return
        try:
            if self.session.computing or self.session.job.loop:
                state.guard.check()
            self._save(state, stops=True)
        except Exception as failed:  # the error of the job is what the user must hear of
            self.show_sentence(
                f"step {self.step} is not saved ({failed}); a later start goes on from the last save"
            )
        else:
            self.show_sentence(
                f"step {self.step} is saved; the next step fails with an error of the job, which ends the run"
            )

    def _check_claim(self, version: Version) -> None:
        """Raises :class:`Refused` unless the newest claim of the run is this command's: otherwise the save of
        ``version`` would not count.
        """
        owner = self.run.owner()
        if (latest := owner["incarnation"] if owner else 0) < self.incarnation:
            gone = self.run.store.full_name(f"{self.run.job.name}/owner/{self.incarnation:06d}.json")
            raise Refused(
                f"this command's claim, {gone}, is missing: somebody has deleted it, or the run's "
                f"folder; {version} is not saved, and this command ends"
            )
        # somebody may have deleted the run, and begun it anew
        if latest != self.incarnation or not alone.is_ours(owner):
            raise Refused(
                f"another command has taken this run over (owner {latest}; this one is {self.incarnation}): "
                f"{version} is not saved, and this command ends"
            )

    def _pay(self) -> None:
        """Tries to pay each debt of the run once; a debt that fails is tried again at the next save."""
        for debt in owed.debts(self.run, self.lineage, self.asked, WORK, self._last_step):
            if not debt.given_up:
                try:
                    said = pay(self.run, self.run.job, debt)[0]
                except (Unavailable, OSError) as error:
                    said = (
                        f"{debt} failed: {error}; this command tries again at the next save; by hand: "
                        "`elastic owed --pay`"
                    )
                self.show_sentence(said)

    @property
    def _last_step(self) -> int:
        """The last step of the run, as far as it is known."""
        return self.step if self.ending.how is not None or self._ends() else self.last

    def show_owed(self, state: str) -> None:
        """Shows which debts are left: those that failed, and validations that spares were to make."""
        with suppress(StorageError, OSError):  # `elastic owed` says it at any time
            left = owed.debts(self.run, self.lineage, self.asked, end=self._last_step)
            self.show_sentence(owed.left(left, state == "Finished"))

    def show_said(self) -> None:
        while self.said:
            self.show_sentence(self.said.popleft())

    def show_sentence(self, text: str) -> None:
        """Shows a sentence that is not empty."""
        tell(self.show, text)
