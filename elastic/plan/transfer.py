"""Computes which state is still held somewhere, and which holder sends which slice to which member.

A holding is one cell of the state: live in a worker, or a copy in the memory of a node's keeper.  Holdings of
one version may come from different layouts, because a world that broke while it healed holds cells of the old
layout and of the new one.  So coverage and transfer are arithmetic on boxes: a wanted box is cut at the edges
of the boxes that are held, and each piece is taken from a holder whose box contains it.

Everything is a pure function of its arguments and independent of the order of the holdings.  So all members
compute the same moves without talking to each other, and each computes only those in which it takes part.
The choice among equally near holders depends on the piece and its destination alone: the holders take turns
by the number of the tensor, the world rank of the destination and the number of the piece. So a receiver
finds its source by a division, and a source finds its receivers by one remainder: see :class:`_Takers`.
Tensors of equal shape that every axis cuts alike are cut at the same edges, so all of this is computed once
for them; each tensor only gives it a name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan import placement
from elastic.plan.layout import Layout
from elastic.plan.placement import Corners
from storage.slices import Slice, Tensor, nbytes

LIVE = NodeId("")
"""Stands in place of a keeper for state in the worker's own memory."""
SPLIT = 2**26
"""Size of a piece in bytes above which several equally near holders each send a part: 64 MiB take half a
second on a link of 1 Gb/s.
"""


@dataclass(frozen=True)
class Holding:
    """``worker`` holds the part of the state that ``cell`` names, at ``version``.

    With ``keeper`` = :data:`LIVE` it is in the worker itself; otherwise it is a copy in the memory of that
    node's keeper, which outlives the worker.
    """

    worker: WorkerId
    version: Version
    cell: Cell
    keeper: NodeId = LIVE


@dataclass(frozen=True)
class Move:
    """``source`` sends ``slice`` to ``destination``.  If both are the same worker, it copies from its own
    memory.

    With a ``keeper`` the slice comes from that keeper's copy of ``source``'s cell.  One box of a holding
    contains the whole slice.
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
    cells: frozenset[Cell]


# ---- coverage


def covered(holdings: Iterable[Holding], classes: Iterable[Tensor]) -> bool:
    """Returns whether the state is held completely.  ``classes`` has a tensor of each class
    (:func:`placement.classes_of`) at the degrees that the cells of a run may have.

    Raises ValueError if the holdings are of several versions: a mixture is no state.  All cells of a
    layout are the whole state, so only the cells that are absent from a layout are looked for in the others.
    """
    held = list(holdings)
    _one_version(held)
    absent = placement.absent(each.cell for each in held)
    if not (held and absent):
        return bool(held)
    geometry = _Geometry(held)
    known = placement.classes_of(classes, {each for degrees in geometry.degrees for each in degrees})
    return not any(True for cell in absent for _ in geometry.lacking(known, cell))


def newest_covered(holdings: Iterable[Holding], classes: Iterable[Tensor]) -> Version | None:
    """Returns the newest version that is held completely, or None."""
    known = tuple(classes)
    by_version: dict[Version, list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_version[holding.version].append(holding)
    return next(
        (version for version in sorted(by_version, reverse=True) if covered(by_version[version], known)), None
    )


def missing(tensors: Iterable[Tensor], holders: Iterable[Holding], cell: Cell) -> tuple[Slice, ...]:
    """Returns the slices of ``cell`` that none of ``holders`` has.  They are read from the bucket."""
    return tuple(_Geometry(holders).lacking(tensors, cell))


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

    A member receives exactly its cell, each element once.  ``nodes[i]`` is the node of ``members[i]``.  A
    member takes each piece from the nearest holder, in this order: its own live memory, a copy on its own
    node, a live member there, a live member on another node, another node's keeper.  Nodes that are equally
    near take turns, and so do the holders on each node.  A large piece is shared out among them.

    With ``partly`` the moves leave out the slices that nobody holds, which :func:`missing` names; without it,
    such a slice raises ValueError.  With ``of`` the result has only the moves to that member and from its
    live memory, in the same order; the time then depends on the number of these moves and of the holdings.
    """
    transfer = _Transfer(list(holders), layout, members, nodes)
    arriving = [rank for rank, member in enumerate(members) if of in (None, member)]
    result: list[Move] = []
    for number, tensor in enumerate(sorted(tensors, key=lambda each: (-nbytes(each, each.whole()), each))):
        found = [move for rank in arriving for move in transfer.into(rank, number, tensor, partly=partly)]
        if of is not None:
            found += transfer.out_of(of, number, tensor)
            found.sort(key=lambda each: each[0])
        result += [move for _, move in found]
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

    def lacking(self, tensors: Iterable[Tensor], cell: Cell) -> Iterator[Slice]:
        """Yields the slices of ``cell`` that nobody holds."""
        for tensor in tensors:
            for box in placement.held(tensor, cell).boxes:
                for piece in self.pieces(tensor, box.slice):
                    if not piece.cells:
                        yield _slice(tensor, piece)

    def pieces(self, tensor: Tensor, part: Slice) -> list[Piece]:
        """Returns ``part``, cut at the edges of the boxes that are held, so that each box contains a piece or
        does not touch it.
        """
        key = _geometry_of(tensor), part.start, part.stop
        if key not in self._known:
            self._known[key] = list(_cut_at_edges((part.start, part.stop), self._held(tensor, part)))
        return self._known[key]

    def _held(self, tensor: Tensor, part: Slice) -> list[tuple[Cell, Corners]]:
        """Returns what is held of ``part``: each cell, with the corners of what one of its boxes has."""
        found: list[tuple[Cell, Corners]] = []
        for degrees in self.degrees:
            for cell, its in placement.cells_meeting(tensor, part, degrees):
                if cell in self.by_cell:
                    boxes = (box.slice.intersect(part) for box in its.boxes)
                    found += [(cell, (box.start, box.stop)) for box in boxes if box is not None]
        return found


