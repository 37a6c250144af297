"""Gradients of our own that have no derivative: whoever asks for one gets an error, and no wrong number.

Torch's ``once_differentiable`` is not enough.  It looks at the gradient that a backward pass gets, and that
of a loss is the constant 1; so what is derived from the saved tensors would count as constant, and a second
derivative would lack its terms without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def once(why: str, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns ``grads``, which a backward pass has computed.  A derivative of theirs raises RuntimeError with
    the words ``why``.

    Compiled code needs nothing: torch refuses its second derivatives.
    """
    # only create_graph=True enables gradients in a backward pass
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grads
    found: tuple[Tensor | None, ...] = _Once.apply(
        why, *(None if grad is None else grad.detach().requires_grad_() for grad in grads)
    )
    return found


class _Once(torch.autograd.Function):
    """Passes gradients on, and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, why: str, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.why = why
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        raise RuntimeError(ctx.why)
