"""Tells with which code a run was made, and refuses to go on with other code unasked (:mod:`elastic.sources` has the notes)."""

from __future__ import annotations

from elastic import sources
from elastic.ids import Version
from elastic.job import Job
from elastic.runs import branches
from elastic.runs.run import Run
from elastic.sources import Sources


def note(run: Run, code: Sources, now: float) -> str:
    """Notes that the run goes on with this code, and returns a sentence if it had another; "" otherwise.

    Raises :class:`~storage.errors.Exists` if another command has noted other code meanwhile.
    """
    known = run.standing(0, 0.0)
    newest = max(known.history.saved, default=Version(0, 0))
    if newest.step >= run.job.steps:
        return ""
    return sources.begin(run.store, run.job.name, code, newest, now, known.generation, _of_the_next_step(run, newest))


def check(run: Run, code: Sources, newest: Version, *, accept: bool) -> str:
    """Raises :class:`JobError` if the run would go on from ``newest`` with other code than it had, unless ``accept`` says so.

    A run that has made all of its steps trains no more, so its code does not matter: returns a sentence if it is other.
    """
    then = None if accept else _of_the_next_step(run, newest)
    if then is None or newest.step < run.job.steps:
        _compare(run, code, then, newest)
    elif differs := code.differ(then):
        return f"the code of {run.job.name} is not that with which it was trained ({sources.listed(differs)}); nothing is trained now"
    return ""


def check_that_of(run: Run, version: Version, code: Sources, *, accept: bool) -> None:
    """Raises :class:`JobError` if ``version`` was made with other code than this, unless ``accept`` says that it does not matter."""
    if not accept:
        _compare(run, code, of(run, version), version)


def check_look(run: Run, version: Version, by: Job, job: Job, *, accept: bool) -> None:
    """Raises :class:`JobError` if a command would look at ``version``, which a world of the job ``by`` committed, with other code than made
    it, unless ``accept`` says that it does not matter.

    ``job`` is that of the command, which may give code as objects.
    """
    if not accept:
        now = sources.sources_of(with_objects(by, job).trajectory_code())
        _compare(run, now, of(run, version), version, looks=True)


def with_objects(its: Job, job: Job) -> Job:
    """Returns the job ``its`` of a run with the code that the ``job`` of a command gives as objects."""
    return its.with_objects({setting: each for setting, each in job.objects().items() if each in its.code()})


def of(run: Run, version: Version) -> Sources | None:
    """Returns the code with which ``version`` was made, perhaps by the run that this one was forked from; None if nobody noted it."""
    return sources.at(run.store, run.checkpoints.holder(version), version)


def _of_the_next_step(run: Run, newest: Version) -> Sources | None:
    """Returns the code with which the run goes on from ``newest``: the newest one, or after a later branch what made ``newest``."""
    branched = branches.every(run.store, run.job.name)
    noted = [each for each in sources.every(run.store, run.job.name)[-1:] if not branches.overtook(branched, each)]
    return sources.of(noted[0]) if noted else of(run, newest)  # also of a fork that has not trained yet


def _compare(run: Run, code: Sources, then: Sources | None, version: Version, *, looks: bool = False) -> None:
    if then is not None and (differs := code.differ(then)):
        raise sources.refused(run.job.name, run.job.bucket, differs, version, then.python, looks=looks)
