"""Parameters whose gradients are summed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn

from elastic.engine.parameters.base import with_rows
from elastic.engine.sync.base import GradientReduction, Round


@dataclass
class SummedUnit:
    """Parameters whose gradients are summed together, by one call of their reduction in each round."""

    reduction: GradientReduction
    shards: int
    names: list[str] = field(default_factory=list)
    computing: list[nn.Parameter] = field(default_factory=list)
    """The parameters with which the model computes, in the order of ``names``."""
    ends: list[int] = field(default_factory=list)
    """The places in ``total`` where the gradients begin, and where the last one ends."""
    hooked: set[int] = field(default_factory=set)
    """The places in ``computing`` of the parameters that tell when their gradient came."""
    total: Tensor | None = None
    """The sum of the gradients of a step, one after the other."""

    def came(self) -> list[Tensor] | None:
        """Returns the gradients, in the order of ``names``, once the present backward pass has brought all of
        them; else None.
        """
        found = list[Tensor]()
        for parameter in self.computing:
            if (grad := parameter.grad) is None:
                return None
            found.append(grad)
        return found

    def missing(self) -> int | None:
        """Returns the place of the first parameter whose gradient has not come yet; None if all have."""
        return next((place for place, parameter in enumerate(self.computing) if parameter.grad is None), None)

    def came_or_zeros(self) -> list[Tensor]:
        """Returns the gradients that came, with zeros in the place of others."""
        grads = ((parameter, parameter.grad) for parameter in self.computing)
        return [grad if grad is not None else torch.zeros_like(parameter) for parameter, grad in grads]

    def flat(self, came: Sequence[Tensor]) -> Tensor:
        """Returns the gradients one after the other, or, where members hold rows, row by row of members."""
        if self.shards == 1:
            return torch._utils._flatten_dense_tensors(came)
        dtype = reduce(torch.promote_types, {grad.dtype for grad in came})
        return torch._chunk_cat([with_rows(grad.detach()).to(dtype) for grad in came], 0, self.shards).view(
            -1
        )

    def add(self, flat: Tensor, now: Round) -> None:
        """Sums the gradients of a round over the members, and over the rounds unless the scheme has done
        that.
        """
        if (total := self.reduction.reduce(flat)) is not None:
            self.total = total if self.total is None else self.total.add_(total)
        if now.last and self.shards > 1 and self.reduction.across_replicas is not None:
            assert self.total is not None
            self.reduction.across_replicas(self.total)

    def grads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns this member's parts of the sums, like ``parts``."""
        assert self.total is not None, "the last round has summed every unit"
        if self.shards == 1:
            grads = torch._utils._unflatten_dense_tensors(self.total, parts)
        else:  # what is behind a short part belongs to none
            places = zip(self.ends, parts, strict=False)
            grads = [self.total[first : first + part.numel()].view(part.shape) for first, part in places]
        return [
            grad if grad.dtype == part.dtype else grad.to(part.dtype)
            for grad, part in zip(grads, parts, strict=True)
        ]

    def forget(self) -> None:
        """Gives up the memory of the gradients."""
        self.total = None
        for parameter in self.computing:
            parameter.grad = None
