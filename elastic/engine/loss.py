"""Losses.  Each returns a sum over valid tokens and their number, never a mean, so the number of members
cannot change the scale.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.errors import ModelError


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy of each next token: (sum as float32 scalar, number of valid targets as int64
    scalar).

    ``batch["tokens"]`` is int64 [batch, seq + 1]; negative targets are masked, and negative inputs read as
    token 0.  If the batch has ``"documents"`` of the same shape, the model gets those of its inputs, and a
    target in another document than its input is masked.  Raises :class:`ModelError` if the model takes no
    documents, or returns something other than logits.
    """
    tokens, documents = batch["tokens"], batch.get("documents")
    inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:].clamp_min(-1)
    more: dict[str, Tensor] = {}
    if documents is not None:
        kind: Any = type(model)
        expect_documents(kind)
        targets = targets.masked_fill(documents[:, 1:] != documents[:, :-1], -1)
        more = {"documents": documents[:, :-1]}
    if getattr(model, "fuses_loss", False):
        loss = model(inputs, targets, **more)
    else:
        loss = F.cross_entropy(
            _logits(model(inputs, **more), inputs).float().flatten(0, 1),
            targets.flatten(),
            ignore_index=-1,
            reduction="sum",
        )
    return loss, torch.count_nonzero(targets >= 0)


def _logits(returned: Any, inputs: Tensor) -> Tensor:
    """Returns ``returned`` if it has the shape of logits; else raises :class:`ModelError`.  If batch and
    sequence are exchanged, the number of logits is right, but they belong to other targets.
    """
    if isinstance(returned, Tensor):
        if returned.dim() == 3 and returned.shape[:2] == inputs.shape and returned.is_floating_point():
            return returned
        came = (
            f"tensor of shape {list(returned.shape)} and {str(returned.dtype).removeprefix('torch.')} for "
            f"tokens {list(inputs.shape)}"
        )
    else:
        came = type(returned).__name__
    raise ModelError(
        f"the model returned a {came}, but loss = 'elastic.engine.loss:next_token' needs a tensor of "
        "logits, [batch, seq, vocabulary]; return logits, or set loss to a function of yours; for a "
        "model of transformers set model = 'elastic.models.transformers_lm:build'"
    )


@cache
def expect_documents(model: Any) -> None:
    """Raises :class:`ModelError` if the class ``model`` takes no documents."""
    known = inspect.signature(model.forward).parameters.values()
    if not any(each.name == "documents" or each.kind is each.VAR_KEYWORD for each in known):
        raise ModelError(
            f"data.args.documents = true, but forward() of {model.__name__} has no argument "
            "'documents'; set data.args.documents = false, use a model of elastic.models.llama or "
            "gpt2, or add the argument and let tokens attend to their own document only"
        )
