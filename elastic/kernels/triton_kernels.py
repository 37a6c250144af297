"""Kernels of our own for NVIDIA GPUs, in Triton.  Import this module only where there is one.

No result depends on how a tensor is cut: an element or a row is computed by the same instructions wherever it
lies.  Fused multiply-adds are written out where torch's kernels have them, and forbidden elsewhere, so that
:func:`adamw_` has the bits of torch's ``foreach`` update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 1024
"""Number of elements that one program of an elementwise kernel computes."""
COLUMNS = 4096
"""Number of logits that one program of :func:`cross_entropy_` holds at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, losses, vocab, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    columns = tl.arange(0, COLUMNS)
    top, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, vocab, COLUMNS):
        some = tl.load(logits + first + columns, mask=first + columns < vocab, other=float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(top, tl.max(some, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(some - higher), 0)
        top = higher
    valid = target >= 0
    chosen = tl.load(logits + tl.where(valid & (target < vocab), target, 0)).to(tl.float32)
    chosen = tl.where(target < vocab, chosen, float("nan"))
    tl.store(losses + row, tl.where(valid, top + tl.log(total) - chosen, 0.0))
    for first in range(0, vocab, COLUMNS):
        here = first + columns
        some = tl.load(logits + here, mask=here < vocab, other=float("-inf")).to(tl.float32)
        grad = tl.exp(some - top) / total - tl.where(here == target, 1.0, 0.0)
        grad = tl.where(target < vocab, grad, float("nan"))
        tl.store(logits + here, tl.where(valid, grad, 0.0).to(logits.dtype.element_ty), mask=here < vocab)


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor) -> None:
    """Writes the cross-entropy of each row of ``logits`` [rows, vocab] into ``losses`` (float32), and its
    gradient over the logits.

    Rows whose target is negative are masked: zeros.  Those whose target is beyond the vocabulary are NaN, so
    that no step applies them.
    """
    rows, vocab = logits.shape
    if rows:
        _cross_entropy[(rows,)](
            logits, targets, losses, vocab, logits.stride(0), COLUMNS=COLUMNS, num_warps=8
        )


@dataclass(frozen=True)
class AdamW:
    """The scalars of an update by AdamW, as Python computes them in float64.  The kernel rounds each to
    float32.
    """

    divide: float
    """The gradient is multiplied by its reciprocal, as torch divides by a scalar."""
    clip: float
    """The gradient is then multiplied by it; 1 leaves it as it is."""
    keep: float
    """It is 1 - lr × weight decay."""
    beta1: float
    beta2: float
    step_size: float
    """It is lr ÷ (1 - beta1 ^ updates)."""
    root: float
    """The square root of 1 - beta2 ^ updates."""
    eps: float


@dataclass(frozen=True)
class Rounding:
    """Says how two moments are rounded to bfloat16 (``engine/optim/rounding.py``): by the places of elements
    in the whole tensor.

    The element ``i`` of the slice is the element ``first + i // run * whole + i % run`` of the tensor.
    """

    first: int
    run: int
    whole: int
    keys: Sequence[int]
    """Two words of 32 bits for each moment."""


@triton.jit
def _mixed(words):  # type: ignore[no-untyped-def]
    words = (words ^ (words >> 16)) * 0x7FEB352D
    words = (words ^ (words >> 15)) * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def _rounded(values, places, key0, key1):  # type: ignore[no-untyped-def]
    low, high = places.to(tl.uint32), (places >> 32).to(tl.uint32)
    bits = _mixed(_mixed(low ^ key0.to(tl.uint32)) ^ high ^ key1.to(tl.uint32)) >> 16
    words = (values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return words.to(tl.float32, bitcast=True).to(tl.bfloat16)


_KEYS = ("first", "run", "whole", "average0", "average1", "square0", "square1")


@triton.jit(do_not_specialize=_KEYS)  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    values, grads, averages, squares, count, inverse, clip, keep, lerp, beta2, part2, step_size, root, eps,
    first, run, whole, average0, average1, square0, square1, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    grad = tl.load(grads + at, mask=here)
    grad = libdevice.mul_rn(libdevice.mul_rn(grad, inverse), clip)
    value = libdevice.mul_rn(tl.load(values + at, mask=here), keep)
    average = tl.load(averages + at, mask=here).to(tl.float32)
    average = libdevice.fma_rn(lerp, libdevice.sub_rn(grad, average), average)
    square = libdevice.mul_rn(tl.load(squares + at, mask=here).to(tl.float32), beta2)
    square = libdevice.fma_rn(part2, libdevice.mul_rn(grad, grad), square)
    below = libdevice.add_rn(libdevice.div_rn(libdevice.sqrt_rn(square), root), eps)
    value = libdevice.fma_rn(step_size, libdevice.div_rn(average, below), value)
    tl.store(values + at, value, mask=here)
    if ROUNDS:
        places = first + at // run * whole + at % run
        average, square = (
            _rounded(average, places, average0, average1),
            _rounded(square, places, square0, square1),
        )
    tl.store(averages + at, average, mask=here)
    tl.store(squares + at, square, mask=here)


def adamw_(
    values: Tensor,
    grads: Tensor,
    averages: Tensor,
    squares: Tensor,
    by: AdamW,
    rounding: Rounding | None = None,
) -> None:
    """Divides, clips and applies the gradient of one tensor in one pass over memory.  All are float32 and
    contiguous.

    With ``rounding`` the moments are bfloat16.
    """
    count = values.numel()
    if count:
        place = rounding or Rounding(0, 1, 1, (0,) * 4)
        _adamw[(triton.cdiv(count, BLOCK),)](
            *(values, grads, averages, squares, count),
            *(
                1 / by.divide,
                by.clip,
                by.keep,
                1 - by.beta1,
                by.beta2,
                1 - by.beta2,
                -by.step_size,
                by.root,
                by.eps,
            ),
            # Triton takes signed words
            *(place.first, place.run, place.whole, *(key - (key >> 31 << 32) for key in place.keys)),
            ROUNDS=rounding is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _squares(values, sums, columns, WIDE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    some = tl.load(values + row * columns + at, mask=at < columns, other=0.0)
    some = libdevice.mul_rn(some, some)
    for level in tl.static_range(WIDE):
        some = tl.sum(tl.reshape(some, (2, PADDED >> (level + 1))), 0)
    tl.store(sums + row + tl.arange(0, 1), some.to(tl.float64))


def squares_(values: Tensor, sums: Tensor) -> None:
    """Writes the sum of the squares of each row of ``values`` (float32 [rows, columns], contiguous) into
    ``sums`` (float64 [rows]).

    It adds as :func:`elastic.engine.norm.tree_sum` does: the halves, then the halves of that, and so on.
    """
    rows, columns = values.shape
    padded = triton.next_power_of_2(columns)
    _squares[(rows,)](
        values,
        sums,
        columns,
        WIDE=padded.bit_length() - 1,
        PADDED=padded,
        num_warps=max(1, min(8, padded // 512)),
    )
