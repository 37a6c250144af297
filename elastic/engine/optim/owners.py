"""Computes with whole matrices whose rows lie on several members, before a commit.

Each matrix has one owner among the members that hold its rows.  The rows go to the owner, it computes, and
the rows of the result go back:
an all-to-all each way.  A matrix lies alone and in memory of its own there, so that kernels round as they do
on a single device.  The members of another replica own the same matrices and do the same work once more; that
saves an exchange between replicas.

Matrices take turns, in which an owner has a limited number of elements.  So beside its rows of all results a
member needs memory for the largest matrix and for the rows of a few.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from elastic.engine.world import World
from elastic.plan.placement import rows_of

TURN_ELEMENTS = 1 << 25
"""Largest number of elements that an owner has in one turn, unless one matrix has more: 64 MiB in bfloat16.
Each turn costs two collectives.
"""
Shape = tuple[int, int]


def by_owners(
    shapes: Sequence[Shape], rows: Callable[[int], Tensor], compute: Callable[[Tensor], Tensor], world: World
) -> list[Tensor]:
    """Returns this member's rows of ``compute(matrix)`` for each matrix; a result has the shape and the dtype
    of its matrix.

    ``shapes`` are those of the whole matrices, and ``rows(number)`` returns this member's rows of one.  Every
    member must call it.
    """
    mates = world.layout.shard_ranks(world.rank)
    if len(mates) == 1:
        return [compute(rows(number)) for number in range(len(shapes))]
    owners = owners_of(tuple(shapes), len(mates))
    found = dict[int, Tensor]()
    for turn in turns_of(tuple(shapes), owners, TURN_ELEMENTS):
        world.keep_up()
        found.update(zip(turn, _take_turn(turn, owners, shapes, rows, compute, mates, world), strict=True))
    return [found[number] for number in range(len(shapes))]


@cache
def owners_of(shapes: tuple[Shape, ...], members: int) -> tuple[int, ...]:
    """Returns the owner of each matrix: the costliest first, each to the member with the least work."""
    cost = [rows * columns * min(rows, columns) for rows, columns in shapes]
    owners, loads = [0] * len(shapes), [(0, member) for member in range(members)]
    for number in sorted(range(len(shapes)), key=lambda number: (-cost[number], number)):
        load, owners[number] = loads[0]
        heapq.heapreplace(loads, (load + cost[number], owners[number]))
    return tuple(owners)


@cache
def turns_of(
    shapes: tuple[Shape, ...], owners: tuple[int, ...], elements: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of the matrices of each turn, in order of their owners.  An owner has at most
    ``elements`` elements in a turn, unless one matrix has more.
    """
    most = max([elements, *(rows * columns for rows, columns in shapes)])
    turns, taken = defaultdict[int, list[int]](list), dict[int, tuple[int, int]]()
    for number in sorted(range(len(shapes)), key=lambda number: (owners[number], number)):
        size, (turn, before) = shapes[number][0] * shapes[number][1], taken.get(owners[number], (0, 0))
        turn, before = (turn, before) if before + size <= most else (turn + 1, 0)
        turns[turn].append(number)
        taken[owners[number]] = turn, before + size
    return tuple(tuple(turns[turn]) for turn in sorted(turns))


def _take_turn(
    turn: Sequence[int],
    owners: Sequence[int],
    shapes: Sequence[Shape],
    rows: Callable[[int], Tensor],
    compute: Callable[[Tensor], Tensor],
    mates: Sequence[int],
    world: World,
) -> list[Tensor]:
    """Returns the results of :func:`by_owners` for the matrices of one turn."""

    def size(number: int, member: int) -> int:
        first, last = rows_of(shapes[number][0], world.layout, mates[member])
        return (last - first) * shapes[number][1]

    me = mates.index(world.rank)
    mine, members = [number for number in turn if owners[number] == me], range(len(mates))
    sent = {
        mates[owner]: sum(size(number, me) for number in turn if owners[number] == owner) for owner in members
    }
    got = {mates[member]: sum(size(number, member) for number in mine) for member in members}
    came = world.all_to_all(torch.cat([rows(number).reshape(-1) for number in turn]), sent, got, 1)
    pieces = came.split([size(number, member) for member in members for number in mine])
    results = []
    for place, number in enumerate(mine):
        matrix = came.new_empty(shapes[number])
        torch.cat(pieces[place :: len(mine)], out=matrix.view(-1))
        results.append(compute(matrix))
    back = [
        result[slice(*rows_of(len(result), world.layout, mate))].reshape(-1)
        for mate in mates
        for result in results
    ]
    came = world.all_to_all(torch.cat([came.new_empty(0), *back]), got, sent, 1)
    return [
        piece.view(-1, shapes[number][1])
        for number, piece in zip(turn, came.split([size(number, me) for number in turn]), strict=True)
    ]
