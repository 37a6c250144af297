"""Looks again at a checkpoint, in this process: what it loses on held-out samples, and what the step after it
does.

It changes nothing of the run, which may go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from elastic.engine.world import World
from elastic.errors import FencedOff, JobError
from elastic.ids import NodeId, Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import GO_ON, CommitShape, Outcome, Validated
from elastic.protocol.member import Member
from elastic.protocol.plan import Plan
from elastic.report.ledger import ledger, outcome_of
from elastic.runs import code
from elastic.runs.metrics import stored
from elastic.runs.resume import instead, parsed, version_at, version_before
from elastic.runs.run import Run
from elastic.train.alone.only_member import WORKER, go
from elastic.train.apply_fence import ApplyFence
from elastic.train.context import Context
from elastic.train.effects import Effects
from elastic.train.gauges.counters import Counters
from elastic.train.gauges.meter import Meter
from elastic.train.heal import Healing
from elastic.train.model import State
from elastic.train.own_faults import Faults
from elastic.train.session import held_out_of, make_session, prepare_process, unlike_held_out
from elastic.train.step import Session, Step
from elastic.train.validation import validate
from storage.checkpoints import Checkpoints


def evaluate_here(
    job: Job,
    step: int | str | None = None,
    *,
    accept_code: bool = False,
    average: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[Version, Validated]:
    """Returns the good checkpoint at ``step``, or the newest, and what it loses on the samples of
    ``[validation]``.

    ``step`` may be ``best``, or name the generation, too, as ``400.3`` does: then of a checkpoint that the
    run has left behind.  With ``average`` the loss is that of the average of the weights.

    ``tell`` is called with a sentence if the samples are those on which the run trains, as they are without
    ``[validation]``, and if the best checkpoint was never saved.  Raises :class:`JobError`, also if the
    checkpoint was made with other code unless ``accept_code``, and :class:`~storage.errors.Damaged` for bytes
    that changed.
    """
    return validate_here(job, step, accept_code=accept_code, average=average, tell=tell)[:2]


def validate_here(
    job: Job,
    step: int | str | None = None,
    *,
    accept_code: bool = False,
    average: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[Version, Validated, str]:
    """Returns and raises as :func:`evaluate_here`; the third value is a text that identifies the samples."""
    run = Run.begun(job)
    asked = job.validation.model_copy(update={"every": max(job.validation.every, 1), "by": "members"})
    if step in (0, "0"):
        version = Version(0, 0)
    else:
        version = version_at(run, None if step is None else str(step))
    for each in instead(run, str(step), version):
        tell(each)
    made, by = (version, run.job_at(version)) if version.step else (run.made(0), run.job_of(0))
    with _restored(run, job, run.job.replace(validation=asked), version, made, by, accept_code) as (
        session,
        state,
        fence,
    ):
        for each in unlike_held_out(session):
            tell(each)
        if average:
            if not state.optimizer.rule.averages:
                raise JobError(
                    f"--average: {run.job.name} keeps no average of the weights, since optim.average = "
                    "0; leave --average out"
                )
            state.evaluate_averages()
        return version, validate(session, state, fence, version.step), held_out_of(session)


@dataclass(frozen=True)
class Again:
    """A step that was computed once more: what came out now, and what the run has recorded, or None if its
    journal lacks that step.
    """

    now: Outcome
    then: Outcome | None
    recorded: tuple[float, float] | None = None
    """The loss and the norm of the step in the journal, or else in the metrics, which are all that a run with
    --local records; None if neither has the step.
    """

    @property
    def same(self) -> bool:
        """True if all recorded losses and the norm of the gradient have the same bits."""
        now, then = self.now, self.then
        if then is None:
            return (now.loss, now.norm) == self.recorded
        return (now.losses, now.squared_norm) == (then.losses, then.squared_norm)


def rerun_here(job: Job, which: int | str, *, accept_code: bool = False) -> Again:
    """Computes a step again from the checkpoint before it, as its branch and the job's loop do, with the
    norms of all layers.

    ``which`` is the step; or, for a step that the run has left behind, the step and its generation, such as
    ``400.3``.  Raises :class:`JobError` if there is no good checkpoint of the step before, or if the step was
    made with other code unless ``accept_code``, and :class:`~storage.errors.Damaged` for bytes that changed.
    """
    run, (step, generation) = Run.begun(job), parsed(str(which))
    made = run.made(step) if generation is None else Version(step, generation)
    its = run.job_of(step) if generation is None else run.job_at(made)
    if not 1 <= step <= max(run.job.steps, its.steps):
        newest = run.newest()
        raise JobError(
            f"--step {which}: {run.job.name} makes the steps 1 to {run.job.steps}, and its newest "
            f"checkpoint is of step {newest.step if newest else 0}; name a step that follows a step "
            "with a checkpoint"
        )
    if (newest_known := run.state().generation) < made.generation:
        raise JobError(
            f"--step {which}: {run.job.name} has had {newest_known} generations so far; `elastic checkpoint "
            "ls` lists them"
        )
    watched = its.watch.model_copy(update={"every": 1})
    outcomes = list[Outcome]()
    try:
        before = version_at(run, str(step - 1)) if step > 1 and generation is None else Version(0, 0)
        version = before if step == 1 or generation is None else version_before(run, step, generation)
    except JobError as error:
        raise JobError(f"--step {which}: rerun needs the checkpoint of step {step - 1}: {error}") from None
    with _restored(run, job, its.replace(watch=watched, faults=()), version, made, its, accept_code) as (
        session,
        state,
        fence,
    ):
        shape = CommitShape(1, 1, its.microbatches, its.microbatch_size, Layout())

        def once() -> Generator[Step]:
            yield Step(
                session,
                state,
                fence,
                shape,
                step,
                lambda: GO_ON,
                done=lambda outcome, _: outcomes.append(outcome),
            )

        assert session.loop is not None
        Context(session.job, state, once, Effects(run.store, its.name, tells=False)).run(session.loop)
    segments = run.segments()
    then = ledger(segments).get(step) if generation is None else outcome_of(segments, made)
    return Again(outcomes[0], then, (then.loss, then.norm) if then is not None else _stored(run, made))


def _stored(run: Run, made: Version) -> tuple[float, float] | None:
    """Returns the loss and the norm of the step ``made`` in the metrics of the run; None if they lack it."""
    rows = stored(run.store, run.job.name, ((made.generation, made.step),), made.step - 1)
    return next(((row["loss"], row["norm"]) for row in rows), None)


@contextmanager
def _restored(
    run: Run, job: Job, its: Job, version: Version, made: Version, by: Job, accept_code: bool
) -> Iterator[tuple[Session, State, ApplyFence]]:
    """Yields the state of ``version`` and what is needed to compute with it by the job ``its``, on the
    workers' kind of device that ``job`` names.

    Raises :class:`JobError` if ``made``, which a world of the job ``by`` committed, was made with other code,
    unless ``accept_code``.
    """
    its = code.with_objects(its, job).replace(
        workers=job.workers, offload="none", offload_folder="", offload_buffer_gb=1.0
    )
    device = prepare_process(its)
    with TemporaryDirectory() as folder:
        session = make_session(its, Counters(Path(folder) / "counters", create=True))
        fence = ApplyFence(Member(WORKER))
        try:
            code.check_look(run, made, by, job, accept=accept_code)
            with _alone(session, device, run.checkpoints, version, fence) as state:
                yield session, state, fence
        finally:
            session.close()


@contextmanager
def _alone(
    session: Session, device: torch.device, checkpoints: Checkpoints, version: Version, fence: ApplyFence
) -> Iterator[State]:
    """Yields the state of ``version`` in a world of this process alone.  ``fence`` is also entered between
    the slices that are read, so that it can end the reading.
    """
    world = World.alone(device, generation=1)
    try:
        plan = Plan(
            1, 1, Layout(), (WORKER,), version, "bucket" if version.step else "init", (), NodeId("local")
        )
        state = State(session.job, session.builder, session.rule, world, version)
        healing = Healing(state, plan, WORKER, session)

        def between() -> None:
            with fence:
                pass

        healing.finish([], checkpoints, between)
        healing.settle()
        go(fence, plan, state.shard)
        yield state
    finally:
        world.close()


class Interruptible(ApplyFence):
    """A fence that raises :class:`FencedOff` on entry once ``interrupted()`` returns True."""

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        super().__init__(Member(WORKER))
        self._interrupted = interrupted

    def __enter__(self) -> Member:
        if self._interrupted():
            raise FencedOff("the worker is needed for training")
        return super().__enter__()


def evaluate_between(
    session: Session,
    device: torch.device,
    checkpoints: Checkpoints,
    version: Version,
    interrupted: Callable[[], bool],
) -> Validated:
    """Returns what a checkpoint loses on the held-out samples, measured by a worker that is no member,
    between two worlds.

    Raises :class:`FencedOff` once it is ``interrupted``, before the next slice or microbatch, and
    :class:`~storage.errors.Damaged`.
    """
    job, fence = (
        session.job.replace(offload="none", offload_folder="", offload_buffer_gb=1.0),
        Interruptible(interrupted),
    )
    own = replace(session, job=job, snapshots=None, faults=Faults(()), meter=Meter())
    with _alone(own, device, checkpoints, version, fence) as state:
        return validate(own, state, fence, version.step)
