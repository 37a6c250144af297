"""The ledger: what each step of the surviving lineage consumed, from the journal alone.

A commit is told by whoever saw it: a ``StepDone``, or the outcomes that a fenced member remembers (those of a dead world rank 0
too).  Steps that were abandoned are other versions of the same step, and are left out: each step and each sample counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastic.control.codec import decode
from elastic.ids import Version
from elastic.protocol.commit_record import Outcome
from elastic.protocol.lineage import Lineage, contains


def mixed(records: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """The generations that the journal marks: their members were of several kinds, so the bits of their steps are nobody else's."""
    marks = [record["changed"]["mixed"] for record in records if "mixed" in record["changed"]]
    return frozenset(marks[-1] if marks else ())


def ledger(records: Iterable[Mapping[str, Any]], lineage: Lineage = ()) -> dict[int, Outcome]:
    """Step -> its outcome.  ``lineage``: as the snapshot before the first record has it."""
    told: dict[Version, Any] = {}
    for record in records:
        event = record["event"]
        outcomes = [event["outcome"]] if event["$"] == "StepDone" else event.get("outcomes", ())
        told.update({Version(each["step"], each["generation"]): each for each in outcomes})
        lineage = decode(Lineage, record["changed"]["lineage"]) if "lineage" in record["changed"] else lineage
    return {version.step: decode(Outcome, told[version]) for version in sorted(told) if contains(lineage, version)}
