"""Batch normalisation whose running statistics depend on no layout.

Each microbatch is normalised by its own mean and variance (Ioffe and Szegedy 2015), as on one device, and
forward changes no buffer.  The running statistics r change once a step, with the parameters.  For M
microbatches one after the other, with statistics s_0 … s_{M-1} and momentum μ, torch computes

    r' = (1-μ)^M · r + μ · Σ_m (1-μ)^(M-1-m) · s_m

so members exchange only the sum, and the scheme adds it as it adds gradients: in the order of the
microbatches if runs are reproducible. The running statistics are buffers, whole on every member, so nothing
else in the platform knows of them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, pad
from torch.nn.modules.batchnorm import _BatchNorm

from elastic.engine.sync.base import Scheme
from elastic.engine.world import all_gather
from elastic.errors import ModelError
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.batch import Deal

ONE_VALUE = "Expected more than 1 value per channel"
"""Words of torch's error about a norm that gets one value for a mean and a variance."""


class NormStatistics:
    """The statistics of the newest microbatch in one norm, at least in float32, and how often its forward
    pass used the norm.
    """

    def __init__(self, norm: _BatchNorm, device: torch.device) -> None:
        assert norm.running_mean is not None
        dtype = torch.promote_types(norm.running_mean.dtype, torch.float32)
        self.mean = torch.zeros(norm.num_features, dtype=dtype, device=device)
        self.variance = torch.zeros_like(self.mean)
        """The unbiased variance."""
        self.uses = 0


def apply_batch_norm(model: nn.Module, table: ShardingTable, scheme: Scheme, job: Job) -> Statistics:
    """Stops the norms of ``model`` from changing their running statistics, and returns these statistics,
    which ``scheme`` sums.

    Raises :class:`ModelError` as :func:`tracking` does.
    """
    norms = tracking(model, table, job)
    for norm in norms.values():
        norm.seen = NormStatistics(norm, scheme.world.device)  # type: ignore[assignment]  # no tensor or module: a plain attribute
        norm.forward = MethodType(_forward, norm)  # type: ignore[method-assign]
    return Statistics(norms, scheme.over_rounds(), job.model)


