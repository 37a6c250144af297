"""Which state is still held somewhere, and who sends which slice to whom.

A holding is one cell of the state, live in a worker or as a copy in the memory of a node's keeper.  Holdings of one version may come from
different layouts: a world that broke while it healed holds cells of the old and of the new.  So coverage and transfer are arithmetic on
boxes: cut what is wanted at the edges of what is held, and take each piece from somebody whose box contains it.  Tensors of equal shape
that every axis cuts alike are cut at the same edges, so the geometry is worked out once for all of them.

Everything is a pure function of its arguments, in whatever order the holdings come: all members compute the same moves, and nobody asks
anybody for anything.  Which of several equal holders sends a piece depends on the piece and its destination alone, not on what was given
to the others before; so one member can work out its own moves and leave out those of all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil

from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan import placement
from elastic.plan.layout import Layout
from elastic.plan.placement import Corners
from storage.slices import Slice, Tensor, nbytes

LIVE = NodeId("")
"""In the place of a keeper: in the worker's own memory."""
SPLIT = 2**26
"""Bytes of a piece above which several equal holders each send a part of it."""


@dataclass(frozen=True)
class Holding:
    """``worker`` holds the part of the state that ``cell`` names, at ``version``.

    ``keeper`` :data:`LIVE`: in the worker itself; else as a copy in the memory of that node's keeper, which outlives the worker.
    """

    worker: WorkerId
    version: Version
    cell: Cell
    keeper: NodeId = LIVE


@dataclass(frozen=True)
class Move:
    """``source`` sends ``slice`` to ``destination``; where they are the same worker, it copies from its own memory.

    With ``keeper`` it comes from the copy of ``source``'s cell there, whoever the destination is.  One box of a holding contains it whole.
    """

    slice: Slice
    source: WorkerId
    destination: WorkerId
    keeper: NodeId = LIVE

    @property
    def stays(self) -> bool:
        """True where the destination has it in its own live memory."""
        return self.source == self.destination and not self.keeper


@dataclass(frozen=True)
class Piece:
    """A part of a wanted box; each of ``cells`` has all of it in one of its boxes.  No cells: nobody holds it."""

    corners: Corners
    cells: tuple[Cell, ...]


# ---- coverage


def covered(holdings: Iterable[Holding], classes: Iterable[Tensor]) -> bool:
    """Return whether the state is held completely.  ``classes``: a tensor of each class (:func:`placement.classes_of`).

    All holdings must be of one version: a mixture is no state, and raises ValueError.
    """
    held = list(holdings)
    _one_version(held)
    cells = {each.cell for each in held}
    return bool(cells) and all(placement.covered(cells, tensor) for tensor in classes)


