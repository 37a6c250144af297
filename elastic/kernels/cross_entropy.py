"""The cross-entropy of a head, fused with the head's matrix product, in chunks of tokens.

The logits of a whole microbatch never exist: at 8,192 tokens and a vocabulary of 128,256 they are 2 GB in
bf16, and 4 GB in float32.  A chunk's gradient replaces its logits at once, and the gradient of the head is
added up in float32 over the chunks, in their order.  So the number of tokens in a chunk is part of what makes
the bits, and the job's ``numerics`` fixes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elastic.kernels.once import once

CHUNK = 2048
"""Number of tokens of a chunk."""
ONCE = (
    "the loss that the model computes itself has no second derivative, as torch.autograd.grad(…, "
    "create_graph=True) needs; call the model without targets, and compute the loss from its logits"
)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the cross-entropies of ``hidden @ weight.T``, a float32 scalar; the caller takes its
    gradient once.

    ``hidden`` is [..., dim], ``weight`` [vocab, dim] and ``targets`` int64 [...]; negative targets are
    masked.
    """
    if not torch.is_grad_enabled():  # ``needs_input_grad`` does not know of it
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _CrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten())
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the sum, as if the gradient of the sum were 1; ``backward`` scales
    them.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        tokens, learns = len(hidden), any(ctx.needs_input_grad)
        losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        by_hidden, by_weight = torch.empty_like(hidden) if learns else None, None
        for first in range(0, tokens, CHUNK):
            chunk = slice(first, first + CHUNK)
            some = hidden[chunk]
            logits = some @ weight.T
            _losses_(logits, targets[chunk], losses[chunk])
            if by_hidden is not None:
                torch.mm(logits, weight, out=by_hidden[chunk])
                by_weight = _added(by_weight, logits.T, some)
        if by_hidden is not None and by_weight is not None:
            ctx.save_for_backward(by_hidden, by_weight.to(weight.dtype))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight = ctx.saved_tensors
        return once(ONCE, by_hidden * grad.to(by_hidden.dtype), by_weight * grad.to(by_weight.dtype), None)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Returns ``total + left @ right`` in float32 at least."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if _stands_for_a_gpu(left) and left.dtype != wide:
        return left.new_empty(len(left), right.shape[1], dtype=wide) if total is None else total
    # torch 2.11 cannot imagine what is below
    if left.device.type != "cuda" or left.dtype == wide or type(left) is not Tensor:
        product = left.to(wide) @ right.to(wide)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(left, right, out_dtype=wide)
    return torch.addmm(total, left, right, out_dtype=wide, out=total)


def _losses_(logits: Tensor, targets: Tensor, losses: Tensor) -> None:
    """Writes the cross-entropy of each row into ``losses``, and its gradient over the logits.  Masked rows
    become zeros.
    """
    if logits.device.type == "cuda" and type(logits) is Tensor:  # a fake tensor has no memory
        from elastic.kernels.triton_kernels import cross_entropy_

        return cross_entropy_(logits, targets, losses)
    if _stands_for_a_gpu(logits):
        return
    wide = logits.to(losses.dtype)
    top = wide.logsumexp(-1, keepdim=True)
    valid, chosen = (targets >= 0)[:, None], targets.clamp_min(0)[:, None]
    losses.copy_(torch.where(valid, top - wide.gather(-1, chosen), 0.0)[:, 0])
    grads = wide.sub_(top).exp_().scatter_(-1, chosen, -1.0, reduce="add").mul_(valid)
    if grads.dtype != logits.dtype:  # else they are the logits already
        logits.copy_(grads)


def _stands_for_a_gpu(tensor: Tensor) -> bool:
    """Returns whether a fake tensor stands for one of a GPU, whose kernels need no memory but for their
    results.
    """
    return getattr(getattr(tensor, "fake_mode", None), "gpu", False)
