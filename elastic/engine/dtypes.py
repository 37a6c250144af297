"""Describes the number formats that a job may compute with, keep, or send, as torch defines them.

A format has a sign, an exponent and a mantissa.  The exponent sets its range, and the mantissa the distance
to the next number: bf16 has the range of fp32 and 8 bits of precision; fp16 has 11 bits of precision, and
overflows beyond 65,504.  E4M3 has no infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FORMATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}
"""The formats by their usual names."""


@dataclass(frozen=True)
class Format:
    """One number format."""

    exponent: int
    """Bits of the exponent."""
    mantissa: int
    """Bits of the mantissa that are stored."""
    largest: float
    """Largest finite number; the smallest one is its negative."""
    smallest_normal: float
    """Smallest positive number with full precision."""
    smallest_subnormal: float
    """Smallest positive number."""
    eps: float
    """Distance from 1 to the next larger number."""


def format_of(dtype: torch.dtype) -> Format:
    """Returns the format of a floating-point ``dtype``, from ``torch.finfo``."""
    info, mantissa = torch.finfo(dtype), 0
    while 2.0**-mantissa > info.eps:
        mantissa += 1
    normal = info.smallest_normal
    return Format(info.bits - 1 - mantissa, mantissa, info.max, normal, normal * info.eps, info.eps)
