"""Matrix products in fp8 (Micikevicius and others 2022): E4M3 for inputs and weights, E5M2 for gradients,
each with a scale.

The linear layers of the blocks multiply in fp8; everything else computes in bf16.  A scale is the largest
power of two with which the largest of its elements fits into the format.  So scaling rounds nothing, and a
scale depends on no order of additions.  There are two recipes:

* ``tensor``: a tensor has one scale, and all three products of a layer are in fp8.  A tensor is the whole
  input of a microbatch, or a whole weight, even if each member holds a part of it.
* ``row``: each row of an input, of a gradient and of a weight (an output of the layer) has a scale, so an
  outlier costs precision in its own row only.  The product for the gradient of the input sums over the rows
  of the weight, and a kernel takes no scales along a dimension that it sums over.  So the gradient of the
  output is multiplied by the weight's scales first, and then gets scales of its own; both products use the
  same fp8 values of the weight.  The gradient of the weight sums over the rows of inputs, so it is a product
  in bf16 (as in torchao's recipe ``rowwise_with_gw_hp``).

The products have the same bits in every layout.  If an element is not finite, no element with the same scale
stays finite.  ``fp8_weights.py`` casts weights once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elastic.kernels.once import once
from elastic.models.spec import ShardingTable

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""The formats of inputs and weights, and of gradients."""
MULTIPLE = 16
"""Each size of a layer must be a multiple of this number, as cuBLAS demands."""
LEAST = 2.0**-100
"""Least maximum for which a scale is computed: elements with a smaller one get the scale of this number."""
EXPONENT = 0x7F800000
"""The bits of a float32 that hold its exponent."""
ONCE = (
    "a product in fp8 has no second derivative, as torch.autograd.grad(…, create_graph=True) needs; "
    "set precision = 'bf16'"
)
Recipe = Literal["tensor", "row"]
"""The names of the recipes."""


def apply_fp8(model: nn.Module, table: ShardingTable, recipe: Recipe = "tensor") -> None:
    """Lets the linear layers of the blocks multiply in fp8."""
    for layer in layers_of(model, table):
        hold(layer, None, None)
        layer.forward = MethodType(_FORWARDS[recipe], layer)  # type: ignore[method-assign]  # no closure: each block would compile anew


def layers_of(model: nn.Module, table: ShardingTable) -> list[nn.Linear]:
    """Returns the linear layers of the blocks whose sizes are multiples of :data:`MULTIPLE`."""
    found = [module for name in table.blocks for module in model.get_submodule(name).modules()]
    return [
        each
        for each in found
        if type(each) is nn.Linear and not each.in_features % MULTIPLE and not each.out_features % MULTIPLE
    ]


def hold(layer: nn.Linear, values: Tensor | None, inverse: Tensor | None) -> None:
    """Lets ``layer`` multiply by fp8 ``values`` with their ``inverse`` scale or scales, in place of its
    weight.

    With None the layer casts its weight in each pass.  The values are attributes and not buffers, because
    buffers are part of the state.
    """
    layer.fp8_values, layer.fp8_inverse = values, inverse  # type: ignore[assignment]


def held_by(module: nn.Module) -> list[Tensor]:
    """Returns the fp8 values that layers within ``module`` hold."""
    found = (getattr(each, "fp8_values", None) for each in module.modules())
    return [each for each in found if each is not None]


def _by_tensor(layer: nn.Linear, x: Tensor) -> Tensor:
    return _forward(_Product, layer, x)


def _by_row(layer: nn.Linear, x: Tensor) -> Tensor:
    return _forward(_RowProduct, layer, x)


_FORWARDS: dict[Recipe, Callable[[nn.Linear, Tensor], Tensor]] = {"tensor": _by_tensor, "row": _by_row}


def _forward(kind: type[torch.autograd.Function], layer: nn.Linear, x: Tensor) -> Tensor:
    if not x.numel():
        return x.new_zeros(*x.shape[:-1], layer.out_features)
    product: Tensor = kind.apply(x, layer.weight, layer.fp8_values, layer.fp8_inverse)
    return product if layer.bias is None else product + layer.bias


