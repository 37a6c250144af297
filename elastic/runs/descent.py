"""Finds the runs of a bucket, and how they descend from each other, from what is in the bucket alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from elastic.config.values import checkpoint_of
from elastic.errors import ElasticError
from elastic.job import Job
from elastic.report.best import Best
from elastic.runs import metrics, resume
from elastic.runs.branches import Branch, Branches, Origin
from elastic.runs.notes import made_by
from elastic.runs.run import Run
from storage.errors import StorageError
from storage.objects import ObjectStore


@dataclass(frozen=True)
class Descent:
    """A run, what it came from and where it stands."""

    name: str
    origin: Origin | None = None
    warm: str = ""
    """The checkpoint with whose weights it began, as ``init`` names it, or ""."""
    branches: tuple[Branch, ...] = ()
    step: int = 0
    steps: int = 0
    best: Best | None = None
    state: str = ""
    at: float | None = None
    """The wall-clock time of its newest recorded step or branch, if one is known."""
    unread: str = ""
    """The reason why the run cannot be read, or ""."""

    @property
    def source(self) -> Origin | None:
        """The checkpoint from which the run comes; None if there is none, or ``init`` does not name it
        exactly.
        """
        return self.origin or (Origin.of(self.warm) if "." in self.warm.rpartition("@")[2] else None)

    @property
    def parent(self) -> str:
        return self.origin.run if self.origin else checkpoint_of(self.warm)[0] if self.warm else ""

    def branch_of(self, child: Descent) -> int:
        """Returns the number of the branch of this run from which ``child`` comes."""
        found = made_by(self.branches, child.source.version) if child.source else None
        return 1 if found is None else found.number


def runs_of(bucket: str) -> list[Descent]:
    """Returns the runs of a bucket by name."""
    store = ObjectStore.open(bucket)
    names = sorted(name.removesuffix("/") for name in store.children() if name.endswith("/"))
    return [_look(store, bucket, name) for name in names if store.exists(f"{name}/job.json")]


def tree(
    found: list[Descent], roots: Collection[str] | None = None
) -> Iterator[tuple[int, Descent, Branch | None]]:
    """Yields the runs, and their branches, from the top down: the depth, the run, and a later branch of it or
    None.

    A run follows the branch from which it comes.  At the top are ``roots``, or by default the runs whose
    parent is not in ``found``.
    """
    names = {each.name for each in found}
    for each in found:
        if (each.parent not in names) if roots is None else (each.name in roots):
            yield from _below(each, found, 0)


def family(found: list[Descent], name: str) -> list[Descent]:
    """Returns the oldest ancestor of the run ``name``, and all runs that descend from that ancestor; none if
    there is no such run.
    """
    parents, known = {each.name: each.parent for each in found}, list[str]()
    while name in parents and name not in known:
        known.append(name)
        name = parents[name]
    return [each for _, each, branch in tree(found, known[-1:]) if branch is None]


def _below(run: Descent, found: list[Descent], depth: int) -> Iterator[tuple[int, Descent, Branch | None]]:
    children = [each for each in found if each.parent == run.name and each is not run]
    for number, branch in ((1, None), *((each.number, each) for each in run.branches)):
        yield depth, run, branch
        for each in children:
            if run.branch_of(each) == number:
                yield from _below(each, found, depth + 1)


def _look(store: ObjectStore, bucket: str, name: str) -> Descent:
    try:
        Branches(store, name).check_lost()
        run = Run.find(Job(name=name, bucket=bucket))
        every, last = run.branches.every(), metrics.last_row(store, name)
        times = [*(each.at for each in every[-1:]), *([last["time"]] if last else [])]
        end, living = run.end(), run.local_process()
        state = (
            f"{'trained' if living.trains else 'rolled back'} by process {living.pid} of this machine"
            if living
            else type(end).__name__
            if end
            else "not finished"
        )
        newest = run.newest()
        return Descent(
            name,
            run.origin,
            run.job.init,
            tuple(every),
            newest.step if newest else 0,
            run.job.steps,
            resume.best_of(run),
            state,
            max(times, default=None),
        )
    except (ElasticError, StorageError, KeyError, ValueError) as error:
        return Descent(name, unread=f"cannot be read: {error}")
