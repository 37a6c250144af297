"""Computes which state is still held somewhere, and which holder sends which slice to which member.

A holding is one cell of the state: live in a worker, or a copy in the memory of a node's keeper.  Holdings of one version may come from
different layouts, because a world that broke while it healed holds cells of the old layout and of the new one.  So coverage and transfer
are arithmetic on boxes: a wanted box is cut at the edges of the boxes that are held, and each piece is taken from a holder whose box
contains it.  Tensors of equal shape that every axis cuts alike are cut at the same edges, so their geometry is computed once.

Everything is a pure function of its arguments and independent of the order of the holdings.  So all members compute the same moves without
talking to each other.  The choice among equally near holders depends only on the piece and its destination, not on earlier choices, so one
member can compute its own moves and leave out those of all others.
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
"""Stands in place of a keeper for state in the worker's own memory."""
SPLIT = 2**26
"""Size of a piece in bytes above which several equally near holders each send a part: 64 MiB take half a second on a link of 1 Gb/s."""


@dataclass(frozen=True)
class Holding:
    """``worker`` holds the part of the state that ``cell`` names, at ``version``.

    With ``keeper`` = :data:`LIVE` it is in the worker itself; otherwise it is a copy in the memory of that node's keeper, which
    outlives the worker.
    """

    worker: WorkerId
    version: Version
    cell: Cell
    keeper: NodeId = LIVE


@dataclass(frozen=True)
class Move:
    """``source`` sends ``slice`` to ``destination``.  If both are the same worker, it copies from its own memory.

    With a ``keeper`` the slice comes from that keeper's copy of ``source``'s cell.  One box of a holding contains the whole slice.
    """

    slice: Slice
    source: WorkerId
    destination: WorkerId
    keeper: NodeId = LIVE

    @property
    def stays(self) -> bool:
        """True if the destination has the slice in its own live memory."""
        return self.source == self.destination and not self.keeper


@dataclass(frozen=True)
class Piece:
    """A part of a wanted box.  Each of ``cells`` has all of it in one box.  Without cells nobody holds it."""

    corners: Corners
    cells: tuple[Cell, ...]


# ---- coverage


def covered(holdings: Iterable[Holding], classes: Iterable[Tensor]) -> bool:
    """Returns whether the state is held completely.  ``classes`` has a tensor of each class (:func:`placement.classes_of`).

    Raises ValueError if the holdings are of several versions: a mixture is no state.
    """
    held = list(holdings)
    _one_version(held)
    cells = {each.cell for each in held}
    return bool(cells) and all(placement.covered(cells, tensor) for tensor in classes)


