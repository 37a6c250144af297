"""Which state is still held somewhere, and who sends which slice to whom.

A holding is one shard of every tensor, live in a worker or as a copy in the memory of a node's keeper.  Holdings of one version may
come from different layouts: a world that broke while it healed holds shards of the old and of the new.  So coverage and transfer are
interval arithmetic over rows: cut what is wanted at the edges of what is held, and take each piece from somebody whose shard contains
it.  Tensors with equal numbers of rows are cut alike, so the geometry is worked out once for each number of rows, not for each tensor.

Everything is a pure function of its arguments, in whatever order the holdings come: all members compute the same moves, and nobody
asks anybody for anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from storage.slices import Slice, Tensor, nbytes, shard_interval, shard_slice

LIVE = NodeId("")
"""In the place of a keeper: in the worker's own memory."""


@dataclass(frozen=True)
class Holding:
    """``worker`` holds shard ``shard_index`` of ``shard_count`` of every tensor, at ``version``.

    ``keeper`` :data:`LIVE`: in the worker itself; else as a copy in the memory of that node's keeper, which outlives the worker.
    """

    worker: WorkerId
    version: Version
    shard_count: int
    shard_index: int
    keeper: NodeId = LIVE


@dataclass(frozen=True)
class Move:
    """``source`` sends ``slice`` to ``destination``; where they are the same worker, it copies from its own memory.

    With ``keeper`` it comes from the copy of ``source``'s shard there, whoever the destination is.  One holding contains the whole slice.
    """

    slice: Slice
    source: WorkerId
    destination: WorkerId
    keeper: NodeId = LIVE

    @property
    def stays(self) -> bool:
        """The destination has it in its own live memory."""
        return self.source == self.destination and not self.keeper


Holder = tuple[WorkerId, NodeId]
"""Whose shard, and the keeper that has the copy of it (:data:`LIVE`: nobody)."""


@dataclass(frozen=True)
class Piece:
    """Rows ``rows[0] <= row < rows[1]``, all in the shard of each of ``holders``.  None: all of a tensor that no shard divides."""

    rows: tuple[int, int] | None
    holders: tuple[Holder, ...]


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


def moves(
    tensors: Iterable[Tensor],
    holders: Iterable[Holding],
    layout: Layout,
    members: Sequence[WorkerId],
    nodes: Sequence[NodeId] = (),
    *,
    partly: bool = False,
) -> tuple[Move, ...]:
    """What brings every member's shard to the version of ``holders``: a member's moves are exactly its shard, each element once.

    ``nodes[i]`` is where ``members[i]`` runs.  A member takes from its own live memory what is there, else from a copy on its own node,
    else from a live member there, else from one on another node, else from another node's keeper.  Of several it is the one whose link, and
    then who itself, has the least to send so far, large tensors first, so that equals send equally much, give or take one part.
    ``partly``: what nobody holds is left out, for :func:`missing` to name; otherwise it raises ValueError.
    """
    held = list(holders)
    _one_version(held)

    @cache
    def pieces(rows: int | None, first: int, last: int) -> list[Piece]:
        return _pieces(held, rows, first, last)

    sent = _Sent()
    homes = dict(zip(members, nodes, strict=True)) if nodes else {}
    result = []
    for tensor in sorted(tensors, key=lambda each: (-nbytes(each, each.whole()), each)):
        for rank, member in enumerate(members):
            wanted = shard_slice(tensor, layout.dp_shard, layout.coordinates(rank)[1])
            for piece in pieces(*_rows(tensor, wanted)):
                if piece.holders:
                    source, keeper = sent.nearest(piece.holders, member, homes)
                    result.append(Move(_cut(wanted, piece), source, member, keeper))
                    sent.note(result[-1], homes, nbytes(tensor, result[-1].slice))
                elif not partly:
                    raise ValueError(f"{member} needs {_cut(wanted, piece)}, which nobody holds")
    return tuple(result)


class _Sent:
    """Bytes that each worker or keeper is to send so far, and each node over its link to others, which all who are there share."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = defaultdict(int)

    def nearest(self, holders: Iterable[Holder], member: WorkerId, homes: Mapping[WorkerId, NodeId]) -> Holder:
        """The best of ``holders`` for ``member``."""
        home = homes.get(member, LIVE)

        def cost(holder: Holder) -> tuple[int, int, int, Holder]:
            worker, keeper = holder
            there = keeper or homes.get(worker, LIVE)
            distance = (1 if there == home else 4) if keeper else (2 if there == home else 3)
            link = self.bytes[f"link of {there}"] if there != home else 0
            return 0 if holder == (member, LIVE) else distance, link, self.bytes[keeper or worker], holder

        return min(holders, key=cost)

    def note(self, move: Move, homes: Mapping[WorkerId, NodeId], size: int) -> None:
        if move.stays:
            return
        there = move.keeper or homes.get(move.source, LIVE)
        self.bytes[move.keeper or move.source] += size
        if there != homes.get(move.destination, LIVE):
            self.bytes[f"link of {there}"] += size


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
        return [Piece(None, tuple(sorted({(each.worker, each.keeper) for each in held})))] * (last - first)
    shards = [(*shard_interval(rows, each.shard_count, each.shard_index), (each.worker, each.keeper)) for each in held]
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
