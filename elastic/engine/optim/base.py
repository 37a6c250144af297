"""An optimizer is a function over the slices that a member holds, and the kinds of state that it keeps.

A member holds slices of parameters and never sees the whole.  So an optimizer, a :class:`Rule`, computes each
slice from the values, the gradient, the moments, and the place of the slice in the whole tensor.  The moments
that a rule declares are slices of the state like any other: they are made before the first step, healed,
copied, saved and resumed without any work of the rule.  A user's rule is tried before the run begins
(``trial.py``).

:class:`Optimizer` has what all rules share: the mean over tokens, clipping, the learning rate, and the
treatment of a gradient that is not finite.  A rule that needs whole matrices (Muon) exchanges them before the
commit, in :attr:`Rule.prepare`: an update after the commit may not wait for a member, which may be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from elastic.code.imports import arguments, load
from elastic.config.optimizers import OPTIMIZERS
from elastic.config.sections import UNUSED_SINCE, Optim, ParameterGroup
from elastic.engine import spike_memory
from elastic.engine.loss_scale import SCALARS, LossScale, is_scaled
from elastic.engine.optim.groups import REST
from elastic.engine.optim.schedule import learning_rate_of
from elastic.engine.world import World
from elastic.errors import CodeError
from elastic.job import Job
from elastic.protocol.commit_record import Outcome
from storage.slices import AVERAGE, Slice
from storage.slices import Tensor as StateTensor

TURN = 1 << 24
"""Largest number of elements whose roots are in memory at once, unless one tensor has more: 64 MiB as
float32.
"""


@dataclass(frozen=True)
class Part:
    """A member's part of one parameter, with its state.  All tensors have the shape of ``values``."""

    name: str
    boxes: tuple[Slice, ...]
    """The boxes of the values in the whole tensor, one after the other along dimension 0."""
    values: Tensor
    moments: Mapping[str, Tensor]
    """Moments by the names that the rule declares, with the dtype that ``optim.moments`` names."""
    decays: bool
    """True if the weights decay, as in tensors of two and more dimensions."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    is_matrix: bool
    """True for a parameter with two dimensions inside a block."""
    average: Tensor | None = None
    """The average of the values, if the job has one (``optim.average``).  A rule leaves it alone."""
    group: ParameterGroup = REST
    """The group of the parameter.  All parts of one update have the same learning rate and the same weight
    decay.
    """


@dataclass(frozen=True)
class Before:
    """The values that a rule gets before the commit.  They are the same on every member."""

    settings: Optim
    divide: Tensor
    """The number by which the summed gradients are divided: a float64 scalar on the device, as ``clip`` is.
    """
    clip: Tensor
    """The number by which the mean gradients are then multiplied."""
    world: World

    def mean(self, grad: Tensor) -> Tensor:
        """Returns the mean gradient, clipped.  It equals that of :func:`mean_` but for the last bit on some
        devices.
        """
        return (grad / self.divide).mul_(self.clip)


@dataclass(frozen=True)
class Hyper:
    """The values that an update gets besides the slices.  They are the same on every member."""

    settings: Optim
    lr: float
    """The learning rate of this step."""
    updates: Tensor
    """Number of updates applied before this one, a float32 scalar.  The rule must not change it."""
    scalars: Mapping[str, Tensor]
    """Scalars (float32) by the names that the rule declares."""
    weight_decay: float
    """The weight decay that the rule itself subtracts from parts that decay: 0 if it is in the gradient
    already.
    """
    divide: float = 1.0
    """The number by which a rule that :attr:`~Rule.scales` divides the summed gradients."""
    clip: float = 1.0
    """The number by which such a rule then multiplies the mean gradients."""
    prepared: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors that the rule has prepared for this step."""
    seed: int = 0
    """The seed of the job."""
    step: int = 0
    """The number of this step, from 1, also counting steps that were skipped."""
    missed: Mapping[str, float] = field(default_factory=dict)
    """The number of updates that left a parameter alone, by its name, if there were any and the rule counts
    them.
    """

    def updates_of(self, parts: Sequence[Part]) -> list[float]:
        """Returns the number of updates that each of ``parts`` will have had after this one."""
        done = float(self.updates) + 1
        return [done - self.missed.get(part.name, 0.0) for part in parts]


