"""Parameters that are split over ``dp_shard`` members by FSDP2; gradients are summed over all data ranks.

This is the only module that knows FSDP2.  FSDP2 splits the parameters of each block, gathers them before the
block runs, and frees them afterwards.  It gets the one-dimensional mesh of the shards only.  A
:class:`~elastic.engine.sync.base.Scheme` sums the gradients over the data ranks.  FSDP2 calls it as a custom
reduce-scatter, and perhaps as a hook for the replicas.

Weights of layers that multiply in fp8 are gathered in fp8, by FSDP2's extension for tensors that say what is
gathered in their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from elastic.engine.fp8 import FORWARD, hold
from elastic.engine.fp8_weights import Fp8Weights, weights_of
from elastic.engine.parameters.base import Parameters, take_over
from elastic.engine.parameters.order import Order
from elastic.engine.precision import Precision
from elastic.engine.streams import stream
from elastic.engine.sync.base import GradientReduction, Scheme
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.models.spec import ShardingTable

FSDP_STREAMS = (
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "reduce_scatter_stream",
    "all_reduce_stream",
)
"""Attributes of FSDP2's communication context that hold streams, in torch 2.11 to 2.13."""
FSDP_STATE = r"torch\.distributed\.fsdp\._fully_shard\._fsdp_state"
VIEW_WARNING = r"FSDP2-wrapped module .* returned a view tensor"
FREED = "out of bounds for storage of size 0"
"""Words of torch's error of an operation on weights that are not gathered."""
CHANGED_VIEW = (
    "the weights of a block are not there in the backward pass: the model or the loss may change the output "
    "of a block, or of the model, in place (x += y); write x = x + y"
)
MIXED = "mixed torch.Tensor and DTensor"
"""Words of torch's error of an operation on a weight that is not gathered, and on a plain tensor."""
OUTSIDE = (
    "with parallel.zero = 3 a weight is whole only while the block that has it runs, and one was read at "
    "another time, as by a penalty on weights in the loss, or where the parts of a block are called and "
    "never the block; set parallel.zero = 2, which gathers all weights once a step"
)
ABSENT = (
    "parallel.zero = 3 needs every member to run each block in each microbatch, and {name} had no part in "
    "this one; set parallel.zero = 2, or freeze what is never used"
)
TWICE = (
    "{name} has two parts in one microbatch, so with parallel.zero = 3 its gradients have no fixed order; "
    "set parallel.zero = 2, or reproducible = false if it has two on every member, always"
)
INNER = (
    "a backward pass ran within the loss (torch.autograd.grad or backward()), and with parallel.zero = 3 "
    "that sums the gradients of {name} at once; set parallel.zero = 2"
)


