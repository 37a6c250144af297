"""Which state is still held somewhere, and who sends which slice to whom.

A holding is one shard of every tensor.  Holdings of one version may come from different layouts: a world that broke while it healed
holds shards of the old and of the new.  So coverage and transfer are interval arithmetic over rows: cut what is wanted at the edges
of what is held, and take each piece from somebody whose shard contains it.  Tensors with equal numbers of rows are cut alike, so
the geometry is worked out once for each number of rows, not for each tensor.

Everything is a pure function of its arguments, in whatever order the holdings come: all members compute the same moves, and nobody
asks anybody for anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from elastic.ids import Version, WorkerId
from elastic.plan.layout import Layout
from storage.slices import Slice, Tensor, nbytes, shard_interval, shard_slice


@dataclass(frozen=True)
class Holding:
    """``worker`` holds shard ``shard_index`` of ``shard_count`` of every tensor, at ``version``."""

    worker: WorkerId
    version: Version
    shard_count: int
    shard_index: int


@dataclass(frozen=True)
class Move:
    """``source`` sends ``slice`` to ``destination``; where they are the same worker, it copies from its own memory.

    One holding of the source contains the whole slice.
    """

    slice: Slice
    source: WorkerId
    destination: WorkerId


@dataclass(frozen=True)
class Piece:
    """Rows ``rows[0] <= row < rows[1]``, all in the shard of each of ``holders``.  None: all of a tensor that no shard divides."""

    rows: tuple[int, int] | None
    holders: tuple[WorkerId, ...]


def covered(holdings: Iterable[Holding], rows: Iterable[int]) -> bool:
    """Whether tensors with these numbers of rows, and all that is whole in every shard, are held completely.

    All holdings must be of one version: a mixture is no state, and raises ValueError.
    """
    held = list(holdings)
    _one_version(held)
    shards = {(each.shard_count, each.shard_index) for each in held}
    return bool(shards) and all(_span(shards, count) for count in rows)


def newest_covered(holdings: Iterable[Holding], rows: Iterable[int]) -> Version | None:
    """The newest version that is held completely."""
    counts = tuple(rows)
    by_version: dict[Version, list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_version[holding.version].append(holding)
    return next((version for version in sorted(by_version, reverse=True) if covered(by_version[version], counts)), None)


def missing(tensors: Iterable[Tensor], holders: Iterable[Holding], wanted: Iterable[Slice]) -> tuple[Slice, ...]:
    """The parts of ``wanted`` that none of ``holders`` has: they are left to the bucket."""
    held, by_name = list(holders), {(tensor.name, tensor.kind): tensor for tensor in tensors}
    _one_version(held)
    parts = []
    for part in wanted:
        pieces = _pieces(held, *_rows(by_name[part.name, part.kind], part))
        parts += [_cut(part, piece) for piece in pieces if not piece.holders]
    return tuple(parts)


def moves(tensors: Iterable[Tensor], holders: Iterable[Holding], layout: Layout, members: Sequence[WorkerId]) -> tuple[Move, ...]:
    """What brings every member's shard to the version of ``holders``: a member's moves are exactly its shard, each element once.

    What a member holds, it takes from itself.  What several others hold comes from the one with the least to send so far, large
    tensors first, so that replicas send equally much, give or take one part.  Raises ValueError for a part that nobody holds.
    """
    held = list(holders)
    _one_version(held)

    @cache
    def pieces(rows: int | None, first: int, last: int) -> list[Piece]:
        return _pieces(held, rows, first, last)

    sent_bytes: dict[WorkerId, int] = defaultdict(int)
    result = []
    for tensor in sorted(tensors, key=lambda each: (-nbytes(each, each.whole()), each)):
        for rank, member in enumerate(members):
            wanted = shard_slice(tensor, layout.dp_shard, layout.coordinates(rank)[1])
            for piece in pieces(*_rows(tensor, wanted)):
                move = Move(_cut(wanted, piece), _source(piece, member, wanted, sent_bytes), member)
                sent_bytes[move.source] += nbytes(tensor, move.slice) if move.source != member else 0
                result.append(move)
    return tuple(result)


def _source(piece: Piece, member: WorkerId, wanted: Slice, sent_bytes: dict[WorkerId, int]) -> WorkerId:
    if member in piece.holders:
        return member
    if not piece.holders:
        raise ValueError(f"{member} needs {_cut(wanted, piece)}, which nobody holds")
    return min(piece.holders, key=lambda worker: (sent_bytes[worker], worker))


def _span(shards: Iterable[tuple[int, int]], rows: int) -> bool:
    """Whether the shards leave no gap in ``rows``."""
    reach = 0
    for first, last in sorted(shard_interval(rows, count, index) for count, index in shards):
        if first > reach:
            return False
        reach = max(reach, last)
    return reach >= rows


def _pieces(held: Sequence[Holding], rows: int | None, first: int, last: int) -> list[Piece]:
    """Rows [first, last) of ``rows`` cut at the edges of the shards, so that a shard contains a piece or does not touch it."""
    if rows is None:
        return [Piece(None, tuple(sorted({each.worker for each in held})))] * (last - first)
    shards = [(*shard_interval(rows, each.shard_count, each.shard_index), each.worker) for each in held]
    inner = {edge for start, stop, _ in shards for edge in (start, stop) if first < edge < last}
    cuts = pairwise(sorted({first, last, *inner}))
    return [Piece((a, b), tuple(sorted({who for start, stop, who in shards if start <= a and b <= stop}))) for a, b in cuts]


def _rows(tensor: Tensor, part: Slice) -> tuple[int | None, int, int]:
    """(of how many rows, first, last).  What is whole in every shard counts as one row of None; an empty ``part`` has no rows."""
    if shard_slice(tensor, 2, 0) == shard_slice(tensor, 2, 1):
        return None, 0, min(part.count, 1)
    return tensor.shape[0], part.start[0], part.stop[0] if part.count else part.start[0]


def _cut(part: Slice, piece: Piece) -> Slice:
    if piece.rows is None:
        return part
    return Slice(part.name, part.kind, (piece.rows[0], *part.start[1:]), (piece.rows[1], *part.stop[1:]))


def _one_version(held: Iterable[Holding]) -> None:
    versions = {each.version for each in held}
    if len(versions) > 1:
        raise ValueError(f"holdings of {len(versions)} versions ({', '.join(map(str, sorted(versions)))}) are mixed")
