"""In which dtypes a step computes and sums.

The parameters that a member holds (the masters), the moments, and the gradient sum are float32 in every policy.  A policy says in which
dtype parameters are gathered and used by forward and backward, and in which dtype gradients travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """``compute`` None: the dtype of the parameters as they are."""

    compute: torch.dtype | None
    reduce: torch.dtype = torch.float32


PRECISIONS = {"fp32": Precision(None), "bf16": Precision(torch.bfloat16)}
"""The policies by the names that the setting ``precision`` accepts."""
