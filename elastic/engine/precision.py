"""Precision policies: the dtypes in which a step computes and sums.

A policy names the dtype in which parameters are gathered and used by forward and backward, and the dtype in which gradients travel.  In
every policy gradients are summed in float32.  The parameters that a member holds (the masters) and the moments keep the dtype of the model,
which is float32 unless the model says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.engine.fp8 import Recipe


@dataclass(frozen=True)
class Precision:
    """One policy.  With ``compute`` None the parameters are used in the dtype that they have.

    With ``fp8`` linear layers of the blocks multiply in that format, by one of the recipes of ``fp8.py``.
    """

    compute: torch.dtype | None
    reduce: torch.dtype = torch.float32
    fp8: Recipe | None = None


PRECISIONS = {
    "fp32": Precision(None),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "fp8": Precision(torch.bfloat16, fp8="tensor"),
    "fp8-rowwise": Precision(torch.bfloat16, fp8="row"),
}
"""The policies by the names that the setting ``precision`` accepts."""
