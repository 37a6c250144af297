"""The lineage: it says which generation committed each step that survived.

A run's history is a line: each step counts once.  It is kept as ``((generation, last step), ...)``, and both
numbers grow.  An entry means that ``generation`` committed the steps after the entry before it, up to ``last
step``.  Falling back to an older version cuts the line there: the steps beyond are abandoned, and when the
same steps are done again they are other versions.
"""

from __future__ import annotations

from elastic.ids import Version

Lineage = tuple[tuple[int, int], ...]


def tip(lineage: Lineage) -> Version:
    """Returns the newest committed version; the initialisation if there is none."""
    return Version(lineage[-1][1], lineage[-1][0]) if lineage else Version(0, 0)


def contains(lineage: Lineage, version: Version) -> bool:
    """Returns whether ``version`` is one of the surviving versions; the initialisation always is."""
    if version == Version(0, 0):
        return True
    before = 0
    for generation, last in lineage:
        if generation == version.generation:
            return before < version.step <= last
        before = last
    return False


def extended(lineage: Lineage, version: Version) -> Lineage:
    """Returns the lineage with the commit of ``version``, which must be newer than the tip and of the same or
    a later generation.
    """
    if lineage and lineage[-1][0] == version.generation:
        lineage = lineage[:-1]
    return (*lineage, (version.generation, version.step))


def cut(lineage: Lineage, version: Version) -> Lineage:
    """Returns the lineage up to ``version``, which it must contain."""
    kept = tuple((generation, last) for generation, last in lineage if generation < version.generation)
    return (*kept, (version.generation, version.step)) if version.step else kept


def abandoned(lineage: Lineage, version: Version) -> tuple[tuple[int, int, int], ...]:
    """Returns the steps that cutting at ``version`` gives up, as (generation, first step, last step), oldest
    first.
    """
    given_up, before = [], 0
    for generation, last in lineage:
        first = max(before, version.step) + 1
        if first <= last:
            given_up.append((generation, first, last))
        before = last
    return tuple(given_up)
