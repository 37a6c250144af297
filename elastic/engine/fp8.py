"""Matrix products in fp8 (Micikevicius and others 2022): E4M3 for inputs and weights, E5M2 for gradients, with one scale for each tensor.

The linear layers of the blocks multiply so; everything else computes in bf16.  The scale of a tensor is the largest power of two with which
its largest element fits.  So scaling changes no bits, and the scale depends on no order.  A tensor is the whole input of a microbatch, or a
whole weight, whatever members hold of it; so the products have the same bits in every layout.  If an element is not finite, no element of
the product is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from elastic.models.spec import ShardingTable

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""The formats of inputs and weights, and of gradients."""
MULTIPLE = 16
"""Each size of a layer must be a multiple of this number, as cuBLAS demands."""
LEAST = 2.0**-100
"""Largest element that counts as zero."""
EXPONENT = 0x7F800000
"""The bits of a float32 that hold its exponent."""


def apply_fp8(model: nn.Module, table: ShardingTable) -> None:
    """Lets the linear layers of the blocks multiply in fp8."""
    for layer in layers_of(model, table):
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]  # no closure: the compiler would compile each block anew


def layers_of(model: nn.Module, table: ShardingTable) -> list[nn.Linear]:
    """Returns the linear layers of the blocks whose sizes fit."""
    found = [module for name in table.blocks for module in model.get_submodule(name).modules()]
    return [each for each in found if type(each) is nn.Linear and not each.in_features % MULTIPLE and not each.out_features % MULTIPLE]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if not x.numel():
        return torch.nn.functional.linear(x, layer.weight, layer.bias)
    product: Tensor = _Product.apply(x, layer.weight)
    return product if layer.bias is None else product + layer.bias


class _Product(torch.autograd.Function):
    """The product x @ w.T: x [..., in], w [out, in] -> [..., out].  Of the input it keeps the fp8 values alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        rows, by_x = scaled(x.reshape(-1, x.shape[-1]), FORWARD)
        weights, by_w = scaled(w, FORWARD)
        ctx.save_for_backward(rows, by_x, w)
        return _multiply(rows, by_x, weights.t(), by_w, w.dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, by_x, w = ctx.saved_tensors
        grads, by_grad = scaled(grad.reshape(-1, grad.shape[-1]), BACKWARD)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            weights, by_w = scaled(w, FORWARD)
            of_x = _multiply(grads, by_grad, _columns(weights), by_w, grad.dtype).view(*grad.shape[:-1], -1)
        if not ctx.needs_input_grad[1]:
            return of_x, None
        if len(rows) % MULTIPLE:
            of_w = (grads.to(w.dtype).t() @ rows.to(w.dtype)) * (by_grad * by_x).to(w.dtype)
        else:
            of_w = _multiply(grads.t().contiguous(), by_grad, _columns(rows), by_x, w.dtype)
        return of_x, of_w


def scaled(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``values`` times a power of two in the fp8 ``dtype``, and the inverse of that power: a float32 scalar."""
    largest = values.abs().amax().float()
    fits = torch.finfo(dtype).max / largest.clamp_min(LEAST)
    power = (fits.view(torch.int32) & EXPONENT).view(torch.float32) + (largest - largest)  # NaN if the largest is not finite
    return (values.float() * power).to(dtype), 1 / power


def _columns(matrix: Tensor) -> Tensor:
    """Returns ``matrix`` with neighbouring rows next to each other in memory, as the product wants its second factor."""
    return matrix.t().contiguous().t()


def _multiply(a: Tensor, by_a: Tensor, b: Tensor, by_b: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Returns a @ b times both scales.  ``fast`` adds in the tensor cores alone, with fewer bits."""
    multiply: Callable[..., Tensor] = torch._scaled_mm
    return multiply(a, b, scale_a=by_a, scale_b=by_b, out_dtype=dtype, use_fast_accum=fast)
