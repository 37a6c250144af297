"""Notes with which code a run was made, and refuses to go on with other code unasked.

Each set of files with which the run trained is a create-only document ``code/<number>.json`` in its folder, with the version from which it
goes on and what had changed (:mod:`elastic.sources` finds the files).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.runs import branches
from elastic.runs.run import Run
from elastic.sources import Sources, sources_of
from storage.errors import Exists
from storage.numbered import Numbered
from storage.objects import ObjectStore

FORMAT = 1
SHOWN = 6
"""Largest number of files that a sentence names."""


def every(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    """Returns what the run of that name has noted, oldest first: number, step, generation, until, changed, files.

    Without what is damaged: it is then not known with which code some steps were made.
    """
    return Numbered(store, f"{name}/code", FORMAT).intact()


def of(run: Run, version: Version) -> Sources | None:
    """Returns the code with which ``version`` was made, perhaps by the run that this one was forked from; None if nobody noted it."""
    noted = every(run.store, run.checkpoints.holder(version))
    return next((_read(each) for each in reversed(noted) if version.generation > max(each.get("until", 0), each["generation"])), None)


def _of_the_next_step(run: Run, newest: Version) -> Sources | None:
    """Returns the code with which the run goes on from ``newest``: the newest one, or after a later branch what made ``newest``."""
    branched = branches.every(run.store, run.job.name)
    noted = [each for each in every(run.store, run.job.name)[-1:] if not branches.overtook(branched, each)]
    return _read(noted[0]) if noted else of(run, newest)  # also of a fork that has not trained yet


def _read(document: Mapping[str, Any]) -> Sources:
    files = {file: (raw, tree) for file, (raw, tree) in document["files"].items()}
    return Sources(files, document["python"], document.get("held_out", True))


def note(run: Run, code: Sources, now: float) -> str:
    """Notes that the run goes on with this code, and returns a sentence if it had another; "" otherwise.

    Raises :class:`~storage.errors.Exists` if another command has noted other code meanwhile.
    """
    known = run.standing(0, 0.0)
    newest = max(known.history.saved, default=Version(0, 0))
    if newest.step >= run.job.steps:
        return ""
    return begin(run.store, run.job.name, code, newest, now, known.generation, _of_the_next_step(run, newest))


def begin(store: ObjectStore, name: str, now: Sources, version: Version, at: float, until: int = 0, before: Sources | None = None) -> str:
    """Writes the sources with which the run goes on from ``version``, unless they are those that are noted, and those of ``before``.

    What the generations up to ``until`` made, they made with other ones, also after ``version``.  Returns and raises as :func:`note`.
    """
    noted = [_read(each) for each in every(store, name)[-1:]]
    changed = next((found for each in (*noted, before) if noted and each and (found := now.differ(each))), [])
    if noted and not changed:
        return ""
    documents = Numbered(store, f"{name}/code", FORMAT)
    number = documents.newest() + 1
    about: dict[str, Any] = {"format": FORMAT, "number": number, "at": at, "step": version.step, "generation": version.generation}
    about |= {"until": until, "changed": changed, "python": now.python, "held_out": now.held_out}
    try:
        documents.add(number, {**about, "files": {file: list(digests) for file, digests in sorted(now.files.items())}})
    except Exists:  # two commands begin the run at the same time, and one of them follows the other
        if not any(not now.differ(_read(each)) for each in every(store, name)[-1:]):
            raise
        return ""
    return f"code {number} of {name} goes on from step {version.step}: {listed(changed)}" if changed else ""


def check(run: Run, code: Sources, newest: Version, *, accept: bool) -> str:
    """Raises :class:`JobError` if the run would go on from ``newest`` with other code than it had, unless ``accept`` says so.

    A run that has made all of its steps trains no more, so its code does not matter: returns a sentence if it is other.
    """
    then = None if accept else _of_the_next_step(run, newest)
    if then is None or newest.step < run.job.steps:
        _compare(run, code, then, newest)
    elif differs := code.differ(then):
        return f"the code of {run.job.name} is not that with which it was trained ({listed(differs)}); nothing is trained now"
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
        _compare(run, sources_of(with_objects(by, job).trajectory_code()), of(run, version), version, looks=True)


def with_objects(its: Job, job: Job) -> Job:
    """Returns the job ``its`` of a run with the code that the ``job`` of a command gives as objects."""
    return its.with_objects({setting: each for setting, each in job.objects().items() if each in its.code()})


def _compare(run: Run, now: Sources, then: Sources | None, version: Version, *, looks: bool = False) -> None:
    """Raises :class:`JobError` if the code of now differs from ``then``: a command ``looks`` at ``version``, or goes on from it."""
    if then is None or not (differs := now.differ(then)):
        return
    other = f" (read by Python {now.python} here, and {then.python} there)" if then.python != now.python else ""
    fix = "undo the change, or use the code of now all the same by --accept-code"
    if not looks:
        fix = "undo the change, or go on with it by --accept-code (launch(..., accept_code=True)), or begin at step 0 under another name"
    where = f"the run {run.job.name!r} in bucket = {run.job.bucket!r}"
    raise JobError(f"the code of {where} has changed since step {version.step}: {listed(differs)}{other}; {fix}")


def listed(differs: list[str]) -> str:
    """Returns the files in words."""
    more = len(differs) - SHOWN
    return ", ".join(differs[:SHOWN]) + (f" and {more} more" if more > 0 else "")
