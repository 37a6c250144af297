"""The end of a journal, before the bucket has it: what other nodes hold of it, and what is read back when its writer has died.

A tail is a part of the writer's local file: segments, each a snapshot and the records after it, a line each.  Copies grow by what the
writer sends, in order, and let go of what is in the bucket.  Who recovers takes the one that reaches furthest from where the bucket ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from storage.journal import Json

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


class Segment(NamedTuple):
    snapshot: Json
    records: list[Json]


def parse(data: bytes) -> list[Segment]:
    """The segments of a tail; a last line that was cut off is none."""
    segments: list[Segment] = []
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        value = json.loads(line)
        if "n" in value:
            segments[-1].records.append(value)
        else:
            segments.append(Segment(value, []))
    return [segment for segment in segments if segment.records]


def local(folder: Path) -> list[bytes]:
    """The files of all incarnations that wrote on this node."""
    return [path.read_bytes() for path in sorted(folder.glob("journal-*.jsonl"))]


def furthest(written: int, tails: Iterable[bytes]) -> list[Segment]:
    """Of the tails that go on without a gap where the bucket ends (``written``: its next record), the one that reaches furthest.

    Empty where none goes further than the bucket.
    """
    best: list[Segment] = []
    reached = written
    for segments in map(parse, tails):
        if segments and segments[0].records[0]["n"] <= written and segments[-1].records[-1]["n"] >= reached:
            best, reached = segments, segments[-1].records[-1]["n"] + 1
    return best
