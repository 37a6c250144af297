"""AdamW (Loshchilov and Hutter 2019), by torch's own function.

``foreach`` computes elementwise, and its result does not depend on how a tensor is cut.  The fused CPU kernel treats the last few
elements of a tensor differently, so its result does depend on the cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.adamw import adamw

from elastic.engine.optim.base import Hyper, Part, Rule


def update(parts: Sequence[Part], grads: Sequence[Tensor], hyper: Hyper) -> None:
    """Updates the parts whose weights decay, then the others, because torch's function takes one decay for each call."""
    settings = hyper.settings
    for decays, weight_decay in ((True, settings.weight_decay), (False, 0.0)):
        chosen = [(part, grad) for part, grad in zip(parts, grads, strict=True) if part.decays is decays]
        adamw(
            [part.values for part, _ in chosen],
            [grad for _, grad in chosen],
            [part.moments["exp_avg"] for part, _ in chosen],
            [part.moments["exp_avg_sq"] for part, _ in chosen],
            [],
            [hyper.updates.clone() for _ in chosen],  # torch increments each of them
            foreach=True,
            amsgrad=False,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            lr=hyper.lr,
            weight_decay=weight_decay,
            eps=settings.eps,
            maximize=False,
        )


ADAMW = Rule(("exp_avg", "exp_avg_sq"), update)
"""The rule that ``optim.kind = "adamw"`` names."""
