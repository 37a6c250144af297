"""A scheme of synchronisation says what members exchange in a step, and whose records a commit needs.

A scheme knows tensors and a :class:`~elastic.engine.world.World`, and not how the model is wrapped.  The axis
that wraps modules asks it for one :class:`GradientReduction` for each module, and calls that in every round
of the backward pass.

For a commit, today's two schemes need one record of every member (:meth:`Scheme.gather`), so a step is
applied by all members or by none.  Fence and outcome in ``elastic/control`` rest on this: any evidence that
one member has applied a step means that every member has prepared it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from elastic.engine.world import World, all_gather
from elastic.plan.batch import Deal


@dataclass
class Round:
    """The present round of a step.  The step writes it before each backward pass, and all reductions of the
    scheme read it.
    """

    number: int = 0
    """The number of this round in its step, from 0."""
    last: bool = True
    """True in the last round of the step."""
    idle: bool = False
    """True in a round in which this member has no microbatch: its gradients count for nothing, whatever hooks
    have made of them.
    """
    again: bool = False
    """True in a round that runs a microbatch of another member again: nothing is summed."""
    digest: Tensor | None = None
    """The wrapping sum of the bits of this round's gradients, int64 scalar on the device; None if it is not
    wanted.
    """


class GradientReduction(ABC):
    """Sums the gradients of one wrapped module over the data ranks, with one call for each round."""

    across_replicas: Callable[[Tensor], None] | None = None
    """Adds a shard over the replicas, in place.  None if :meth:`reduce` has done so already.  It may be called
    on another stream than :meth:`reduce`.
    """

    @abstractmethod
    def reduce(self, grads: Tensor) -> Tensor | None:
        """Takes this member's gradient of one microbatch, flat [shards × n], and returns its shard of the
        sum, flat [n].

        The sum is of all rounds, and is returned in the last one; in others the result is None.  If
        parameters are split and the scheme neither :attr:`~Scheme.keeps_sums` nor defers its sums, the sum is
        of this round, and is returned in each.
        """


class Scheme(ABC):
    """One way to synchronise the members of one world, which run the microbatches that ``deal`` gives them."""

    keeps_sums: ClassVar[bool]
    """True if reductions add up the rounds by themselves.  If False, the caller adds the results of the
    rounds if parameters are split.
    """
    needs_replicate_group: ClassVar[bool]
    """True if the world must have a process group of the members that hold the same shard."""

    def __init__(self, world: World, deal: Deal, *, deferred: bool = False) -> None:
        """``deferred``: sums over the members wait for the last round, if the scheme can do that."""
        self.world, self.deal, self.deferred, self.round = world, deal, deferred, Round()

    def begin_step(self, microbatches: int) -> Deal:
        """Prepares for a step with so many microbatches, and returns their deal."""
        self.deal = self.deal.of(microbatches)
        return self.deal

    def over_rounds(self) -> Scheme:
        """Returns a scheme whose sums are over all rounds of a step: this one, if it keeps sums, or a new
        one.
        """
        return self if self.keeps_sums else type(self)(self.world, self.deal, deferred=True)

    @abstractmethod
    def reduction(self, wire: torch.dtype | None = None) -> GradientReduction:
        """Returns a new reduction for one wrapped module.

        With ``wire``, of 16 bits, what travels is rounded to it: see the scheme.  Sums are kept in float32
        all the same.
        """

    def gather(self, record: Tensor) -> Tensor:
        """Exchanges commit records: [fields] of this member -> [members × fields], in order of world ranks.

        This is the commit, because it completes nowhere unless every member has called it.  A member without
        others has all records.
        """
        if self.world.size == 1:
            return record
        gathered = record.new_empty(self.world.size * record.numel())
        all_gather(gathered, record)
        return gathered
