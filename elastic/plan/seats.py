"""Seats workers on the cells of a layout, so that a replica's shards lie on one node and few of them move.

Three wishes, the first before the second before the third:

1. As many replicas as possible lie within one node.  Members of one replica exchange every weight in every
   step, and a node that is lost breaks only the replicas that have members there.  Of a replica over several
   nodes, as many as possible of its *blocks* lie within one node: the shards of one pipeline stage, then the
   members that compute one microbatch of a stage together, then the tensor groups, whose members exchange
   activations in every layer.  Larger blocks consist of whole smaller ones, so as many tensor groups lie
   within nodes as the nodes have room for.
2. A worker that holds a cell keeps it.  A cell is the same in all replicas, so a node needs each cell as
   often as it has replicas, and it does not matter in which of them a worker sits.  Where a replica or a
   block comes into one node its members move once: the bytes of one healing, against bytes between nodes in
   every step.  Which block a node gets is decided by the cells that it keeps: the block of which a node keeps
   most comes first.
3. A worker that must take another cell takes one near to what it holds: both are put in the order of the
   rows.

Workers that are left over on their nodes form replicas and blocks over several nodes, node by node, those
with most left first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul

from elastic.ids import Cell, NodeId, WorkerId
from elastic.plan.layout import REPLICAS, Layout
from elastic.plan.placement import cell_of, middle_of
from elastic.plan.transfer import Holding

Replica = list[WorkerId]
"""The members of one replica, by the number of their seat."""
Point = tuple[tuple[str, float], ...]
"""A place in the state: see :func:`placement.middle_of`."""


def seat(
    there: Sequence[WorkerId],
    nodes: Mapping[WorkerId, NodeId],
    layout: Layout,
    holders: Iterable[Holding] = (),
) -> tuple[WorkerId, ...]:
    """Returns the members of ``layout``, by world rank, out of the workers ``there``; of equal ones, the
    first.

    ``nodes`` has the node of each worker.  ``holders`` hold the version from which the members begin.  The
    replicas are in the order of their first worker ``there``.  The time is linear in the workers, apart from
    sorting.
    """
    order = {worker: number for number, worker in enumerate(there)}
    hall = _Hall(there, nodes, layout, holders)
    by_node: dict[NodeId, list[WorkerId]] = defaultdict(list)
    for worker in there:
        by_node[nodes[worker]].append(worker)
    replicas, left = list[Replica](), list[list[WorkerId]]()
    for node, count in hall.room(by_node).items():
        inside, over = hall.fill(by_node[node], [range(hall.size)] * count)
        replicas += inside
        left.append(over)
    across = hall.across(left, layout.replicas - len(replicas))
    replicas = sorted([*replicas, *across], key=lambda each: min(order[worker] for worker in each))
    seats = {
        rank: worker
        for ranks, members in zip(hall.ranks, zip(*replicas, strict=True), strict=True)
        for rank, worker in zip(ranks, members, strict=True)
    }
    return tuple(seats[rank] for rank in range(layout.world))


class _Hall:
    """Knows the shards of one replica, and which of them each worker holds."""

    def __init__(
        self,
        there: Sequence[WorkerId],
        nodes: Mapping[WorkerId, NodeId],
        layout: Layout,
        holders: Iterable[Holding],
    ) -> None:
        self.ranks = [layout.replica_ranks(rank) for rank in layout.replica(0)]
        """The world ranks of each seat of a replica, in the order of replicas."""
        self.replicas, self.size = layout.replicas, len(self.ranks)
        degrees = [degree for name, degree in reversed(layout.degrees) if name not in REPLICAS]
        self.blocks = sorted(set(accumulate(degrees, mul)) - {1, self.size}, reverse=True)
        """The sizes of the blocks of a replica, the largest first.  A block has seats with neighbouring
        numbers.
        """
        cells = [cell_of(layout, ranks[0]) for ranks in self.ranks]
        self.places = [middle_of(cell) for cell in cells]
        number_of = dict[Cell, int]()
        self.first = [number_of.setdefault(cell, number) for number, cell in enumerate(cells)]
        """The first seat with an equal cell, of each seat: along some axes members hold the same part, and
        each of them may sit on any of these seats.
        """
        self.alike = Counter(self.first)
        """The number of seats that have equal cells, by the first of them."""
        self.own: dict[WorkerId, int] = {}
        """The first seat with the cell that each worker holds; for a worker that holds nothing, with a cell
        that on its node only the keeper holds.
        """
        self.middle: dict[WorkerId, Point] = {}
        """The place of what each worker holds, of whatever layout."""
        kept: dict[NodeId, list[int]] = defaultdict(list)
        for holding in sorted(holders, key=lambda each: (each.worker, each.cell)):
            seat = number_of.get(holding.cell)
            if holding.keeper and seat is not None:
                kept[holding.keeper].append(seat)
            elif not holding.keeper and holding.worker in nodes:
                self.middle.setdefault(holding.worker, middle_of(holding.cell))
                if seat is not None:
                    self.own.setdefault(holding.worker, seat)
        self._give_copies(there, nodes, kept)

    def _give_copies(
        self, there: Sequence[WorkerId], nodes: Mapping[WorkerId, NodeId], kept: Mapping[NodeId, list[int]]
    ) -> None:
        """Takes workers that hold nothing for holders of the copies that the dead have left on their nodes."""
        live: dict[NodeId, set[int]] = defaultdict(set)
        for worker, number in self.own.items():
            live[nodes[worker]].add(number)
        copies = {node: sorted(set(numbers) - live[node], reverse=True) for node, numbers in kept.items()}
        for worker in there:
            if worker not in self.middle and (found := copies.get(nodes[worker])):
                self.own[worker] = found.pop()

    def room(self, by_node: Mapping[NodeId, Sequence[WorkerId]]) -> dict[NodeId, int]:
        """Returns how many replicas each node gets for itself: as many as it has workers for.

        If that is more than there are replicas, those come first that keep most cells; a node's next replica
        keeps no more than the one before it.
        """
        wishes = []
        for place, (node, workers) in enumerate(by_node.items()):
            copies = Counter(self.own[worker] for worker in workers if worker in self.own)
            for number in range(len(workers) // self.size):
                kept = sum(self._kept(copies[seat], seat, number) for seat in copies)
                wishes.append((-kept, place, number, node))
        chosen = Counter(node for *_, node in sorted(wishes)[: self.replicas])
        return {node: chosen[node] for node in by_node}

    def _kept(self, copies: int, seat: int, number: int) -> int:
        """Returns how many of the holders of a cell keep it in replica ``number`` of their node, if all
        before it have as many as they can.
        """
        return min(max(copies - number * self.alike[seat], 0), self.alike[seat])

    def across(self, left: Sequence[list[WorkerId]], count: int) -> list[Replica]:
        """Returns ``count`` replicas over several nodes, of the workers ``left`` on each node."""
        found: list[list[WorkerId | None]] = [[None] * self.size for _ in range(count)]
        for block in self.blocks if count else ():
            left = self._seat_blocks(block, found, left)
        empty = [[number for number, worker in enumerate(replica) if worker is None] for replica in found]
        by_size = [worker for over in sorted(left, key=len, reverse=True) for worker in over]
        for replica, numbers, members in zip(found, empty, self.fill(by_size, empty)[0], strict=True):
            for number, worker in zip(numbers, members, strict=True):
                replica[number] = worker
        return [[worker for worker in replica if worker is not None] for replica in found]

    def _seat_blocks(
        self, block: int, replicas: Sequence[list[WorkerId | None]], left: Sequence[list[WorkerId]]
    ) -> list[list[WorkerId]]:
        """Seats as many blocks as possible within nodes, and returns the workers that are left on each node.

        Each block lies on the node that keeps most of its cells, as long as there is room.  The others come
        near to what their workers hold.
        """
        open_ = defaultdict[int, list[int]](list)
        for row, replica in enumerate(replicas):
            for first in range(0, self.size, block):
                if replica[first] is None:
                    open_[first].append(row)
        left = [*left]

        def sit(place: int, workers: Sequence[WorkerId], row: int, first: int) -> None:
            (members,), _ = self.fill(workers, [range(first, first + block)])
            replicas[row][first : first + block] = members
            left[place] = [worker for worker in left[place] if worker not in members]

        for _, place, _, first in sorted(self._wishes(block, left)):
            if len(left[place]) >= block and open_[first]:
                sit(place, left[place], open_[first].pop(0), first)
        parties = [
            (place, party) for place, workers in enumerate(left) for party in self._parties(workers, block)
        ]
        held = {self.own[worker] for workers in left for worker in workers if worker in self.own}
        free = [(row, first) for first, rows in open_.items() for row in rows]
        free.sort(key=lambda at: (sum(seat in held for seat in range(at[1], at[1] + block)), at))
        free, parties = sorted(free[: len(parties)]), parties[: len(free)]
        places = [self.places[first + block // 2] for _, first in free]
        middles = [self.middle.get(party[block // 2]) for _, party in parties]
        for at, number in _paired(places, middles):
            sit(*parties[number], *free[at])
        return left

    def _wishes(self, block: int, left: Sequence[Sequence[WorkerId]]) -> Iterator[tuple[int, int, int, int]]:
        """Yields (-cells that it keeps, place of the node, number on the node, first seat) of each block of
        which workers of a node hold cells.
        """
        for place, workers in enumerate(left):
            by_block = defaultdict[int, Counter[int]](Counter)
            for worker in workers:
                if (seat := self.own.get(worker)) is not None:
                    by_block[seat // block * block][seat] += 1
            for first, copies in by_block.items():
                for number in range(len(workers) // block):
                    if kept := sum(self._kept(count, seat, number) for seat, count in copies.items()):
                        yield -kept, place, number, first

    def _parties(self, workers: Sequence[WorkerId], block: int) -> list[list[WorkerId]]:
        """Returns the workers of a node in parties of ``block``, so that each has neighbours in the state;
        fewer workers are left out.
        """
        holding = sorted((each for each in workers if each in self.middle), key=self.middle.__getitem__)
        everyone = holding + [each for each in workers if each not in self.middle]
        return [everyone[at : at + block] for at in range(0, len(everyone) - block + 1, block)]

    def fill(
        self, workers: Sequence[WorkerId], rows: Sequence[Sequence[int]]
    ) -> tuple[list[list[WorkerId]], list[WorkerId]]:
        """Seats workers on ``rows``, each of which has the numbers of seats of one replica.  Returns the
        members of each row, and the workers that are left over.
        """
        where = defaultdict[int, list[tuple[int, int]]](list)
        for row, numbers in enumerate(rows):
            for place, number in enumerate(numbers):
                where[self.first[number]].append((row, place))
        free = {number: iter(places) for number, places in where.items()}
        seats: list[list[WorkerId | None]] = [[None] * len(numbers) for numbers in rows]
        others, surplus, sitting = list[WorkerId](), list[WorkerId](), set[WorkerId]()
        for worker in workers:
            number = self.own.get(worker, -1)
            if number < 0:
                others.append(worker)
            elif (seat := next(free.get(number, iter(())), None)) is None:
                surplus.append(worker)
            else:
                seats[seat[0]][seat[1]] = worker
                sitting.add(worker)
        others.sort(key=lambda worker: worker not in self.middle)
        chosen = set((others + surplus)[: sum(map(len, rows)) - len(sitting)])
        coming = iter([worker for worker in workers if worker in chosen])
        for numbers, members in zip(rows, seats, strict=True):
            empty = [place for place, worker in enumerate(members) if worker is None]
            new = [next(coming) for _ in empty]
            for at, number in _paired(
                [self.places[numbers[place]] for place in empty], [self.middle.get(worker) for worker in new]
            ):
                members[empty[at]] = new[number]
        sitting |= chosen
        return [[worker for worker in members if worker is not None] for members in seats], [
            worker for worker in workers if worker not in sitting
        ]


def _paired(places: Sequence[Point], middles: Sequence[Point | None]) -> Iterator[tuple[int, int]]:
    """Yields (number of a place, number of one who comes there), for at most as many as there are places:
    those that hold something come near to it, in its order; ``middles`` has None for the others.
    """
    holding = sorted((middle, number) for number, middle in enumerate(middles) if middle is not None)
    at, taken = 0, set[int]()
    for count, (middle, number) in enumerate(holding, len(places) - len(holding)):
        while at < count and _distance(middle, places[at + 1]) < _distance(middle, places[at]):
            at += 1
        taken.add(at)
        yield at, number
        at += 1
    free = (at for at in range(len(places)) if at not in taken)
    yield from zip(free, (number for number, middle in enumerate(middles) if middle is None), strict=False)


def _distance(a: Point, b: Point) -> float:
    """Returns the distance along the axes that cut the state in both layouts."""
    other = dict(b)
    return sum(abs(place - other[name]) for name, place in a if name in other)
