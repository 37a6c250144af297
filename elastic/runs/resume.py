"""Finds the checkpoint that a command names, and where a command that trains begins: at the newest checkpoint
of its run, at an older one, or at one of another run.

A checkpoint is named by its step; by its step and its generation, as 400.3, if the run has left it behind; or
by a word, as ``best``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic.config.values import checkpoint_meant, checkpoint_of, same_checkpoint
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.stretches import ended
from elastic.protocol import lineage
from elastic.protocol.lineage import Lineage
from elastic.report.best import Best, Loss, best, enough, newest_improvement, number_of, over_fit
from elastic.runs import branches, forks, metrics
from elastic.runs.branches import Branch, Branches, Origin
from elastic.runs.notes import abandoned
from elastic.runs.run import Run
from storage.errors import StorageError
from storage.objects import ObjectStore

LATEST = "latest"
BEST = "best"


@dataclass(frozen=True)
class StartPoint:
    """The place where a command begins to train, and its job with the settings that it takes from there."""

    job: Job
    at: Version | None = None
    """The checkpoint of the run itself from which a branch goes on."""
    word: str = ""
    """The word that named ``at``."""
    origin: Origin | None = None
    """The checkpoint of another run from which a new run goes on, or (with ``init``) whose weights it begins
    with.
    """
    changed: dict[str, Any] = field(default_factory=dict)
    """The settings in which a fork differs from the run that it comes from."""

    said: str = ""
    """The sentence that says that the run has gone on from the checkpoint before; for a new run, the end of
    the sentence that :meth:`begin` returns.
    """

    @property
    def setting(self) -> str:
        """The words that asked for the other run's checkpoint, for errors."""
        return (
            f"init = {self.job.init!r}" if self.job.init else (f"--resume {self.origin and self.origin.word}")
        )

    def begin(self) -> str:
        """Begins a fork, or a run with the weights of ``init``; returns the sentence that says so, or "".

        Raises :class:`JobError` if the checkpoint has gone meanwhile, and :class:`~storage.errors.Exists` if
        a run of this name has begun meanwhile.
        """
        if self.origin is None:
            return self.said
        store, name = ObjectStore.open(self.job.bucket), self.job.name
        forks.begin(store, self.job, self.origin, self.changed)
        if self.job.init:
            return f"{name} begins at step 0 with the weights of {self.origin}{self.said}"
        what = ", ".join(
            f"{key} = {there!r} before and {here!r} now" for key, (there, here) in self.changed.items()
        )
        return f"{name} goes on from {self.origin}: {what or 'with the same settings'}{self.said}"


def start_of(job: Job, resume: str | int = LATEST) -> StartPoint:
    """Returns where ``job`` begins: ``resume`` is ``latest``, a step of its run, or ``run@latest``,
    ``run@best``, ``run@step``.

    Raises :class:`JobError` if there is no such checkpoint, or if its state does not fit the job.
    """
    word = str(resume)
    if word == LATEST and not job.init:
        return StartPoint(job)
    run = Run.find(job)
    if word == LATEST:
        return StartPoint(job) if run.there is not None else _warm(job)
    try:
        name, which = (job.name, word) if is_step(word) else checkpoint_of(word)
    except ValueError as error:
        raise JobError(
            f"--resume = {word!r} {error}, or be 'latest', or a step of this run, such as "
            f"400{checkpoint_meant(word)}"
        ) from None
    if name == job.name:
        with _asked(f"--resume {word}"):
            run = Run.begun(job)
        return _older(job, run, word, which)
    if run.there is not None:
        _check_same(run, name, which)
        return StartPoint(job)
    if job.init:
        raise JobError(
            f"init = {job.init!r} and --resume {word}: a run either begins with the weights of a "
            "checkpoint (init) or goes on from a checkpoint (--resume); leave one of them out"
        )
    return _fork(job, name, which)


@contextmanager
def _asked(words: str) -> Iterator[None]:
    """Begins the errors of a search for a checkpoint with the words that asked for it."""
    try:
        yield
    except JobError as error:
        raise JobError(f"{words}: {error}") from None


