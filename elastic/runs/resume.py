"""Finds where a command that trains begins: at the newest checkpoint of its run, at an older one, or at one of another run."""

from __future__ import annotations

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
from elastic.report.best import Best, Loss, best, enough, mark, number_of, over_fit
from elastic.runs import branches, forks, metrics
from elastic.runs.branches import Branches, Origin
from elastic.runs.run import Run
from elastic.runs.which import is_step, left_behind, version_at
from storage.errors import StorageError
from storage.objects import ObjectStore

LATEST = "latest"
BEST = "best"


@dataclass(frozen=True)
class Start:
    """The place from which a command begins, as it was asked for, and the job with what it takes from there."""

    job: Job
    at: Version | None = None
    """The checkpoint of the run itself from which a branch goes on."""
    word: str = ""
    """The word that named it."""
    origin: Origin | None = None
    """The checkpoint of another run from which a new run goes on, or (with ``init``) whose weights it begins with."""
    changed: dict[str, Any] = field(default_factory=dict)
    """The settings in which a fork differs from the run that it comes from."""

    said: str = ""
    """The sentence about a checkpoint from which the run has gone on already; or what follows the one about the other run's checkpoint."""

    @property
    def setting(self) -> str:
        """The words that asked for the other run's checkpoint, for errors."""
        return f"init = {self.job.init!r}" if self.job.init else f"--resume {self.origin and self.origin.word}"

    def begin(self) -> str:
        """Begins a fork, or a run with the weights of ``init``; returns the sentence that says so, or "".

        Raises :class:`JobError` if the checkpoint is gone meanwhile, and :class:`~storage.errors.Exists` if there is such a run by now.
        """
        if self.origin is None:
            return self.said
        store, name = ObjectStore.open(self.job.bucket), self.job.name
        forks.begin(store, self.job, self.origin, self.changed)
        if self.job.init:
            return f"{name} begins at step 0 with the weights of {self.origin}{self.said}"
        what = ", ".join(f"{key} = {there!r} there and {here!r} here" for key, (there, here) in self.changed.items())
        return f"{name} goes on from {self.origin}: {what or 'with the same settings'}{self.said}"


def start_of(job: Job, resume: str | int = LATEST) -> Start:
    """Returns where ``job`` begins: ``resume`` is ``latest``, a step of its run, or ``run@latest``, ``run@best``, ``run@step``.

    Raises :class:`JobError` if there is no such checkpoint, or if its state does not fit the job.
    """
    word = str(resume)
    if word == LATEST and not job.init:
        return Start(job)
    there = Branches(ObjectStore.open(job.bucket), job.name).last()
    if word == LATEST:
        return Start(job) if there is not None else _warm(job)
    if is_step(word):
        return _older(job, Run.begun(job), word)
    try:
        name, which = checkpoint_of(word)
    except ValueError as error:
        raise JobError(f"--resume = {word!r} {error}, or be 'latest', or a step of this run{checkpoint_meant(word)}") from None
    if name == job.name:
        return _older(job, Run.begun(job), which)
    if there is not None:
        _check_same(job, name, which)
        return Start(job)
    if job.init:
        raise JobError(f"init = {job.init!r} and --resume {word}: a run begins with the weights of one, or goes on from one; name one")
    return _fork(job, name, which)


def _older(job: Job, run: Run, which: str) -> Start:
    """Returns the start at an older checkpoint of ``run``.  If its newest branch began there, with this job, and has saved a step since, it
    goes on: a supervisor starts the same line again and again.  By then ``best`` may be another one, so the word counts and not its step.
    """
    newest, begun = run.newest(), run.branches.every()[-1:]
    again = begun if not branches.changed(job.going_on(run.branches.job()), run.job) else []

    def went_on(there: str) -> Start:
        said = f"branch {again[0].number} of {job.name} went on from {there} before: it goes on from {newest or Version(0, 0)}"
        return Start(job, said=said + ("; to go back once more, name a step" if which == BEST else ""))

    if again and which == BEST == again[0].word:
        return went_on(f"{job.name}@best, step {again[0].step},")
    version = checkpoint(run, which)
    if "." in which and left_behind(run, [version]):
        raise JobError(
            f"--resume {which}: {run.job.name} has left {version} behind, so it cannot go on from there; a new run can: "
            f"--name OTHER --resume {run.job.name}@{which}"
        )
    if again and again[0].step == version.step and newest is not None and newest.step > version.step:
        return went_on(f"step {version.step}")
    return Start(job, at=version, word=which)


def checkpoint(run: Run, which: str) -> Version:
    """Returns the good checkpoint of ``run`` that ``latest``, ``best``, or a step with or without its generation names; step 0 is its
    beginning.

    Raises :class:`JobError` if there is none.
    """
    if which == BEST:
        return _best(run)
    if which == "0" and run.checkpoints.inherited:
        raise JobError(f"step 0: {run.job.name} was forked at step {min(run.checkpoints.inherited).step}, and has no steps before that")
    return Version(0, 0) if which == "0" else version_at(run, None if which == LATEST else which, "checkpoint")


def saved(run: Run) -> list[Version]:
    """Returns all good checkpoints of the surviving lineage, oldest first."""
    line = run.lineage
    return [each.version for each in run.checkpoints.versions() if each.good and lineage.contains(line, each.version)]


def rewind(run: Run, now: float, version: Version, incarnation: int = 0, word: str = "") -> str:
    """Begins a branch of ``run``, with its job, that goes on from ``version``, which ``word`` has named.

    Returns and raises as :meth:`Run.branch`.

    Whoever goes on at once has claimed the run: a deletion that began before the claim is seen here, and one that sees the claim ends.
    Raises :class:`JobError` if ``version`` is being deleted, or gone.
    """
    if version.step and not any(each.good for each in run.checkpoints.at(version.step) if each.version == version):
        raise JobError(
            f"another command has begun to delete {version} of {run.job.name} meanwhile, so no branch goes on from there, and the run "
            f"stays as it is; name another step: `elastic checkpoint ls` lists them"
        )
    metrics.keep_until(run, version)
    return run.branch(now, version, incarnation, word)


