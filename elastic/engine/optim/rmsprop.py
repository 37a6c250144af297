"""RMSProp (Tieleman and Hinton 2012, lecture 6.5): s ← α·s + (1 - α)·g², w ← w - lr·g / (√s + eps), with α =
``betas[1]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic.engine.optim.base import Hyper, Part, Rule, decay_, descend_


def update(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    values, squares = [part.values for part in parts], [part.moments["square_avg"] for part in parts]
    alpha = hyper.settings.betas[1]
    decay_(parts, hyper)
    torch._foreach_mul_(squares, alpha)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - alpha)
    descend_(values, grads, squares, hyper)


RMSPROP = Rule(("square_avg",), update)
"""The rule that ``optim.kind = "rmsprop"`` names."""
