"""The branches of a run: from some step on, it has other settings.

``job.json`` is the job with which a run began, branch 1.  Each later branch is a create-only object ``branches/<number>.json`` with its
job, the version from which it goes on, and what it changed.  The newest branch is the run's job.

A branch may go on from an older checkpoint than the newest one.  Then it says which generations there were until then: what they committed
after its step is abandoned, as it is by a fall-back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from elastic.config.values import Change, change_at
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import BEFORE, Job
from storage.documents import seal, unseal
from storage.errors import Missing
from storage.objects import ObjectStore

FORMAT = 1
DATA_POSITION = ("seed", "global_batch", "batch_ramp", "data.sampling")
"""The settings that say which samples a step has.  With other values, samples would be left out or repeated."""


def stored(store: ObjectStore, name: str) -> dict[str, Any] | None:
    """Returns the job of the newest branch as the run of that name has stored it, or None if there is no such run."""
    if number := _newest(store, name):
        found: dict[str, Any] = _read(store, name, number)["job"]
        return found
    with suppress(Missing):
        return first(store, name)
    return None


def first(store: ObjectStore, name: str) -> dict[str, Any]:
    """Returns the job with which the run began."""
    found: dict[str, Any] = json.loads(store.get(f"{name}/job.json"))["job"]
    return found


def every(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    """Returns all branches after the first one, oldest first: number, step, generation, changed."""
    return [_read(store, name, number) for number in range(2, _newest(store, name) + 1)]


def at(store: ObjectStore, name: str, version: Version) -> dict[str, Any]:
    """Returns the job of the branch of which ``version`` is."""
    later = (each for each in reversed(every(store, name)) if version.generation > max(each.get("until", 0), each["generation"]))
    found: dict[str, Any] | None = next((each["job"] for each in later), None)
    return first(store, name) if found is None else found


def abandoned(every: Iterable[Mapping[str, Any]], version: Version) -> bool:
    """Returns whether one of the branches has abandoned ``version``."""
    return any(version.generation <= each.get("until", 0) and version.step > each["step"] for each in every)


def change_of(setting: str) -> Change:
    """Returns what another value of ``setting`` does to a run that has begun: what :func:`check` says of it."""
    return Change.REFUSED if setting.startswith(DATA_POSITION) else change_at(Job, setting.partition("[")[0])


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
    moved = [key for key in differs if key.startswith(DATA_POSITION)]
    holds = f"bucket = {job.bucket!r} holds a run {job.name!r} of another job ({_shown(differs)})"
    other = "to begin at step 0 choose another name; to continue that run use its settings"
    if refused:
        raise JobError(f"{holds}; the state of that run does not fit another value of {', '.join(refused[:4])}; {other}")
    if moved:
        raise JobError(f"{holds}; with another value of {', '.join(moved[:4])} it would leave out samples, or repeat them; {other}")
    if not asked:
        raise JobError(f"{holds}; another value would change the weights from here on; {other}, or go on with these by --branch")


def begin(store: ObjectStore, job: Job, found: Job, version: Version, now: float, *, until: int = 0, claim: int = 0) -> str:
    """Writes the next branch, which goes on from ``version``, and returns the sentence that says so.

    What the generations up to ``until`` committed after it is abandoned.  ``claim`` is the newest claim of the run until then.

    Raises :class:`~storage.errors.Exists` if another command has begun it.
    """
    differs, number = changed(job, found), max(_newest(store, job.name), 1) + 1
    about = {
        "format": FORMAT,
        "number": number,
        "at": now,
        "step": version.step,
        "generation": version.generation,
        "until": until,
        "claim": claim,
        "changed": {key: list(pair) for key, pair in differs.items()},
        "job": json.loads(job.to_json()),
    }
    store.put_if_absent(_key(job.name, number), seal(about))
    what = _shown(differs, " before and ", " now") or "its settings stay"
    return f"branch {number} of {job.name} goes on from step {version.step}: {what}"


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one dictionary with dotted names."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= flat(each, f"{prefix}{key}.") if isinstance(each, Mapping) else {f"{prefix}{key}": each}
    return found


def _shown(differs: Mapping[str, tuple[Any, Any]], there: str = " there and ", here: str = " here") -> str:
    return ", ".join(f"{key} = {before!r}{there}{after!r}{here}" for key, (before, after) in list(differs.items())[:4])


def _newest(store: ObjectStore, name: str) -> int:
    return max((int(PurePosixPath(key).stem) for key in store.list(f"{name}/branches/")), default=0)


def _read(store: ObjectStore, name: str, number: int) -> dict[str, Any]:
    key = _key(name, number)
    return dict(unseal(store.get(key), store.full_name(key), FORMAT))


def _key(name: str, number: int) -> str:
    return f"{name}/branches/{number:06d}.json"