def _geometry_of(tensor: Tensor) -> Hashable:
    """Returns a value that is equal for tensors with equal boxes in every cell."""
    return placement.class_of(tensor), tensor.shape


def _cut_at_edges(whole: Corners, held: Sequence[tuple[Cell, Corners]], dim: int = 0) -> Iterator[Piece]:
    """Yields ``whole`` cut at the edges of the boxes inside it, from dimension ``dim`` on, in the order of
    the coordinates.
    """
    start, stop = whole
    if dim == len(start):
        yield Piece(whole, frozenset(cell for cell, _ in held))
        return
    edges = sorted({start[dim], stop[dim], *(corner[dim] for _, box in held for corner in box)})
    number = {edge: index for index, edge in enumerate(edges)}
    inside: list[list[tuple[Cell, Corners]]] = [[] for _ in edges[1:]]
    for cell, box in held:
        for index in range(number[box[0][dim]], number[box[1][dim]]):
            inside[index].append((cell, box))
    for (low, high), there in zip(pairwise(edges), inside, strict=True):
        part = (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :])
        yield from _cut_at_edges(part, there, dim + 1)


class _Nearest:
    """Finds the nearest holders among those of one piece, grouped by node.  Several holdings of a worker in
    one place count once.
    """

    def __init__(self, held: Iterable[Holding], place: Callable[[Holding], NodeId]) -> None:
        live: dict[NodeId, dict[WorkerId, Holding]] = defaultdict(dict)
        kept: dict[NodeId, dict[WorkerId, Holding]] = defaultdict(dict)
        for holding in sorted(held, key=lambda each: (each.worker, each.keeper, each.cell)):
            (kept if holding.keeper else live)[place(holding)].setdefault(holding.worker, holding)
        self.live = {worker: holding for there in live.values() for worker, holding in there.items()}
        self._near = {node: list(there.values()) for node, there in (live | kept).items()}
        self._far = [list(there.values()) for _, there in sorted((live or kept).items())]

        self._turns: dict[NodeId | None, dict[WorkerId, tuple[int, int]]] = {}

    def near(self, home: NodeId) -> NodeId | None:
        """Returns ``home``, the node of a member, if there are holders; None if all are on other nodes."""
        return home if home in self._near else None

    def on(self, node: NodeId | None) -> list[list[Holding]]:
        """Returns the holders on ``node``, or for None those that are nearest to members of all other nodes."""
        return self._far if node is None else [self._near[node]]

    def turn_of(self, source: WorkerId, node: NodeId | None) -> tuple[int, int] | None:
        """Returns (every, turn) if ``source`` is one of the live holders ``on(node)``: of ``every`` turns in
        a row, ``turn`` is its own.
        """
        if node not in self._turns:
            groups = self.on(node)
            self._turns[node] = {
                holding.worker: (len(groups) * len(there), group + len(groups) * number)
                for group, there in enumerate(groups)
                for number, holding in enumerate(there)
                if not holding.keeper
            }
        return self._turns[node].get(source)


