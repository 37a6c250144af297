"""The side of plain torch in a trial: its optimizers, modes that watch what it does, and how far two results are apart (``trial.py``)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic.errors import StateChanged
from elastic.job import Job
from elastic.train.guards import WRITTEN

SMALL = 0.01
"""The part of the largest root mean square of a gradient below which that of a tensor is rounding, and is compared with this part."""
ROUNDED = 2.0**-22
"""The part by which weights in float32 are moved for that: two steps of the format."""
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.dropout_)
"""The functions of torch that drop values of their first argument."""


@dataclass
class Found:
    """The loss and the count of a microbatch, and the gradient of each trained parameter that has one."""

    loss: float
    count: float
    grads: Mapping[str, Tensor]


@dataclass
class TorchOptimizer:
    """An optimizer of ``torch.optim`` that stands for a rule of ours."""

    job: Job
    optimizer: torch.optim.Optimizer
    decayed: Sequence[nn.Parameter]

    @staticmethod
    def of(job: Job, model: nn.Module) -> TorchOptimizer | None:
        """Returns that of the job; None if there is none with the same arithmetic."""
        settings, trained = job.optim, [each for each in model.parameters() if each.requires_grad]
        if settings.moments != "model" or not trained:
            return None
        decayed = [each for each in trained if each.dim() >= 2]
        l2 = settings.weight_decay if settings.decay == "l2" else 0.0
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": l2}, {"params": [each for each in trained if each.dim() < 2]}]
        groups = [group for group in groups if group["params"]]
        if settings.kind == "adamw":
            made: torch.optim.Optimizer = torch.optim.Adam(groups, lr=1.0, betas=settings.betas, eps=settings.eps, foreach=False)
        elif settings.kind == "sgd":
            made = torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum, foreach=False)
        else:
            return None
        return TorchOptimizer(job, made, decayed)

    def step(self, lr: float, found: Found) -> None:
        """Updates by the mean gradient, clipped, with decoupled weight decay before it."""
        settings, grads = self.job.optim, [*found.grads.values()]
        norm = float(torch.stack([each.double().square().sum() for each in grads]).sum().sqrt()) / max(found.count, 1)
        clip = settings.clip_norm / norm if norm > settings.clip_norm else 1.0
        with torch.no_grad():
            for grad in grads:
                grad.mul_(clip / max(found.count, 1))
            if settings.decay != "l2" and settings.weight_decay:
                for each in self.decayed:
                    if each.grad is not None:
                        each.mul_(1 - lr * settings.weight_decay)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


class NoWrites(TorchDispatchMode):
    """Raises :class:`StateChanged` for an operation that writes to a parameter, also through ``.data``, which torch does not count."""

    def __init__(self, model: nn.Module, named: str) -> None:
        super().__init__()
        self.named = named
        self.names = {each.untyped_storage()._cdata: name for name, each in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in (*zip(func._schema.arguments, args, strict=False), *_named(func, kwargs)):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for each in tree_leaves(value):
                        if isinstance(each, Tensor) and (name := self.names.get(each.untyped_storage()._cdata)):
                            raise StateChanged(WRITTEN.format(name=name, model=self.named))
        return func(*args, **kwargs)


def _named(func: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


class NoDropout(TorchFunctionMode):
    """Lets torch's own functions and layers drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        elif func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        elif getattr(func, "__name__", "") in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            args = tuple(0.0 if type(each) is float else each for each in args)  # the one number with a fraction is that of dropout
        return func(*args, **kwargs)


def summary_of(found: Found) -> list[float]:
    """Returns numbers that differ if the loss or any gradient does: norms, and sums in which places count."""
    numbers = [found.loss, found.count]
    for each in found.grads.values():
        flat = each.detach().flatten().double()
        numbers += [float(flat.norm()), float((flat * torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device)).sum())]
    return [number if number == number else math.inf for number in numbers]


def moved(values: Tensor) -> Tensor:
    """Returns ``values`` moved by the rounding of a few operations, every second one up and the others down."""
    if not values.is_floating_point():
        return values
    signs = 1 - 2 * (torch.arange(values.numel(), device=values.device) % 2).view(values.shape)
    return values * (1 + signs * ROUNDED)


def near(one: float, other: float, part: float) -> bool:
    return one == other or abs(one - other) <= part * max(abs(one), abs(other))


def apart_by(plain: float, ours: float) -> float:
    """Returns the difference of two losses, as a part; those that are not finite are alike."""
    if not math.isfinite(plain):
        return 0.0 if not math.isfinite(ours) else math.inf
    return abs(plain - ours) / max(abs(plain), abs(ours), 1e-30) if math.isfinite(ours) else math.inf


def parts_of(plain: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the difference of the gradients of each parameter, as a part of their norm, or of what is small beside all others."""
    norms = {name: float(each.float().norm()) for name, each in plain.items()}
    finite = [norm / each.numel() ** 0.5 for norm, each in zip(norms.values(), plain.values(), strict=True) if math.isfinite(norm)]
    least, found = SMALL * max(finite, default=0.0), dict[str, float]()
    for name, each in plain.items():
        difference = float((ours[name].float().reshape(-1) - each.float().reshape(-1)).norm())
        found[name] = difference / max(norms[name], least * each.numel() ** 0.5, 1e-30)
        if not math.isfinite(norms[name]):  # what is not finite there must not be so here
            found[name] = 0.0 if not math.isfinite(float(ours[name].float().norm())) else math.inf
        elif not math.isfinite(difference):
            found[name] = math.inf
    return found
