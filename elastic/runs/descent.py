"""Finds the runs of a bucket, and how they descend from each other, from what is in the bucket alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic.config.values import checkpoint_of
from elastic.errors import ElasticError
from elastic.ids import Version
from elastic.job import Job
from elastic.runs import branches, metrics, resume
from elastic.runs.forks import Origin
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
    branches: tuple[dict[str, Any], ...] = ()
    step: int = 0
    steps: int = 0
    best: tuple[Version, float] | None = None
    state: str = ""
    at: float | None = None
    """The wall-clock time of its newest recorded step or branch, if one is known."""
    unread: str = ""
    """Why it cannot be read, or ""."""

    @property
    def parent(self) -> str:
        return self.origin.run if self.origin else checkpoint_of(self.warm)[0] if self.warm else ""


def runs_of(bucket: str) -> list[Descent]:
    """Returns the runs of a bucket by name."""
    store = ObjectStore.open(bucket)
    names = sorted(name.removesuffix("/") for name in store.children() if name.endswith("/"))
    return [_look(store, bucket, name) for name in names if store.exists(f"{name}/job.json")]


def tree(found: list[Descent], parent: str = "", depth: int = 0) -> Iterator[tuple[int, Descent]]:
    """Yields each run after the one that it comes from, with its depth.  Those that come from none that is there are at the top."""
    names = {each.name for each in found}
    for each in found:
        if (each.parent if each.parent in names else "") == parent:
            yield depth, each
            yield from tree(found, each.name, depth + 1)


def _look(store: ObjectStore, bucket: str, name: str) -> Descent:
    try:
        job = Job(name=name, bucket=bucket)
        run = Run.find(job)
        every, last = branches.every(store, name), metrics.last_row(store, name)
        times = [*(each["at"] for each in every[-1:]), *([last["time"]] if last else [])]
        end, living = run.end(), run.local_process()
        state = f"trained by process {living} of this machine" if living else type(end).__name__ if end else "not finished"
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