@dataclass(frozen=True)
class Rule:
    """An optimizer.  ``update(parts, grads, hyper)`` changes values, moments and scalars in place, and may
    use ``grads`` as scratch.

    ``grads[i]`` is the mean gradient of ``parts[i]``, clipped.  An update must give the same bits however a
    tensor is cut, as an elementwise one does.  It must compute scalars from ``hyper`` alone, since every
    member keeps the same scalars.
    """

    moments: tuple[str, ...]
    update: Callable[[list[Part], list[Tensor], Hyper], None]
    scalars: tuple[str, ...] = field(default=())
    scales: bool = False
    """True if ``update`` gets sums, and takes the mean and clips by itself, as :func:`mean_` does."""
    matrix_moments: tuple[str, ...] | None = None
    """The moments of :attr:`matrices <Part.is_matrix>`, if they differ from ``moments``."""
    prepare: Callable[[list[Part], list[Tensor], Before], Mapping[str, Tensor]] | None = None
    """``prepare(parts, grads, before)`` runs before the commit, and returns tensors for the update.  Its
    ``grads`` are sums, not means.

    It may use collectives, but it must change nothing: the step may be given up.  It must not wait for the
    device.
    """
    counts: bool = False
    """True if ``update`` must know how many updates each parameter has had.  :func:`rule_of` unsets it for
    earlier ``numerics``.
    """
    in_torch: Callable[[list[dict[str, Any]], Optim], torch.optim.Optimizer] | None = None
    """``in_torch(groups, settings)`` returns the optimizer of ``torch.optim`` that computes the same but for
    the decoupled weight decay, with a learning rate of 1.  The trial of a job compares updates with it, if the
    rule is one of Elastic's own; None means that ``torch.optim`` has no such optimizer.
    """
    kept: tuple[StateTensor, ...] = ()
    """Further tensors of the state, whole on every member, which the job keeps beside the rule.
    :func:`rule_of` sets it.
    """
    averages: bool = False
    """True if the job keeps an average of the weights beside the moments.  :func:`rule_of` sets it."""
    moments_dtype: torch.dtype | None = None
    """The dtype of the moments, if it is not that of the parameter.  :func:`rule_of` sets it; ``update`` must
    round then.
    """

    def moments_of(self, *, is_matrix: bool) -> tuple[str, ...]:
        """Returns the moments of a parameter."""
        return self.matrix_moments if is_matrix and self.matrix_moments is not None else self.moments


def dtype_of_average(values: Tensor) -> torch.dtype:
    """Returns the dtype of the average of ``values``: float32 at least, since an average in 16 bits would
    stand still.
    """
    return torch.promote_types(values.dtype, torch.float32)


def mean_(grads: list[Tensor], hyper: Hyper) -> None:
    """Turns summed gradients into their mean, and clips that."""
    torch._foreach_div_(grads, hyper.divide)
    if hyper.clip != 1.0:
        torch._foreach_mul_(grads, hyper.clip)


def add_(into: list[Tensor], terms: list[Tensor], factor: float) -> None:
    """Adds ``factor`` × ``terms``, with the same bits however the tensors are cut.

    In 16 bits a CPU would round the product by itself for the last few elements of a tensor only, so it
    computes in float32.
    """
    if all(each.dtype.itemsize >= 4 or each.device.type != "cpu" for each in into):
        torch._foreach_add_(into, terms, alpha=factor)
        return
    for each, term in zip(into, terms, strict=True):
        wide = torch.promote_types(each.dtype, torch.float32)
        each.copy_(each.to(wide).add_(term.to(wide), alpha=factor))


def decay_(parts: Sequence[Part], hyper: Hyper) -> None:
    """Subtracts the decoupled weight decay (Loshchilov and Hutter 2019) from the parts that decay."""
    if hyper.weight_decay and (values := [part.values for part in parts if part.decays]):
        torch._foreach_mul_(values, 1 - hyper.lr * hyper.weight_decay)


def descend_(values: list[Tensor], grads: list[Tensor], squares: list[Tensor], hyper: Hyper) -> None:
    """Subtracts lr·g / (√s + eps), where s is an average or a sum of squared gradients.

    Tensors take turns, because the plan of the device's memory has no room for the roots of all tensors at
    once.
    """
    first = 0
    while first < len(squares):
        last, elements = first + 1, squares[first].numel()
        while last < len(squares) and (elements := elements + squares[last].numel()) <= TURN:
            last += 1
        below = torch._foreach_sqrt(squares[first:last])
        torch._foreach_add_(below, hyper.settings.eps)
        torch._foreach_addcdiv_(values[first:last], grads[first:last], below, value=-hyper.lr)
        del below
        first = last