def _older(job: Job, run: Run, word: str, which: str) -> StartPoint:
    """Returns the start at the checkpoint ``which`` of ``run``, for which ``--resume`` has ``word``.

    A supervisor starts the same command line again and again.  So if the newest branch began at that
    checkpoint with this job, and has saved a step since, the run goes on from its newest checkpoint.  A
    branch that began at ``best`` is known by that word, because the best step may have changed since.
    """
    newest = run.newest() or Version(0, 0)
    begun = next(
        (each for each in run.branches.every()[-1:] if not branches.changed(job.going_on(each.job), run.job)),
        None,
    )

    def went_on(begun: Branch, there: str) -> StartPoint:
        said = (
            f"branch {begun.number} of {job.name} has gone on from {there} already, so it goes on from "
            f"its newest checkpoint, {newest}"
        )
        return StartPoint(job, said=said + ("; to go back once more, name a step" if which == BEST else ""))

    if begun and which == BEST == begun.word:
        return went_on(begun, f"{job.name}@best, step {begun.step},")
    with _asked(f"--resume {word}"):
        version = checkpoint(run, which)
    if "." in which and left_behind(run, [version]):
        raise JobError(
            f"--resume {which}: {run.job.name} has abandoned {version}, and cannot go on from it; a "
            f"new run can: --name OTHER --resume {run.job.name}@{which}"
        )
    if begun and begun.step == version.step < newest.step:
        return went_on(begun, f"step {version.step}")
    return StartPoint(job, at=version, word=which)


def checkpoint(run: Run, which: str) -> Version:
    """Returns the good checkpoint of ``run`` that ``which`` names: ``latest``, 0 for the beginning of the
    run, or a word that :func:`version_at` knows.

    Raises :class:`JobError` if there is no such checkpoint.
    """
    if which != "0":
        return version_at(run, None if which == LATEST else which, "checkpoint")
    if run.checkpoints.inherited:
        raise JobError(
            f"step 0: {run.job.name} was forked at step {min(run.checkpoints.inherited).step}, and has "
            "no earlier steps"
        )
    return Version(0, 0)


def is_step(word: str) -> bool:
    """Returns whether a word is a step, as 400, or a step and its generation, as 400.3."""
    return re.fullmatch(r"\d+(\.\d+)?", word) is not None


def parsed(which: str, setting: str = "--step") -> tuple[int, int | None]:
    """Returns the step and the generation that ``which`` names.  Without a generation, as in 400, it is None,
    which stands for the surviving lineage.

    Raises :class:`JobError`, which names ``setting``, for any other word.
    """
    if not is_step(which):
        raise JobError(
            f"{setting} = {which!r} must be a step, such as 400, or a step and its generation, such as 400.3"
        )
    step, _, generation = which.partition(".")
    return int(step), int(generation) if generation else None


def version_at(run: Run, which: str | None, setting: str = "--step") -> Version:
    """Returns the good checkpoint that ``which`` names: ``best``, a step, or a step and its generation.  None
    names the newest one.

    Raises :class:`JobError` if there is none.  The error names the checkpoints of that step that the run has
    left behind.
    """
    if which is None or which == BEST:
        return _best(run) if which else run.version_at(None)
    step, generation = parsed(which, setting)
    good = [
        each.version
        for each in run.checkpoints.at(step)
        if each.good and not run.checkpoints.damage(each.version)
    ]
    if generation is not None and Version(step, generation) in good:
        return Version(step, generation)
    try:
        if generation is None:
            return run.version_at(step)
        # the run may not be that of the job file
        has = f"`elastic checkpoint ls --name {run.job.name}` lists its checkpoints"
        raise JobError(f"{setting} {which}: {run.job.name} has no good checkpoint of this name; {has}")
    except JobError as error:
        left = ", ".join(f"{each.step}.{each.generation}" for each in left_behind(run, good))
        raise JobError(
            f"{error}; abandoned checkpoints of this step: {left}" if left else str(error)
        ) from None


