"""The norm of the whole gradient, with the same bits in every layout.

Library reductions add in an order that depends on the number of rows and threads.  Here a fixed binary tree
(pad to a power of two, add the halves) sums the elements of each row, another one the rows of each whole
tensor, and a third one the tensors.  Members split tensors between rows and never inside a row, so the trees
are the same for every distribution of the rows.

The result of a tree does not change if zeros are appended, or if other trees are computed in the same kernel.
So tensors of equal shape are added together, which takes few kernels.  And tensors take turns, so that memory
holds the rows of the largest tensor and not of all: a mixture of experts has 36,000 tensors, and 86 million
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from elastic.engine.world import World, all_gather
from elastic.plan.layout import Layout
from elastic.plan.placement import most_rows

TURN_ROWS = 1 << 20
"""Number of rows that take one turn, if no tensor has more: 8 MiB as float64.  Each turn costs one
collective.
"""
WIDEST = 1 << 15
"""Number of elements of the widest row that a kernel of our own adds on a GPU."""
SQUARED = 1 << 24
"""Largest number of elements that are squared at once, unless one row has more: 64 MiB as float32."""


def tree_sum(values: Tensor) -> Tensor:
    """Returns the sum over the last dimension by a fixed binary tree: [..., n] -> [...].  The order depends
    on n alone.
    """
    count = values.shape[-1]
    if count == 0:
        return values.new_zeros(values.shape[:-1])
    half = (1 << (count - 1).bit_length()) // 2
    if half < count < 2 * half:
        values = values[..., :half] + torch.nn.functional.pad(values[..., half:], (0, 2 * half - count))
    while values.shape[-1] > 1:
        left, right = values.chunk(2, -1)
        values = left + right
    return values.squeeze(-1)


def squared_norm(grads: Sequence[Tensor], rows: Sequence[int], world: World) -> Tensor:
    """Returns the squared 2-norm of the whole gradient: a float64 scalar, with the same bits in every layout.

    The arguments are those of :func:`squared_norms`.
    """
    return tree_sum(squared_norms(grads, rows, world))


def squared_norms(grads: Sequence[Tensor], rows: Sequence[int], world: World) -> Tensor:
    """Returns the squared 2-norm of each tensor of the whole gradient: float64 [tensors], with the same bits
    in every layout.

    The elements are squared as float32, so those below 1e-23 count as zero.  ``grads[i]`` is this member's
    shard [its rows, ...] of a tensor that has ``rows[i]`` rows.
    """
    totals = dict[int, Tensor]()
    sizes = [most_rows(count, world.layout) for count in rows]
    for turn in _turns(rows, world.layout):
        mine: dict[int, Tensor] = {}
        for alike in _alike(turn, lambda number: (sizes[number], grads[number].shape, grads[number].dtype)):
            mine.update(
                zip(alike, _row_sums([grads[number] for number in alike], sizes[alike[0]]), strict=True)
            )
        everyone = _gathered(torch.cat([mine[number] for number in turn]), world)
        first = 0
        # tensors with equal numbers of rows are neighbours, because a turn is sorted by them
        for alike in _alike(turn, lambda number: rows[number]):
            count, size = rows[alike[0]], sizes[alike[0]]
            columns = (
                everyone[:, first : first + len(alike) * size]
                .unflatten(1, (len(alike), size))
                .transpose(0, 1)
                .flatten(1)
            )
            totals.update(zip(alike, tree_sum(columns[:, :count]), strict=True))
            first += len(alike) * size
    return torch.stack([totals[number] for number in range(len(rows))])


def _turns(rows: Sequence[int], layout: Layout) -> Iterator[list[int]]:
    """Yields the numbers of the tensors that are added in one turn, in order of their rows: the same lists on
    every member.
    """
    padded = [most_rows(count, layout) * layout.shards for count in rows]
    most, turn, taken = max([TURN_ROWS, *padded]), list[int](), 0
    for number in sorted(range(len(rows)), key=rows.__getitem__):
        if turn and taken + padded[number] > most:
            yield turn
            turn, taken = [], 0
        turn.append(number)
        taken += padded[number]
    yield turn


def _alike(turn: Iterable[int], key: Callable[[int], Hashable]) -> Iterable[list[int]]:
    """Returns the numbers of ``turn`` in lists, one for each ``key``."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number in turn:
        found[key(number)].append(number)
    return found.values()


def _gathered(mine: Tensor, world: World) -> Tensor:
    """Returns ``mine`` [n] of every member of the shard group: [members, n]."""
    if world.layout.shards == 1:
        return mine[None]
    everyone = mine.new_empty(world.layout.shards, mine.numel())
    all_gather(everyone.view(-1), mine, world.shard_group)
    return everyone


def _row_sums(grads: Sequence[Tensor], size: int) -> Tensor:
    """Returns, for tensors of equal shape, the sum of the squares of each row, and zeros up to ``size``:
    float64 [tensors, size].

    The squares are added in float32, and computed in portions of at most ``SQUARED`` elements.
    """
    rows, columns = len(grads[0]), grads[0][:1].numel()
    sums = torch.zeros(len(grads), size, dtype=torch.float64, device=grads[0].device)
    if not rows or not columns:
        return sums
    if grads[0].device.type == "cuda" and grads[0].dtype == torch.float32 and 1 < columns <= WIDEST:
        from elastic.kernels import triton_kernels as kernels

        for number, grad in enumerate(grads):
            kernels.squares_(grad.detach().reshape(rows, columns), sums[number, :rows])
        return sums
    if rows * columns > SQUARED:
        step = max(1, SQUARED // columns)
        for number, grad in enumerate(grads):
            for first in range(0, rows, step):
                squares = grad.detach()[first : first + step].float().square().reshape(-1, columns)
                sums[number, first : first + len(squares)] = tree_sum(squares)
        return sums
    step = SQUARED // (rows * columns)
    for first in range(0, len(grads), step):
        some = torch.stack([*grads[first : first + step]]).detach().reshape(-1, rows, columns)
        sums[first : first + step, :rows] = tree_sum(some.float().square_())
    return sums