def rule_of(job: Job) -> Rule:
    """Returns the rule that ``optim.kind`` names, with the scalars and the dtype of moments that the job
    adds.

    Raises :class:`CodeError` if it names none.
    """
    kind = job.optim.kind
    found = load(OPTIMIZERS[kind].rule if kind in OPTIMIZERS else kind, "optim.kind")
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        raise CodeError(
            f"optim.kind = {kind!r} names a torch.optim.Optimizer, which needs whole tensors, and "
            "keeps its own state; write its step() as update(parts, grads, hyper), which changes "
            "slices in place, and name Rule(('moment',), update) of elastic.engine.optim.base"
        )
    if not isinstance(found, Rule):
        raise CodeError(
            f"optim.kind = {kind!r} names a {type(found).__name__}; name a Rule of "
            f"elastic.engine.optim.base, or one of {', '.join(OPTIMIZERS)}"
        )
    if found.scalars and job.optim.groups:
        raise CodeError(
            f"optim.groups have different learning rates, but optim.kind = {kind!r} has one scalar "
            f"{found.scalars[0]!r} for all groups; leave optim.groups out, or use a moment in place of "
            "the scalar"
        )
    if job.optim.average and AVERAGE in (f"moment.{each}" for each in found.moments):
        raise CodeError(
            f"optim.kind = {kind!r} has a moment 'average', a name that optim.average uses; rename the moment"
        )
    counts = found.counts and job.numerics >= UNUSED_SINCE
    found = replace(
        found, averages=job.optim.average > 0, kept=spike_memory.tensors_of(job.spikes), counts=counts
    )
    if job.optim.moments == "bf16":
        found = replace(found, moments_dtype=torch.bfloat16)
    if not is_scaled(job.precision):
        return found
    if taken := set(SCALARS).intersection(found.scalars):
        raise CodeError(
            f"optim.kind = {kind!r} has a scalar {min(taken)!r}, a name that precision = 'fp16' uses; "
            "rename the scalar"
        )
    return replace(found, scalars=(*found.scalars, *SCALARS))


def _add_penalty(parts: list[Part], grads: list[Tensor], weight_decay: float) -> None:
    """Adds the gradient of ½ × ``weight_decay`` × |w|² of the parts that decay."""
    chosen = [(part.values, grad) for part, grad in zip(parts, grads, strict=True) if part.decays]
    if chosen and weight_decay:
        add_([grad for _, grad in chosen], [values for values, _ in chosen], weight_decay)