def version_before(run: Run, step: int, generation: int) -> Version:
    """Returns the good checkpoint of the step before ``step`` from which ``generation`` made ``step``: its
    own, or that of the generation before it.

    Raises :class:`JobError` if there is none, or if no checkpoint knows where the generation began.
    """
    before = f"{step - 1}.{generation}"
    if not any(
        each.good and each.version == Version(step - 1, generation) for each in run.checkpoints.at(step - 1)
    ):
        lines = [each.manifest.lineage for each in run.checkpoints.versions() if each.manifest is not None]
        if line := next((each for each in lines if lineage.contains(each, Version(step, generation))), ()):
            before = f"{step - 1}.{next(each for each, last in line if step <= last + 1)}"
    return version_at(run, before, "checkpoint")


def left_behind(run: Run, versions: Sequence[Version]) -> list[Version]:
    """Returns the ``versions`` that a branch or a fall-back of the run has abandoned."""
    line, every = run.lineage, run.branches.every()
    passed = [
        each for each in versions if each.step <= lineage.tip(line).step and not lineage.contains(line, each)
    ]
    return [each for each in versions if each in passed or abandoned(every, each)]


def saved(run: Run) -> list[Version]:
    """Returns all good checkpoints of the surviving lineage, oldest first."""
    line = run.lineage
    return [
        each.version
        for each in run.checkpoints.versions()
        if each.good and lineage.contains(line, each.version)
    ]


def rewind(run: Run, now: float, version: Version, incarnation: int = 0, word: str = "") -> str:
    """Begins a branch of ``run``, with its job, that goes on from ``version``, which ``word`` has named.

    Returns and raises as :meth:`Run.branch` does.  Raises :class:`JobError` if ``version`` is being deleted,
    or gone.

    A caller that goes on at once has claimed the run before.  So a deletion that began before the claim is
    seen here, and a later deletion sees the claim, and ends.
    """
    if version.step and not any(
        each.good for each in run.checkpoints.at(version.step) if each.version == version
    ):
        raise JobError(
            f"another command has just begun to delete {version} of {run.job.name}, so no branch was "
            "begun; name another step: `elastic checkpoint ls` lists the checkpoints"
        )
    metrics.keep_until(run, version)
    return run.branch(now, version, incarnation, word)


def best_of(run: Run) -> Best | None:
    """Returns the best validated version of the surviving lineage, whether it was saved or not; None if
    nothing was validated.
    """
    history = run.state().history
    found = metrics.validations(run, history.lineage)
    for score in filter(None, (history.best, history.validated)):
        found[score.version] = Loss(score.found.mean, number_of(score.held_out))
    return best(found)


def measured(run: Run, line: Lineage, held_out: str) -> dict[Version, Loss]:
    """Returns the validations of the lineage ``line`` on the samples ``held_out`` or on unknown samples; none
    if the job does not set ``validation.patience``.
    """
    found = metrics.validations(run, line) if run.job.validation.patience else {}
    return {version: loss for version, loss in found.items() if loss.data in (0, number_of(held_out))}


def impatient(run: Run, line: Lineage, held_out: str) -> tuple[int, int] | None:
    """Returns the step of the last validation that was better, and the step at which ``validation.patience``
    ran out; None if it has not run out.
    """
    found, rule = measured(run, line, held_out), run.job.validation
    step, top = enough(found, rule.patience, rule.min_delta), newest_improvement(found, rule.min_delta)
    return (top.version.step, step) if step and top is not None else None


def over_fits(run: Run) -> str:
    """Returns the sentence that says that the run over-fits, by the validations in its bucket; "" if it does
    not, or if the bucket does not answer.
    """
    try:
        line = run.lineage
        found = metrics.validations(run, line)
        rows = partial(metrics.stored, run.store, run.job.name, line)
        return over_fit(
            found,
            lambda after: ((int(row["step"]), row["loss"]) for row in rows(after)),
            f"--resume {run.job.name}@best",
        )
    except (StorageError, OSError):
        return ""


