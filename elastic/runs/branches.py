"""The branches of a run.  A branch gives the run other settings from some step on.

``job.json`` is the job with which a run began, branch 1.  Each later branch is a note
(:mod:`elastic.runs.notes`) with its job, the version from which it goes on, and what it changed.  The newest
branch is the run's job.

A branch may go on from an older checkpoint than the newest one.  Then the branch names the last generation
until then: steps after the branch's step that this or an earlier generation committed are abandoned, as by a
fall-back.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elastic.config.settings import option_of
from elastic.config.values import Change, change_at, checkpoint_of, is_secret, shown
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import BEFORE, Job
from elastic.plan.stretches import Stretch, ended
from elastic.runs.notes import Since, abandoned, made_by
from storage.checkpoints import Checkpoints
from storage.errors import Damaged, Missing
from storage.numbered import Numbered
from storage.objects import ObjectStore

SHOWN = 4
"""Largest number of settings that a sentence about differing settings names."""
FORMAT = 2
"""Format of a branch that changes how samples are drawn.  An older release, which would draw them as before
the branch, reads only format 1.
"""


@dataclass(frozen=True)
class Origin:
    """A checkpoint in the folder of another run."""

    run: str
    version: Version

    @classmethod
    def of(cls, exact: str) -> Origin:
        """Returns the checkpoint that :attr:`word` names."""
        run, word = checkpoint_of(exact)
        step, generation = word.split(".")
        return cls(run, Version(int(step), int(generation)))

    @property
    def word(self) -> str:
        """The exact name of the checkpoint, as the setting ``init`` has it."""
        return f"{self.run}@{self.version.step}.{self.version.generation}"

    def to_json(self) -> dict[str, Any]:
        """Returns what the document of a fork says of its origin."""
        return {"run": self.run, "step": self.version.step, "generation": self.version.generation}

    def __str__(self) -> str:
        return f"{self.version} of {self.run}"


@dataclass(frozen=True, kw_only=True)
class Branch(Since):
    """A branch of a run.  The first branch, ``job.json``, leaves most fields at their defaults."""

    claim: int = 0
    """The newest claim on the run when the branch was begun."""
    reached: int = 0
    """The last step that the run had reached when the branch was begun; 0 if an older release began it."""
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The settings that it has changed, each as (before, now)."""
    word: str = ""
    """The word that named the version from which it goes on, as "best" or "400", if one did."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """The rules by which the steps before the branch draw their samples."""
    job: dict[str, Any]

    def of_run(self, job: Job) -> Job:
        """Returns the job of the branch, with the name and the bucket of ``job``."""
        return self.before(job.begun_as(self.job))

    def before(self, job: Job) -> Job:
        """Returns ``job`` with the rules by which the steps before this branch draw their samples."""
        return job.after(tuple(map(Stretch.from_json, self.earlier)))

    @property
    def left(self) -> str:
        """The steps that the branch has abandoned, in words, or "" if there are none or an older release
        began it.
        """
        first, last = self.step + 1, self.reached
        if last < first:
            return ""
        return f"1 step, {first}" if first == last else f"{last - first + 1} steps, {first} to {last}"


@dataclass(frozen=True, kw_only=True)
class First(Branch):
    """The branch with which a run began: what ``job.json`` says."""

    origin: Mapping[str, Any] | None = None
    """The checkpoint from which a fork goes on."""
    asked: bool = False
    """True if the run has recorded what it asks from its beginning on (:mod:`elastic.runs.asked`)."""


class Branches(Numbered[Branch]):
    """The branches of the run ``name``."""

    def __init__(self, store: ObjectStore, name: str, once: bool = False) -> None:
        fix = (
            "put the file back from a copy; or remove the file, and begin the branch again: `elastic "
            "train --branch` with the settings of the branch"
        )
        super().__init__(store, f"{name}/branches", FORMAT, 2, fix, Branch.of, once)
        self.name = name
        self._first: First | None = None

    @property
    def begun(self) -> First:
        """The first branch, read at most once.  Raises :class:`Missing`, or :class:`Damaged`, which says what
        to do.
        """
        if self._first is None:
            raw = self.store.get(self._first_key)
            try:
                found = First.of(json.loads(raw))
                _ = dict(found.job)
            except (ValueError, TypeError, AttributeError):
                where, is_none = self.store.full_name(self._first_key), f"{len(raw)} bytes that are none"
                raise Damaged(where, "the job of a run", is_none, lost_fix(self.name)) from None
            self._first = found
        return self._first

    @property
    def _first_key(self) -> str:
        return f"{self.name}/job.json"

    def last(self) -> Branch | None:
        """Returns the newest branch, or None if there is no such run."""
        if number := self.newest():
            return self.read(number)
        with suppress(Missing, Damaged):
            return self.begun
        return None

    def job(self) -> dict[str, Any]:
        """Returns the job of the newest branch as it is stored; no settings if there is no such run."""
        return there.job if (there := self.last()) is not None else {}

    def at(self, version: Version) -> Branch:
        """Returns the branch in which ``version`` was made.  Raises as :attr:`begun` does."""
        return made_by(self.every(), version) or self.begun

    def origin(self) -> Origin | None:
        """Returns the checkpoint from which the run was forked; None if it is no fork, or its ``job.json``
        cannot be read.
        """
        with suppress(Missing, Damaged):
            if (found := self.begun.origin) is not None:
                return Origin(found["run"], Version(found["step"], found["generation"]))
        return None

    def checkpoints(self) -> Checkpoints:
        """Returns the checkpoints of the run.  In a fork, the first one is the checkpoint from which it was
        forked.
        """
        origin = self.origin()
        return Checkpoints(self.store, self.name, {} if origin is None else {origin.version: origin.run})

    def lost(self) -> bool:
        """Returns whether the run has checkpoints or branches, but the document of its first branch is gone
        or damaged.
        """
        with suppress(Missing, Damaged):
            _ = self.begun
            return False
        return bool(Checkpoints(self.store, self.name).steps() or self.numbers())

    def check_lost(self) -> None:
        """Raises :class:`JobError` for a run that is :meth:`lost`: without its first job, any job could go on
        with it.
        """
        if self.lost():
            state, fix = (
                ("damaged", lost_fix(self.name))
                if self.store.exists(self._first_key)
                else ("missing", lost_fix(self.name, ""))
            )
            raise JobError(
                f"{self.store.full_name(self._first_key)} is {state}, so the settings with which the "
                f"run made its checkpoints are not known; {fix}"
            )


def document(job: Job, origin: Origin | None = None, changed: Mapping[str, Any] | None = None) -> bytes:
    """Returns the document ``job.json`` of a run that begins.  ``origin`` is the checkpoint from which a fork
    goes on, and ``changed`` are the settings in which it differs from the run of that checkpoint.

    The entry "asked" says that the run records what it asks (:mod:`elastic.runs.asked`) from its beginning
    on.
    """
    about = {"format": 1, "digest": job.digest, "asked": True, "job": json.loads(job.to_json())}
    if origin is not None:
        about["origin"] = {**origin.to_json(), "changed": changed or {}}
    if earlier := [each.to_json() for each in job.stretches()[:-1]]:
        about["earlier"] = earlier
    return json.dumps(about).encode()


def lost_fix(
    name: str,
    anew: str = (
        ", or run `elastic train` with the settings with which the run began, which writes the file again"
    ),
) -> str:
    """Returns the advice for a run whose ``job.json`` is damaged; with ``anew`` = "", for a run whose
    ``job.json`` is gone.
    """
    return (
        f"put the file back from a copy{anew}, or begin a run of another name with the weights of this "
        f"run: init = '{name}@latest'"
    )


def no_run(job: Job, of_the_file: bool = True) -> JobError:
    """Returns the error of a command that finds no run of that name, after :meth:`Branches.check_lost`.

    Without ``of_the_file`` the run is not that of the job file, so the error does not say how to begin it.
    """
    what = ", which is a file, not a folder" if os.path.isfile(job.bucket) else ""
    fix = "correct the name or the bucket" + (
        ", or begin the run with `elastic train`" if of_the_file else ""
    )
    return JobError(f"there is no run {job.name!r} in bucket = {job.bucket!r}{what}; {fix}")


def overtook(later: Iterable[Branch], noted: Since) -> bool:
    """Returns whether one of the branches ``later`` was begun after the note ``noted``."""
    return any(each.abandons(noted.version) or each.until > noted.until for each in later)


def change_of(setting: str) -> Change:
    """Returns what another value of ``setting`` does to a run that has begun, as :func:`check` judges it."""
    return change_at(Job, setting.partition("[")[0])


def changed(job: Job, found: Job) -> dict[str, tuple[Any, Any]]:
    """Returns the settings of the trajectory in which ``job`` differs from ``found``, each as (there, here),
    in order.
    """
    ours, theirs = (flat(BEFORE | each.trajectory()) for each in (job, found))
    differs = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    # a trajectory leaves out the values that older releases had
    here, there = (flat(each.model_dump(mode="json")) for each in (job, found))
    return {key: (there.get(key), here.get(key)) for key in differs}


def check(job: Job, found: Job, *, asked: bool) -> None:
    """Raises :class:`JobError` unless the run of ``found`` may go on with ``job``, and a branch was asked
    for.
    """
    differs = changed(job, found)
    refused = [key for key in differs if Job.refuses(key)]
    parts, there = len(job.data.weights), len(found.data.weights)
    holds = f"{in_words(differs)}: the run {job.name!r} in bucket = {job.bucket!r} has other settings"
    options = " ".join(_options(differs))
    own = f"use the settings of the run{f' ({options})' if options else ''}"
    anew = "begin at step 0 with another --name"
    if refused:
        raise JobError(
            f"{holds}, and the state of the run does not fit another value of {', '.join(refused[:4])}; "
            f"either {own}, or {anew}"
        )
    if parts != there:  # the place in a pool of samples says nothing of places in parts
        raise JobError(
            f"{holds}; data.weights of a run may change its values, but not its length from "
            f"{there or 'no'} to {parts or 'no'} weights, since samples would be left out or repeated; "
            f"either {own}, or {anew}"
        )
    if not asked:
        raise JobError(
            f"{holds}, and the new values would change the weights from here on; either {own}, or take the "
            f"new values with --branch, or {anew}"
        )


def _options(differs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Returns the options of the command line that give the run's values, if there are few and each can be
    typed; else none.
    """
    values = {name: before for name, (before, _) in differs.items()}
    typed = {name: each for name, each in values.items() if isinstance(each, bool | int | float | str)}
    if len(typed) < len(differs) or len(differs) > SHOWN or any(map(is_secret, values, values.values())):
        return []
    words = (
        (option_of(name), each if isinstance(each, str) else json.dumps(each)) for name, each in typed.items()
    )
    return [shlex.join(each) for each in words]


