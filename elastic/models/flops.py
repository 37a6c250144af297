"""Counts the floating-point operations of a model's forward and backward pass.

A matrix costs 6 operations a token and parameter: a multiplication and an addition in forward, and twice as
many in backward (Chowdhery and others 2022, appendix B).  A model that has a method ``flops_per_token(seq,
causal)`` says by itself what attention adds, which depends on the length of a sequence: ours count 12 ×
layers × dim × seq, or half of it with ``causal``, because a causal mask leaves half of the matrix (as
Megatron counts).  What is computed again to save memory does not count.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

Flops = Callable[[float, bool], float]
"""``flops(seq, causal)`` returns the operations of a token in sequences of ``seq`` tokens."""


def flops_of(model: nn.Module) -> Flops:
    """Returns how the operations of ``model`` are counted.  Of a model that does not say it, attention does
    not count.
    """
    own: Flops | None = getattr(model, "flops_per_token", None)
    if own is not None:
        return own
    matrices = 6.0 * matrix_parameters(model)
    return lambda seq, causal: matrices


def matrix_parameters(model: nn.Module) -> int:
    """Returns the number of parameters in tensors of two and more dimensions.  An embedding counts only if it
    is tied to another module:
    it is looked up, not multiplied.
    """
    owners = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    multiplied = {
        id(parameter): parameter for module in owners for parameter in module.parameters(recurse=False)
    }
    return sum(parameter.numel() for parameter in multiplied.values() if parameter.dim() >= 2)
