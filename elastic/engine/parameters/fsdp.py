"""Wraps a model by FSDP2.  No other module knows FSDP2.

FSDP2 splits the parameters of each block, gathers them before the block runs, and frees them afterwards.  It
gets the one-dimensional mesh of the shards only.  A :class:`~elastic.engine.sync.base.Scheme` sums the
gradients over the data ranks.  FSDP2 calls it as a custom reduce-scatter, and perhaps as a hook for the
replicas.  The rules of a step with split parameters are in ``split.py``.

Weights of layers that multiply in fp8 are gathered in fp8, by FSDP2's extension for tensors that say what is
gathered in their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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

from elastic.engine.fp8 import FORWARD, Recipe, hold
from elastic.engine.fp8_weights import Fp8Weights, weights_of, whole_weights
from elastic.engine.pace import ForwardPace
from elastic.engine.parameters.base import take_over
from elastic.engine.precision import Precision
from elastic.engine.streams import stream
from elastic.engine.sync.base import GradientReduction, Scheme
from elastic.engine.world import World
from elastic.models.spec import ShardingTable

FSDP_STREAMS = (
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "reduce_scatter_stream",
    "all_reduce_stream",
)
"""Attributes of FSDP2's communication context that hold streams, in torch 2.11 to 2.13."""
FSDP_STATE = r"torch\.distributed\.fsdp\._fully_shard\._fsdp_state"
"""The module that gives FSDP2's warnings."""
VIEW_WARNING = r"FSDP2-wrapped module .* returned a view tensor"
"""FSDP2's warning of a module whose output is a view."""


# ---- a model is wrapped


def apply_fsdp(model: nn.Module, world: World, table: ShardingTable, precision: Precision) -> None:
    """Wraps each block by itself, and the rest of ``model`` as the root.  Gradients are summed and never
    divided.

    FSDP2 warns of each module whose output is a view, such as that of ``nn.Linear`` for an input of three
    dimensions, because code must not change the view in place.  Such a change makes the first step fail
    (:func:`~elastic.engine.parameters.split.tell_of_views`), so nobody needs the warning.
    """
    warnings.filterwarnings("ignore", VIEW_WARNING, UserWarning, FSDP_STATE)
    for each in (*(model.get_submodule(name) for name in table.blocks), model):
        fully_shard(each, mesh=world.shard_mesh, mp_policy=_policy(each, precision))
    for module in wrapped(model).values():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


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
    for module in wrapped(model).values():
        reduction = scheme.reduction(precision.wire)
        ours = Reduce(reduction, _group(module))
        module.set_custom_reduce_scatter(ours)  # type: ignore[arg-type]  # torch's base class is private; it is duck-typed
        group = _group(module)
        _fill(group)
        _count(group, ours)
        _time_apart(group, scheme.world.pace)
        _end(group, module._get_fsdp_state())
        _forget(group, scheme)
        if reduction.across_replicas is not None:
            module.set_all_reduce_hook(reduction.across_replicas)


def keep_their_kind(model: nn.Module, before: Mapping[tuple[nn.Module, str], nn.Parameter]) -> None:
    """Lets code of the model take FSDP2's parameters for those that they replace: ``before``, by module and
    name.

    FSDP2 makes a gathered parameter when it gathers it first, and keeps it.
    """
    for module in wrapped(model).values():
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


# ---- fp8 in place of a master


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


def apply_fp8_gather(model: nn.Module, world: World, table: ShardingTable, recipe: Recipe) -> Fp8Weights:
    """Lets the weights of layers that multiply in fp8 be gathered in fp8, before ``model`` is wrapped."""
    layers = weights_of(model, table)
    weights = Fp8Weights(layers, whole_weights(model, layers), world, recipe)
    for name, layer in weights.layers.items():
        layer.weight = nn.Parameter(_Master(layer.weight.detach()), layer.weight.requires_grad)
        layer.fp8_part, layer.fp8_carrier, layer.fp8_inverse = (
            weights.parts[name],
            weights.carrier(name),
            weights.inverse[name],
        )
    return weights


# ---- hooks on FSDP2's own parts


def _group(module: FSDPModule) -> Any:
    """Returns what FSDP2 gathers and sums together: the parameters of ``module`` that are in no wrapped
    module below; None without any.
    """
    return module._get_fsdp_state()._fsdp_param_group


def _count(group: Any, ours: Reduce) -> None:
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


def _time_apart(group: Any, pace: ForwardPace) -> None:
    """Leaves the time in which FSDP2 gathers the parameters of a module out of the forward pass."""
    if group is not None:
        group.pre_forward = pace.without(group.pre_forward)


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


