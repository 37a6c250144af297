"""When to save to the bucket, and when a save is complete.

Each member writes its own part in the background and reports it; only when all members of the world that began the save have, and
the version is on the lineage, is the manifest written.  A save that lost a writer can never be complete and is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.ids import Version, WorkerId
from elastic.protocol.commit_record import SAVE_AND_PAUSE, Outcome


def due(step: int, save_every: int, target_step: int) -> bool:
    """Is the state after ``step`` to be saved to the bucket?"""
    return step > 0 and (step % save_every == 0 or step == target_step)


def begins(outcome: Outcome, save_every: int, target_step: int) -> bool:
    """Is it?  Where a member still writes the save before, only if it is the last one, or asked for: a bucket that is down stops nobody."""
    if outcome.boundary == SAVE_AND_PAUSE or outcome.step == target_step:
        return True
    return due(outcome.step, save_every, target_step) and not outcome.behind


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way.  ``members``: who writes it; ``reported``: whose part is in the bucket."""

    version: Version
    members: tuple[WorkerId, ...]
    reported: tuple[WorkerId, ...] = ()
    ask_at: float = 0.0
    """When to ask for the manifest (again), once complete."""
    asked: bool = False
    by: int = 0
    """Generation of the world that writes it, all in one layout; 0: the one that committed it."""
    failed: str = ""
    """Why it can never be complete, heard before the commit of its version was."""

    @property
    def complete(self) -> bool:
        return not self.failed and set(self.reported) >= set(self.members)


Saves = tuple[Saving, ...]
"""In order of version, one each."""


def find(saves: Saves, version: Version) -> Saving | None:
    return next((saving for saving in saves if saving.version == version), None)


def put(saves: Saves, saving: Saving) -> Saves:
    """With ``saving`` in the place of what there was of its version."""
    return tuple(sorted((*without(saves, saving.version), saving), key=lambda each: each.version))


def without(saves: Saves, version: Version) -> Saves:
    return tuple(saving for saving in saves if saving.version != version)


def is_of(saving: Saving, generation: int) -> bool:
    """Is a part that a member of ``generation`` (0: as above) wrote one of it?"""
    return (generation or saving.version.generation) == (saving.by or saving.version.generation)


def report(saving: Saving, worker: WorkerId) -> Saving:
    """With the part of ``worker``."""
    reported = {*saving.reported, worker}
    return replace(saving, reported=tuple(member for member in saving.members if member in reported))


def survivors(saves: Saves, gone: Iterable[WorkerId]) -> Saves:
    """Those that need nothing more from ``gone``; and those whose manifest was asked for, by another coordinator perhaps: it may come."""
    lost = set(gone)
    return tuple(saving for saving in saves if saving.asked or not lost & (set(saving.members) - set(saving.reported)))
