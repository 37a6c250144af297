"""The norm of the whole gradient, with the same bits in every layout.

Library reductions add in an order that depends on the number of rows and threads.  Here a fixed binary tree (pad to a power of two, add the
halves) sums the elements of each row, another one the rows of each whole tensor, and a third one the tensors.  Members split tensors
between rows and never inside a row, so the trees are the same for every distribution of the rows.

The result of a tree does not change if zeros are appended, so tensors need no common number of rows.  Those with equally many rows are
added at once: that takes few kernels, and memory for the rows that there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from elastic.engine.world import World, all_gather


def tree_sum(values: Tensor) -> Tensor:
    """Returns the sum over the last dimension by a fixed binary tree: [..., n] -> [...].  The order depends on n alone."""
    count = values.shape[-1]
    if count == 0:
        return values.new_zeros(values.shape[:-1])
    values = torch.nn.functional.pad(values, (0, (1 << (count - 1).bit_length()) - count))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def squared_norm(grads: Sequence[Tensor], rows: Sequence[int], world: World) -> Tensor:
    """Returns the squared 2-norm of the whole gradient: a float64 scalar, with the same bits in every layout.

    ``grads[i]`` is this member's shard [its rows, ...] of a tensor that has ``rows[i]`` rows.
    """
    shards = world.layout.dp_shard
    sizes = [-(-count // shards) for count in rows]
    mine = torch.cat([_row_sums(grad, size) for grad, size in zip(grads, sizes, strict=True)])
    if shards == 1:
        everyone = mine[None]
    else:
        everyone = mine.new_empty(shards, mine.numel())
        all_gather(everyone.view(-1), mine, world.shard_group)
    firsts = list(accumulate(sizes, initial=0))
    alike: dict[int, list[int]] = defaultdict(list)
    for number, count in enumerate(rows):
        alike[count].append(number)
    totals: dict[int, Tensor] = {}
    for count, numbers in alike.items():
        columns = torch.stack([everyone[:, firsts[number] : firsts[number + 1]].reshape(-1)[:count] for number in numbers])
        totals.update(zip(numbers, tree_sum(columns), strict=True))
    return tree_sum(torch.stack([totals[number] for number in range(len(rows))]))


def _row_sums(grad: Tensor, size: int) -> Tensor:
    """Returns the sum of squares of each row, added in float32 and given as float64, padded with zeros to [size]."""
    sums = tree_sum(grad.detach().float().square().reshape(grad.shape[0], -1) if grad.numel() else grad.new_zeros(0, 1))
    return torch.nn.functional.pad(sums.double(), (0, size - sums.numel()))
