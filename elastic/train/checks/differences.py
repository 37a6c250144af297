"""Measures how far two results of one microbatch are apart, and makes numbers that identify a result, for
``trial.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from elastic.train.checks.plain import PlainResult

SMALL = 0.01
"""Part of the largest root mean square of any gradient.  A gradient whose root mean square is below it is
mostly rounding, so its difference is divided by this part instead of by its own norm.
"""
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes that hold the bits of floating-point numbers, by the bytes of a number."""
ROUNDED = 2.0**-22
"""Relative change of the float32 weights that shows how sensitive a model is: two steps of the format."""


def summary_of(found: PlainResult, *, exact: bool) -> list[float]:
    """Returns numbers that differ if the loss or any gradient does: its norm and, if ``exact``, the sum of
    its bits.
    """
    norms = [each.detach().norm().float() for each in found.grads.values()]
    told = [found.loss, found.count, *(torch.stack(norms).tolist() if norms else ())]
    if exact and norms:
        bits = [
            each.detach().contiguous().view(WORDS[each.dtype.itemsize]).sum(dtype=torch.int64)
            for each in found.grads.values()
        ]
        told += torch.stack(bits).tolist()
    return [number if number == number else math.inf for number in told]


def moved(values: Tensor, part: float, kind: int) -> Tensor:
    """Returns ``values``, each changed by the relative amount ``part``, up or down.  Each ``kind`` has
    another pattern of signs.
    """
    if not values.is_floating_point():
        return values
    places = torch.arange(values.numel(), device=values.device)
    signs = 1 - 2 * ((places * (2 * kind + 1) + places // (kind + 2)) % 2).view(values.shape)
    return values * (1 + signs * part)


def apart_by(plain: float, ours: float) -> float:
    """Returns the relative difference of two losses; 0 if neither is finite, infinity if only one is."""
    if not math.isfinite(plain):
        return 0.0 if not math.isfinite(ours) else math.inf
    return abs(plain - ours) / max(abs(plain), abs(ours), 1e-30) if math.isfinite(ours) else math.inf


def parts_of(plain: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the difference of the two gradients of each parameter, as a part of the norm of ``plain``, or
    of a least norm (:data:`SMALL`).
    """
    norms = {name: float(each.float().norm()) for name, each in plain.items()}
    finite = [
        norm / each.numel() ** 0.5
        for norm, each in zip(norms.values(), plain.values(), strict=True)
        if math.isfinite(norm)
    ]
    least, found = SMALL * max(finite, default=0.0), dict[str, float]()
    for name, each in plain.items():
        difference = float((ours[name].float().reshape(-1) - each.float().reshape(-1)).norm())
        found[name] = difference / max(norms[name], least * each.numel() ** 0.5, 1e-30)
        if not math.isfinite(norms[name]):  # not finite in plain torch: ours must not be finite either
            found[name] = 0.0 if not math.isfinite(float(ours[name].float().norm())) else math.inf
        elif not math.isfinite(difference):
            found[name] = math.inf
    return found


def values_of(model: nn.Module) -> dict[str, float]:
    """Returns the norm of each parameter, as a mark of its values: other values hardly have the same norm."""
    norms = {name: each.detach().float().norm() for name, each in model.named_parameters()}
    return (
        dict(zip(norms, torch.stack([*norms.values()]).nan_to_num().tolist(), strict=True)) if norms else {}
    )
