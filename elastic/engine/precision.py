"""Precision policies: the dtypes in which a step computes and sums.

A policy names the dtype in which parameters are gathered and used by forward and backward, and the dtypes in
which gradients travel and are summed.  In every policy gradients are summed in float32.  The parameters that
a member holds (the masters) and the moments keep the dtype of the model, which is float32 unless the model
says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from elastic.engine.fp8 import Recipe
from elastic.job import Job


@dataclass(frozen=True)
class Precision:
    """One policy.  With ``compute`` None the parameters are used in the dtype that they have.

    With ``fp8`` linear layers of the blocks multiply in that format, by one of the recipes of ``fp8.py``.
    """

    compute: torch.dtype | None
    reduce: torch.dtype = torch.float32
    fp8: Recipe | None = None
    wire: torch.dtype | None = None
    """The dtype to which gradients are rounded before they travel or are added; None leaves them as they are.
    """
    casts_inputs: bool = True
    """True if floating-point inputs of the model and of its blocks are cast to ``compute``; else the model
    casts what its layers need.
    """


PRECISIONS = {
    "fp32": Precision(None),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "fp8": Precision(torch.bfloat16, fp8="tensor"),
    "fp8-rowwise": Precision(torch.bfloat16, fp8="row"),
}
"""The policies by the names that the setting ``precision`` accepts."""

WIRES = {"fp32": None, "bf16": torch.bfloat16}
"""The dtypes of gradients on their way, by the names that ``reduction.wire`` accepts."""


def precision_of(job: Job, model: nn.Module | None = None) -> Precision:
    """Returns the policy of a job.  Its ``model`` may say ``casts_inputs = False``."""
    return replace(
        PRECISIONS[job.precision],
        wire=WIRES[job.reduction.wire],
        casts_inputs=getattr(model, "casts_inputs", True),
    )
