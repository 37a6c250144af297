"""Replicas of the end of a journal: other nodes hold what the bucket does not have yet, and give it back when
its writer has died.

A tail is a part of the writer's local files.  It consists of segments: a snapshot and the records after it,
one line each.  The first one may be a continuation, whose snapshot is in the bucket
(:meth:`storage.journal.Newest.rejoined`).  The module ``elastic/protocol/authority.py`` says what a keeper
accepts of a tail, and which tail a new coordinator takes.
"""

from __future__ import annotations

from pathlib import Path

from storage.journal.reading import parse
from storage.journal.stored_segment import Segment

WRITER = "journal-"
"""Beginning of the name of a writer's local folder; the incarnation follows."""


def segments_of(tail: bytes) -> list[Segment]:
    """Returns the segments of a tail that have records.  Ignores a last line that was cut off."""
    return [
        (snapshot, records)
        for snapshot, records in parse(tail[: tail.rfind(b"\n") + 1], tail=True)
        if records
    ]


Written = tuple[int, bytes]
"""The incarnation that wrote a tail, and the tail."""


def folder_of(folder: Path, incarnation: int) -> Path:
    """Returns the folder in which a coordinator writes on its node, with one file for each object of the
    journal.
    """
    return folder / f"{WRITER}{incarnation:06d}"


def local(folder: Path) -> list[Written]:
    """Returns the tails that all incarnations have left in ``folder`` on this node."""
    writers = sorted(folder.glob(f"{WRITER}*"))
    return [
        (
            int(each.name.removeprefix(WRITER)),
            b"".join(path.read_bytes() for path in sorted(each.glob("*.jsonl"))),
        )
        for each in writers
    ]


def first_of(segments: list[Segment]) -> int:
    """Returns the number of the first record of ``segments``."""
    return int(segments[0][1][0]["n"])


def last_of(segments: list[Segment]) -> int:
    """Returns the number of the last record of ``segments``."""
    return int(segments[-1][1][-1]["n"])
