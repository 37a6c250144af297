"""The ordered reduction: a sum of gradients that does not depend on the number of data ranks.

Floating-point addition is not associative.  A library's reduce-scatter adds in an order that depends on the number of ranks, and rounds are
accumulated afterwards; so 2, 3 and 4 workers give three different sums.  Here the same bytes travel in an all-to-all instead, and each
owner adds the pieces to its running sum in the order of the microbatches.  It starts with the first piece and not with zeros, which would
turn -0.0 into 0.0.  Data rank i mod d runs microbatch i in round i div d, so within a round the pieces come in rank order; ranks that idle
in the last round are left out.

With R replicas of S shards, world rank r·S + s owns sub-piece r of shard s while the sum runs (R·S distinct pieces, so no element
is added twice), and the replicas exchange the finished sub-pieces once, after the last round.  Each rank sends the bytes of one
reduce-scatter in each round and of one all-gather over the replicas in each step.  HSDP sends the same, in another order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.engine.sync.base import Reduction, Round, Scheme
from elastic.engine.world import World


class Ordered(Scheme):
    """Adds gradients in the order of the microbatches, which gives the same bits for any number of members."""

    keeps_sums = True
    needs_replicate_group = False

    def reduction(self) -> OrderedReduction:
        return OrderedReduction(self.world, self.round)


class OrderedReduction(Reduction):
    """Sums the gradients of one wrapped module, over data ranks, replicas and rounds."""

    def __init__(self, world: World, round_: Round) -> None:
        self.world, self.round = world, round_
        self.sum: Tensor | None = None

    def reduce(self, grads: Tensor, total: Tensor) -> None:
        self.world.keep_up()
        pieces = self._exchange(grads.view(self.world.layout.dp_shard, -1))
        for piece in pieces[: self.round.active]:
            self.sum = piece.float() if self.sum is None else self.sum.add_(piece)
        if self.sum is None:
            raise RuntimeError("a round of a step has no microbatch on any data rank")
        if self.round.last:
            total.copy_(self._gather(self.sum, total.numel()))
            self.sum = None

    def _exchange(self, grads: Tensor) -> Tensor:
        """Turns [S, n] of this rank into [world, n / R]: every rank's version of the sub-piece that this rank owns."""
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
        """Joins the sub-pieces of all replicas: flat [count].

        It is an all-to-all among all members, in which only replicas send each other anything.  That saves a communicator for the replicas.
        """
        layout, part = self.world.layout, total.numel()
        if layout.dp_replicate == 1:
            return total
        replicas = layout.ranks_along("dp_replicate", self.world.rank)
        sizes = [part if rank in replicas else 0 for rank in range(layout.world)]
        whole = total.new_empty(layout.dp_replicate * part)
        dist.all_to_all_single(whole, total.repeat(layout.dp_replicate), sizes, sizes)
        return whole[:count]
