"""Replicas of the end of a journal: other nodes hold what the bucket does not have yet, and give it back when its writer has died.

A tail is a part of the writer's local files.  It consists of segments: a snapshot and the records after it, one line each.  A replica grows
by what the writer sends, in order, and drops what is in the bucket.  A new coordinator takes the tail of the latest writer, and of several
the one that reaches furthest beyond the end of the bucket.  An earlier writer may have been cut off and have continued to write, but
nobody acted on that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from storage.journal.journal import Json, parse

WRITER = "journal-"
"""What the folder of a writer's local files is called, before its incarnation."""
DEPOSED = -1
"""The answer to a writer that has been followed by a later incarnation."""


@dataclass
class Tail:
    """A replica: the bytes from ``begin`` on of all that ``incarnation`` writes."""

    incarnation: int = 0
    begin: int = 0
    data: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        return self.begin + len(self.data)

    def extend(self, incarnation: int, begin: int, at: int, data: bytes) -> int:
        """Adds ``data``, which lies at ``at`` in the file, and drops what lies before ``begin``.  Returns where the replica ends.

        Skips bytes that it holds already, and refuses bytes behind a gap.  Returns :data:`DEPOSED` if a later incarnation has written.
        """
        if incarnation < self.incarnation:
            return DEPOSED
        if incarnation > self.incarnation:
            if at != begin:  # keep the earlier writer's tail until this one's is here from its beginning
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
"""A snapshot and the records after it."""


def segments_of(tail: bytes) -> list[Segment]:
    """Returns the segments of a tail.  Ignores a last line that was cut off."""
    return [(snapshot, records) for snapshot, records in parse(tail[: tail.rfind(b"\n") + 1]) if records]


Written = tuple[int, bytes]
"""The incarnation that wrote a tail, and the tail."""


def folder_of(folder: Path, incarnation: int) -> Path:
    """Returns the folder in which a coordinator writes on its node, a file a segment."""
    return folder / f"{WRITER}{incarnation:06d}"


def local(folder: Path) -> list[Written]:
    """Returns what all incarnations that wrote on this node have left here."""
    writers = sorted(folder.glob(f"{WRITER}*"))
    return [(int(each.name.removeprefix(WRITER)), b"".join(path.read_bytes() for path in sorted(each.glob("*.jsonl")))) for each in writers]


def furthest(written: int, by: int, tails: Iterable[Written]) -> list[Segment]:
    """Returns the segments of the tail that reaches furthest, of those that continue the bucket's journal without a gap.

    ``written``: number of the bucket's next record; ``by``: the incarnation that wrote its last one.  Returns an empty list if no tail
    reaches further than the bucket.
    """
    found = [(incarnation, segments_of(data)) for incarnation, data in tails if incarnation >= by]
    further = [(each, segments) for each, segments in found if segments and _first(segments) <= written <= _last(segments)]
    return max(further, key=lambda tail: (tail[0], _last(tail[1])), default=(0, []))[1]


def _first(segments: list[Segment]) -> int:
    return int(segments[0][1][0]["n"])


def _last(segments: list[Segment]) -> int:
    return int(segments[-1][1][-1]["n"])
