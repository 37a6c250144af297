"""Forks: a run that goes on from a checkpoint of another run in the same bucket, or begins with its weights.  Nothing is copied.

    <run>/job.json                                       "origin": the run and the version from which a fork goes on
    <holder>/references/<run>-<step>-<generation>.json   the holder of a checkpoint keeps it for that run

A reference is written before the run that needs it begins, and stays as long as that run may be resumed.  Who deletes a checkpoint looks
for references before it marks it, and again before it removes it.  Who forks writes the reference first, and then looks for the mark.  So
one of the two sees the other: a checkpoint that had no mark once the reference was there is not removed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.config.values import checkpoint_of
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from storage.checkpoints import Checkpoints, Listed
from storage.documents import seal, unseal
from storage.errors import Exists, Missing
from storage.objects import ObjectStore


@dataclass(frozen=True)
class Origin:
    """A checkpoint of another run, in whose folder it is."""

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

    def __str__(self) -> str:
        return f"{self.version} of {self.run}"


def origin_of(store: ObjectStore, name: str) -> Origin | None:
    """Returns the checkpoint from which the run of that name was forked; None for another run, or if there is none of that name."""
    with suppress(Missing):
        if (found := json.loads(store.get(f"{name}/job.json")).get("origin")) is not None:
            return Origin(found["run"], Version(found["step"], found["generation"]))
    return None


def checkpoints(store: ObjectStore, name: str) -> Checkpoints:
    """Returns the checkpoints of a run.  Those of a fork begin with the one of its origin."""
    origin = origin_of(store, name)
    return Checkpoints(store, name, {} if origin is None else {origin.version: origin.run})


def references(store: ObjectStore, name: str) -> dict[Version, tuple[str, ...]]:
    """Returns the versions of a run that others need, each with the names of these."""
    found: dict[Version, tuple[str, ...]] = {}
    for key in store.list(f"{name}/references/"):
        about = unseal(store.get(key), store.full_name(key), 1)
        version = Version(about["step"], about["generation"])
        found[version] = (*found.get(version, ()), str(about["run"]))
    return found


def refer(store: ObjectStore, origin: Origin, name: str) -> Origin:
    """Makes sure that a checkpoint stays for the run ``name``.  Returns where it really is: a fork may have it from its own origin.

    Raises :class:`JobError` unless it is a good one that is not being deleted.
    """
    holder = Origin(checkpoints(store, origin.run).holder(origin.version), origin.version)
    key = f"{holder.run}/references/{name}-{origin.version.step}-{origin.version.generation}.json"
    about = {"format": 1, "run": name, "step": origin.version.step, "generation": origin.version.generation}
    with suppress(Exists):
        store.put_if_absent(key, seal(about))
    found = _look(store, holder)
    if found is None or not found.good:
        store.delete(key)
        why = "is being deleted" if found is not None and found.deleted else "is not complete, or damaged"
        raise JobError(f"the checkpoint of {origin} {why}; name another one: `elastic checkpoint ls` lists them")
    return holder


def begin(store: ObjectStore, job: Job, origin: Origin, changed: dict[str, Any]) -> None:
    """Begins the run of ``job`` as a fork.  Raises :class:`JobError` as :func:`refer`, and :class:`Exists` if there is such a run."""
    holder = refer(store, origin, job.name)
    came = {"run": holder.run, "step": origin.version.step, "generation": origin.version.generation, "changed": changed}
    earlier = [each.to_json() for each in job.stretches()[:-1]]
    store.put_if_absent(f"{job.name}/job.json", document(job, origin=came, earlier=earlier))


def document(job: Job, **more: Any) -> bytes:
    """Returns the document ``job.json`` of a run that begins."""
    return json.dumps({"format": 1, "digest": job.digest, "job": json.loads(job.to_json()), **more}).encode()


def _look(store: ObjectStore, origin: Origin) -> Listed | None:
    listed = Checkpoints(store, origin.run).at(origin.version.step)
    return next((each for each in listed if each.version == origin.version), None)
