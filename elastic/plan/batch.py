"""Deals the microbatches of a step out to the data ranks in rounds.  It is exact for any number of
microbatches and of ranks.

The ordered reduction adds ``block`` consecutive microbatches at a time, and then the sums of the blocks.
Both orders are left folds, so a node may add a whole block, or the first microbatches of one, before it sends
anything; any other sum of a part would be another sum of the whole.  So whole blocks go to nodes that have
``block`` free ranks, and the rest goes to the ranks that are left over.  Each round runs the next consecutive
microbatches, so an owner of the sum waits for the rest of one block at most.

A step has as few rounds as the number of data ranks allows.  As far as these rounds have room, each of them
ends with the end of a block, or even has whole blocks on single nodes only; leftover ranks then have nothing
to do.  Ranks without a microbatch run along with weight zero, so that every collective finds all members.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from elastic.plan.layout import Layout
from elastic.plan.placement import data_ranks, reporters


@dataclass(frozen=True)
class Unit:
    """Consecutive microbatches of one block whose sum, or the gradient of the only one, leaves its node as
    one tensor.

    ``ranks`` are the data ranks that run them, in order; all are on one node.
    """

    first: int
    ranks: tuple[int, ...]
    begins: bool
    """True if it begins a block.  A unit of several microbatches always does."""
    ends: bool
    """True if the block has no microbatches after it."""


@dataclass(frozen=True)
class Deal:
    """The work of all data ranks in a step of ``microbatches``.  ``nodes[i]`` is the node of data rank i."""

    microbatches: int
    block: int
    nodes: tuple[Hashable, ...]

    def of(self, microbatches: int) -> Deal:
        """Returns the deal of another number of microbatches to the same ranks."""
        found: Deal = self if microbatches == self.microbatches else resized(self, microbatches)
        return found

    @property
    def rounds(self) -> int:
        """The number of rounds of a step.  Each rank runs at most one microbatch in a round."""
        return -(-self.microbatches // len(self.nodes))

    @cached_property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of each round, in the order in which they are added."""
        return tuple(tuple(self._dealt(first, last)) for first, last in pairwise(self._bounds()))

    def _bounds(self) -> list[int]:
        """Returns the first microbatch of each round, and the number of all.

        A round ends where whole blocks on single nodes do, or at least where a block does, if later rounds
        can run all the rest.
        """
        ranks, block = len(self.nodes), self.block
        on_single_nodes = sum(len(each) // block for each in self._ranks_by_node()) * block
        bounds = [0]
        for later in reversed(range(self.rounds)):
            begun = -bounds[-1] % block  # microbatches of a block that the round before began
            widths = (begun + on_single_nodes, begun + (ranks - begun) // block * block, ranks)
            ends = [bounds[-1] + width for width in widths if 0 < width <= ranks]
            bounds.append(
                min(next(end for end in ends if self.microbatches - end <= later * ranks), self.microbatches)
            )
        return bounds

    def microbatch_of(self, round_: int, data_rank: int) -> int | None:
        """Returns the microbatch that the rank runs in the round, or None if it idles."""
        return self._table[round_].get(data_rank)

    @cached_property
    def _table(self) -> tuple[dict[int, int], ...]:
        """The microbatch of each data rank that has one, by round."""
        return tuple(
            {rank: unit.first + i for unit in units for i, rank in enumerate(unit.ranks)}
            for units in self.units
        )

    def _ranks_by_node(self) -> list[list[int]]:
        found: dict[Hashable, list[int]] = defaultdict(list)
        for rank, node in enumerate(self.nodes):
            found[node].append(rank)
        return list(found.values())

    def _dealt(self, first: int, last: int) -> list[Unit]:
        """Deals the microbatches ``first`` … ``last`` - 1 of one round.

        A piece of a block that begins it goes to one node if any has room.  If not, as much of its beginning
        as possible does.
        """
        free, starts = _Free(self._ranks_by_node(), self.block), [first]
        starts += range((first // self.block + 1) * self.block, last, self.block)
        pieces = list(zip(starts, [*starts[1:], last], strict=True))
        units, split, single = list[Unit](), list[tuple[int, int]](), list[int]()
        for start, stop in sorted(pieces, key=lambda piece: piece[0] - piece[1]):  # whole blocks first
            if start % self.block:
                single += range(start, stop)
            elif (
                ranks := free.take_whole() if stop - start == self.block else free.take_fitting(stop - start)
            ) is not None:
                units.append(self._unit(start, ranks))
            else:
                split.append((start, stop))
        for start, stop in split:
            ranks = free.take_most(stop - start)
            units.append(self._unit(start, ranks))
            single += range(start + len(ranks), stop)
        units += [self._unit(microbatch, free.take_most(1)) for microbatch in single]
        return sorted(units, key=lambda unit: unit.first)

    def _unit(self, first: int, ranks: Sequence[int]) -> Unit:
        after = first + len(ranks)
        return Unit(
            first,
            tuple(ranks),
            first % self.block == 0,
            after % self.block == 0 or after == self.microbatches,
        )


class _Free:
    """The ranks that have no microbatch yet in a round."""

    def __init__(self, nodes: list[list[int]], block: int) -> None:
        # the next rank of a node is its last element
        self._nodes, self._block = [ranks[::-1] for ranks in nodes], block
        self._whole = [(ranks[0], node) for node, ranks in enumerate(nodes) if len(ranks) >= block]
        self._most = [(-len(ranks), ranks[0], node) for node, ranks in enumerate(nodes)]
        heapq.heapify(self._whole)
        heapq.heapify(self._most)

    def take_whole(self) -> list[int] | None:
        """Takes ranks for a whole block from the first node that has enough.  Nothing else may have been
        taken before.
        """
        if not self._whole:
            return None
        _, node = heapq.heappop(self._whole)
        taken = self._take(node, self._block)
        if len(left := self._nodes[node]) >= self._block:
            heapq.heappush(self._whole, (left[-1], node))
        return taken

    def take_fitting(self, count: int) -> list[int] | None:
        """Takes ``count`` ranks of the node with the fewest free ranks that are enough; None if no node has
        enough.
        """
        fits = [
            (len(ranks), ranks[-1], node) for node, ranks in enumerate(self._nodes) if len(ranks) >= count
        ]
        return self._take(min(fits)[2], count) if fits else None

    def take_most(self, count: int) -> list[int]:
        """Takes at most ``count`` ranks of the node with the most free ranks."""
        while True:
            size, _, node = heapq.heappop(self._most)
            if (have := len(self._nodes[node])) == -size:
                return self._take(node, min(count, have))
            if have:
                heapq.heappush(self._most, (-have, self._nodes[node][-1], node))

    def _take(self, node: int, count: int) -> list[int]:
        ranks = self._nodes[node]
        taken = [ranks.pop() for _ in range(count)]
        if ranks:
            heapq.heappush(self._most, (-len(ranks), ranks[-1], node))
        return taken


@lru_cache(maxsize=8)
def resized(value: Any, microbatches: int) -> Any:
    """Returns ``value``, a dataclass, for steps of ``microbatches`` microbatches.

    The newest results are cached with what they have computed: a batch that grows keeps each size for many
    steps.
    """
    return replace(value, microbatches=microbatches)


def deal_of(microbatches: int, block: int, layout: Layout, nodes: Sequence[Hashable] = ()) -> Deal:
    """Returns the deal of a world.  ``nodes[i]`` is the node of world rank i; without ``nodes`` all members
    are on one.
    """
    if not nodes:
        return Deal(microbatches, block, (None,) * data_ranks(layout))
    return Deal(microbatches, block, tuple(nodes[rank] for rank in reporters(layout)))
