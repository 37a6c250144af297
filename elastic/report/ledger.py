"""The ledger: what each step of the surviving lineage consumed, from the journal alone.

World rank 0 reports each commit; if it is dead, a fenced member that remembers the commit does.  An abandoned
step is another version of the same step and is left out, so each step and each sample counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.ids import Version
from elastic.journal.codec import Segment, checked, decode, field_after
from elastic.protocol.commit_record import Outcome
from elastic.protocol.lineage import Lineage, contains
from elastic.report.metrics import version_of


def ledger(segments: Sequence[Segment]) -> dict[int, Outcome]:
    """Returns the outcome of each step of the surviving lineage."""
    told = _told(segments)
    lineage = decode(Lineage, field_after(segments[-1], "history", "lineage")) if segments else ()
    return {
        version.step: decode(Outcome, told[version]) for version in sorted(told) if contains(lineage, version)
    }


def outcome_of(segments: Sequence[Segment], version: Version) -> Outcome | None:
    """Returns the outcome that committed ``version``, even if its step was abandoned; None if nobody reported
    it.
    """
    told = _told(segments).get(version)
    return None if told is None else decode(Outcome, told)


def _told(segments: Sequence[Segment]) -> dict[Version, Any]:
    records = (record for _, each in map(checked, segments) for record in each)
    return {version_of(each): each for record in records for each in record.get("commits", ())}
