"""Optimizers as users write them: Lion, and some that cannot work."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic.engine.optim.base import Hyper, Part, Rule


def lion(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    """Lion (Chen and others 2023, algorithm 2)."""
    beta1, beta2 = hyper.settings.betas
    for part, grad in zip(parts, grads, strict=True):
        momentum = part.moments["momentum"]
        direction = (momentum * beta1 + grad * (1 - beta1)).sign()
        if part.decays:
            direction += part.values * hyper.weight_decay
        part.values.sub_(direction * hyper.lr)
        momentum.mul_(beta2).add_(grad * (1 - beta2))


LION = Rule(("momentum",), lion)


def normalised(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    """Takes the norm of a slice for that of the tensor (as LARS or Adafactor would)."""
    for part, grad in zip(parts, grads, strict=True):
        part.values.sub_(grad / grad.norm(), alpha=hyper.lr)


NORMALISED = Rule((), normalised)


def nan(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    for part, grad in zip(parts, grads, strict=True):
        part.moments["momentum"].copy_(grad.sqrt())


NAN = Rule(("momentum",), nan)


def mis_shaped(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    for part, grad in zip(parts, grads, strict=True):
        part.moments["momentum"].copy_(grad.new_ones(9))


MIS_SHAPED = Rule(("momentum",), mis_shaped)


def replaces(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    for part, grad in zip(parts, grads, strict=True):
        part.moments["momentum"] = grad.clone()  # type: ignore[index]


REPLACES = Rule(("momentum",), replaces)


class Torchs(torch.optim.SGD):
    """One of torch's kind."""
