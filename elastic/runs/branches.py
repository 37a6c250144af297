"""The branches of a run: from some step on, it has other settings.

``job.json`` is the job with which a run began, branch 1.  Each later branch is a create-only object ``branches/<number>.json`` with its
job, the version from which it goes on, and what it changed.  The newest branch is the run's job.

A branch may go on from an older checkpoint than the newest one.  Then it says which generations there were until then: what they committed
after its step is abandoned, as it is by a fall-back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic.config.values import Change, change_at, shown
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import BEFORE, Job
from elastic.plan.stretches import Stretch, Stretches, ended
from elastic.runs import forks
from storage.checkpoints import Checkpoints
from storage.errors import Damaged, Missing, Unavailable
from storage.numbered import Numbered
from storage.objects import ObjectStore

FORMAT = 2
"""Format of a branch from which on samples are drawn otherwise.  An older release, which would draw as before, reads only format 1."""


class Branch(NamedTuple):
    """A branch of a run, the newest one if nothing else is said: its job as it is stored, and what the steps before it draw."""

    job: dict[str, Any]
    earlier: Stretches = ()
    begun: Mapping[str, Any] | None = None
    """The document ``job.json``, if it was read for this: only the first branch is there."""
    number: int = 1


ABSENT = Branch({}, begun={}, number=0)
"""Stands for the newest branch of a run that is not there."""


@dataclass(frozen=True)
class Before:
    """A run as it was before a branch."""

    job: Job
    newest: int = 1
    """The number of its newest branch."""
    until: int = 0
    """The generation up to which is abandoned what was committed after the version from which the branch goes on."""
    claim: int = 0
    """Its newest claim."""
    made: tuple[Version, ...] = ()
    """The newest versions that are known."""


def newest(store: ObjectStore, name: str) -> Branch | None:
    """Returns the newest branch of the run of that name, or None if there is no such run."""
    documents = _documents(store, name)
    if number := documents.newest():
        return _of(documents.read(number))
    with suppress(Missing, Damaged):
        return first(store, name)
    return None


def lost(store: ObjectStore, name: str) -> bool:
    """Returns whether a run has checkpoints or branches, but the document of its first branch is gone or damaged."""
    try:
        forks.begun(store, name)
        return False
    except (Missing, Damaged):
        return bool(Checkpoints(store, name).steps() or _documents(store, name).numbers())


def write_anew(job: Job) -> str:
    """Writes a damaged ``job.json``, if a checkpoint of the first branch was made with ``job``.  Returns the sentence that says so, or "".

    A run for which another one keeps a checkpoint was forked from there.
    """
    name = job.name
    try:
        store = ObjectStore.open(job.bucket)
    except Unavailable:  # the checks of the bucket say so, with the fix
        return ""
    if not lost(store, name) or not store.exists(f"{name}/job.json"):
        return ""
    later, listed = every(store, name), Checkpoints(store, name).versions()
    own = (each.manifest.about for each in listed if each.manifest is not None and made_by(later, each.version) is None)
    if job.digest not in (about.get("job") for about in own):
        return ""
    others = [each.removesuffix("/") for each in store.children() if each.endswith("/")] if not job.init else []
    came = [forks.Origin(other, each.version) for other in others for each in forks.kept(store, other) if each.run == name]
    store.put(f"{name}/job.json", forks.document(job, **({"origin": {**came[0].to_json(), "changed": {}}} if came else {})))
    return f"{store.full_name(f'{name}/job.json')} is damaged: it is written anew, since these settings made its checkpoints"


def check_lost(store: ObjectStore, name: str) -> None:
    """Raises :class:`JobError` for a run that is :func:`lost`: any job would go on with it."""
    if lost(store, name):
        state, fix = ("damaged", forks.lost_fix(name)) if store.exists(f"{name}/job.json") else ("missing", forks.lost_fix(name, ""))
        raise JobError(
            f"{store.full_name(f'{name}/job.json')} is {state}, although the run has checkpoints, so nobody knows with which settings they "
            f"were made; {fix}"
        )


def no_run(job: Job, of_the_file: bool = True) -> JobError:
    """Returns the error of a command that finds no run of that name, after :func:`check_lost`.

    Without ``of_the_file`` it is not the run of the job file, which cannot begin it.
    """
    what = ", which is a file and not a folder" if os.path.isfile(job.bucket) else ""
    fix = "correct the name or the bucket" + (", or begin the run with `elastic train`" if of_the_file else "")
    return JobError(f"there is no run {job.name!r} in bucket = {job.bucket!r}{what}; {fix}")


def stored(store: ObjectStore, name: str) -> dict[str, Any] | None:
    """Returns the job of the newest branch as the run of that name has stored it, or None if there is no such run."""
    found = newest(store, name)
    return None if found is None else found.job


def first(store: ObjectStore, name: str) -> Branch:
    """Returns the branch with which the run began.  Raises :class:`Missing` if there is no such run."""
    begun = forks.begun(store, name)
    return _of(begun)._replace(begun=begun)


def number_of(store: ObjectStore, name: str) -> int:
    """Returns the number of the newest branch."""
    return max(_documents(store, name).newest(), 1)


def every(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    """Returns all branches after the first one, oldest first: number, step, generation, changed."""
    return _documents(store, name).every()


def at(store: ObjectStore, name: str, version: Version) -> Branch:
    """Returns the branch of which ``version`` is."""
    found = made_by(every(store, name), version)
    return first(store, name) if found is None else _of(found)


def made_by(every: Sequence[Mapping[str, Any]], version: Version) -> Mapping[str, Any] | None:
    """Returns which of all later branches has made ``version``; None for the first branch."""
    later = (each for each in reversed(every) if version.generation > max(each.get("until", 0), each["generation"]))
    return next(later, None)


def abandoned(every: Iterable[Mapping[str, Any]], version: Version) -> bool:
    """Returns whether one of the branches has abandoned ``version``."""
    return any(version.generation <= each.get("until", 0) and version.step > each["step"] for each in every)


def overtook(every: Iterable[Mapping[str, Any]], noted: Mapping[str, Any]) -> bool:
    """Returns whether one of the branches was begun after ``noted``, which says of which version and until which generation it is."""
    every, known = list(every), noted.get("until", 0)
    return abandoned(every, Version(noted["step"], noted["generation"])) or any(each.get("until", 0) > known for each in every)


def change_of(setting: str) -> Change:
    """Returns what another value of ``setting`` does to a run that has begun: what :func:`check` says of it."""
    return change_at(Job, setting.partition("[")[0])


def changed(job: Job, found: Job) -> dict[str, tuple[Any, Any]]:
    """Returns the settings of the trajectory in which ``job`` differs from ``found``, each as (there, here), in order."""
    ours, theirs = (flat(BEFORE | each.trajectory()) for each in (job, found))
    differs = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    here, there = (flat(each.model_dump(mode="json")) for each in (job, found))  # a trajectory leaves out what stands for older releases
    return {key: (there.get(key), here.get(key)) for key in differs}


def check(job: Job, found: Job, *, asked: bool) -> None:
    """Raises :class:`JobError` unless the run of ``found`` may go on with ``job``, and a branch was asked for."""
    differs = changed(job, found)
    refused = [key for key in differs if Job.refuses(key)]
    parts, there = len(job.data.weights), len(found.data.weights)
    holds = f"bucket = {job.bucket!r} holds a run {job.name!r} of another job ({in_words(differs)})"
    other = "to begin at step 0 choose another name; to continue that run use its settings"
    if refused:
        raise JobError(f"{holds}; the state of that run does not fit another value of {', '.join(refused[:4])}; {other}")
    if parts != there:  # the place in a pool of samples says nothing of places in parts
        raise JobError(
            f"{holds}; data.weights may have other values from here on, but not {parts or 'no'} instead of {there or 'no'}: samples would "
            f"be left out, or repeated; {other}"
        )
    if not asked:
        raise JobError(f"{holds}; another value would change the weights from here on; {other}, or go on with these by --branch")


def begin(store: ObjectStore, job: Job, before: Before, version: Version, now: float, word: str = "") -> str:
    """Writes the next branch of a run, with ``job``, which goes on from ``version``, and returns the sentence that says so.

    ``word`` is the one that named ``version``, if one did, as "best" or "400".

    Raises :class:`~storage.errors.Exists` if another command has begun it.
    """
    differs, number, others = changed(job, before.job), before.newest + 1, every(store, job.name)
    earlier = ended(before.job.stretches(), version.step)
    about = {
        "format": FORMAT if len(job.after(earlier).stretches()) > 1 else 1,
        "number": number,
        "at": now,
        "step": version.step,
        "generation": version.generation,
        "until": before.until,
        "claim": before.claim,
        "reached": max((each.step for each in before.made if not abandoned(others, each)), default=version.step),
        "changed": {key: list(pair) for key, pair in differs.items()},
        "word": word,
        "earlier": [each.to_json() for each in earlier],
        "job": json.loads(job.to_json()),
    }
    _documents(store, job.name).add(number, about)
    what = in_words(differs, " before and ", " now") or "its settings stay"
    gone = f"; it abandons {told}" if (told := left(about)) else ""
    return f"branch {number} of {job.name} goes on from step {version.step}: {what}{gone}"


def left(branch: Mapping[str, Any]) -> str:
    """Returns the steps that a branch has abandoned, in words, or "" if there are none or an older release began it."""
    first, last = branch["step"] + 1, branch.get("reached", 0)
    if last < first:
        return ""
    return f"1 step, {first}" if first == last else f"{last - first + 1} steps, {first} to {last}"


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one dictionary with dotted names."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= flat(each, f"{prefix}{key}.") if isinstance(each, Mapping) else {f"{prefix}{key}": each}
    return found


def in_words(differs: Mapping[str, tuple[Any, Any]], there: str = " there and ", here: str = " here") -> str:
    """Returns the words for the first few settings that differ."""
    return ", ".join(f"{key} = {shown(key, before)}{there}{shown(key, after)}{here}" for key, (before, after) in list(differs.items())[:4])


def _of(document: Mapping[str, Any]) -> Branch:
    earlier = tuple(Stretch.from_json(each) for each in document.get("earlier", ()))
    return Branch(document["job"], earlier, number=document.get("number", 1))


def _documents(store: ObjectStore, name: str) -> Numbered:
    fix = "put it back from a copy; or remove it, and begin the branch anew: `elastic train --branch` with its settings"
    return Numbered(store, f"{name}/branches", FORMAT, 2, fix)
