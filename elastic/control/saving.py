"""Which saves are on their way to the bucket, and when one is complete.

The members copy the version, and the keepers of their nodes upload the copies; only when the parts of all members of the world that began
the save are in the bucket, and the version is on the lineage, is the manifest written.  A member may die meanwhile: its keeper says whether
its copy was complete.  A save that lost a keeper which still had a part to upload can never be complete and is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.actions import Save
from elastic.protocol.commit_record import SAVE_AND_PAUSE, Outcome
from elastic.protocol.copy_schedule import due


def begins(outcome: Outcome, save_every: int, target_step: int) -> bool:
    """Returns whether the version that ``outcome`` commits is saved.  Journals of older versions do not say so; this is their rule."""
    if outcome.saves is not None:
        return outcome.saves
    if outcome.boundary == SAVE_AND_PAUSE or outcome.step == target_step:
        return True
    return due(outcome.step, save_every, target_step) and not outcome.behind


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way.  ``members``: whose parts it consists of; ``reported``: whose part is in the bucket.

    ``nodes``: where each member runs, or ran, and whose keeper uploads its part; ``layout``: of the members.  Without ``nodes`` the members
    upload their parts themselves, as those of older versions did, and the save ends with any of them.
    """

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
    layout: Layout | None = None
    nodes: tuple[NodeId, ...] = ()

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
    """Returns the saves that need nothing more from the workers that are ``gone``.

    One whose manifest was asked for is among them, too: by another coordinator perhaps, and the manifest may come.
    """
    lost = set(gone)
    return tuple(saving for saving in saves if saving.nodes or saving.asked or not lost & (set(saving.members) - set(saving.reported)))


def needs(saving: Saving, node: NodeId) -> bool:
    """Returns whether a part is still to come from the keeper of ``node``.  A manifest that was asked for may come all the same."""
    missing = {where for member, where in zip(saving.members, saving.nodes, strict=False) if member not in saving.reported}
    return node in missing and not saving.asked


def orders(saves: Saves) -> tuple[Save, ...]:
    """Returns what the keepers are to upload."""
    return tuple(
        Save(each.version, each.by or each.version.generation, each.layout, each.members, each.nodes)
        for each in saves
        if each.layout is not None and not each.failed
    )
