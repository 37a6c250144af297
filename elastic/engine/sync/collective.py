"""Sums by the library's collectives: faster than the ordered reduction over slow links, but the sum depends
on the number of members.

With ``wire`` each member's sum is rounded to that dtype before it is sent, and the library adds in it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.engine.sync.base import GradientReduction, Scheme
from elastic.engine.world import reduce_scatter


class Collective(Scheme):
    """A reduce-scatter over the shards and an all-reduce over the replicas: in the last round, or, if
    parameters are split and the scheme does not defer its sums, in every round.
    """

    keeps_sums = False
    needs_replicate_group = True

    def reduction(self, wire: torch.dtype | None = None) -> CollectiveReduction:
        return CollectiveReduction(self, wire)


class CollectiveReduction(GradientReduction):
    """Sums the gradients of one wrapped module."""

    def __init__(self, scheme: Collective, wire: torch.dtype | None) -> None:
        self.scheme, self.world, self.wire = scheme, scheme.world, wire
        self.total: Tensor | None = None
        """The sum of this member's rounds, if members do not sum each round."""
        if not self.scheme.deferred and self.world.layout.replicas > 1 and self.world.layout.shards > 1:
            self.across_replicas = self._add_replicas

    def reduce(self, grads: Tensor) -> Tensor | None:
        shards = self.world.layout.shards
        if self.scheme.round.idle:
            grads = torch.zeros_like(grads)
        if shards > 1 and not self.scheme.deferred:
            return self._scattered(grads.to(_wide(grads)))
        self.total = grads.to(_wide(grads), copy=True) if self.total is None else self.total.add_(grads)
        if not self.scheme.round.last:
            return None
        total, self.total = self.total, None
        if shards > 1:
            total = self._scattered(total)
        if self.world.layout.replicas > 1:
            self._add_replicas(total)
        return total

    def _scattered(self, grads: Tensor) -> Tensor:
        """Returns this member's shard of the sum over the members of its replica."""
        sent = grads.to(self.wire or grads.dtype)
        total = sent.new_empty(sent.numel() // self.world.layout.shards)
        reduce_scatter(total, sent, self.world.shard_group)
        return total.to(grads.dtype)

    def _add_replicas(self, shard: Tensor) -> None:
        sent = shard.to(self.wire or shard.dtype)
        dist.all_reduce(sent, group=self.world.replicate_group)
        if sent is not shard:
            shard.copy_(sent)


def _wide(grads: Tensor) -> torch.dtype:
    """Returns the dtype of sums of such gradients."""
    return torch.promote_types(grads.dtype, torch.float32)
