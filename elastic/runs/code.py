"""Notes with which code a run was made, and refuses to go on with other code unless the user accepts it
(:mod:`elastic.code.sources` finds the files).

Each set of files with which the run trained is a note (:mod:`elastic.runs.notes`), with the version from
which the run goes on with these files, and the files that had changed.  If a note is damaged, nobody knows
with which code some steps were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.code.sources import Sources, sources_of
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.runs.branches import overtook
from elastic.runs.notes import Since, made_by
from elastic.runs.run import Run
from storage.errors import Exists
from storage.numbered import Numbered
from storage.objects import ObjectStore

SHOWN = 6
"""Largest number of files that a sentence names."""


@dataclass(frozen=True, kw_only=True)
class Code(Since):
    """The digests of the files with which a run goes on from a version, and the files that had changed."""

    changed: list[str]
    python: str
    held_out: bool = False  # an older release could have noted the files of held-out data, too
    files: Mapping[str, tuple[str, str]]

    @property
    def sources(self) -> Sources:
        return Sources({file: (raw, tree) for file, (raw, tree) in self.files.items()}, self.python)


def noted(store: ObjectStore, name: str) -> list[Code]:
    """Returns the notes about the code of the run ``name``, oldest first, without damaged ones."""
    return _notes(store, name).intact()


def _notes(store: ObjectStore, name: str) -> Numbered[Code]:
    return Numbered(store, f"{name}/code", 1, of=Code.of)


def at(store: ObjectStore, name: str, version: Version) -> Sources | None:
    """Returns the sources with which the run ``name`` made ``version``; None if the run has noted none, or
    did not make the version.
    """
    found = made_by(noted(store, name), version)
    return found.sources if found is not None else None


def note(run: Run, code: Sources, now: float) -> str:
    """Notes that the run goes on with this code, and returns a sentence if it had other code before; ""
    otherwise.

    Raises :class:`~storage.errors.Exists` if another command has noted other code meanwhile.
    """
    known = run.state()
    newest = max(known.history.saved, default=Version(0, 0))
    if newest.step >= run.job.steps:
        return ""
    return begin(run.store, run.job.name, code, newest, now, known.generation, _of_the_next_step(run, newest))


def begin(
    store: ObjectStore,
    name: str,
    now: Sources,
    version: Version,
    at: float,
    until: int = 0,
    before: Sources | None = None,
) -> str:
    """Notes the sources ``now``, with which the run goes on from ``version``, unless they are equal to the
    newest note and to ``before``.

    The note does not hold for generations up to ``until``, not even for their steps after ``version``.

    Returns the sentence that says what changed, or "".  Raises :class:`~storage.errors.Exists` as
    :func:`note` does.
    """
    notes = _notes(store, name)
    number, there = notes.newest() + 1, notes.intact()
    then = (there[-1].sources, before) if there else ()
    differs = next((found for each in then if each and (found := now.differ(each))), [])
    if there and not differs:
        return ""
    about = Code(
        number=number,
        at=at,
        step=version.step,
        generation=version.generation,
        until=until,
        changed=differs,
        python=now.python,
        files=dict(now.files),
    )
    try:
        notes.add(number, vars(about))
    except Exists:  # two commands begin the run at the same time, and one of them follows the other
        if not (there := notes.intact()) or now.differ(there[-1].sources):
            raise
        return ""
    return f"code {number} of {name} goes on from step {version.step}: {listed(differs)}" if differs else ""


def listed(differs: list[str]) -> str:
    """Returns the first few of the files in words."""
    more = len(differs) - SHOWN
    return ", ".join(differs[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def check(run: Run, code: Sources, newest: Version, *, accept: bool) -> str:
    """Raises :class:`JobError` if the run would go on from ``newest`` with other code than it had, unless
    ``accept`` says so.

    A run that has made all of its steps trains no more, so its code does not matter: then a difference is not
    raised, but returned as a sentence.
    """
    then = None if accept else _of_the_next_step(run, newest)
    if then is None or newest.step < run.job.steps:
        _compare(run, code, then, newest)
    elif differs := code.differ(then):
        return (
            f"the code has changed since {run.job.name} was trained ({listed(differs)}); this does not "
            "matter now, since no step is left to train"
        )
    return ""


def check_that_of(run: Run, version: Version, code: Sources, *, accept: bool) -> None:
    """Raises :class:`JobError` if ``version`` was made with other code than this, unless ``accept`` says that
    it does not matter.
    """
    if not accept:
        _compare(run, code, of(run, version), version)


def check_look(run: Run, version: Version, by: Job, job: Job, *, accept: bool) -> None:
    """Raises :class:`JobError` if a command would look at ``version``, which a world of the job ``by``
    committed, with other code than that which made it, unless ``accept`` says that it does not matter.

    ``job`` is that of the command, which may give code as objects.
    """
    if not accept:
        now = sources_of(with_objects(by, job).trajectory_code())
        _compare(run, now, of(run, version), version, looks=True)


def with_objects(its: Job, job: Job) -> Job:
    """Returns the job ``its`` of a run with the code that the ``job`` of a command gives as objects."""
    return its.with_objects({setting: each for setting, each in job.objects().items() if each in its.code()})


def of(run: Run, version: Version) -> Sources | None:
    """Returns the code with which ``version`` was made, perhaps by the run that this one was forked from;
    None if nobody noted it.
    """
    return at(run.store, run.checkpoints.holder(version), version)


def _of_the_next_step(run: Run, newest: Version) -> Sources | None:
    """Returns the noted code with which the run goes on from ``newest``: that of the newest note, or, if a
    branch was begun after that note, the code that made ``newest``.
    """
    there, branched = noted(run.store, run.job.name), run.branches.every()
    if there and not overtook(branched, there[-1]):
        return there[-1].sources
    return of(run, newest)  # also of a fork that has not trained yet


def _compare(run: Run, code: Sources, then: Sources | None, version: Version, *, looks: bool = False) -> None:
    """Raises :class:`JobError` if ``code`` differs from ``then``, with which ``version`` was made.  With
    ``looks`` the error is that of a command that only looks at the version.
    """
    if then is None or not (differs := code.differ(then)):
        return
    other = f" (Python was {then.python}, and is {code.python} now)" if then.python != code.python else ""
    what = (
        f"the code of the run {run.job.name!r} in bucket = {run.job.bucket!r} has changed since step "
        f"{version.step}: {listed(differs)}"
    )
    by = "--accept-code (launch(..., accept_code=True)), or begin at step 0 under another name"
    fix = "use today's code with --accept-code" if looks else f"go on with today's code by {by}"
    raise JobError(f"{what}{other}; undo the change, or {fix}")
