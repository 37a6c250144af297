"""AdamW on this member's shards.

torch's own, ``foreach``: elementwise in a way that does not depend on how a tensor is cut (the fused CPU kernel's scalar tail does).  It
works on the plain local tensors behind the sharded parameters, and its moments are made here at once, so that they are slices of
the state like any other, before the first step too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from elastic.engine.optim.schedule import learning_rate_of
from elastic.job import Job
from elastic.protocol.commit_record import Outcome

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """``parameters``: local shards by name, sharing memory with the model.  ``decayed``: names whose weights decay."""

    def __init__(self, job: Job, parameters: Mapping[str, Tensor], decayed: frozenset[str]) -> None:
        self.job, self.parameters = job, dict(parameters)
        settings = job.optim
        groups = [
            {"params": [p for name, p in parameters.items() if (name in decayed) is decays], "weight_decay": weight_decay}
            for decays, weight_decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, foreach=True)
        self.updates = torch.zeros((), dtype=torch.float32)
        """Number of updates applied: the state's one scalar.  A step that is skipped does not count."""
        for parameter in self.parameters.values():
            moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
            self.adamw.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    def moment(self, name: str, parameter: str) -> Tensor:
        moment: Tensor = self.adamw.state[self.parameters[parameter]][name]
        return moment

    @torch.no_grad()
    def apply(self, grads: Mapping[str, Tensor], outcome: Outcome) -> float:
        """The update of ``outcome.step`` from summed gradients, which are scaled in place.  Returns the learning rate used."""
        job = self.job
        lr = learning_rate_of(job, outcome.step)
        if not outcome.finite:
            return lr
        means = [grads[name] for name in self.parameters]
        torch._foreach_div_(means, float(max(outcome.tokens, 1)))
        if outcome.norm > job.optim.clip_norm:
            torch._foreach_mul_(means, job.optim.clip_norm / outcome.norm)
        for parameter, mean in zip(self.parameters.values(), means, strict=True):
            parameter.grad = mean
            self.adamw.state[parameter]["step"].copy_(self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.updates += 1
        self.adamw.zero_grad()
        return lr
