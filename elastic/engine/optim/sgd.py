"""Stochastic gradient descent with momentum (Polyak 1964; as in torch.optim.SGD without dampening): v ← μ·v +
g, w ← w - lr·v.

With ``momentum = 0`` it is plain gradient descent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elastic.config.sections import Optim
from elastic.engine.optim.base import Hyper, Part, Rule, add_, decay_


def update(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    values, velocities = [part.values for part in parts], [part.moments["velocity"] for part in parts]
    decay_(parts, hyper)
    torch._foreach_mul_(velocities, hyper.settings.momentum)
    torch._foreach_add_(velocities, grads)
    add_(values, velocities, -hyper.lr)


def in_torch(groups: list[dict[str, Any]], settings: Optim) -> torch.optim.Optimizer:
    """Returns torch's SGD, for a trial."""
    return torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum, foreach=False)


SGD = Rule(("velocity",), update, in_torch=in_torch)
"""The rule that ``optim.kind = "sgd"`` names."""
