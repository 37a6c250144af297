"""The end of a journal, before the bucket has it: what other nodes hold of it, and what is read back when its writer has died.

A tail is a part of the writer's local file: segments, each a snapshot and the records after it, a line each.  Copies grow by what the
writer sends, in order, and let go of what is in the bucket.  Who recovers takes the latest writer's, of several the one that reaches
furthest from where the bucket ends: an earlier writer may have been cut off and have written on, and nothing came of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from storage.journal.journal import Json, parse

DEPOSED = -1
"""The answer to a writer whose incarnation is not the latest."""


@dataclass
class Tail:
    """A copy: bytes from ``begin`` on of the file that ``incarnation`` writes."""

    incarnation: int = 0
    begin: int = 0
    data: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        return self.begin + len(self.data)

    def extend(self, incarnation: int, begin: int, at: int, data: bytes) -> int:
        """Take ``data``, which lies at ``at``, and let go of what is before ``begin``.  The answer: where the copy ends.

        What is held already is passed over; what leaves a gap is not taken.  :data:`DEPOSED` where a later incarnation has written.
        """
        if incarnation < self.incarnation:
            return DEPOSED
        if incarnation > self.incarnation:
            if at != begin:  # what an earlier one wrote is of use until this one's is here from its beginning
                return begin
            self.incarnation, self.begin, self.data = incarnation, begin, bytearray()
        if self.end < begin:
            self.begin, self.data = begin, bytearray()
        if at <= self.end:
            self.data += data[self.end - at :]
        drop = max(begin - self.begin, 0)
        del self.data[:drop]
        self.begin += drop
        return self.end


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


def furthest(written: int, by: int, tails: Iterable[Written]) -> list[Segment]:
    """Of the tails that go on without a gap where the bucket ends (``written``: its next record; ``by``: who wrote the last one there).

    Empty where none goes further than the bucket.
    """
    found = [(incarnation, segments_of(data)) for incarnation, data in tails if incarnation >= by]
    further = [(each, segments) for each, segments in found if segments and _first(segments) <= written <= _last(segments)]
    return max(further, key=lambda tail: (tail[0], _last(tail[1])), default=(0, []))[1]


def _first(segments: list[Segment]) -> int:
    return int(segments[0][1][0]["n"])


def _last(segments: list[Segment]) -> int:
    return int(segments[-1][1][-1]["n"])
