"""The side of plain torch in a trial (``trial.py``): computes microbatches, and looks for writes to
parameters and for values that the model keeps.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic.config.optimizers import OPTIMIZERS
from elastic.engine import paged
from elastic.engine.blocks import sharding_table
from elastic.engine.dtypes import FORMATS, format_of
from elastic.engine.optim.base import rule_of
from elastic.engine.optim.groups import decays, parameter_groups
from elastic.engine.parameters.base import take_over
from elastic.engine.parameters.ties import aliases_of, tie
from elastic.engine.seeds import Seeds
from elastic.errors import ElasticError, ModelError, StateChanged
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.copy_budget import amount
from elastic.state.node_memory import free_memory
from elastic.train.checks.differences import apart_by, summary_of, values_of
from elastic.train.checks.guards import BUFFER, WRITTEN
from elastic.train.checks.remembered import attributes_of, changed
from elastic.train.model import build_model
from elastic.train.step import Session, loss_of

EXACT = 1e-5
"""Largest difference in float32, as a part of the loss or of the norm of a gradient."""
STEPS = {"bf16": ("bf16", 32), "fp16": ("fp16", 64), "fp8": ("fp8 e4m3", 8), "fp8-rowwise": ("fp8 e4m3", 8)}
"""Largest difference for each precision but fp32: (a format, how many times the distance from 1 to the next
larger number of that format).
"""
TIMES = 11
"""Bytes that a trial takes for each byte of the parameters: values, gradients and moments of both sides, and
copies between them.
"""
ROOM = 0.5
"""Part of the free memory that the tensors of a trial may take; the rest is for activations.  Workers without
a GPU share it, since they hold their trials at the same time.
"""
KEPT = 2
"""Number of layers that are compared in place of all if memory is short."""
Batch = dict[str, Tensor]
DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
)
"""The functions of torch that drop values of their first argument."""


@dataclass
class PlainResult:
    """The loss and the count of a microbatch, and the gradient of each trained parameter that has one."""

    loss: float
    count: float
    grads: Mapping[str, Tensor]


@dataclass
class TorchOptimizer:
    """An optimizer of ``torch.optim`` that stands for a rule of ours."""

    job: Job
    optimizer: torch.optim.Optimizer
    """It has a group for each parameter."""

    @staticmethod
    def of(job: Job, model: nn.Module) -> TorchOptimizer | None:
        """Returns the optimizer for ``job``; None if ``torch.optim`` has none with the same arithmetic."""
        settings, l2 = job.optim, job.optim.decay == "l2"
        groups: list[dict[str, Any]] = []
        for name, group in parameter_groups(settings, model).items():
            each = model.get_parameter(name)
            decay = settings.weight_decay if group.weight_decay == "auto" else group.weight_decay
            decay = decay if decays(group, each.dim()) else 0.0
            own = {
                "weight_decay": decay if l2 else 0.0,
                "decoupled": 0.0 if l2 else decay,
                "lr_scale": group.lr_scale,
            }
            groups.append({"params": [each], **own})
        # a user's rule may be a copy of ours with another update
        in_torch = rule_of(job).in_torch if settings.kind in OPTIMIZERS else None
        if settings.moments != "model" or not groups or in_torch is None:
            return None
        return TorchOptimizer(job, in_torch(groups, settings))

    def step(self, lr: float, found: PlainResult) -> None:
        """Updates by the mean gradient, clipped, with decoupled weight decay before it."""
        settings, grads = self.job.optim, [*found.grads.values()]
        norm = float(torch.stack([each.norm().double() for each in grads]).norm()) / max(found.count, 1)
        clip = settings.clip_norm / norm if norm > settings.clip_norm else 1.0
        with torch.no_grad():
            for grad in grads:
                grad.mul_(clip / max(found.count, 1))
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
                for each in group["params"]:
                    if each.grad is not None and group["decoupled"]:
                        each.mul_(1 - group["lr"] * group["decoupled"])
        self.optimizer.step()


class NoWrites(TorchDispatchMode):
    """Raises :class:`StateChanged` for an operation that writes to a parameter, also through ``.data``, which
    torch does not count.
    """

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
                        if isinstance(each, Tensor) and (
                            name := self.names.get(each.untyped_storage()._cdata)
                        ):
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
            # the one number with a fraction is that of dropout
            args = tuple(0.0 if type(each) is float else each for each in args)
        return func(*args, **kwargs)


class Theirs(Exception):
    """The model or the loss fails in plain torch, too."""


class TooLarge(Exception):
    """Both sides do not fit the memory."""


class PlainSide:
    """Builds the model in plain torch, computes microbatches with it, and looks for values that it keeps from
    one microbatch to the next.
    """

    def __init__(self, session: Session, device: torch.device, tell: Callable[[str], None]) -> None:
        job, self.tell = session.job, tell
        policy = job.recompute if job.recompute != "auto" else "none"
        changes: dict[str, Any] = {
            "compile": False,
            "activations": "keep",
            "recompute": policy,
            "offload": "none",
            "offload_folder": "",
        }
        self.job = job.replace(**changes, offload_buffer_gb=1.0)
        self.session, self.device = replace(session, job=self.job), device
        self.left_out = [name for name, is_set in _others(job) if is_set]
        self.exact = job.precision == "fp32"
        """True if both sides compute in one format."""
        self._passes, self._skipped = 0, 0
        self.seeds: WatchedSeeds
        """The seeds of the model in plain torch, once it is built."""
        self._updates = ""
        self._at_first: Mapping[str, Hashable] = {}
        self._noted: Mapping[str, Hashable] = {}
        """The attributes of the model in plain torch after its first microbatch; ``_at_first`` has those
        before it.
        """
        self.largest = 0.0
        """The largest relative difference that was found."""
        self.most = EXACT if self.exact else _steps(job.precision)
        if job.reduction.wire == "bf16":
            self.most = max(self.most, _steps("bf16"))

    def _samples(self) -> tuple[Batch, Batch]:
        """Returns the first microbatch, and the next one."""
        session, size = self.session, self.job.microbatch_size
        step = session.cursor.batches.since + 1
        after = (step, 1) if session.cursor.microbatches(step, size) > 1 else (step + 1, 0)
        return session.loader.read(session.cursor.some_ids(size)), session.loader.read(
            session.cursor.microbatch_ids(*after, size)
        )

    def _plain(self, blueprint: nn.Module) -> nn.Module:
        """Returns the model in plain torch, with the values of ``init_weights()``."""
        job, session = self.job, self.session
        self.tell("builds the model in plain torch")
        size = sum(each.nbytes for each in blueprint.parameters())
        if TIMES * size <= (room := _room(self.device, job)):
            with paged.seeded(job.seed), torch.device(self.device), torch.no_grad():
                model: nn.Module = session.builder(**job.model_args)
                built = paged.facts_of(model)
                model.init_weights()  # type: ignore[operator]
            paged.refuse_other_than_values(paged.facts_of(blueprint), built, model)
            return model
        builder = session.builder

        def shortened(**args: Any) -> nn.Module:
            model: nn.Module = builder(**args)
            _shorten(model)
            return model

        self.session = session = replace(session, builder=shortened)
        model, layers = build_model(job, shortened), len(sharding_table(blueprint).blocks)
        size = sum(each.nbytes for each in model.parameters())
        if layers <= KEPT or TIMES * size > room:
            raise TooLarge(
                f"both sides need {amount(TIMES * size)} of memory, and may take {amount(int(room))}"
            )
        self.left_out.append(f"{layers - KEPT} of {layers} layers, since memory is short")
        tied, before = aliases_of(model), dict(model.named_parameters())
        model.to_empty(device=self.device)
        tie(model, tied)
        for name, parameter in model.named_parameters():
            take_over(parameter, before[name])
        there = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        def keep(name: str, whole: Tensor) -> None:
            there[name].data.copy_(whole)

        with paged.seeded(job.seed):
            paged.initialise(
                lambda: shortened(**job.model_args),
                self.device,
                job.seed,
                keep,
                lambda name, nbytes: None,
                lambda: None,
            )
        return model

    def _plainly(self, model: nn.Module, batch: Batch, number: int, *, watch: bool = False) -> PlainResult:
        """Computes a microbatch in plain torch; with ``watch`` no operation may write to a parameter."""
        for parameter in model.parameters():
            parameter.grad = None
        model.train()
        self._passes += 1
        self.tell(f"computes in plain torch, pass {self._passes}")
        with self._alike(), NoWrites(model, self.job.model) if watch else nullcontext():
            loss, count = self._loss(model, self.seeds, batch, number)
            loss.backward()
        self.seeds.look()
        grads = {
            name: each.grad
            for name, each in model.named_parameters()
            if each.requires_grad and each.grad is not None
        }
        if sparse := next((name for name, each in grads.items() if each.layout is not torch.strided), ""):
            raise ModelError(
                f"the gradient of {sparse!r} of {self.job.model!r} is sparse, and sparse gradients cannot "
                "be summed in a fixed order; leave out sparse=True where the model calls "
                "torch.nn.functional.embedding"
            )
        return PlainResult(float(loss.detach()), float(count), grads)

    def _loss(
        self, model: nn.Module, seeds: Seeds, batch: Batch, number: int
    ) -> tuple[Tensor, Tensor | float]:
        seeds.begin(1, number)
        there = {name: value.to(self.device, copy=True) for name, value in batch.items()}
        try:
            return loss_of(self.session, model, there)
        except StateChanged:
            raise
        # a broken contract of the model or the loss is reported where it is used
        except ElasticError as error:
            raise Theirs(str(error)) from error

    def _alike(self) -> Any:
        """Returns a context in which torch's dropout drops nothing; with ``exact`` it does nothing, as both
        sides then drop the same values.
        """
        return nullcontext() if self.exact else NoDropout()

    def _remembers(self, model: nn.Module, first: Batch, second: Batch) -> None:
        """Raises :class:`ModelError` if plain torch computes the first microbatch differently after another
        one, or if an attribute changes with each microbatch; :class:`StateChanged` if a parameter or a buffer
        does.
        """
        job, exact = self.job, self.job.reproducible
        memory = {name: (id(each), each.untyped_storage()._cdata) for name, each in model.named_parameters()}
        values = values_of(model)
        self._at_first = attributes_of(model, exact=exact)
        self._watched(model, first)
        noted = self._noted = attributes_of(model, exact=exact)
        self._evaluates(model, first)
        self._plainly(model, second, 1)
        before = summary_of(self._plainly(model, first, 0), exact=exact)
        self._plainly(model, second, 1)
        after = summary_of(self._plainly(model, first, 0), exact=exact)
        since = attributes_of(model, exact=exact)
        self._plainly(model, first, 0)
        last, now = attributes_of(model, exact=exact), values_of(model)
        for name, each in model.named_parameters():
            if memory.get(name) != (id(each), each.untyped_storage()._cdata) or now[name] != values[name]:
                raise StateChanged(WRITTEN.format(name=name, model=job.model))
        if name := changed(since, last):
            if name in dict(model.named_buffers()):
                raise StateChanged(BUFFER.format(name=name, model=job.model))
            raise ModelError(
                f"forward or the loss changes {name!r} of {job.model!r} with each microbatch: its "
                "value would depend on which worker computed which microbatch, and no checkpoint has "
                "it.  Compute it again in each forward pass; draw random numbers from the default "
                "generators of torch, Python and numpy, which are seeded for each microbatch"
            )
        same = (
            before == after
            if exact
            else all(apart_by(a, b) <= 1e-3 for a, b in zip(before, after, strict=True))
        )
        if not same:
            kept = changed(noted, since)
            what = (
                f"forward or the loss has set {kept!r}"
                if kept
                else ("something outside of the model keeps a value")
            )
            raise ModelError(
                f"model = {job.model!r} with loss = {job.loss!r}: in plain torch the first microbatch "
                f"gives another result after a second microbatch was computed (loss {before[0]:g}, "
                f"then {after[0]:g}): {what}.  The result would depend on which worker computed which "
                "microbatch; let the result depend on the samples and the weights alone"
            )

    def _watched(self, model: nn.Module, batch: Batch) -> None:
        """Computes a microbatch in which no operation may write to a parameter."""
        try:
            self._plainly(model, batch, 0, watch=True)
        except (StateChanged, torch.OutOfMemoryError):
            raise
        except Exception:  # some operations of torch cannot be watched; values are compared at the end
            self._plainly(model, batch, 0)

    def _evaluates(self, model: nn.Module, batch: Batch) -> None:
        """Raises :class:`StateChanged` if evaluation, as in a validation, or the change to evaluation mode
        and back, writes to a parameter or a buffer.
        """
        before = {name: each.detach().clone() for name, each in model.named_buffers()}
        try:
            with NoWrites(model, self.job.model), torch.no_grad():
                model.eval()
                self._loss(model, self.seeds, batch, 0)
                model.train()
        except (StateChanged, torch.OutOfMemoryError):
            raise
        except Exception:  # without a validation a loss need not work in evaluation mode
            model.train()
        for name, each in model.named_buffers():
            if name in before and not torch.equal(each, before[name]):
                raise StateChanged(BUFFER.format(name=name, model=self.job.model))


def _others(job: Job) -> Iterator[tuple[str, bool]]:
    """Yields pairs: a feature that a trial does not compare, and whether the job uses it."""
    yield "compiled code", job.compile
    yield f"activations = {job.activations!r}", job.activations != "keep"
    yield f"offload = {job.offload!r}", job.offloads
    yield "worlds of several workers", job.workers.max > 1
    yield "dropout", job.precision != "fp32"


def _steps(precision: str) -> float:
    name, multiple = STEPS[precision]
    return multiple * format_of(FORMATS[name]).eps


class WatchedSeeds(Seeds):
    """Notes whether anything draws random numbers."""

    found = False
    """True once something drew a number."""
    _seeded: Hashable = None
    """The state of the generators at the last seeding of the present microbatch."""

    def begin(self, step: int, microbatch: int) -> None:
        self._seeded = None
        super().begin(step, microbatch)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._seeded = _state(self.device)

    def _next(self, block: str) -> int:
        self.look()  # where a block runs again, torch has brought back older generators
        return super()._next(block)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._run(*args, **kwargs)
        self.look()
        return result

    def look(self) -> None:
        """Compares the generators with their state at the last seeding."""
        self.found = self.found or self._seeded not in (None, _state(self.device))


def _state(device: torch.device) -> Hashable:
    """Returns the state of the generators from which a pass may draw."""
    cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    theirs = numpy.random.get_state(legacy=False)
    return torch.get_rng_state().numpy().tobytes(), cuda, random.getstate(), repr(theirs)


def _room(device: torch.device, job: Job) -> float:
    """Returns the bytes that the values, gradients and moments of both sides may take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return ROOM * torch.cuda.mem_get_info(device)[0]
    return ROOM * free_memory()[0] / min(job.workers.max, os.cpu_count() or 1)


def _shorten(model: nn.Module) -> None:
    """Deletes all layers but the first ``KEPT`` in each list that has blocks of ``model``.  Raises
    :class:`TooLarge` if these are not in an nn.ModuleList.
    """
    blocks = sharding_table(model).blocks
    for name in {block.rpartition(".")[0] for block in blocks}:
        layers = model.get_submodule(name)
        if not isinstance(layers, nn.ModuleList):
            raise TooLarge(
                f"two models do not fit the memory, and {name!r} is no list that can be made shorter"
            )
        del layers[KEPT:]
    names = {name for name, _ in model.named_modules()}
    table = ShardingTable(tuple(block for block in blocks if block in names))
    if hasattr(model, "sharding"):
        model.sharding = lambda: table  # type: ignore[assignment]  # its own may name layers that are gone