def best_of(run: Run) -> Best | None:
    """Returns the best validated version of the surviving lineage, whether it was saved or not; None without any."""
    history = run.standing(0, 0.0).history
    found = metrics.validations(run, history.lineage, older=history.best is None)
    for score in filter(None, (history.best, history.validated)):
        found[score.version] = Loss(score.found.mean, number_of(score.held_out))
    return best(found)


def measured(run: Run, line: Lineage, held_out: str) -> dict[Version, Loss]:
    """Returns the validations of the lineage ``line`` on these held-out samples, if ``validation.patience`` asks how good they were."""
    found = metrics.validations(run, line, older=False) if run.job.validation.patience else {}
    return {version: loss for version, loss in found.items() if loss.data in (0, number_of(held_out))}


def impatient(run: Run, line: Lineage, held_out: str) -> tuple[int, int] | None:
    """Returns the step of the last better validation, and the one at which the run lost ``validation.patience``; None if it has not."""
    found, rule = measured(run, line, held_out), run.job.validation
    step, top = enough(found, rule.patience, rule.min_delta), mark(found, rule.min_delta)
    return (top.version.step, step) if step and top is not None else None


def over_fits(run: Run) -> str:
    """Returns the sentence about a run that over-fits, by what is in its bucket; "" for another one, or if the bucket does not answer."""
    try:
        line = run.lineage
        found = metrics.validations(run, line)
        rows = partial(metrics.stored, run.store, run.job.name, line)
        return over_fit(found, lambda after: ((int(row["step"]), row["loss"]) for row in rows(after)), f"--resume {run.job.name}@best")
    except (StorageError, OSError):
        return ""


def _best(run: Run) -> Version:
    """Returns the first good checkpoint at or after the best validated version, as ``checkpoint.keep_best`` keeps it."""
    name, found = run.job.name, best_of(run)
    if found is None:
        raise JobError(f"{name}@best: {name} has no validation with a number; name a step, or set validation.every in its job")
    later = (version for version in saved(run) if version >= found.version and not run.checkpoints.damage(version))
    if (first := next(later, None)) is None:
        raise JobError(
            f"{name}@best: the best validation was after step {found.version.step}, and there is no checkpoint of it or after it"
        )
    return first


def _fork(job: Job, name: str, which: str) -> Start:
    Branches(ObjectStore.open(job.bucket), name).check_lost()  # also if it has later branches
    other = Run.begun(job.replace(name=name), of_the_file=False)
    version = checkpoint(other, which)
    if not version.step:
        raise JobError(f"--resume {name}@0: nothing was done by then; leave --resume out to begin at step 0")
    branch = other.branches.at(version)
    job = job.going_on(branch.job)
    found = branch.of_run(job)
    try:
        branches.check(job.replace(name=name), found, asked=True)
    except JobError as error:
        raise JobError(f"--resume {name}@{which}: {error}") from None
    if version.step > job.steps:
        raise JobError(f"steps = {job.steps}: the checkpoint of {name} is at step {version.step} already; ask for more steps")
    job = job.after(ended(found.stretches(), version.step))
    changed = {key: list(pair) for key, pair in branches.changed(job, found).items()}
    return Start(job, origin=Origin(name, version), changed=changed, said=_ending(other, which, version))


def instead(run: Run, which: str, version: Version) -> list[str]:
    """Returns sentences that say if ``version`` is not the best, but the next one of which there is a checkpoint, and if validations on
    other samples do not count.
    """
    if which != BEST or (found := best_of(run)) is None:
        return []
    other = "" if found.version == version else f"the best validation was after step {found.version.step}, of which there is no checkpoint"
    return [each for each in (other, found.left_out) if each]


def _ending(run: Run, which: str, version: Version) -> str:
    return "".join(f"; {each}" for each in instead(run, which, version))


def _warm(job: Job) -> Start:
    name, which = checkpoint_of(job.init)
    if name == job.name:
        raise JobError(
            f"init = {job.init!r} names the run itself; name another one, or leave it out and take --resume with a step of this run"
        )
    other = Run.find(job.replace(name=name, init=""))
    if other.there is None and not other.branches.lost():  # weights need no settings
        raise branches.no_run(other.job, of_the_file=False)
    version = checkpoint(other, which)
    if not version.step:
        raise JobError(f"init = {job.init!r}: nothing was trained by then; leave it out")
    origin = Origin(name, version)
    return Start(job.replace(init=origin.word), origin=origin, said=_ending(other, which, version))


def _check_same(job: Job, name: str, which: str) -> None:
    """Raises :class:`JobError` unless the run that is there began from the checkpoint that is named."""
    store = ObjectStore.open(job.bucket)
    origin = Branches(store, job.name).origin()
    holders = () if origin is None else (origin.run, *(run for run in (name,) if _passed_on(store, run, origin)))
    if origin is None or name not in holders or not same_checkpoint(f"{name}@{which}", Origin(name, origin.version).word):
        how = "began at step 0" if origin is None else f"goes on from {origin}"
        raise JobError(f"--resume {name}@{which}: there is a run {job.name!r} already, which {how}; give the new one another name")


def _passed_on(store: ObjectStore, name: str, origin: Origin) -> bool:
    """Returns whether the run ``name`` has the checkpoint from its own origin."""
    return forks.checkpoints(store, name).holder(origin.version) == origin.run
