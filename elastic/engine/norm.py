"""The norm of the whole gradient, with the same bits in every layout.

Library reductions add in an order that depends on the number of rows and threads.  Here a fixed binary tree (pad to a power of two, add the
halves) sums the elements of each row, another one the rows of each whole tensor, and a third one the tensors.  Members split tensors
between rows and never inside a row, so the trees are the same for every distribution of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    columns = torch.zeros(len(rows), max(rows, default=1), dtype=torch.float64, device=mine.device)
    first = 0
    for column, count, size in zip(columns, rows, sizes, strict=True):
        column[:count] = everyone[:, first : first + size].reshape(-1)[:count]
        first += size
    return tree_sum(tree_sum(columns))  # zeros that are appended to a column do not change the result of its tree


def _row_sums(grad: Tensor, size: int) -> Tensor:
    """Returns the sum of squares of each row, added in float32 and given as float64, padded with zeros to [size]."""
    sums = tree_sum(grad.detach().float().square().reshape(grad.shape[0], -1) if grad.numel() else grad.new_zeros(0, 1))
    return torch.nn.functional.pad(sums.double(), (0, size - sums.numel()))
