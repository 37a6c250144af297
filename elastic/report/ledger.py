"""The ledger: what each step of the surviving lineage consumed, from the journal alone.

World rank 0 reports each commit; if it is dead, a fenced member that remembers the commit does.  A step that was abandoned is another
version of the same step and is left out, so each step and each sample counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.control.codec import Segment, decode, field_after, modern
from elastic.ids import Version
from elastic.protocol.commit_record import Outcome
from elastic.protocol.lineage import Lineage, contains


def mixed(segments: Sequence[Segment]) -> frozenset[int]:
    """Returns the generations with workers of several kinds.  The bits of their steps cannot be reproduced."""
    return frozenset(generation for segment in segments for generation in field_after(modern(*segment), "members", "mixed"))


def ledger(segments: Sequence[Segment]) -> dict[int, Outcome]:
    """Returns the outcome of each step of the surviving lineage."""
    told: dict[Version, Any] = {}
    segments = [modern(*segment) for segment in segments]
    for _, records in segments:
        for record in records:
            told.update({Version(each["step"], each["generation"]): each for each in record.get("commits", ())})
    lineage = decode(Lineage, field_after(segments[-1], "history", "lineage")) if segments else ()
    return {version.step: decode(Outcome, told[version]) for version in sorted(told) if contains(lineage, version)}