class Optimizer:
    """The rule of a job, with the parameters and the state that this member holds."""

    def __init__(
        self,
        job: Job,
        rule: Rule,
        parameters: Mapping[str, Tensor],
        boxes: Mapping[str, tuple[Slice, ...]],
        decayed: frozenset[str],
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        matrices: frozenset[str] = frozenset(),
        groups: Mapping[str, ParameterGroup] = MappingProxyType({}),
    ) -> None:
        """Makes the state of ``rule``, which is the job's.

        ``parameters`` are local shards by name, which share memory with the model.  ``boxes`` are their places
        in the whole tensors, for each trained parameter of the whole model: those of other pipeline stages
        have none.  ``decayed`` has the names of the parameters whose weights decay, ``matrices``
        those of the matrices of blocks.  ``shapes`` has the shapes of the whole tensors, if ``parameters``
        are not whole.  ``groups`` has the group of each parameter that is not in
        :data:`~elastic.engine.optim.groups.REST`.
        """
        self.job, self.rule = job, rule
        self._settings = job.optim.model_copy(update={"args": arguments("optim.args", job.optim.args)})
        self.updates = torch.zeros((), dtype=torch.float32)
        """Number of updates applied.  A step that is skipped does not count."""
        self._names = sorted(boxes)
        self.missed = torch.zeros(len(boxes) if rule.counts else 0, dtype=torch.float32)
        """Number of updates that left each parameter alone, in the order of their names, because their order
        in the model may change.
        """
        self.scalars = {name: torch.zeros((), dtype=torch.float32) for name in self.rule.scalars}
        self.loss_scale = LossScale(job, self.scalars)
        self.kept = {
            each.name: torch.zeros(each.shape, dtype=spike_memory.DTYPES[each.dtype]) for each in rule.kept
        }
        self.parts = {
            name: Part(
                name,
                boxes[name],
                value,
                {
                    kind: torch.zeros_like(value, dtype=rule.moments_dtype, requires_grad=False)
                    for kind in rule.moments_of(is_matrix=name in matrices)
                },
                name in decayed,
                shapes.get(name, tuple(value.shape)),
                name in matrices,
                torch.zeros_like(value, dtype=dtype_of_average(value), requires_grad=False)
                if rule.averages
                else None,
                groups.get(name, REST),
            )
            for name, value in parameters.items()
        }
        self.visit: Callable[[Callable[[list[Part]], None]], None] = lambda update: update(
            [*self.parts.values()]
        )
        """Calls ``update`` with parts on the device: with all at once, or group by group if the parts live in
        the host's memory.
        """
        self._prepared: Mapping[str, Tensor] = {}

    @torch.no_grad()
    def prepare(
        self, grads: Mapping[str, Tensor], squared_norm: Tensor, tokens: Tensor, world: World
    ) -> None:
        """Prepares the update of a step before its commit, if the rule does so.

        ``squared_norm`` and ``tokens`` are those of the outcome, as float64 scalars on the device.  State and
        ``grads`` do not change.
        """
        assert self.rule.prepare is not None
        count, most = tokens.clamp(min=1), self.job.optim.clip_norm
        norm = squared_norm.sqrt() / count
        clip = torch.where(norm > most, most / norm, 1.0)
        before = Before(self._settings, count * self.loss_scale.value, clip, world)
        self._prepared = self.rule.prepare(
            [*self.parts.values()], [grads[name] for name in self.parts], before
        )

    @torch.no_grad()
    def apply(
        self, grads: Mapping[str, Tensor], outcome: Outcome, unused: frozenset[str] = frozenset()
    ) -> float:
        """Applies the update of ``outcome.step`` from summed gradients, which are scaled in place.  Returns
        the learning rate of the step.

        If the step is skipped, nothing changes but the scale of the loss.  The parameters ``unused`` stay as
        they are, with their moments.
        """
        job = self.job
        lr = learning_rate_of(job, outcome.step)
        divide = max(outcome.tokens, 1) * self.loss_scale.value
        self.loss_scale.after(finite=outcome.finite)
        prepared, self._prepared = self._prepared, {}
        clip = job.optim.clip_norm / outcome.norm if outcome.norm > job.optim.clip_norm else 1.0
        before = {name: value.clone() for name, value in self.scalars.items()}
        missed = {
            name: count for name, count in zip(self._names, self.missed.tolist(), strict=False) if count
        }
        hyper = Hyper(
            self._settings,
            lr,
            self.updates,
            self.scalars,
            0.0,
            divide,
            clip,
            prepared,
            job.seed,
            outcome.step,
            missed,
        )

        def update(parts: list[Part]) -> None:
            used = [part for part in parts if part.name not in unused] if unused else parts
            if used and outcome.applies:
                # each group begins with the same scalars, and ends with the same
                for name, value in before.items():
                    self.scalars[name].copy_(value)
                self._update(used, [grads[part.name] for part in used], hyper)
            if outcome.applies and self.rule.averages:
                self._average(parts)

        self.visit(update)
        self.updates += outcome.applies
        if self.rule.counts and unused and outcome.applies:
            self.missed += torch.tensor([float(name in unused) for name in self._names])
        return lr

    def _average(self, parts: list[Part]) -> None:
        """Takes the values into their averages, as torch.optim.swa_utils.AveragedModel does with
        get_ema_multi_avg_fn().
        """
        share = 1 - self.job.optim.average if self.updates else 1.0
        for part in parts:
            assert part.average is not None
            part.average.lerp_(part.values.to(part.average.dtype), share)

    def _update(self, parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
        l2, weight_decay = self.job.optim.decay == "l2", self.job.optim.weight_decay
        if l2 or not self.rule.scales:
            mean_(grads, hyper)
            hyper = replace(hyper, divide=1.0, clip=1.0)
        alike: dict[tuple[float, float], tuple[list[Part], list[Tensor]]] = {}
        for part, grad in zip(parts, grads, strict=True):
            own = part.group.weight_decay
            of = alike.setdefault(
                (part.group.lr_scale, weight_decay if own == "auto" or not part.decays else own), ([], [])
            )
            of[0].append(part)
            of[1].append(grad)
        for (scale, decay), (some, theirs) in alike.items():
            if l2:
                _add_penalty(some, theirs, decay)
            self.rule.update(
                some, theirs, replace(hyper, lr=hyper.lr * scale, weight_decay=0.0 if l2 else decay)
            )
