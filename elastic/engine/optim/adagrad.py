"""AdaGrad (Duchi and others 2011, figure 1, diagonal form): s ← s + g², w ← w - lr·g / (√s + eps)."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic.engine.optim.base import Hyper, Part, Rule, decay_, descend_


def update(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    values, sums = [part.values for part in parts], [part.moments["square_sum"] for part in parts]
    decay_(parts, hyper)
    torch._foreach_addcmul_(sums, grads, grads)
    descend_(values, grads, sums, hyper)


ADAGRAD = Rule(("square_sum",), update)
"""The rule that ``optim.kind = "adagrad"`` names."""