def begin(
    run: Branches,
    job: Job,
    before: Job,
    version: Version,
    now: float,
    *,
    number: int = 2,
    until: int = 0,
    claim: int = 0,
    made: Iterable[Version] = (),
    word: str = "",
) -> str:
    """Writes the branch ``number`` of a run, with ``job``, which goes on from ``version``, and returns the
    sentence that says so.

    The run had the job ``before`` until then.  Steps after ``version`` that generations up to ``until`` have
    committed are abandoned.  ``made`` are the newest versions that are known, and ``claim`` is the newest
    claim.  ``word`` is the word that named ``version``, or "".

    Raises :class:`~storage.errors.Exists` if another command has begun the branch ``number``.
    """
    differs, others, earlier = changed(job, before), run.every(), ended(before.stretches(), version.step)
    branch = Branch(
        format=FORMAT if len(job.after(earlier).stretches()) > 1 else 1,
        number=number,
        at=now,
        step=version.step,
        generation=version.generation,
        until=until,
        claim=claim,
        reached=max((each.step for each in made if not abandoned(others, each)), default=version.step),
        changed=differs,
        word=word,
        earlier=[each.to_json() for each in earlier],
        job=json.loads(job.to_json()),
    )
    run.add(number, vars(branch))
    what = in_words(differs, " before and ", " now") or "its settings stay"
    gone = f"; it abandons {branch.left}" if branch.left else ""
    if not branch.reached:
        return f"{job.name} has saved no step yet, so it begins anew at step 0, as branch {number}: {what}"
    return f"branch {number} of {job.name} goes on from step {version.step}: {what}{gone}"


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one dictionary with dotted names."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= flat(each, f"{prefix}{key}.") if isinstance(each, Mapping) else {f"{prefix}{key}": each}
    return found


def differing(job: Job, settings: Mapping[str, Any]) -> str:
    """Returns the words for the first few ``settings`` of a run that lives in which it differs from
    ``job``.
    """
    ours, found = flat(job.model_dump(mode="json", exclude={"on_driver_exit"})), flat(settings)
    return in_words(
        {name: (found[name], each) for name, each in ours.items() if found.get(name, each) != each}
    )


def in_words(
    differs: Mapping[str, tuple[Any, Any]], there: str = " in the run and ", here: str = " now"
) -> str:
    """Returns the words for the first few settings that differ."""
    return ", ".join(
        f"{key} = {shown(key, before)}{there}{shown(key, after)}{here}"
        for key, (before, after) in list(differs.items())[:SHOWN]
    )