class _Product(torch.autograd.Function):
    """The product x @ w.T: x [..., in], w [out, in] -> [..., out].  For the backward pass it keeps only the
    fp8 values of the input.

    ``values`` and ``inverse`` are the fp8 values of ``w`` and their inverse scale; the values of ``w`` itself
    are not read then.  If they are None, they are computed from ``w``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, values: Tensor | None, inverse: Tensor | None) -> Tensor:
        rows, by_x = scaled(x.reshape(-1, x.shape[-1]), FORWARD)
        ctx.save_for_backward(rows, by_x, w if values is None else None, values, inverse)
        weights, by_w = (
            (values, inverse) if values is not None and inverse is not None else scaled(w, FORWARD)
        )
        return _multiply(rows, by_x, weights.t(), by_w, w.dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, by_x, w, values, inverse = ctx.saved_tensors
        grads, by_grad = scaled(grad.reshape(-1, grad.shape[-1]), BACKWARD)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            weights, by_w = (values, inverse) if w is None else scaled(w, FORWARD)
            of_x = _multiply(grads, by_grad, _columns(weights), by_w, grad.dtype).view(*grad.shape[:-1], -1)
        if not ctx.needs_input_grad[1]:
            return once(ONCE, of_x, None, None, None)
        if len(rows) % MULTIPLE:
            of_w = (grads.to(grad.dtype).t() @ rows.to(grad.dtype)) * (by_grad * by_x).to(grad.dtype)
        else:
            of_w = _multiply(grads.t().contiguous(), by_grad, _columns(rows), by_x, grad.dtype)
        return once(ONCE, of_x, of_w, None, None)


class _RowProduct(torch.autograd.Function):
    """The product of :class:`_Product` with a scale for each row.  For the backward pass it keeps the input
    as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, values: Tensor | None, inverse: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w if values is None else None, values, inverse)
        rows, by_x = scaled(x.reshape(-1, x.shape[-1]), FORWARD, by_row=True)
        weights, by_w = (
            (values, inverse)
            if values is not None and inverse is not None
            else scaled(w, FORWARD, by_row=True)
        )
        return _multiply(rows, by_x, weights.t(), by_w.view(1, -1), w.dtype, fast=True).view(
            *x.shape[:-1], -1
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, values, inverse = ctx.saved_tensors
        flat, of_x, of_w = grad.reshape(-1, grad.shape[-1]), None, None
        if ctx.needs_input_grad[0]:
            weights, by_w = (values, inverse) if w is None else scaled(w, FORWARD, by_row=True)
            # exact: powers of two
            grads, by_grad = scaled(flat * by_w.view(1, -1).to(flat.dtype), BACKWARD, by_row=True)
            ones = torch.ones(1, weights.shape[1], dtype=torch.float32, device=grad.device)
            of_x = _multiply(grads, by_grad, _columns(weights), ones, grad.dtype).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            of_w = flat.t() @ x.reshape(-1, x.shape[-1])
        return once(ONCE, of_x, of_w, None, None)


def scaled(values: Tensor, dtype: torch.dtype, *, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """Returns ``values`` times powers of two in the fp8 ``dtype``, and the inverse of these powers, float32:
    a scalar, or [rows, 1].

    For a scalar, too, the maximum of each row is taken first: the compiler can do that where it computes the
    rows.
    """
    largest = values.abs().amax(-1, keepdim=by_row)
    power = power_of((largest if by_row else largest.amax()).float(), dtype)
    return (values.float() * power).to(dtype), 1 / power


def power_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the largest powers of two with which ``largest``, float32, fit the ``dtype``; NaN for those
    that are not finite.
    """
    fits = torch.finfo(dtype).max / largest.clamp_min(LEAST)
    return (fits.view(torch.int32) & EXPONENT).view(torch.float32) + (largest - largest)


def _columns(matrix: Tensor) -> Tensor:
    """Returns ``matrix`` with neighbouring rows next to each other in memory, as the product wants its second
    factor.
    """
    return matrix.t().contiguous().t()


def _multiply(
    a: Tensor, by_a: Tensor, b: Tensor, by_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Returns a @ b times both scales.  ``fast`` adds in the tensor cores alone, with fewer bits."""
    multiply: Callable[..., Tensor] = torch._scaled_mm
    return multiply(a, b, scale_a=by_a, scale_b=by_b, out_dtype=dtype, use_fast_accum=fast)
