"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon) for the matrices of the blocks, and AdamW for
everything else.

The update of a matrix is its Nesterov momentum, made nearly orthogonal by Newton–Schulz iterations.  These
need whole matrices, and members hold rows; so they run before the commit, when a member may still be lost.
The update itself needs no other member.  The iterations run in bfloat16, as those of ``torch.optim.Muon`` do,
and so do the rows that travel.

The learning rate of a matrix is 0.2 × √(its longer side) times ``optim.lr``.  With that an update is as large
as one of AdamW (Liu and others 2025, section 2.2), and both share the learning rate and the weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from elastic.engine.optim.adamw import ADAMW
from elastic.engine.optim.base import Before, Hyper, Part, decay_, mean_
from elastic.engine.optim.owners import by_owners

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of an iteration, which are steep at zero: x ← a·x + b·x³ + c·x⁵ for each singular value."""
ITERATIONS = 5
MOMENTUM = "momentum_buffer"
"""Name of the moment of a matrix."""
LEAST_NORM = 1e-7
"""Least norm by which a matrix is divided, so that a matrix of zeros stays zero."""


def orthogonalised(matrix: Tensor) -> Tensor:
    """Returns U·Vᵀ of the singular value decomposition of ``matrix``, roughly: its singular values become 0.5
    to 1.5.  The result is in bfloat16.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    found = found / found.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def prepare(parts: list[Part], grads: list[Tensor], before: Before) -> Mapping[str, Tensor]:
    """Returns this member's rows of the directions of all matrices, by name."""
    chosen = [(part, grad) for part, grad in zip(parts, grads, strict=True) if part.is_matrix]
    mu = before.settings.momentum

    def rows(number: int) -> Tensor:
        part, grad = chosen[number]
        # in 16 bits the kernel rounds the last elements of a tensor differently
        wide = torch.promote_types(grad.dtype, torch.float32)
        mean = before.mean(grad.to(wide))
        momentum = part.moments[MOMENTUM].to(mean.device, wide)
        return mean.lerp_(momentum.lerp(mean, 1 - mu), mu).bfloat16()

    shapes = [(part.shape[0], part.shape[1]) for part, _ in chosen]
    directions = by_owners(shapes, rows, orthogonalised, before.world)
    return {part.name: direction for (part, _), direction in zip(chosen, directions, strict=True)}


def update(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    """Takes the mean, clips, and updates."""
    pairs = list(zip(parts, grads, strict=True))
    others = [pair for pair in pairs if not pair[0].is_matrix]
    if others:
        ADAMW.update([part for part, _ in others], [grad for _, grad in others], hyper)
    if not (matrices := [part for part in parts if part.is_matrix]):
        return
    means = [grad for part, grad in pairs if part.is_matrix]
    mean_(means, hyper)
    torch._foreach_lerp_([part.moments[MOMENTUM] for part in matrices], means, 1 - hyper.settings.momentum)
    decay_(matrices, hyper)
    for part in matrices:
        values = part.values.to(torch.promote_types(part.values.dtype, torch.float32))
        values.add_(hyper.prepared[part.name], alpha=-hyper.lr * (0.2 * math.sqrt(max(part.shape))))
        part.values.copy_(values)  # copies nothing unless the part has 16 bits


MUON = replace(ADAMW, update=update, matrix_moments=(MOMENTUM,), prepare=prepare, in_torch=None)
"""The rule that ``optim.kind = "muon"`` names."""
