"""What a scheme of synchronisation is: what members exchange in a step, and whose records a commit needs.

A scheme knows tensors and a :class:`~elastic.engine.world.World`, and nothing of how the model is wrapped.  The axis that wraps modules
asks it for one :class:`Reduction` a module and calls that in every round of the backward pass.

Whose records a commit needs: today's two schemes need one record of every member (:meth:`Scheme.gather`), so a step is applied by all
members or by none.  Fence and outcome in ``elastic/control`` rest on this: any evidence that one member has applied a step means that
every member has prepared it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from elastic.engine.world import World, all_gather


@dataclass
class Round:
    """Where the step stands.  The step writes it before each backward pass, and all reductions of the scheme read it."""

    active: int = 1
    """Number of data ranks that run a microbatch in this round."""
    last: bool = True


class Reduction(ABC):
    """Sums the gradients of one wrapped module over the data ranks, one call a round."""

    across_replicas: Callable[[Tensor], None] | None = None
    """Adds a shard over the replicas, in place, where :meth:`reduce` has not done so already; on a stream of its own where there is one."""

    @abstractmethod
    def reduce(self, grads: Tensor, total: Tensor) -> None:
        """Take this member's gradient of one microbatch, and give its shard of the sum.

        ``grads`` is flat [shards × n]; ``total`` is flat [n] and may be the same memory where there is one shard.  If the scheme
        :attr:`~Scheme.keeps_sums`, ``total`` is written in the last round, else in every round.
        """


class Scheme(ABC):
    """One way to synchronise, for one world."""

    keeps_sums: ClassVar[bool]
    """True: reductions add the rounds up by themselves.  False: the caller adds what each round gives to what the rounds before gave."""
    needs_replicate_group: ClassVar[bool]
    """True: the world must have a process group of the members that hold the same shard."""

    def __init__(self, world: World) -> None:
        self.world, self.round = world, Round()

    @abstractmethod
    def reduction(self) -> Reduction:
        """Return a new reduction, for one wrapped module."""

    def gather(self, record: Tensor) -> Tensor:
        """Exchange commit records: [fields] of this member -> [members × fields], in the order of the world ranks.

        It completes nowhere unless every member has called it: this is the commit.
        """
        gathered = record.new_empty(self.world.size * record.numel())
        all_gather(gathered, record)
        return gathered
