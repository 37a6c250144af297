"""Retention: which checkpoints of a run are kept, and which are deleted.

A checkpoint is deleted only if no rule keeps it.  Only checkpoints older than the newest good checkpoint are
deleted, and none while there is no good checkpoint; a ``dead`` checkpoint is deleted whatever its age.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from elastic.ids import Version

Rule = Literal["newest", "last", "every", "best", "younger", "branch", "owed", "all"]
"""Names of the rules that keep a checkpoint.  ``owed`` is given by ``elastic/runs/retention.py``, the others
by :func:`reasons`.
"""


@dataclass(frozen=True)
class Keep:
    """The rules of a job.  A checkpoint that any of them names is kept."""

    last: int = 0
    """Number of the newest good checkpoints that are kept; 0 keeps all."""
    every: int = 0
    """The first good checkpoint at or after each multiple of this number of steps is kept; 0 means none.  A
    save may be a step late.
    """
    best: bool = False
    """True if the first good checkpoint at or after the best validated version is kept.  As long as there is
    none, all are kept.
    """
    younger_s: float = 0.0
    """Good checkpoints that were written less than this many seconds ago are kept; 0 means that age keeps
    none.  See :func:`young`.
    """


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the bucket, or what was written of one."""

    version: Version
    begun: bool
    """True if it has no manifest: it was never complete, or its deletion has begun."""
    dead: bool = False
    """True if it has no manifest and never gets one: it was begun by a generation that the run has left
    behind.
    """


def young(saved: Iterable[Version], written: Mapping[Version, float], keep: Keep, now: float) -> set[Version]:
    """Returns the versions among ``saved`` that were written less than ``keep.younger_s`` before ``now``.

    ``written`` has the wall-clock times that are known, and clocks of machines differ.  A time after ``now``
    is wrong, and so is one before that of an earlier version: neither is known.  If a version's time is not
    known, the next known one counts, or ``now`` without one, so such a version is kept for too long.  Only a
    time that is early and yet not before those of earlier versions, or a fast clock of ``now``, lets a
    checkpoint go too early.
    """
    if not keep.younger_s:
        return set()
    known, latest, ordered = dict[Version, float](), -math.inf, sorted(saved)
    for version in ordered:
        if latest <= (at := written.get(version, math.inf)) <= now:
            known[version] = latest = at
    found, at = set[Version](), now
    for version in reversed(ordered):
        at = known.get(version, at)
        if now - at < keep.younger_s:
            found.add(version)
    return found


def reasons(
    saved: Iterable[Version],
    keep: Keep,
    best: Version | None,
    needed: Collection[Version],
    young: Collection[Version] = (),
) -> dict[Version, tuple[str, ...]]:
    """Returns the versions among ``saved`` that are kept, newest first, each with the names of the rules that
    keep it.

    ``saved`` has the good checkpoints on the lineage, ``best`` is the best validated version if one is known,
    ``needed`` are the versions from which a branch or a fork goes on, and ``young`` are those of
    :func:`young`.
    """
    ordered = sorted(saved, reverse=True)
    firsts = (
        {version.step // keep.every: version for version in ordered if version.step >= keep.every}
        if keep.every
        else {}
    )
    at_multiples = set(firsts.values())
    of_best = min((version for version in ordered if best is not None and version >= best), default=None)
    found = dict[Version, tuple[str, ...]]()
    for place, version in enumerate(ordered):
        named: dict[Rule, bool] = {
            "newest": place == 0,
            "last": place < keep.last,
            "every": version in at_multiples,
            "best": keep.best and version == of_best,
            "younger": version in young,
            "branch": version in needed,
            "all": not keep.last or (keep.best and of_best is None),
        }
        if any(named.values()):
            found[version] = tuple(name for name, holds in named.items() if holds)
    return found


def victims(
    found: Iterable[StoredCheckpoint], kept: Collection[Version], keep: Keep, spared: Collection[Version]
) -> tuple[Version, ...]:
    """Returns the versions that are deleted, oldest first.

    ``kept`` has the good checkpoints that rules keep; ``spared`` has those that are on their way, being read,
    or needed by a branch.  If all checkpoints are kept, only what was begun and never completed is deleted.
    """
    newest, safe = max(kept, default=None), {*kept, *spared}
    old = (
        each
        for each in found
        if each.dead or (newest is not None and each.version < newest and (each.begun or keep.last))
    )
    return tuple(sorted(each.version for each in old if each.version not in safe))
