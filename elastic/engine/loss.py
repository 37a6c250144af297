"""Losses.  Each returns a sum over valid tokens and their number, never a mean, so the number of members cannot change the scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy of each next token: (sum as float32 scalar, number of valid targets as int64 scalar).

    ``batch["tokens"]`` is int64 [batch, seq + 1]; negative targets are masked, and negative inputs read as token 0.
    """
    tokens = batch["tokens"]
    inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:].clamp_min(-1)
    if getattr(model, "fuses_loss", False):
        loss = model(inputs, targets)
    else:
        loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return loss, torch.count_nonzero(targets >= 0)
