"""The commit of a step: what every member puts into the one all-gather, and what all of them conclude from it.

The record is a fixed-size vector of float64 (integers below 2**53 are exact), so that it travels in one small collective
on any backend and can be filled in on the accelerator.  The collective completes nowhere unless every member's gradients were
complete: having seen it *is* the commit.  An aborted collective can look complete over garbage, so each record names whom it
is from and carries a checksum; one wrong record and there is no outcome.

    [MAGIC, incarnation, generation, step, world rank, boundary, finite, squared norm]
    then what it says of its copies        [copied_through, buddied_through, copy_every, buddy_every, save, behind]
    then for each of the member's rounds   [loss sum, token count, sample ids ...]
    then the checksum: the wrapping 64-bit sum of everything before it, word i as a bit pattern times 2i + 1, so that order counts; first
    its upper half is mixed into its lower (exclusive or), or two words that differ in their sign alone could change places unseen
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from elastic.plan.batch import microbatch_of, rounds
from elastic.plan.layout import Layout
from elastic.plan.placement import data_ranks, reporters

GO_ON, PAUSE, SAVE_AND_PAUSE = 0, 1, 2
"""What a member asks for at the boundary after this step; the greatest of all members counts."""
NO_SAVE, DUE, LAST = 0, 1, 2
"""Whether a member asks that the state after this step be saved to the bucket: not, once there is room, whatever else is on its way."""

MAGIC = 20261124.0
HEADER = 14
LOWER = 2**32 - 1


class Copied(NamedTuple):
    """What a member says of its copies when it prepares a step: complete through which, and every how many steps it can make one.

    -1 and 0: none, as often as planned.  Of all members the least step and the greatest number count.  ``save`` is NO_SAVE, DUE or
    LAST.  ``behind`` is 1 while this member has no room for a save: the one before is not in the bucket yet, or its newest copy is not
    complete.
    """

    copied_through: int = -1
    buddied_through: int = -1
    copy_every: int = 0
    buddy_every: int = 0
    save: int = NO_SAVE
    behind: int = 0


NO_COPIES = Copied()


@dataclass(frozen=True)
class Outcome:
    """The commit of one step, the same on every member.

    ``squared_norm`` is that of the summed gradient, before it is divided by ``tokens``; ``losses`` and ``counts`` are sums
    by microbatch, in order; ``samples`` the ids each microbatch read (the ledger).  ``finite`` False: the update is skipped.
    ``copied_through``: the newest step of this generation of which every member had a complete copy in host memory when it prepared
    this one (-1: none); ``buddied_through``: a complete copy at its buddy.
    ``behind``: a member has no room for a save.  ``copy_every``, ``buddy_every``: steps from one copy to the next, at least.
    ``saves``: every member copies the state after this step, and that copy is a save; None in the journals of older versions, whose
    members found that out for themselves.
    """

    step: int
    generation: int
    squared_norm: float
    losses: tuple[float, ...]
    counts: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...]
    finite: bool
    boundary: int = GO_ON
    copied_through: int = -1
    buddied_through: int = -1
    behind: bool = False
    copy_every: int = 0
    buddy_every: int = 0
    saves: bool | None = None

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def loss(self) -> float:
        """Mean over the step's valid tokens, added in microbatch order."""
        total = 0.0
        for part in self.losses:
            total += part
        return total / max(self.tokens, 1)

    @property
    def norm(self) -> float:
        """Norm of the mean gradient, the one that is clipped."""
        return float(self.squared_norm**0.5 / max(self.tokens, 1))


@dataclass(frozen=True)
class CommitShape:
    """What fixes the size of a record: the same for every member of a world."""

    incarnation: int
    generation: int
    microbatches: int
    microbatch: int
    layout: Layout

    @property
    def world(self) -> int:
        """The number of members, each of which sends a record."""
        return self.layout.world

    @property
    def rounds(self) -> int:
        """The number of rounds, of each of which a record has the loss, the tokens and the samples."""
        return rounds(self.microbatches, data_ranks(self.layout))

    @property
    def fields(self) -> int:
        """Number of float64 in one record, checksum included."""
        return HEADER + self.rounds * (2 + self.microbatch) + 1


def is_saved(boundary: int, asked: int, behind: bool) -> bool:
    """Returns whether the state after a step becomes a save; ``asked`` is the greatest of what the members asked for.

    The last step and a stop are saved whatever else is on its way; any other save waits until every member has room for it.
    """
    return boundary == SAVE_AND_PAUSE or asked >= LAST or (asked == DUE and not behind)


class BadRecord(ValueError):
    """A gathered record is not what its member sent: the collective was aborted under us."""


def conclude(shape: CommitShape, step: int, gathered: bytes) -> Outcome:
    """The outcome of ``step`` from the records of all members in order of world rank (little-endian float64).

    Raises :class:`BadRecord` when any of them is garbage.
    """
    size = shape.fields * 8
    if len(gathered) != size * shape.world:
        raise BadRecord(f"{len(gathered)} bytes of commit records instead of {size * shape.world}")
    records = [_record(shape, step, rank, gathered[rank * size : (rank + 1) * size]) for rank in range(shape.world)]
    parts, speakers = {}, reporters(shape.layout)
    for data_rank, world_rank in enumerate(speakers):
        for round_ in range(shape.rounds):
            index = microbatch_of(round_, data_rank, len(speakers), shape.microbatches)
            if index is not None:
                first = HEADER + round_ * (2 + shape.microbatch)
                parts[index] = records[world_rank][first : first + 2 + shape.microbatch]
    ordered = [parts[i] for i in range(shape.microbatches)]
    boundary, behind = max(int(record[5]) for record in records), any(record[13] > 0 for record in records)
    return Outcome(
        step=step,
        generation=shape.generation,
        squared_norm=records[speakers[0]][7],
        losses=tuple(part[0] for part in ordered),
        counts=tuple(int(part[1]) for part in ordered),
        samples=tuple(tuple(int(i) for i in part[2:]) for part in ordered),
        finite=all(record[6] == 1.0 for record in records),
        boundary=boundary,
        copied_through=int(min(record[8] for record in records)),
        buddied_through=int(min(record[9] for record in records)),
        behind=behind,
        copy_every=int(max(record[10] for record in records)),
        buddy_every=int(max(record[11] for record in records)),
        saves=is_saved(boundary, int(max(record[12] for record in records)), behind),
    )


def _record(shape: CommitShape, step: int, rank: int, raw: bytes) -> tuple[float, ...]:
    words = struct.unpack(f"<{shape.fields}q", raw)
    if (sum((2 * i + 1) * (word ^ (word >> 32 & LOWER)) for i, word in enumerate(words[:-1])) - words[-1]) % 2**64:
        raise BadRecord(f"the commit record of world rank {rank} at step {step} has a wrong checksum")
    fields = struct.unpack(f"<{shape.fields}d", raw)
    expected = (MAGIC, float(shape.incarnation), float(shape.generation), float(step), float(rank))
    if fields[:5] != expected:
        raise BadRecord(f"the commit record of world rank {rank} says {fields[1:5]} instead of {expected[1:]}")
    return fields
