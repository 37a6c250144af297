"""The lineage: which generation committed which step, of all that survived.

A run's history is a line: each step counts once.  It is kept as ``((generation, last step), ...)``, both growing: the steps after
the entry before it, up to ``last step``, were committed by ``generation``.  Falling back to an older version cuts the line there;
what is beyond is abandoned, and when the same steps are done again they are other versions.
"""

from __future__ import annotations

from elastic.ids import Version

Lineage = tuple[tuple[int, int], ...]


def tip(lineage: Lineage) -> Version:
    """The newest committed version; the initialisation when there is none."""
    return Version(lineage[-1][1], lineage[-1][0]) if lineage else Version(0, 0)


def contains(lineage: Lineage, version: Version) -> bool:
    """Is it one of the surviving versions?  The initialisation always is."""
    if version == Version(0, 0):
        return True
    before = 0
    for generation, last in lineage:
        if generation == version.generation:
            return before < version.step <= last
        before = last
    return False


def extended(lineage: Lineage, version: Version) -> Lineage:
    """With the commit of ``version``, which must be newer than the tip and of the same or a later generation."""
    if lineage and lineage[-1][0] == version.generation:
        lineage = lineage[:-1]
    return (*lineage, (version.generation, version.step))


def cut(lineage: Lineage, version: Version) -> Lineage:
    """Up to ``version``, which it contains."""
    kept = tuple((generation, last) for generation, last in lineage if generation < version.generation)
    return (*kept, (version.generation, version.step)) if version.step else kept


def abandoned(lineage: Lineage, version: Version) -> tuple[tuple[int, int, int], ...]:
    """What cutting at ``version`` gives up: (generation, first step, last step), oldest first."""
    given_up, before = [], 0
    for generation, last in lineage:
        first = max(before, version.step) + 1
        if first <= last:
            given_up.append((generation, first, last))
        before = last
    return tuple(given_up)