def newest_covered(holdings: Iterable[Holding], classes: Iterable[Tensor]) -> Version | None:
    """Returns the newest version that is held completely, or None."""
    known = tuple(classes)
    by_version: dict[Version, list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_version[holding.version].append(holding)
    return next((version for version in sorted(by_version, reverse=True) if covered(by_version[version], known)), None)


def missing(tensors: Iterable[Tensor], holders: Iterable[Holding], cell: Cell) -> tuple[Slice, ...]:
    """Returns the slices of ``cell`` that none of ``holders`` has.  They are read from the bucket."""
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
    """Returns the moves that bring every member's cell to the version of ``holders``.

    A member receives exactly its cell, each element once.  ``nodes[i]`` is the node of ``members[i]``.  A member takes each piece from the
    nearest holder, in this order: its own live memory, a copy on its own node, a live member there, a live member on another node, another
    node's keeper.  Nodes that are equally near take turns, and so do the holders on each node.  A large piece is shared out among them.

    With ``partly`` the moves leave out the slices that nobody holds, which :func:`missing` names; without it, such a slice raises
    ValueError.  With ``of`` the result has only the moves to that member and from its live memory, in the same order.
    """
    transfer = _Transfer(list(holders), layout, members, nodes)
    own = transfer.own_cells(of)
    result = []
    for number, tensor in enumerate(sorted(tensors, key=lambda each: (-nbytes(each, each.whole()), each))):
        for rank in transfer.destinations(tensor, of, own):
            found = transfer.into(rank, number, tensor, partly=partly)
            result += [move for move in found if of is None or of == move.destination or (of == move.source and not move.keeper)]
    return tuple(result)


def reads_copies(moves: Iterable[Move], worker: WorkerId) -> bool:
    """Returns whether ``worker`` takes any slice from a keeper's copy."""
    return any(move.keeper and move.destination == worker for move in moves)


class _Geometry:
    """Knows the holdings by cell, and cuts boxes at the edges of what is held."""

    def __init__(self, holders: Iterable[Holding]) -> None:
        self.by_cell: dict[Cell, list[Holding]] = defaultdict(list)
        for holding in holders:
            self.by_cell[holding.cell].append(holding)
        _one_version([holding for held in self.by_cell.values() for holding in held])
        self.degrees = {placement.degrees_in(cell) for cell in self.by_cell}
        self._known: dict[Hashable, list[Piece]] = {}

    def pieces(self, tensor: Tensor, part: Slice) -> list[Piece]:
        """Returns ``part``, cut at the edges of the boxes that are held, so that each box contains a piece or does not touch it."""
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
    """Yields ``whole``, which contains ``boxes``, cut at all of their edges."""
    start, stop = whole
    edges = [sorted({a, b, *(corner[dim] for box in boxes for corner in box)}) for dim, (a, b) in enumerate(zip(start, stop, strict=True))]
    for intervals in product(*(list(pairwise(each)) for each in edges)):
        yield tuple(a for a, _ in intervals), tuple(b for _, b in intervals)


def _contains(outer: Corners, inner: Corners) -> bool:
    return all(a <= b for a, b in zip(outer[0], inner[0], strict=True)) and all(a >= b for a, b in zip(outer[1], inner[1], strict=True))


class _Transfer:
    """Computes the moves, one destination after the other."""

    def __init__(self, holders: list[Holding], layout: Layout, members: Sequence[WorkerId], nodes: Sequence[NodeId]) -> None:
        self.geometry = _Geometry(holders)
        self.members = members
        self.homes = dict(zip(members, nodes, strict=True)) if nodes else {}
        self.cells = [placement.cell_of(layout, rank) for rank in range(len(members))]
        live = {(each.worker, each.cell) for held in self.geometry.by_cell.values() for each in held if not each.keeper}
        self.wanting = {
            cell: [rank for rank in ranks if (members[rank], cell) not in live] for cell, ranks in placement.distinct_cells(layout).items()
        }
        """Maps each cell to the world ranks of the members that have to receive it, because their live memory lacks it."""
        self.degrees = placement.degrees_of(layout)
        self._nearest: dict[tuple[int, tuple[Cell, ...]], list[list[Holding]]] = {}

    def own_cells(self, of: WorkerId | None) -> list[Cell]:
        """Returns the cells that ``of`` holds in its live memory."""
        return [cell for cell, held in self.geometry.by_cell.items() if any(each.worker == of and not each.keeper for each in held)]

    def destinations(self, tensor: Tensor, of: WorkerId | None, own: Collection[Cell]) -> Collection[int]:
        """Returns world ranks in order: all of them, or only that of ``of`` and those to which it may send a part of ``tensor``.

        ``own``: the cells of ``of``.  A member that already holds its cell takes nothing from others.
        """
        if of is None:
            return range(len(self.members))
        found = {self.members.index(of)} if of in self.members else set()
        for box in (box for cell in own for box in placement.held(tensor, cell).boxes):
            for cell in placement.cells_meeting(tensor, box.slice, self.degrees):
                found.update(self.wanting[cell])
        return sorted(found)

    def into(self, rank: int, number: int, tensor: Tensor, *, partly: bool) -> Iterator[Move]:
        """Yields all moves to the member at ``rank`` for ``tensor``, which has this ``number`` among the tensors."""
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
        """Returns the nearest holders of ``cells``, grouped by node."""
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
    """Cuts a large ``part`` along dimension 0, so that several holders each send a share."""
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
        raise ValueError(f"all holdings must have one version, but there are {', '.join(map(str, sorted(versions)))}")
