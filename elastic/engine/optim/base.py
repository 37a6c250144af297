"""What an optimizer is: a function over the slices that a member holds, and the kinds of state that it keeps.

A member holds slices of parameters and never knows the whole.  So an optimizer, a :class:`Rule`, computes each slice from what it is
given: the values, the gradient, the moments, and where the slice lies in the whole tensor.  The moments that a rule declares are slices of
the state like any other: they are made before the first step, healed, copied, saved and resumed without the rule knowing of it.

Everything that rules have in common is in :class:`Optimizer`: the mean over tokens, clipping, the learning rate, and a step whose gradient
is not finite.  An optimizer that needs a whole matrix (Muon) must exchange it before the commit, when members may still fail; no rule does
so yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elastic.engine.optim.schedule import learning_rate_of
from elastic.errors import CodeError
from elastic.imports import load
from elastic.job import Job, Optim
from elastic.protocol.commit_record import Outcome
from storage.slices import Slice

RULES = {"adamw": "elastic.engine.optim.adamw:ADAMW"}
"""Where the rules lie that have a name of their own.  Any other is given as ``pkg.module:NAME``."""


@dataclass(frozen=True)
class Part:
    """What a member holds of one parameter, and the state that belongs to it.  All tensors have the shape of ``values``."""

    name: str
    boxes: tuple[Slice, ...]
    """Where the values lie in the whole tensor: their boxes, one after the other along dimension 0."""
    values: Tensor
    moments: Mapping[str, Tensor]
    """By the names that the rule declares; of the dtype of ``values``."""
    decays: bool
    """True where weights decay: in tensors of two and more dimensions."""


@dataclass(frozen=True)
class Hyper:
    """What an update knows beside the slices; the same on every member."""

    settings: Optim
    lr: float
    """The learning rate of this step."""
    updates: Tensor
    """float32 scalar: the number of updates that were applied before this one.  The rule must not change it."""
    scalars: Mapping[str, Tensor]
    """float32 scalars by the names that the rule declares."""


@dataclass(frozen=True)
class Rule:
    """An optimizer.  ``update(parts, grads, hyper)`` changes values, moments and scalars in place, and may use ``grads`` as scratch.

    ``grads[i]`` is the mean gradient of ``parts[i]``, clipped.  An update must be elementwise, or at least give the same bits however a
    tensor is cut; it must change scalars by what ``hyper`` holds alone, since every member keeps the same ones.
    """

    moments: tuple[str, ...]
    update: Callable[[Sequence[Part], Sequence[Tensor], Hyper], None]
    scalars: tuple[str, ...] = field(default=())


def rule_of(job: Job) -> Rule:
    """Return the rule that ``optim.kind`` names.  Raises :class:`CodeError` where that names none."""
    kind = job.optim.kind
    found = load(RULES.get(kind, kind), "optim.kind")
    if not isinstance(found, Rule):
        raise CodeError(f"optim.kind = {kind!r} names a {type(found).__name__}; name a Rule of elastic.engine.optim.base, or 'adamw'")
    return found


class Optimizer:
    """The rule of a job, with the parameters and the state that this member holds."""

    def __init__(self, job: Job, parameters: Mapping[str, Tensor], boxes: Mapping[str, tuple[Slice, ...]], decayed: frozenset[str]) -> None:
        """``parameters``: local shards by name, sharing memory with the model, at ``boxes``.  ``decayed``: names whose weights decay."""
        self.job, self.rule = job, rule_of(job)
        self.updates = torch.zeros((), dtype=torch.float32)
        """Number of updates applied.  A step that is skipped does not count."""
        self.scalars = {name: torch.zeros((), dtype=torch.float32) for name in self.rule.scalars}
        self.parts = {
            name: Part(
                name,
                boxes[name],
                value,
                {kind: torch.zeros_like(value, requires_grad=False) for kind in self.rule.moments},
                name in decayed,
            )
            for name, value in parameters.items()
        }

    @torch.no_grad()
    def apply(self, grads: Mapping[str, Tensor], outcome: Outcome) -> float:
        """Apply the update of ``outcome.step`` from summed gradients, which are scaled in place.  Returns the learning rate used."""
        job = self.job
        lr = learning_rate_of(job, outcome.step)
        if not outcome.finite:
            return lr
        means = [grads[name] for name in self.parts]
        torch._foreach_div_(means, float(max(outcome.tokens, 1)))
        if outcome.norm > job.optim.clip_norm:
            torch._foreach_mul_(means, job.optim.clip_norm / outcome.norm)
        self.rule.update([*self.parts.values()], means, Hyper(job.optim, lr, self.updates, self.scalars))
        self.updates += 1
        return lr