class Split(Parameters):
    """The parameters of a model that FSDP2 has split."""

    needs_every_pass = True
    order: Order

    def __init__(self, model: nn.Module, scheme: Scheme, fp8: Fp8Weights | None = None) -> None:
        self.scheme, self._fp8 = scheme, fp8
        self._parameters = dict(model.named_parameters())
        self.parts = {name: _local(parameter).detach() for name, parameter in self._parameters.items()}
        self._held = _held_by(model, self._parameters)
        self.trained = frozenset(
            name for name, parameter in self._parameters.items() if parameter.requires_grad
        )
        self.copies = [*fp8.parts.values()] if fp8 is not None else []
        self._modules = [*_wrapped(model).values()]
        self.order = Order(scheme.world, [*_wrapped(model)])
        _note(_wrapped(model).values(), self.order)
        self._reduces = {
            name: reduce
            for name, module in _wrapped(model).items()
            if (reduce := _reduce_of(module)) is not None
        }

    def refresh(self) -> None:
        """Frees gathered weights, so that FSDP2 gathers the present values in the next pass; a pass without
        gradients leaves the weights of the root gathered.  Weights in fp8 are cast.
        """
        for module in self._modules:
            module.reshard()
        if self._fp8 is not None:
            self._fp8.cast(self.parts)
        self.current = True

    def begin_round(self, number: int, *, last: bool) -> None:
        self.scheme.round.number, self.scheme.round.last = number, last
        self.order.begins_round()
        if self.scheme.keeps_sums or number == 0:
            self.forget_grads()
        if number == 0:
            self.refresh()
        for each in self._reduces.values():
            each.summed = each.passes = each.runs = 0
        for held in self._held.values():
            held.unused = True

    def end_forward(self) -> None:
        """Checks that each module had one part in the forward pass, in which FSDP2 has gathered all weights.

        Members gather and sum module by module.  If one member leaves a module out, its next collective meets
        that of another module; and an ordered sum takes one gradient of each module in a microbatch.  So a
        pass with gradients raises :class:`ModelError` if a module did not run, ran with gradients twice, or
        is summed already, by a backward pass within the loss.  In a reentrant checkpoint a module runs
        without gradients, so if it never runs with gradients its other runs count.
        """
        for name, each in self._reduces.items() if torch.is_grad_enabled() else ():
            parts = each.runs or each.passes
            wrong = (
                INNER
                if each.summed
                else ABSENT
                if not parts
                else TWICE
                if parts > 1 and self.scheme.keeps_sums
                else ""
            )
            if wrong:
                raise ModelError(wrong.format(name=name or "the model itself"))

    def end_round(self) -> None:
        """Checks that FSDP2 has summed each module once in the backward pass.  Raises :class:`ModelError` if
        a module had no part in it, or two parts and the scheme keeps the sums.
        """
        for name, each in self._reduces.items():
            if (
                wrong := ABSENT
                if not each.summed
                else TWICE
                if each.summed > 1 and self.scheme.keeps_sums
                else ""
            ):
                raise ModelError(wrong.format(name=name or "the model itself"))
        self.missing = frozenset(
            name for name, held in self._held.items() if held.unused and name in self.trained
        )

    def grads(self) -> dict[str, Tensor]:
        found = {}
        for name, part in self.parts.items():
            if name in self.trained:
                grad = self._parameters[name].grad
                found[name] = torch.zeros_like(part) if grad is None else _local(grad)
        return found

    def writes(self) -> Mapping[str, Hashable]:
        return {name: _written(self._parameters[name], each) for name, each in self._held.items()}

    def is_own(self, name: str, found: object) -> bool:
        each = self._held[name]
        return (
            found is self._parameters[name]
            or found is each.sharded_param
            or found is getattr(each, "_unsharded_param", None)
        )

    def forget_grads(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


def _held_by(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Returns FSDP2's record of each of ``parameters``, by name."""
    names, found = {id(parameter): name for name, parameter in parameters.items()}, dict[str, Any]()
    for module in _wrapped(model).values():
        for each in getattr(_group(module), "fsdp_params", ()):
            place = each._module_info
            found[names[id(place.module._parameters[place.param_name])]] = each
    return found


def _written(part: Any, held: Any) -> Hashable:
    """Returns the mark of :meth:`Split.writes`: how often the part of a parameter and the gathered parameter
    were written to, the memory and the hooks of the gathered parameter, and whether it is trained.
    """
    whole = getattr(held, "_unsharded_param", None)
    if whole is None:
        return part._local_tensor._version, 0, 0, held.hooks, part.requires_grad
    version, memory = held.made
    there = whole.untyped_storage()._cdata - memory
    return (
        part._local_tensor._version,
        whole._version - version,
        there,
        len(whole._backward_hooks or ()),
        whole.requires_grad,
    )


def keep_their_kind(model: nn.Module, before: Mapping[tuple[nn.Module, str], nn.Parameter]) -> None:
    """Lets code of the model take FSDP2's parameters for those that they replace: ``before``, by module and
    name.

    FSDP2 makes a gathered parameter when it gathers it first, and keeps it.
    """
    for module in _wrapped(model).values():
        for each in getattr(_group(module), "fsdp_params", ()):
            place = each._module_info
            old = before[place.module, place.param_name]
            place.module._parameters[place.param_name].__dict__.update(old.__dict__)
            each.hooks = len(old._backward_hooks or ())
            each.init_unsharded_param = partial(_make_whole, each, each.init_unsharded_param, old)


def _make_whole(held: Any, make: Callable[[], None], old: nn.Parameter) -> None:
    known = hasattr(held, "_unsharded_param")
    make()
    if not known:
        whole = held._unsharded_param
        take_over(whole, old)
        held.made = whole._version, whole.untyped_storage()._cdata


def _local(tensor: Tensor) -> Tensor:
    """Returns the part of a split tensor that is in this process."""
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    return local.plain if isinstance(local, _Master) else local


class _Master(Tensor):
    """A parameter, or a part of one, in whose place FSDP2 gathers fp8 values.  ``plain`` has its memory.

    FSDP2 asks the part for these values, so each operation with which torch cuts, copies or moves a master
    gives masters.
    """

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> _Master:
        made: _Master = Tensor._make_wrapper_subclass(
            cls, plain.size(), strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        known = {id(each.plain): each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)}
        args, kwargs = tree_map_only(cls, lambda each: each.plain, (args, kwargs or {}))
        return tree_map_only(
            Tensor, lambda each: known[id(each)] if id(each) in known else cls(each), func(*args, **kwargs)
        )

    def fsdp_pre_all_gather(
        self, mesh: Any, size: Any, stride: Any, layer: Any, policy: Any
    ) -> tuple[tuple[Tensor], Any]:
        """Returns this member's part of the weight of ``layer``, as bytes."""
        return (layer.fp8_part.view(torch.uint8),), layer

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], layer: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Lets ``layer`` hold what was gathered.  FSDP2 fills the same memory each time, so the first time is
        enough.
        """
        if out is not None:
            return None
        hold(layer, gathered[0][: layer.out_features].view(FORWARD), layer.fp8_inverse)
        return layer.fp8_carrier, ()


def apply_fp8_gather(
    model: nn.Module, world: World, table: ShardingTable, precision: Precision
) -> Fp8Weights | None:
    """Lets the weights of layers that multiply in fp8 be gathered in fp8, before ``model`` is wrapped."""
    if precision.fp8 is None:
        return None
    weights = Fp8Weights(weights_of(model, table), world, precision.fp8)
    for name, layer in weights.layers.items():
        layer.weight = nn.Parameter(_Master(layer.weight.detach()), layer.weight.requires_grad)
        layer.fp8_part, layer.fp8_carrier, layer.fp8_inverse = (
            weights.parts[name],
            weights.carrier(name),
            weights.inverse[name],
        )
    return weights


def apply_fsdp(model: nn.Module, world: World, table: ShardingTable, precision: Precision) -> None:
    """Wraps each block by itself, and the rest of ``model`` as the root.  Gradients are summed and never
    divided.

    FSDP2 warns of each module whose output is a view, such as that of ``nn.Linear`` for an input of three
    dimensions, because code must not change the view in place.  Such a change makes the first step fail
    (:func:`tell_of_views`), so nobody needs the warning.
    """
    warnings.filterwarnings("ignore", VIEW_WARNING, UserWarning, FSDP_STATE)
    for each in (*(model.get_submodule(name) for name in table.blocks), model):
        fully_shard(each, mesh=world.shard_mesh, mp_policy=_policy(each, precision))
    for module in _wrapped(model).values():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def tell_of_views(error: RuntimeError) -> None:
    """Adds advice to the error of a backward pass that lacks the weights of a block because of a change in
    place.
    """
    if FREED in str(error):
        error.add_note(CHANGED_VIEW)


def tell_of_reads(error: Exception) -> None:
    """Adds advice to the error of an operation on a weight whose block does not run."""
    if MIXED in str(error):
        error.add_note(OUTSIDE)


def _policy(module: nn.Module, precision: Precision) -> MixedPrecisionPolicy:
    """Returns the dtypes of ``module``.  Gradients are summed in float64 if it has such parameters, and
    computes in their dtype.

    Parameters of blocks in it, which are wrapped already, and frozen ones do not count: they would change how
    the others are summed.
    """
    own = {each.dtype for each in module.parameters() if each.requires_grad and not isinstance(each, DTensor)}
    own = own if precision.compute is None else set()
    summed = reduce(torch.promote_types, own, precision.reduce)
    return MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=summed, cast_forward_inputs=precision.casts_inputs
    )


def apply_sync(model: nn.Module, scheme: Scheme, precision: Precision) -> None:
    """Lets ``scheme`` sum the gradients of every wrapped module."""
    for module in _wrapped(model).values():
        reduction = scheme.reduction(precision.wire)
        ours = _Reduce(reduction, _group(module))
        module.set_custom_reduce_scatter(ours)  # type: ignore[arg-type]  # torch's base class is private; it is duck-typed
        group = _group(module)
        _fill(group)
        _count(group, ours)
        _end(group, module._get_fsdp_state())
        _forget(group, scheme)
        if reduction.across_replicas is not None:
            module.set_all_reduce_hook(reduction.across_replicas)


def _group(module: FSDPModule) -> Any:
    """Returns what FSDP2 gathers and sums together: the parameters of ``module`` that are in no wrapped
    module below; None without any.
    """
    return module._get_fsdp_state()._fsdp_param_group


def _reduce_of(module: FSDPModule) -> _Reduce | None:
    """Returns the reduce-scatter of ``module``, if the module has parameters of its own that are trained."""
    group = _group(module)
    trained = group is not None and any(each.sharded_param.requires_grad for each in group.fsdp_params)
    return group._reduce_scatter_comm if trained and isinstance(group._reduce_scatter_comm, _Reduce) else None


def _count(group: Any, ours: _Reduce) -> None:
    """Lets ``ours`` count the runs of its module, and its runs with gradients.  A teacher model runs without
    gradients, and has no part in the sums.
    """
    if group is None:
        return
    original = group._record_post_forward

    def record() -> None:
        ours.passes += 1
        ours.runs += torch.is_grad_enabled()
        original()

    group._record_post_forward = record


def _end(group: Any, state: Any) -> None:
    """Marks a module as idle as soon as its part of a backward pass is over, so that it may have a second
    part in the same pass.

    Without this mark FSDP2 takes a later run by a reentrant checkpoint for a recomputation of the part that
    is over, and leaves the gradients of that run out of every sum.
    """

    def idle() -> None:
        state._training_state = TrainingState.IDLE

    if group is not None:
        _after_backward(group, idle)


def _forget(group: Any, scheme: Scheme) -> None:
    """Gives up the memory that FSDP2 takes for the result of each round, if the scheme keeps the sums and has
    a result in the last round only.

    FSDP2 itself would keep this memory, which is as large as the sums, until the next round begins.
    """

    def forget() -> None:
        for each in () if scheme.round.last else group.fsdp_params:
            each.sharded_param.grad = None

    if group is not None and scheme.keeps_sums:
        _after_backward(group, forget)


def _after_backward(group: Any, do: Callable[[], None]) -> None:
    """Lets FSDP2 call ``do()`` whenever it has ended a module's part of a backward pass."""
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        original(*unused)
        do()

    group.post_backward = post_backward


def _fill(group: Any) -> None:
    """Gives a parameter without a gradient zeros, if its module took part in a microbatch.

    FSDP2 sums only parameters that have gradients.  If the microbatches of members use different parameters,
    members would add gradients of different parameters.  Torch 2.13 can fill in zeros itself
    (``set_reduce_scatter_unused_params``), 2.11 cannot.
    """
    if group is None:
        return
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.is_unsharded:
            for each in group.fsdp_params:
                parameter = each.unsharded_param
                each.unused = each.unused and parameter.grad is None
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        original(*unused)

    group.post_backward = post_backward


def _note(modules: Iterable[FSDPModule], order: Order) -> None:
    """Lets ``order`` know of each collective for one of ``modules`` when it begins."""
    for place, module in enumerate(modules):
        if (group := _group(module)) is not None:
            module.set_custom_all_gather(_Gather(group._all_gather_comm, partial(order.gathers, place)))  # type: ignore[arg-type]  # as above
            group._reduce_scatter_comm.begins = partial(order.sums, place)


class _Gather:
    """The all-gather that FSDP2 calls for the parameters of a module: its own ``gather``, after
    ``begins()``.
    """

    def __init__(self, gather: Any, begins: Callable[[], None]) -> None:
        self.allocate, self._gather, self._begins = gather.allocate, gather, begins

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begins()
        return self._gather(*args, **kwargs)


class _Reduce:
    """The reduce-scatter that FSDP2 calls for the parameters of ``group``."""

    def __init__(self, reduction: GradientReduction, group: Any) -> None:
        self.reduction, self.group = reduction, group
        self.summed = 0
        """The number of its calls in the present microbatch."""
        self.begins: Callable[[], None] = lambda: None
        """Called when a sum begins."""
        self.passes = self.runs = 0
        """The number of forward passes of its module in the present microbatch, and of those with gradients.
        """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self.summed += 1
        self.begins()
        if (total := self.reduction.reduce(input_tensor)) is not None:
            output_tensor.copy_(total)


def settle(model: nn.Module) -> None:
    """Runs FSDP2's lazy initialisation now and not before the first pass, because it may move the part of a
    :class:`_Master` to other memory.
    """
    model._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # of an FSDPModule


def keep_streams(model: nn.Module, world: World) -> None:
    """Gives ``model`` the streams of earlier worlds in place of the streams that FSDP2 makes for each
    model.
    """
    state = model._get_fsdp_state()  # type: ignore[operator]  # of an FSDPModule
    state._lazy_init()
    for purpose in FSDP_STREAMS:
        priority = getattr(state._comm_ctx, purpose).priority
        setattr(state._comm_ctx, purpose, stream(purpose, world.device, priority))


@contextmanager
def gathered(block: nn.Module) -> Iterator[None]:
    """Gathers the parameters of ``block`` for a run outside of a pass of its model, if they are split.  Every
    member must do so.
    """
    if not isinstance(block, FSDPModule):
        yield
        return
    block.unshard()
    yield
    block.reshard()


def _wrapped(model: nn.Module) -> dict[str, FSDPModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
