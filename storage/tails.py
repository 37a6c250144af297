"""The end of a journal before the bucket has it, as it is read back when its writer has died.

A tail is a part of the writer's local file: segments, each a snapshot and the records after it, a line each.  Keepers hold copies of it;
which copy a follower takes, ``elastic/protocol/authority.py`` says.
"""

from __future__ import annotations

from pathlib import Path

from storage.journal import Json, parse

Segment = tuple[Json, list[Json]]
"""A snapshot, and the records after it."""


def segments_of(tail: bytes) -> list[Segment]:
    """A last line that was cut off is none."""
    return [(snapshot, records) for snapshot, records in parse(tail[: tail.rfind(b"\n") + 1]) if records]


Written = tuple[int, bytes]
"""A tail, and the incarnation that wrote it."""


def file_of(folder: Path, incarnation: int) -> Path:
    """Where a coordinator writes on its node."""
    return folder / f"journal-{incarnation:06d}.jsonl"


def local(folder: Path) -> list[Written]:
    """The files of all incarnations that wrote on this node."""
    return [(int(path.stem.removeprefix("journal-")), path.read_bytes()) for path in sorted(folder.glob("journal-*.jsonl"))]


def first_of(segments: list[Segment]) -> int:
    """The number of their first record."""
    return int(segments[0][1][0]["n"])


def last_of(segments: list[Segment]) -> int:
    """The number of their last record."""
    return int(segments[-1][1][-1]["n"])