def tracking(model: nn.Module, table: ShardingTable, job: Job) -> dict[str, _BatchNorm]:
    """Returns, by name, the norms of ``model`` that track running statistics and compute as torch's
    BatchNorm1d, 2d and 3d do.

    Raises :class:`ModelError` if the job has settings with which their statistics would be wrong.
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and module.num_batches_tracked is not None
    }
    for name in norms:
        if job.spikes.leaves_out:
            raise ModelError(
                f"{name!r} of {job.model!r} keeps running statistics, and with spikes.microbatch_z = "
                f"{job.spikes.microbatch_z:g} they would count microbatches that are left out; set "
                "spikes.microbatch_z to 0, or give the norm track_running_stats=False"
            )
        if job.compile and job.recompute not in ("none", "auto") and table.block_of(name):
            raise ModelError(
                f"{name!r} of {job.model!r} keeps running statistics, which is not possible with both "
                f"compile = true and recompute = {job.recompute!r}; set recompute = 'none' or compile "
                "= false"
            )
    return norms


def about_one_value(error: Exception, microbatch: int) -> str:
    """Returns advice about the error of a norm that gets a single value because a microbatch is a single
    sample; "" for any other error.  ``microbatch`` is the number of samples of a microbatch.
    """
    if ONE_VALUE not in str(error) or microbatch > 1:
        return ""
    return (
        "microbatch = 1: a batch norm takes its mean and variance from the samples of one microbatch, "
        "and one value is too few; set microbatch to 2 or more, or use LayerNorm or GroupNorm"
    )


def _forward(norm: Any, x: Tensor) -> Tensor:
    """Normalises a microbatch by its own statistics, and keeps them: with a momentum of 1 torch writes them
    over the older ones.

    A norm that is frozen normalises by its running statistics.
    """
    norm._check_input_dim(x)
    seen: NormStatistics = norm.seen
    if norm.training:
        seen.uses += 1  # compiled code assumes its value, so begin_round() resets it
    mean, variance = (seen.mean, seen.variance) if norm.training else (norm.running_mean, norm.running_var)
    # torch takes no other dtype
    weight, bias = (each if each is None else each.to(mean.dtype) for each in (norm.weight, norm.bias))
    return batch_norm(x, mean, variance, weight, bias, norm.training, 1.0, norm.eps)


class Statistics:
    """The running statistics of all norms of a model.  A step calls the methods in this order."""

    def __init__(self, norms: dict[str, _BatchNorm], scheme: Scheme, model: str) -> None:
        """``scheme`` must sum over all rounds; ``model`` is the model's name in messages."""
        self.norms, self.scheme, self.model = norms, scheme, model
        self.seen: list[NormStatistics] = [norm.seen for norm in norms.values()]  # type: ignore[misc]
        self.values = [value for seen in self.seen for value in (seen.mean, seen.variance)]
        self.reduction = scheme.reduction()
        self.total: Tensor | None = None
        """The sum of the step, complete after its last round."""

    def begin_round(self, number: int, deal: Deal) -> None:
        """Prepares for the forward pass of round ``number`` of ``deal``."""
        if not self.norms:
            return
        self.scheme.begin_step(deal.microbatches)
        self.scheme.round.number, self.scheme.round.last = number, number + 1 == deal.rounds
        for seen in self.seen:
            seen.uses = 0
        torch._foreach_zero_(self.values)  # a NaN would stay, even with a momentum of 1

    def add(self, microbatch: int | None) -> None:
        """Adds the statistics of ``microbatch`` to the sum of the step.  None, in an idle round, adds
        nothing.

        It is called before the backward pass, which may compute norms again.  Raises :class:`ModelError`
        unless each norm was used once.
        """
        if self.norms:
            self._add(microbatch)

    @torch.no_grad()
    def _add(self, microbatch: int | None) -> None:
        for (name, norm), seen in zip(self.norms.items(), self.seen, strict=True):
            if norm.training and seen.uses != 1:
                raise ModelError(
                    f"the forward pass used {name!r} of {self.model!r} {seen.uses} times; running "
                    "statistics need one use for each microbatch.  Use the norm once, call its eval() in "
                    "the model's train(), or give it track_running_stats=False"
                )
        after, shards = (
            self.scheme.deal.microbatches - 1 - (microbatch or 0),
            self.scheme.world.layout.shards,
        )
        weights = [
            0.0 if microbatch is None else _kept(norm) ** after
            for norm in self.norms.values()
            for _ in range(2)
        ]
        mine = torch.cat(torch._foreach_mul(self.values, weights))
        if microbatch is None:
            mine.zero_()  # 0 × NaN is NaN
        part = self.reduction.reduce(pad(mine, (0, -len(mine) % shards)))
        if part is None:
            return
        if shards > 1:
            self.total = part.new_empty(shards * len(part))
            all_gather(self.total, part, self.scheme.world.shard_group)
        else:
            self.total = part

    def guard(self, norm: Tensor) -> Tensor:
        """Returns the ``norm`` of the gradient, or NaN if a statistic is not finite, although the gradient
        may be: the step is skipped.

        A variance that overflows, for one, makes the norm's output zero.
        """
        return norm if self.total is None else torch.where(torch.isfinite(self.total).all(), norm, torch.nan)

    @torch.no_grad()
    def apply(self, *, applies: bool) -> None:
        """Updates the running statistics.  Nothing changes unless the step ``applies``."""
        total, self.total = self.total, None
        if total is None or not applies:
            return
        count, sizes = self.scheme.deal.microbatches, [len(value) for value in self.values]
        sums = total[: sum(sizes)].split(sizes)
        for norm, mean, variance in zip(self.norms.values(), sums[::2], sums[1::2], strict=True):
            if not norm.training:  # frozen
                continue
            assert (
                norm.num_batches_tracked is not None
                and norm.running_mean is not None
                and norm.running_var is not None
            )
            norm.num_batches_tracked.add_(count)
            if norm.momentum is None:  # the mean of all microbatches so far
                share: Tensor | float = 1 / norm.num_batches_tracked.double()
                keep = 1 - count * share
            else:
                share, keep = norm.momentum, _kept(norm) ** count
            norm.running_mean.mul_(keep).add_(mean * share)
            norm.running_var.mul_(keep).add_(variance * share)


def _kept(norm: _BatchNorm) -> float:
    """Returns the part of a sum that remains when the statistics of one more microbatch are added to it."""
    return 1.0 if norm.momentum is None else 1 - norm.momentum