@dataclass(frozen=True)
class _Takers:
    """Members that have the same nearest holders of a piece, as one of these holders sees them.

    Of ``every`` turns in a row, ``turn`` is the turn of this holder.  ``ranks`` has the members' world ranks
    by their remainder. ``holders`` is the number of nearest holders.
    """

    every: int
    turn: int
    holders: int
    ranks: dict[int, list[int]]

    def at(self, turn: int) -> Sequence[int]:
        """Returns the world ranks for which the sum of ``turn`` and the rank is a turn of this holder: see
        :func:`_holder`.
        """
        return self.ranks.get((self.turn - turn) % self.every, ())


def _holder(nearest: list[list[Holding]], turn: int) -> Holding:
    """Returns the holder whose turn it is: the nodes take turns, and the holders on each of them."""
    there = nearest[turn % len(nearest)]
    return there[turn // len(nearest) % len(there)]


Place = tuple[int, int, int]
"""Place of a move among those of one tensor: the world rank of its destination, the number of its piece, the
number of its share.
"""
Part = tuple[int, Piece]
"""A piece of a cell, and its number among the pieces that somebody holds."""


class _Transfer:
    """Computes the moves to one member, or from one, for one tensor after the other."""

    def __init__(
        self, holders: list[Holding], layout: Layout, members: Sequence[WorkerId], nodes: Sequence[NodeId]
    ) -> None:
        self.geometry = _Geometry(holders)
        self.layout, self.members = layout, members
        self.homes = dict(zip(members, nodes, strict=True)) if nodes else {}
        self.live: dict[WorkerId, set[Cell]] = defaultdict(set)
        """Maps each worker to the cells in its live memory."""
        for holding in holders:
            if not holding.keeper:
                self.live[holding.worker].add(holding.cell)
        self.degrees = placement.degrees_of(layout)
        self._parts: dict[tuple[Hashable, Cell], list[Part]] = {}
        self._leaving: dict[tuple[Hashable, WorkerId], list[tuple[Part, _Takers]]] = {}
        self._nearest: dict[frozenset[Cell], _Nearest] = {}

    @cached_property
    def wanting(self) -> dict[Cell, list[int]]:
        """Maps each cell to the world ranks of the members that have to receive it, because their live memory
        lacks it.
        """
        return {
            cell: [rank for rank in ranks if cell not in self.live.get(self.members[rank], ())]
            for cell, ranks in placement.distinct_cells(self.layout).items()
        }

    def into(self, rank: int, number: int, tensor: Tensor, *, partly: bool) -> Iterator[tuple[Place, Move]]:
        """Yields all moves to the member at ``rank`` for ``tensor``, which has this ``number`` among the
        tensors.
        """
        member = self.members[rank]
        for index, piece in self._parts_of(tensor, placement.cell_of(self.layout, rank)):
            part = _slice(tensor, piece)
            if piece.cells:
                nearest = self._nearest_to(member, piece.cells)
                for offset, share in enumerate(_shares(part, nbytes(tensor, part), sum(map(len, nearest)))):
                    holding = _holder(nearest, number + rank + index + offset)
                    yield (rank, index, offset), Move(share, holding.worker, member, holding.keeper)
            elif not partly:
                raise ValueError(f"{member} needs {part}, which nobody holds")

    def out_of(self, source: WorkerId, number: int, tensor: Tensor) -> Iterator[tuple[Place, Move]]:
        """Yields the moves of ``tensor`` from the live memory of ``source`` to other members."""
        key = _geometry_of(tensor), source
        if key not in self._leaving:
            self._leaving[key] = list(self._parts_from(tensor, source))
        for (index, piece), takers in self._leaving[key]:
            part = _slice(tensor, piece)
            for offset, share in enumerate(_shares(part, nbytes(tensor, part), takers.holders)):
                for rank in takers.at(number + index + offset):
                    yield (rank, index, offset), Move(share, source, self.members[rank])

    def _parts_of(self, tensor: Tensor, cell: Cell) -> list[Part]:
        """Returns the pieces of ``tensor`` that a member with ``cell`` holds, each with its number."""
        key = _geometry_of(tensor), cell
        if key not in self._parts:
            pieces = [
                piece
                for box in placement.held(tensor, cell).boxes
                for piece in self.geometry.pieces(tensor, box.slice)
            ]
            numbers = accumulate((bool(piece.cells) for piece in pieces), initial=0)
            self._parts[key] = list(zip(numbers, pieces, strict=False))
        return self._parts[key]

    def _parts_from(self, tensor: Tensor, source: WorkerId) -> Iterator[tuple[Part, _Takers]]:
        """Yields the pieces that ``source`` holds and other members want, each with those of them that have
        the same nearest holders.
        """
        own = self.live.get(source, set())
        boxes = [box.slice for cell in own for box in placement.held(tensor, cell).boxes]
        wanted = {
            cell
            for box in boxes
            for cell, _ in placement.cells_meeting(tensor, box, self.degrees)
            if self.wanting[cell]
        }
        ranks: dict[Part, list[int]] = defaultdict(list)
        for cell in wanted:
            for part in self._parts_of(tensor, cell):
                if not part[1].cells.isdisjoint(own):
                    ranks[part] += self.wanting[cell]
        for part, those in ranks.items():
            yield from ((part, takers) for takers in self._takers_of(source, part[1].cells, those))

    def _takers_of(self, source: WorkerId, cells: frozenset[Cell], ranks: Iterable[int]) -> Iterator[_Takers]:
        """Yields those at ``ranks`` that may take from ``source`` a piece that ``cells`` have, grouped by
        their nearest holders.
        """
        nearest, groups = self._among(cells), defaultdict[NodeId | None, list[int]](list)
        for rank in ranks:
            if self.members[rank] not in nearest.live:
                groups[nearest.near(self._home(self.members[rank]))].append(rank)
        for node, those in groups.items():
            if (found := nearest.turn_of(source, node)) is not None:
                by_rest: dict[int, list[int]] = defaultdict(list)
                for rank in those:
                    by_rest[rank % found[0]].append(rank)
                yield _Takers(*found, sum(map(len, nearest.on(node))), by_rest)

    def _nearest_to(self, member: WorkerId, cells: frozenset[Cell]) -> list[list[Holding]]:
        """Returns the holders of ``cells`` that are nearest to ``member``, grouped by node."""
        nearest = self._among(cells)
        own = nearest.live.get(member)
        return nearest.on(nearest.near(self._home(member))) if own is None else [[own]]

    def _among(self, cells: frozenset[Cell]) -> _Nearest:
        if cells not in self._nearest:
            self._nearest[cells] = _Nearest(
                (holding for cell in cells for holding in self.geometry.by_cell[cell]), self._place
            )
        return self._nearest[cells]

    def _place(self, holding: Holding) -> NodeId:
        return holding.keeper or self._home(holding.worker)

    def _home(self, worker: WorkerId) -> NodeId:
        return self.homes.get(worker, LIVE)


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
        raise ValueError(
            f"all holdings must have one version, but there are {', '.join(map(str, sorted(versions)))}"
        )
