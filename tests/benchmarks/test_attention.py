"""The instrument of the attention benchmark: its plain math is torch's, and it sees wrong values and bits
that change.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.attention import Attend, Shape, both, difference, exact, measured, sdpa

pytestmark = pytest.mark.fast

SHAPE = Shape(heads=4, kv_heads=2, dim=16, seq=40)


def row(attend: Attend) -> tuple[bool, float]:
    found = measured(attend, SHAPE, "cpu", torch.float32, least_s=0.001)
    return found["same_bits"], found["difference"]


def all_see_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(None)(q, k, v) + 1e-6 * torch.rand(())


def test_the_plain_math_is_that_of_torch_in_double() -> None:
    inputs = SHAPE.inputs("cpu", torch.float64)
    assert difference(both(sdpa(None), inputs), exact(*inputs)) < 1e-14
    assert difference(both(all_see_all, inputs), exact(*inputs)) > 0.1, (
        "attention without a mask must not pass"
    )


def test_a_row_tells_wrong_values_and_changing_bits() -> None:
    same, off = row(sdpa(None))
    assert same and off < 1e-5
    same, off = row(all_see_all)
    assert same and off > 0.1
    same, off = row(noisy)
    assert not same and off < 1e-5
