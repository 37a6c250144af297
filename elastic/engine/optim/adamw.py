"""AdamW (Loshchilov and Hutter 2019), with the bits of torch's own function, and on a GPU by a kernel in one
pass over memory.

``foreach`` computes elementwise, and its result does not depend on how a tensor is cut.  The fused CPU kernel
treats the last few elements of a tensor differently, so its result does depend on the cut. With the weight
decay in the gradient (``optim.decay = "l2"``) the same update is Adam (Kingma and Ba 2015).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elastic.config.sections import Optim
from elastic.engine.optim.base import Hyper, Part, Rule, decay_, mean_
from elastic.engine.optim.rounding import key_of, lines, portions, round_

if TYPE_CHECKING:
    from elastic.kernels.triton_kernels import Rounding

AVERAGE, SQUARE = "exp_avg", "exp_avg_sq"
"""The moments: averages of the gradients and of their squares."""


def update(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    """Takes the mean, clips, and updates."""
    by_kernel = all(
        each.device.type == "cuda" and each.dtype == torch.float32
        for each in (*grads, *(part.values for part in parts))
    )
    if any(moment.dtype != part.values.dtype for part in parts for moment in part.moments.values()):
        for part, grad in zip(parts, grads, strict=True):
            whence = lines(part) if by_kernel else None
            _rounded(part, grad, hyper) if whence is None else _rounded_by_kernel(part, grad, hyper, whence)
    elif by_kernel:
        for part, grad in zip(parts, grads, strict=True):
            _by_kernel(part, grad, hyper)
    else:
        mean_(grads, hyper)
        _by_foreach(parts, grads, hyper)


def _rounded(part: Part, grad: Tensor, hyper: Hyper) -> None:
    """Updates a portion at a time with moments in the dtype of the values, and rounds the moments."""
    keys = {kind: key_of(hyper, part.name, kind) for kind in part.moments}
    for rows, places in portions(part):
        wide = {kind: moment[rows].to(part.values.dtype) for kind, moment in part.moments.items()}
        update([replace(part, values=part.values[rows], moments=wide)], [grad[rows]], hyper)
        for kind, values in wide.items():
            round_(part.moments[kind][rows], values, places, keys[kind])


def _rounded_by_kernel(
    part: Part, grad: Tensor, hyper: Hyper, whence: list[tuple[slice, int, int, int]]
) -> None:
    """Updates, and rounds the moments, in one pass over memory, with the same bits as :func:`_rounded`."""
    from elastic.kernels.triton_kernels import Rounding

    keys = [word for kind in (AVERAGE, SQUARE) for word in key_of(hyper, part.name, kind)]
    for rows, first, run, whole in whence:
        some = {kind: moment[rows] for kind, moment in part.moments.items()}
        _by_kernel(
            replace(part, values=part.values[rows], moments=some),
            grad[rows],
            hyper,
            Rounding(first, run, whole, keys),
        )


def _by_kernel(part: Part, grad: Tensor, hyper: Hyper, rounding: Rounding | None = None) -> None:
    from elastic.kernels import triton_kernels as kernels

    settings, (beta1, beta2) = hyper.settings, hyper.settings.betas
    (updates,) = hyper.updates_of([part])
    by = kernels.AdamW(
        divide=hyper.divide,
        clip=hyper.clip,
        keep=1 - hyper.lr * (hyper.weight_decay if part.decays else 0.0),
        beta1=beta1,
        beta2=beta2,
        step_size=hyper.lr / (1 - beta1**updates),
        root=(1 - beta2**updates) ** 0.5,
        eps=settings.eps,
    )
    kernels.adamw_(part.values, grad, part.moments[AVERAGE], part.moments[SQUARE], by, rounding)


def _by_foreach(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    """Updates by the operations of torch's own function with ``foreach``, in their order.

    Torch's function keeps the number of updates of each tensor in a second tensor, which costs the host more
    time than the update of a small tensor.
    """
    settings, (beta1, beta2) = hyper.settings, hyper.settings.betas
    values, updates = [part.values for part in parts], hyper.updates_of(parts)
    averages, squares = [part.moments[AVERAGE] for part in parts], [part.moments[SQUARE] for part in parts]
    decay_(parts, hyper)
    torch._foreach_lerp_(averages, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    below = torch._foreach_sqrt(squares)
    torch._foreach_div_(below, [(1 - beta2**each) ** 0.5 for each in updates])
    torch._foreach_add_(below, settings.eps)
    torch._foreach_addcdiv_(values, averages, below, [-(hyper.lr / (1 - beta1**each)) for each in updates])


def in_torch(groups: list[dict[str, Any]], settings: Optim) -> torch.optim.Optimizer:
    """Returns torch's Adam, for a trial."""
    return torch.optim.Adam(groups, lr=1.0, betas=settings.betas, eps=settings.eps, foreach=False)


ADAMW = Rule((AVERAGE, SQUARE), update, scales=True, counts=True, in_torch=in_torch)
"""The rule that ``optim.kind = "adamw"`` names."""