def _best(run: Run) -> Version:
    """Returns the first good checkpoint at or after the best validated version, as ``checkpoint.keep_best``
    keeps it.
    """
    name, found = run.job.name, best_of(run)
    if found is None:
        raise JobError(
            f"{name} has no validation with a finite loss, so there is no best checkpoint; name a step, or "
            "set validation.every in its job"
        )
    later = (
        version for version in saved(run) if version >= found.version and not run.checkpoints.damage(version)
    )
    if (first := next(later, None)) is None:
        raise JobError(
            f"the best validation of {name} was after step {found.version.step}, and there is no "
            "checkpoint of this step or a later one; name another step"
        )
    return first


def _fork(job: Job, name: str, which: str) -> StartPoint:
    with _asked(f"--resume {name}@{which}"):
        other = Run.begun(job.replace(name=name), of_the_file=False)
        other.branches.check_lost()  # also if it has later branches
        version = checkpoint(other, which)
    if not version.step:
        raise JobError(
            f"--resume {name}@0: at step 0 nothing was trained; leave --resume out to begin at step 0"
        )
    branch = other.branches.at(version)
    job = job.going_on(branch.job)
    found = branch.of_run(job)
    with _asked(f"--resume {name}@{which}"):
        branches.check(job.replace(name=name), found, asked=True)
    if version.step > job.steps:
        raise JobError(
            f"steps = {job.steps}: the checkpoint of {name} is at step {version.step} already; raise steps"
        )
    job = job.after(ended(found.stretches(), version.step))
    changed = {key: list(pair) for key, pair in branches.changed(job, found).items()}
    return StartPoint(job, origin=Origin(name, version), changed=changed, said=_ending(other, which, version))


def instead(run: Run, which: str, version: Version) -> list[str]:
    """Returns the sentences that limit what ``best`` means: ``version`` is only the next checkpoint after the
    best validation, or validations on other samples do not count.  Returns none for another word than
    ``best``.
    """
    if which != BEST or (found := best_of(run)) is None:
        return []
    other = (
        ""
        if found.version == version
        else (
            f"the best validation was after step {found.version.step}, which has no checkpoint, so the "
            "next one is used"
        )
    )
    return [each for each in (other, found.left_out) if each]


def _ending(run: Run, which: str, version: Version) -> str:
    return "".join(f"; {each}" for each in instead(run, which, version))


def _warm(job: Job) -> StartPoint:
    name, which = checkpoint_of(job.init)
    if name == job.name:
        raise JobError(
            f"init = {job.init!r} names this run itself; name another run, or leave init out and use "
            "--resume with a step of this run"
        )
    other = Run.find(job.replace(name=name, init=""))
    if other.there is None and not other.branches.lost():  # weights need no settings
        raise branches.no_run(other.job, of_the_file=False)
    with _asked(f"init = {job.init!r}"):
        version = checkpoint(other, which)
    if not version.step:
        raise JobError(f"init = {job.init!r}: at step 0 nothing was trained; leave init out")
    origin = Origin(name, version)
    return StartPoint(job.replace(init=origin.word), origin=origin, said=_ending(other, which, version))


def _check_same(run: Run, name: str, which: str) -> None:
    """Raises :class:`JobError` unless ``run`` began from the checkpoint ``which`` of the run ``name``, which
    that run may have from its own origin.
    """
    origin, its = run.origin, Branches(run.store, name).checkpoints()
    of_it = origin is not None and origin.run in (name, its.holder(origin.version))
    if (
        origin is None
        or not of_it
        or not same_checkpoint(f"{name}@{which}", Origin(name, origin.version).word)
    ):
        how = "began at step 0" if origin is None else f"goes on from {origin}"
        raise JobError(
            f"--resume {name}@{which}: there is a run {run.job.name!r} already, which {how}; give the "
            "new run another name"
        )
