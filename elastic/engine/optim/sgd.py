"""Stochastic gradient descent with momentum (Polyak 1964; as in torch.optim.SGD without dampening): v ← μ·v +
g, w ← w - lr·v.

With ``momentum = 0`` it is plain gradient descent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic.engine.optim.base import Hyper, Part, Rule, add_, decay_


def update(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    values, velocities = [part.values for part in parts], [part.moments["velocity"] for part in parts]
    decay_(parts, hyper)
    torch._foreach_mul_(velocities, hyper.settings.momentum)
    torch._foreach_add_(velocities, grads)
    add_(values, velocities, -hyper.lr)


SGD = Rule(("velocity",), update)
"""The rule that ``optim.kind = "sgd"`` names."""
