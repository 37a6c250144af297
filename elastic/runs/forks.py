"""Forks: a run that goes on from a checkpoint of another run in the same bucket, or begins with its weights.
Nothing is copied.

    <run>/job.json                                       "origin": the run and the version from which a fork goes on
    <holder>/references/<run>-<step>-<generation>.json   the holder of a checkpoint keeps it for that run
    <holder>/unused/<run>-<step>-<generation>.json       a mark: there was no such run, or it did not need the checkpoint
    <holder>/unused/now/<run>-<step>-<generation>.json   its reference is being removed

A reference is written before the run that needs it begins, and stays as long as that run may be resumed.  A
deletion looks for references before it marks a checkpoint, and again before it removes the checkpoint.  A
fork writes its reference first, and then looks for the mark.  So one of the two sees the other: a checkpoint
that had no mark once the reference was there is not removed.

A command that dies leaves a reference without a run, and so does a run that is removed.  Such references are
collected in two phases, too: one round marks them, and a later round removes those that are still unused, and
then looks for their runs once more.  A fork writes ``job.json`` and then makes sure that its reference is
there.  So again one of the two sees the other, however long the fork takes to begin.

A fork or a collection may die between two requests.  Before a collection removes a reference, it writes a
note (``unused/now``) that only a collection removes, and that keeps the checkpoint as a reference does.  If
the collection dies, the next collection puts the reference back if it is needed.  If a fork dies after it
wrote ``job.json``, it makes sure of its reference when it goes on.  The name of a reference says all about
it, so a listing is enough.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.runs.branches import Branches, Origin, document
from elastic.runs.notes import made_by
from storage.checkpoints import Checkpoints, Listed
from storage.documents import seal
from storage.errors import Damaged, Exists, Missing, Unavailable
from storage.objects import ObjectStore

_NAME = r"([^/]+)-(\d+)-(\d+)[.]json"


class Reference(NamedTuple):
    """A run for which another one keeps a checkpoint."""

    run: str
    version: Version

    @classmethod
    def all(cls, store: ObjectStore, folder: str, pattern: str = _NAME) -> list[Reference]:
        """Returns the references whose objects, or whose marks, are in ``folder``."""
        return [
            cls(found[1], Version(int(found[2]), int(found[3]))) for found in store.matching(folder, pattern)
        ]

    @property
    def name(self) -> str:
        return f"{self.run}-{self.version.step}-{self.version.generation}.json"

    def to_bytes(self) -> bytes:
        return seal({"format": 1, **Origin(self.run, self.version).to_json()})


def references(store: ObjectStore, name: str) -> dict[Version, tuple[str, ...]]:
    """Returns the versions of a run that other runs need, or may need, each with the names of those runs."""
    # in this order: a note goes once the reference was put back
    there = {*_marks(store, name), *kept(store, name)}
    found: dict[Version, tuple[str, ...]] = {}
    for each in sorted(there):
        found[each.version] = (*found.get(each.version, ()), each.run)
    return found


def kept(store: ObjectStore, name: str) -> list[Reference]:
    return Reference.all(store, f"{name}/references/")


def _marks(store: ObjectStore, name: str) -> list[Reference]:
    return Reference.all(store, f"{name}/unused/", f"(?:now/)?{_NAME}")


def refer(store: ObjectStore, origin: Origin, name: str) -> Origin:
    """Makes sure that the checkpoint ``origin`` stays for the run ``name``.

    Returns the checkpoint in the folder of the run that really holds it, since a fork may have it from its
    own origin.  Raises :class:`JobError` unless the checkpoint is good and not being deleted.
    """
    holder = _holder(store, origin)
    reference = Reference(name, origin.version)
    try:
        _hold(store, holder, reference)
    except JobError:
        store.delete(f"{holder.run}/references/{reference.name}")
        raise
    store.delete(f"{holder.run}/unused/{reference.name}")
    return holder


def _holder(store: ObjectStore, origin: Origin) -> Origin:
    return Origin(Branches(store, origin.run).checkpoints().holder(origin.version), origin.version)


def _hold(store: ObjectStore, holder: Origin, reference: Reference) -> None:
    """Writes a reference, unless it is there.  Raises :class:`JobError` unless its checkpoint is a good one
    that is not being deleted.
    """
    with suppress(Exists):
        store.put_if_absent(f"{holder.run}/references/{reference.name}", reference.to_bytes())
    found = _look(store, holder)
    if found is None or not found.good:
        why = "is being deleted" if found is not None and found.deleted else "is not complete, or damaged"
        raise JobError(
            f"the checkpoint of {holder} {why}; name another checkpoint: `elastic checkpoint ls --name "
            f"{holder.run}` lists them"
        )


def begin(store: ObjectStore, job: Job, origin: Origin, changed: dict[str, Any]) -> None:
    """Begins the run of ``job``: as a fork, or (with ``init``) as one that has the weights of ``origin``.

    Raises :class:`JobError` as :func:`refer` does, and :class:`Exists` if there is a run of that name.
    """
    holder, key = refer(store, origin, job.name), f"{job.name}/job.json"
    store.put_if_absent(key, document(job, None if job.init else holder, changed))
    try:
        _make_sure(store, holder, job.name)
    except JobError:
        store.delete(key)  # first: a reference without a run can be collected
        store.delete(f"{holder.run}/references/{Reference(job.name, origin.version).name}")
        raise


def make_sure(store: ObjectStore, job: Job, origin: Origin | None) -> None:
    """Makes sure that a run that goes on has its reference, which it lacks if the command that began it died
    too early.

    ``origin`` is where a fork comes from.  A checkpoint that is gone is no error: the run may not need it any
    more.
    """
    if origin is None and "." in job.init.rpartition("@")[2]:
        origin = _holder(store, Origin.of(job.init))
    if origin is not None:
        with suppress(JobError):
            _make_sure(store, origin, job.name)


def _make_sure(store: ObjectStore, holder: Origin, name: str) -> None:
    """Writes the reference of the run ``name``, whose ``job.json`` is there, if a collection removed it
    before.  Raises as :func:`_hold` does.
    """
    if not store.exists(f"{holder.run}/references/{Reference(name, holder.version).name}"):
        _hold(store, holder, Reference(name, holder.version))


# ---- references that nobody needs


def unused(store: ObjectStore, name: str) -> list[Reference]:
    """Returns the references to checkpoints of the run ``name`` that no run needs."""
    return [each for each in kept(store, name) if not _needs(store, each, name)]


def _needs(store: ObjectStore, reference: Reference, holder: str) -> bool:
    """Returns whether the run of the reference is there and goes on from the checkpoint, or began with its
    weights, whichever run it named as their holder.
    """
    run, origin = Branches(store, reference.run), Origin(holder, reference.version)
    try:
        word = run.begun.job.get("init", "").rpartition("@")[2]
    except Missing:
        return False
    except Damaged:  # the run may need it
        return True
    return run.origin() == origin or (bool(word) and ("." not in word or origin.word.endswith(f"@{word}")))


def collect(store: ObjectStore, name: str, reference: Reference) -> bool:
    """Performs one phase of the collection of an unused reference: marks it, or removes it if it was marked
    before.  Returns whether it is gone.
    """
    mark = f"{name}/unused/{reference.name}"
    try:
        store.put_if_absent(mark, reference.to_bytes())
        return False
    except Exists:
        # a fork that begins removes the mark
        store.put(f"{name}/unused/now/{reference.name}", reference.to_bytes())
    store.delete(f"{name}/references/{reference.name}")
    needed = _needs(store, reference, name)
    _settle(store, name, reference, needed=needed)
    return not needed


def unmark(store: ObjectStore, name: str) -> list[Reference]:
    """Removes the marks of references that are needed by now, or are gone, and returns the references that
    are unused.

    Undoes what a collection that died has begun.
    """
    begun, idle = {*Reference.all(store, f"{name}/unused/now/")}, unused(store, name)
    for each in {*_marks(store, name)} - {*idle} | begun:
        _settle(store, name, each, needed=_needs(store, each, name))
    return idle


def _settle(store: ObjectStore, name: str, reference: Reference, *, needed: bool) -> None:
    """Removes the marks of a reference.  If the reference is ``needed``, writes it first, unless it is
    there.
    """
    if needed:
        with suppress(Exists):
            store.put_if_absent(f"{name}/references/{reference.name}", reference.to_bytes())
    store.delete(f"{name}/unused/{reference.name}")
    store.delete(f"{name}/unused/now/{reference.name}")


def _look(store: ObjectStore, origin: Origin) -> Listed | None:
    listed = Checkpoints(store, origin.run).at(origin.version.step)
    return next((each for each in listed if each.version == origin.version), None)


def write_anew(job: Job) -> str:
    """Writes a damaged ``job.json``, if a checkpoint of the first branch was made with ``job``.  Returns the
    sentence that says so, or "".

    If another run keeps a checkpoint for this run, that checkpoint is taken as the origin of a fork.
    """
    name, key = job.name, f"{job.name}/job.json"
    try:
        store = ObjectStore.open(job.bucket)
    except Unavailable:  # the checks of the bucket say so, with the fix
        return ""
    if not (run := Branches(store, name)).lost() or not store.exists(key):
        return ""
    later, listed = run.every(), Checkpoints(store, name).versions()
    own = (
        each.manifest.about
        for each in listed
        if each.manifest is not None and made_by(later, each.version) is None
    )
    if job.digest not in (about.get("job") for about in own):
        return ""
    others = (
        [each.removesuffix("/") for each in store.children() if each.endswith("/")] if not job.init else []
    )
    came = (
        Origin(other, each.version) for other in others for each in kept(store, other) if each.run == name
    )
    store.put(key, document(job, next(came, None)))
    return (
        f"{store.full_name(key)} is damaged, and is written again with the settings of this command, "
        "which made the run's checkpoints"
    )
