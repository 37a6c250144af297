"""Precision policies: the dtypes in which a step computes and sums.

The parameters that a member holds (the masters), the moments, and the gradient sum are float32 in every policy.  A policy names
the dtype in which parameters are gathered and used by forward and backward, and the dtype in which gradients travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """One policy.  With ``compute`` None the parameters are used in the dtype that they have."""

    compute: torch.dtype | None
    reduce: torch.dtype = torch.float32


PRECISIONS = {"fp32": Precision(None), "bf16": Precision(torch.bfloat16)}
"""The policies by the names that the setting ``precision`` accepts."""
