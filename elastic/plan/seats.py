"""Seats workers on the cells of a layout, so that a replica's shards lie on one node and few of them move.

Three wishes, the first before the second before the third:

1. As many replicas as possible lie within one node.  Members of one replica exchange every weight in every
   step, and a node that is lost breaks only the replicas that have members there.
2. A worker that holds a cell keeps it.  A cell is the same in all replicas, so a node needs each cell as
   often as it has replicas, and it does not matter in which of them a worker sits.  Where a replica comes
   into one node its members move once: the bytes of one healing, against bytes between nodes in every step.
3. A worker that must take another cell takes one near to what it holds: both are put in the order of the
   rows.

Workers that are left over on their nodes form replicas over several nodes, node by node, those with most left
first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from elastic.ids import Cell, NodeId, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, middle_of
from elastic.plan.transfer import Holding

Replica = list[WorkerId]
"""The members of one replica, by the number of their shard."""


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
        inside, over = hall.fill(by_node[node], count)
        replicas += inside
        left.append(over)
    across, _ = hall.fill(
        [worker for over in sorted(left, key=len, reverse=True) for worker in over],
        layout.replicas - len(replicas),
    )
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
        cells = [cell_of(layout, ranks[0]) for ranks in self.ranks]
        self.places = [middle_of(cell) for cell in cells]
        self.alike: dict[int, list[int]] = defaultdict(list)
        """The seats of a replica that have equal cells, by the first of them: along some axes members hold
        the same part, and each of them may sit on any of these seats.
        """
        number_of = dict[Cell, int]()
        for number, cell in enumerate(cells):
            self.alike[number_of.setdefault(cell, number)].append(number)
        self.own: dict[WorkerId, int] = {}
        """The first seat with the cell that each worker holds; for a worker that holds nothing, with a cell
        that on its node only the keeper holds.
        """
        self.middle: dict[WorkerId, tuple[float, ...]] = {}
        """The place of each worker's rows, of whatever layout: see :func:`placement.middle_of`."""
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
                kept = sum(
                    min(max(copies[seat] - number * len(equal), 0), len(equal))
                    for seat, equal in self.alike.items()
                    if seat in copies
                )
                wishes.append((-kept, place, number, node))
        chosen = Counter(node for *_, node in sorted(wishes)[: self.replicas])
        return {node: chosen[node] for node in by_node}

    def fill(self, workers: Sequence[WorkerId], count: int) -> tuple[list[Replica], list[WorkerId]]:
        """Returns ``count`` replicas of ``workers``, and those that are left over."""
        seats: list[list[WorkerId | None]] = [[None] * self.size for _ in range(count)]
        taken, others, surplus = [0] * self.size, list[WorkerId](), list[WorkerId]()
        for worker in workers:
            number = self.own.get(worker)
            if number is None:
                others.append(worker)
            elif taken[number] < count * len(equal := self.alike[number]):
                row, place = divmod(taken[number], len(equal))
                seats[row][equal[place]] = worker
                taken[number] += 1
            else:
                surplus.append(worker)
        others.sort(key=lambda worker: worker not in self.middle)
        free = count * self.size - sum(taken)
        chosen = set((others + surplus)[:free])
        coming = iter([worker for worker in workers if worker in chosen])
        for replica in seats:
            empty = [number for number, worker in enumerate(replica) if worker is None]
            new = [next(coming) for _ in empty]
            for number, worker in self._placed(empty, new):
                replica[number] = worker
        sitting = {worker for replica in seats for worker in replica}
        return [[worker for worker in replica if worker is not None] for replica in seats], [
            w for w in workers if w not in sitting
        ]

    def _placed(self, empty: Sequence[int], new: Sequence[WorkerId]) -> Iterator[tuple[int, WorkerId]]:
        """Yields each of the shards ``empty`` with one of as many workers: those that hold rows come near to
        them, in their order.
        """
        holding, at, taken = (
            sorted((each for each in new if each in self.middle), key=self.middle.__getitem__),
            0,
            set[int](),
        )
        for count, worker in enumerate(holding, len(empty) - len(holding)):
            while at < count and self._distance(worker, empty[at + 1]) < self._distance(worker, empty[at]):
                at += 1
            taken.add(at)
            yield empty[at], worker
            at += 1
        free = (number for place, number in enumerate(empty) if place not in taken)
        yield from zip(free, (each for each in new if each not in self.middle), strict=True)

    def _distance(self, worker: WorkerId, number: int) -> float:
        return sum(abs(a - b) for a, b in zip(self.middle[worker], self.places[number], strict=False))