def newest_covered(holdings: Iterable[Holding], classes: Iterable[Tensor]) -> Version | None:
    """Return the newest version that is held completely."""
    known = tuple(classes)
    by_version: dict[Version, list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_version[holding.version].append(holding)
    return next((version for version in sorted(by_version, reverse=True) if covered(by_version[version], known)), None)


def missing(tensors: Iterable[Tensor], holders: Iterable[Holding], cell: Cell) -> tuple[Slice, ...]:
    """Return the slices of ``cell`` that none of ``holders`` has: they are left to the bucket."""
    geometry = _Geometry(holders)
    wanted = ((tensor, box.slice) for tensor in tensors for box in placement.held(tensor, cell).boxes)
    return tuple(_slice(tensor, piece) for tensor, part in wanted for piece in geometry.pieces(tensor, part) if not piece.cells)


# ---- moves


def moves(
    tensors: Iterable[Tensor],
    holders: Iterable[Holding],
    layout: Layout,
    members: Sequence[WorkerId],
    nodes: Sequence[NodeId] = (),
    *,
    partly: bool = False,
    of: WorkerId | None = None,
) -> tuple[Move, ...]:
    """Return what brings every member's cell to the version of ``holders``: what a member receives is exactly its cell, each element once.

    ``nodes[i]`` is where ``members[i]`` runs.  A member takes from its own live memory what is there, else from a copy on its own node,
    else from a live member there, else from one on another node, else from another node's keeper.  Of several that are equally near, nodes
    take turns, and on each node those who are there; a large piece is shared out among them.
    ``partly``: what nobody holds is left out, for :func:`missing` to name; otherwise it raises ValueError.
    ``of``: only the moves that this member takes part in, in the same order: those to it, and those from its live memory.
    """
    transfer = _Transfer(list(holders), layout, members, nodes)
    result = []
    for number, tensor in enumerate(sorted(tensors, key=lambda each: (-nbytes(each, each.whole()), each))):
        for rank in transfer.destinations(tensor, of):
            found = transfer.into(rank, number, tensor, partly=partly)
            result += [move for move in found if of is None or of == move.destination or (of == move.source and not move.keeper)]
    return tuple(result)


class _Geometry:
    """What is held, by cell."""

    def __init__(self, holders: Iterable[Holding]) -> None:
        self.by_cell: dict[Cell, list[Holding]] = defaultdict(list)
        for holding in holders:
            self.by_cell[holding.cell].append(holding)
        _one_version([holding for held in self.by_cell.values() for holding in held])
        self.degrees = {placement.degrees_in(cell) for cell in self.by_cell}
        self._known: dict[Hashable, list[Piece]] = {}

    def pieces(self, tensor: Tensor, part: Slice) -> list[Piece]:
        """``part`` cut at the edges of the boxes that are held, so that a box contains a piece or does not touch it."""
        key = placement.key_of(tensor), tensor.shape, part.start, part.stop
        if key not in self._known:
            self._known[key] = self._cut(tensor, part)
        return self._known[key]

    def _cut(self, tensor: Tensor, part: Slice) -> list[Piece]:
        held: list[tuple[Cell, Corners]] = []
        for degrees in self.degrees:
            for cell in placement.cells_meeting(tensor, part, degrees):
                if cell in self.by_cell:
                    boxes = (box.slice.intersect(part) for box in placement.held(tensor, cell).boxes)
                    held += [(cell, (box.start, box.stop)) for box in boxes if box is not None]
        corners = [corners for _, corners in held]
        pieces = []
        for box in grid((part.start, part.stop), corners):
            pieces.append(Piece(box, tuple(sorted({cell for cell, other in held if _contains(other, box)}))))
        return pieces


def grid(whole: Corners, boxes: Sequence[Corners]) -> Iterator[Corners]:
    """Yield ``whole``, which contains ``boxes``, cut at all of their edges."""
    start, stop = whole
    edges = [sorted({a, b, *(corner[dim] for box in boxes for corner in box)}) for dim, (a, b) in enumerate(zip(start, stop, strict=True))]
    for intervals in product(*(list(pairwise(each)) for each in edges)):
        yield tuple(a for a, _ in intervals), tuple(b for _, b in intervals)


def _contains(outer: Corners, inner: Corners) -> bool:
    return all(a <= b for a, b in zip(outer[0], inner[0], strict=True)) and all(a >= b for a, b in zip(outer[1], inner[1], strict=True))


class _Transfer:
    """Who sends what to whom, destination by destination."""

    def __init__(self, holders: list[Holding], layout: Layout, members: Sequence[WorkerId], nodes: Sequence[NodeId]) -> None:
        self.geometry = _Geometry(holders)
        self.members = members
        self.homes = dict(zip(members, nodes, strict=True)) if nodes else {}
        self.cells = [placement.cell_of(layout, rank) for rank in range(len(members))]
        self.ranks = placement.distinct_cells(layout)
        self.degrees = placement.degrees_of(layout)
        self._nearest: dict[tuple[int, tuple[Cell, ...]], list[list[Holding]]] = {}

    def destinations(self, tensor: Tensor, of: WorkerId | None) -> Collection[int]:
        """World ranks in order: all, or those that ``of`` may have to send something of ``tensor`` to, and its own."""
        if of is None:
            return range(len(self.members))
        found = {self.members.index(of)} if of in self.members else set()
        own = {cell for cell, held in self.geometry.by_cell.items() if any(each.worker == of and not each.keeper for each in held)}
        for box in (box for cell in own for box in placement.held(tensor, cell).boxes):
            for cell in placement.cells_meeting(tensor, box.slice, self.degrees):
                found.update(self.ranks[cell])
        return sorted(found)

    def into(self, rank: int, number: int, tensor: Tensor, *, partly: bool) -> Iterator[Move]:
        """All that the member at ``rank`` receives of the ``number``-th tensor."""
        turn, member = number + rank, self.members[rank]
        for box in placement.held(tensor, self.cells[rank]).boxes:
            for piece in self.geometry.pieces(tensor, box.slice):
                if piece.cells:
                    yield from self._taken(tensor, piece, rank, turn)
                    turn += 1
                elif not partly:
                    raise ValueError(f"{member} needs {_slice(tensor, piece)}, which nobody holds")

    def _taken(self, tensor: Tensor, piece: Piece, rank: int, turn: int) -> Iterator[Move]:
        part, nearest = _slice(tensor, piece), self._equals(rank, piece.cells)
        for offset, share in enumerate(_shares(part, nbytes(tensor, part), sum(map(len, nearest)))):
            at = turn + offset
            there = nearest[at % len(nearest)]
            holding = there[at // len(nearest) % len(there)]
            yield Move(share, holding.worker, self.members[rank], holding.keeper)

    def _equals(self, rank: int, cells: tuple[Cell, ...]) -> list[list[Holding]]:
        """The nearest of those who hold ``cells``, by node."""
        if (rank, cells) not in self._nearest:
            member = self.members[rank]
            held = [holding for cell in cells for holding in self.geometry.by_cell[cell]]
            least = min(self._distance(holding, member) for holding in held)
            by_node: dict[str, dict[tuple[WorkerId, NodeId], Holding]] = defaultdict(dict)
            for holding in sorted(held, key=lambda each: (each.worker, each.keeper, each.cell)):
                if self._distance(holding, member) == least:
                    by_node[self._place(holding)].setdefault((holding.worker, holding.keeper), holding)
            self._nearest[rank, cells] = [list(by_node[node].values()) for node in sorted(by_node)]
        return self._nearest[rank, cells]

    def _place(self, holding: Holding) -> NodeId:
        return holding.keeper or self.homes.get(holding.worker, LIVE)

    def _distance(self, holding: Holding, member: WorkerId) -> int:
        if holding.worker == member and not holding.keeper:
            return 0
        near = self._place(holding) == self.homes.get(member, LIVE)
        return (1 if near else 4) if holding.keeper else (2 if near else 3)


def _shares(part: Slice, size: int, holders: int) -> Iterator[Slice]:
    """Cut a large ``part`` along dimension 0, so that several of its holders send some of it."""
    ways = min(holders, ceil(size / SPLIT), part.shape[0]) if part.start else 1
    first, *start = part.start or (0,)
    for way in range(ways):
        if ways == 1:
            yield part
            return
        low, high = (first + part.shape[0] * each // ways for each in (way, way + 1))
        yield Slice(part.name, part.kind, (low, *start), (high, *part.stop[1:]))


def _slice(tensor: Tensor, piece: Piece) -> Slice:
    return Slice(tensor.name, tensor.kind, *piece.corners)


def _one_version(held: Iterable[Holding]) -> None:
    versions = {each.version for each in held}
    if len(versions) > 1:
        raise ValueError(f"holdings of {len(versions)} versions ({', '.join(map(str, sorted(versions)))}) are mixed")