class _Gather:
    """The all-gather that FSDP2 calls for the parameters of a module: its own ``gather``, after
    ``begins()``.
    """

    def __init__(self, gather: Any, begins: Callable[[], None]) -> None:
        self.allocate, self._gather, self._begins = gather.allocate, gather, begins

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begins()
        return self._gather(*args, **kwargs)


class Reduce:
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


# ---- what a wrapped model has


def wrapped(model: nn.Module) -> dict[str, FSDPModule]:
    """Returns the wrapped modules by name: the blocks, and the model itself, which has the rest."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def free(module: FSDPModule) -> None:
    """Frees the gathered parameters of a wrapped module, so that its next pass gathers the present values."""
    module.reshard()


def reduce_of(module: FSDPModule) -> Reduce | None:
    """Returns the reduce-scatter of ``module``, if the module has parameters of its own that are trained."""
    group = _group(module)
    trained = group is not None and any(each.sharded_param.requires_grad for each in group.fsdp_params)
    return group._reduce_scatter_comm if trained and isinstance(group._reduce_scatter_comm, Reduce) else None


def note(module: FSDPModule, gathers: Callable[[], None], sums: Callable[[], None]) -> None:
    """Calls ``gathers()`` whenever a collective begins that gathers the parameters of a wrapped module, and
    ``sums()`` for one that sums its gradients.
    """
    if (group := _group(module)) is not None:
        module.set_custom_all_gather(_Gather(group._all_gather_comm, gathers))  # type: ignore[arg-type]  # as above
        group._reduce_scatter_comm.begins = sums


class SplitParameter:
    """One parameter of a wrapped model."""

    def __init__(self, parameter: nn.Parameter, held: Any) -> None:
        """``held`` is FSDP2's record of ``parameter``."""
        self._parameter, self._held = parameter, held
        self.part = _local(parameter).detach()
        """This member's part."""
        self.is_trained = parameter.requires_grad

    @property
    def missing(self) -> bool:
        """True if the parameter is trained, and no backward pass of the present round gave it a gradient."""
        return self.is_trained and self._held.unused

    @property
    def whole(self) -> nn.Parameter:
        """The gathered parameter, once FSDP2 has gathered it; its memory may be free again."""
        found: nn.Parameter = self._held._unsharded_param
        return found

    def begin_round(self) -> None:
        """Counts as unused until a backward pass gives a gradient."""
        self._held.unused = True

    def grad(self) -> Tensor:
        """Returns this member's part of the summed gradient: zeros if there is none."""
        grad = self._parameter.grad
        return torch.zeros_like(self.part) if grad is None else _local(grad)

    def add(self, grad: Tensor) -> None:
        """Adds to this member's part of the summed gradient."""
        assert self._parameter.grad is not None, "a module sums the gradients of all of its parameters"
        _local(self._parameter.grad).add_(grad)

    def forget_grad(self) -> None:
        self._parameter.grad = None

    def mark(self) -> Hashable:
        """Returns the mark of :meth:`Parameters.writes`: how often the part and the gathered parameter were
        written to, the memory and the hooks of the gathered parameter, and whether it is trained.
        """
        part: Any = self._parameter
        whole = getattr(self._held, "_unsharded_param", None)
        if whole is None:
            return part._local_tensor._version, 0, 0, self._held.hooks, part.requires_grad
        version, memory = self._held.made
        there = whole.untyped_storage()._cdata - memory
        return (
            part._local_tensor._version,
            whole._version - version,
            there,
            len(whole._backward_hooks or ()),
            whole.requires_grad,
        )

    def is_own(self, found: object) -> bool:
        """Returns whether ``found`` is the parameter as FSDP2 has put it into the model."""
        return (
            found is self._parameter
            or found is self._held.sharded_param
            or found is getattr(self._held, "_unsharded_param", None)
        )


def split_parameters(model: nn.Module) -> dict[str, SplitParameter]:
    """Returns the parameters of a wrapped model by name."""
    parameters = dict(model.named_parameters())
    held = _held_by(model, parameters)
    return {name: SplitParameter(parameter, held[name]) for name, parameter in parameters.items()}


def _held_by(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Returns FSDP2's record of each of ``parameters``, by name."""
    names, found = {id(parameter): name for name, parameter in parameters.items()}, dict[str, Any]()
    for module in wrapped(model).values():
        for each in getattr(_group(module), "fsdp_params", ()):
            place = each._module_info
            found[names[id(place.module._parameters[place.param_name])]] = each
    return found


def _local(tensor: Tensor) -> Tensor:
    """Returns the part of a split tensor that is in this process."""
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    return local.plain if isinstance(local, _Master) else local
