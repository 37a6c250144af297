"""The ordered gradient reduction: why the number of data ranks never enters the result.

Floating-point addition does not commute with regrouping.  FSDP's reduce-scatter adds in an order that depends on the number of
ranks, and accumulates over rounds afterwards; so 2, 3 and 4 workers give three different sums.  Here the same bytes travel in an
all-to-all instead, and each owner adds the pieces to its running sum in the order of the microbatches, starting *from* the first
piece, not from zeros (which would turn -0.0 into 0.0).  Microbatch i is run by data rank i mod d in round i div d, so within a
round the pieces come in rank order; ranks that idle in the last round are left out.

With R replicas of S shards, world rank r·S + s owns sub-piece r of shard s while the sum runs (R·S distinct pieces, so nobody adds
twice), and the replicas exchange the finished sub-pieces once, after the last round.  Per step and rank: one reduce-scatter's
bytes a round, one all-gather over replicas: what HSDP sends, in another order.

The norm is summed by a fixed binary tree over the elements of a row and then over the rows of the whole tensor (rows are never
split by dim-0 sharding): pad to a power of two, add halves.  Library reductions change their order with rows and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.engine.world import World, all_gather


@dataclass
class Round:
    """Where the step stands; shared by the folds of all modules.  ``active``: data ranks that run a microbatch in this round."""

    active: int = 1
    last: bool = True


class OrderedReduction:
    """The reduction of one FSDP module.  Both ``set_custom_reduce_scatter`` (dp_shard > 1) and ``set_all_reduce_hook`` (= 1)."""

    def __init__(self, world: World, round_: Round) -> None:
        self.world, self.round = world, round_
        self.sum: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp, async_op: bool = False
    ) -> None:
        self._add(input_tensor, output_tensor)

    def hook(self, reduce_output: Tensor) -> None:
        """For ``dp_shard`` = 1, where FSDP skips its reduce-scatter."""
        self._add(reduce_output, reduce_output)

    def _add(self, grads: Tensor, output: Tensor) -> None:
        """grads: flat [S × n], this rank's microbatch; output: flat [n], filled in the last round."""
        self.world.keep_up()
        pieces = self._exchange(grads.view(self.world.layout.dp_shard, -1))
        for piece in pieces[: self.round.active]:
            self.sum = piece.float() if self.sum is None else self.sum.add_(piece)
        if self.sum is None:
            raise RuntimeError("a round without a microbatch")
        if self.round.last:
            output.copy_(self._gather(self.sum, output.numel()))
            self.sum = None

    def _exchange(self, grads: Tensor) -> Tensor:
        """[S, n] of this rank -> [world, n / R]: every rank's version of the sub-piece that this rank owns."""
        layout = self.world.layout
        replicas = layout.dp_replicate
        part = -(-grads.shape[1] // replicas)
        if replicas > 1:
            padded = torch.nn.functional.pad(grads, (0, part * replicas - grads.shape[1]))
            grads = padded.view(layout.dp_shard, replicas, part).transpose(0, 1).contiguous()
        if layout.world == 1:
            return grads.reshape(1, part).clone()
        pieces = grads.new_empty(layout.world, part)
        dist.all_to_all_single(pieces.view(-1), grads.reshape(-1))
        return pieces

    def _gather(self, total: Tensor, count: int) -> Tensor:
        """The sub-pieces of all replicas, joined: flat [count].  An all-to-all among all members, of which only replicas have anything
        for each other, spares them a communicator of their own."""
        layout, part = self.world.layout, total.numel()
        if layout.dp_replicate == 1:
            return total
        replicas = layout.replicate_ranks(self.world.rank)
        sizes = [part if rank in replicas else 0 for rank in range(layout.world)]
        whole = total.new_empty(layout.dp_replicate * part)
        dist.all_to_all_single(whole, total.repeat(layout.dp_replicate), sizes, sizes)
        return whole[:count]


def tree_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension by a fixed binary tree: [..., n] -> [...].  The order depends on n alone."""
    count = values.shape[-1]
    if count == 0:
        return values.new_zeros(values.shape[:-1])
    values = torch.nn.functional.pad(values, (0, (1 << (count - 1).bit_length()) - count))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def squared_norm(grads: Sequence[Tensor], rows: Sequence[int], world: World) -> Tensor:
    """Squared 2-norm of the whole gradient, float64 scalar, the same bits in every layout.

    ``grads[i]``: this member's shard [its rows, ...] of a tensor with ``rows[i]`` rows.
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
    return tree_sum(tree_sum(columns))  # more zeros behind a column leave its tree's result as it is


def _row_sums(grad: Tensor, size: int) -> Tensor:
    """Squared sum of each row, added in float32 and given as float64, padded with zeros to [size]."""
    sums = tree_sum(grad.detach().float().square().reshape(grad.shape[0], -1) if grad.numel() else grad.new_zeros(0, 1))
    return torch.nn.functional.pad(sums.double(), (0, size - sums.numel()))
