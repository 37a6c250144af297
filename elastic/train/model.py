"""The state of a job in one generation: the wrapped model, the optimizer, and every tensor of both by name.

``State`` computes.  Its ``Shard`` is the same memory seen as slices; healing and saving know only the shard.
"""

from __future__ import annotations

import functools
import hashlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic.code.imports import arguments, failure, less_memory, load, unknown_argument
from elastic.config.values import without_secrets
from elastic.engine import paged
from elastic.engine.blocks import matrices_of, sharding_table
from elastic.engine.cuts import cuts_of
from elastic.engine.layers import Layers
from elastic.engine.loss_scale import SCALARS, is_scaled
from elastic.engine.meta import without_memory
from elastic.engine.optim.base import Optimizer, Part, Rule, dtype_of_average
from elastic.engine.optim.groups import decays, parameter_groups
from elastic.engine.parallelize import parallelize
from elastic.engine.parameters.base import shape_of
from elastic.engine.parameters.split import shared_across, unlike_within, without_dimensions
from elastic.engine.spike_memory import SpikeMemory
from elastic.engine.world import World
from elastic.errors import ElasticError, ModelError
from elastic.ids import Cell
from elastic.job import Job
from elastic.plan.placement import cell_of, held
from elastic.state.shard import DTYPE_NAMES, DTYPES, Key, Shard, ShardHome
from elastic.state.streaming import Moments, fetch, group_bytes, groups_of, put, through
from elastic.train.checks.guards import Guard
from elastic.train.gauges.arithmetic import Arithmetic
from storage.errors import Unavailable
from storage.slices import AVERAGE, Tensor, Version, nbytes

AS_IT_BEGAN = "go on with the code and the settings with which the run began, or begin a run of another name"
AS_IT_IS_THERE = "use the model and the model_args of that run"
UPDATES = Tensor("updates", "scalar", "F32", ())
"""Number of updates that were applied; a step that is skipped does not count."""

MISSED = "updates.missed"
"""Name of the scalars that count, for each trained parameter in the order of names, the updates that did not
change it.
"""

BUFFERS = ("buffer", "constant")
"""Kinds of buffers: those that the model saves (persistent), and those that it does not."""
Builder = Callable[..., Any]
"""``builder(**job.model_args)`` returns a new model of the job; it is the user's code, so :func:`build_model`
checks what it returns.
"""


def builder_of(job: Job) -> Builder:
    """Returns the builder that ``model`` names.  Raises :class:`CodeError` if it names nothing."""
    found: Builder = load(job.model, "model")
    if arguments("model_args", job.model_args) == job.model_args:
        return found
    return functools.wraps(found)(lambda **args: found(**arguments("model_args", args)))


def build_model(job: Job, builder: Builder) -> nn.Module:
    """Builds the user's model on the meta device and checks it.  Raises :class:`ModelError`."""
    try:
        with without_memory():
            model = builder(**job.model_args)
    except (ElasticError, Unavailable):
        raise
    # the user's code may raise anything, first of all for an argument that it does not know
    except Exception as error:
        named = f"model = {job.model!r}"
        if unknown := unknown_argument("model_args", named, builder, job.model_args, error):
            raise ModelError(unknown) from error
        raise ModelError(
            f"model_args = {without_secrets('model_args', job.model_args)}: {named} failed with "
            f"{failure(error)}; {_fix_of(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model = {job.model!r} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    _check_parameters(job, model)
    if not callable(getattr(model, "init_weights", None)):
        raise ModelError(
            f"model = {job.model!r}: {type(model).__name__} has no init_weights() method; add a method "
            "that sets every parameter (with the body `pass`, parameters keep the values of the constructor)"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype not in DTYPE_NAMES:
            raise ModelError(
                f"{name!r} of {job.model!r} is {tensor.dtype}, which a checkpoint cannot hold; use one "
                f"of {', '.join(DTYPES)} (torch.view_as_real for complex numbers), or compute it in "
                "forward"
            )
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ModelError(
                f"{name!r} of {job.model!r} has sparse = True, and sparse gradients cannot be summed; leave "
                "sparse out"
            )
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise ModelError(
                f"parameter {name!r} of {job.model!r} has no elements (shape {[*parameter.shape]}); correct "
                f"model_args = {without_secrets('model_args', job.model_args)}"
            )
        usual = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        # its parts get these strides, and kernels rely on one order in memory
        if parameter.stride() != usual.stride():
            parameter.data = usual.data
    return model


def _check_parameters(job: Job, model: nn.Module) -> None:
    """Raises :class:`ModelError` for a parameter that the state cannot hold: one without a shape, a tensor
    subclass, one with a hook after accumulation, or one that shares its memory with another.
    """
    for name, parameter in model.named_parameters():
        named = f"parameter {name!r} of {job.model!r}"
        if is_lazy(parameter):
            raise ModelError(
                f"{named} has no shape before the first forward pass; give its sizes, with nn.Linear "
                "in place of nn.LazyLinear"
            )
        if is_traceable_wrapper_subclass(parameter):
            raise ModelError(
                f"{named} is a {type(parameter).__name__}, which cannot be cut into rows, since its "
                "values are in other tensors; register those tensors as parameters"
            )
        if parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{named} has a hook of register_post_accumulate_grad_hook, which does not work here, "
                "since the engine adds gradients over workers first; use register_hook, which gets "
                "the gradient of each microbatch, or, for an update, an optimizer of your own "
                "(optim.kind)"
            )
    if names := paged.sharing(model):
        raise ModelError(
            f"{names[0]!r} and {names[1]!r} of {job.model!r} are two tensors that share memory; make "
            "them one parameter, as self.head.weight = self.embed.weight does"
        )


def _fix_of(error: Exception) -> str:
    """Returns what to do about an exception of a builder."""
    if "meta tensors" in str(error):
        return (
            "the model is built on the meta device, where tensors have no values: compute a number "
            "without a tensor, or with a tensor on the CPU, as torch.linspace(0, 0.3, 3, "
            "device='cpu'); nn.utils.parametrizations.orthogonal needs use_trivialization=False"
        )
    if not any(
        frame.name == "from_pretrained" and "modeling_utils" in frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
    ):
        return "correct the arguments, or the model"
    return (
        "the model is built on the meta device, where tensors have no values, so it cannot read "
        "weights there: build it from its config, and read the weights in init_weights(); "
        "elastic.models.transformers_lm:build does so with model_args = "
        "{ path = '<folder>', pretrained = true }"
    )


OTHER_DEVICE = ("same device", "not compiled with CUDA", "NVIDIA driver", "No CUDA GPUs")
"""Words of torch's errors about a tensor that is not on the device of the microbatch."""


def remedy(error: Exception, model: nn.Module) -> str:
    """Returns what to do about a lack of memory, or about tensors that the engine cannot find and so does not
    put on the device; "" for any other error.
    """
    if less := less_memory(error):
        return less
    if any(words in str(error) for words in OTHER_DEVICE):
        return (
            "a tensor is on another device than the microbatch: register it as a buffer "
            "(self.register_buffer(name, tensor, persistent=False)), which moves to the device of the "
            "weights, or make it with device=x.device; call no .cuda() or .to('cuda')"
        )
    if "meta" not in str(error):
        return ""
    tables, modules = list[str](), list[str]()
    for where, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                name = f"{where}.{key}" if where else key
                some = (
                    value.values()
                    if isinstance(value, dict)
                    else value
                    if isinstance(value, list | tuple)
                    else (value,)
                )
                tables += [name for each in some if isinstance(each, torch.Tensor) and each.is_meta]
                modules += [
                    name
                    for each in some
                    if isinstance(each, nn.Module) and any(p.is_meta for p in each.parameters())
                ]
    said = list[str]()
    if tables:
        said.append(
            f"{', '.join(map(repr, tables))}: a tensor in a plain attribute has no values, since the model "
            "is built on the meta device; register it (self.register_buffer(name, tensor, "
            "persistent=False)), or compute it in forward"
        )
    if modules:
        said.append(
            f"{', '.join(map(repr, modules))}: modules in a list or dictionary have no values; put them "
            "into an nn.ModuleList"
        )
    return "; ".join(said)


def tensors_of(model: nn.Module, rule: Rule) -> tuple[Tensor, ...]:
    """Returns every tensor of the state in a fixed order: parameters, their moments by ``rule``, buffers, and
    scalars.

    Raises :class:`ModelError` if the rule is for matrices of blocks, and the model has none, or if the
    model's sharding table does not fit it.
    """
    found, matrices, trained, cuts = [], matrices_of(model), 0, cuts_of(model)
    if rule.matrix_moments is not None and not matrices:
        raise ModelError(
            "this optim.kind is for weights with two dimensions inside the model's blocks, and the "
            "model has none; name the blocks in sharding(), or use another optim.kind"
        )
    for name, parameter in model.named_parameters():
        shape, cut = shape_of(parameter), (cuts[name].split, cuts[name].depth)
        found.append(Tensor(name, "parameter", DTYPE_NAMES[parameter.dtype], shape, *cut))
        if parameter.requires_grad:
            trained += 1
            moments = rule.moments_of(is_matrix=name in matrices)
            dtype = DTYPE_NAMES[rule.moments_dtype or parameter.dtype]
            found += [Tensor(name, f"moment.{moment}", dtype, shape, *cut) for moment in moments]
            if rule.averages:
                found.append(Tensor(name, AVERAGE, DTYPE_NAMES[dtype_of_average(parameter)], shape, *cut))
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        found.append(
            Tensor(
                name,
                "buffer" if name in persistent else "constant",
                DTYPE_NAMES[buffer.dtype],
                tuple(buffer.shape),
            )
        )
    counted = (Tensor(MISSED, "scalar", "F32", (trained,)),) if rule.counts and trained else ()
    return (*found, UPDATES, *counted, *(_scalar(name) for name in rule.scalars), *rule.kept)


def digest_of(model: nn.Module) -> str:
    """Returns a digest of all that members must have in common to add their gradients: each tensor in its
    order, and how the model is cut.
    """
    table = sharding_table(model)
    tensors = [
        (name, [*each.shape], str(each.dtype), each.requires_grad)
        for name, each in (*model.named_parameters(), *model.named_buffers())
    ]
    return hashlib.blake2b(repr((tensors, table)).encode(), digest_size=6).hexdigest()


def begun_anew(job: Job, rule: Rule, tensors: Iterable[Tensor]) -> set[Tensor]:
    """Returns the tensors that a branch begins anew if its checkpoint lacks them: averages with the values of
    the weights, all others with zeros.  A loss scale of zero stands for the first loss scale.
    """
    averages = (tensor for tensor in tensors if tensor.kind == AVERAGE)
    return {*rule.kept, *(_scalar(name) for name in SCALARS if is_scaled(job.precision)), *averages}


def as_stored(tensor: Tensor) -> Tensor:
    """Returns the tensor as a checkpoint describes it, which does not say how it may be cut."""
    return replace(tensor, split=(), depth=())


def _scalar(name: str) -> Tensor:
    return Tensor(name, "scalar", "F32", ())


def in_its_stage(job: Job, model: nn.Module) -> Job:
    """Returns the job with stage 2 of ZeRO in place of ``auto``, if stage 3 cannot gather the weights of its
    model.

    The returned job may have other layouts, so plans are made with ``job`` itself.
    """
    return (
        job.in_stage(2)
        if job.zero == "auto" and (shared_across(model) or unlike_within(model) or without_dimensions(model))
        else job
    )


def misfit(
    job: Job, tensors: Sequence[Tensor], stored: Iterable[Tensor], version: Version, fix: str = AS_IT_BEGAN
) -> str:
    """Returns a sentence about the first tensor in which the model differs from a checkpoint of ``version``;
    "" if it fits.
    """
    there = {(tensor.kind, tensor.name): tensor for tensor in stored}
    here = {(tensor.kind, tensor.name): tensor for tensor in tensors}
    lost = next(
        (tensor for key, tensor in there.items() if tensor.kind == "parameter" and key not in here), None
    )
    differ = [tensor for key, tensor in here.items() if there.get(key) != as_stored(tensor)]
    ours = next(
        (tensor for tensor in differ if tensor.name != MISSED),
        None if lost is not None else next(iter(differ), None),
    )
    if ours is None and lost is None:
        return ""
    named, checkpoint = f"model = {job.model!r}", f"the checkpoint of {version}"
    if ours is None or (lost is not None and (ours.kind, ours.name) not in there):
        assert lost is not None
        what = f"{_told(lost)} is in {checkpoint}, and {named} has no such {lost.kind}"
    elif (theirs := there.get((ours.kind, ours.name))) is None:
        what = f"{_told(ours)} of {named} is not in {checkpoint}"
    else:
        what = (
            f"{ours.kind} {ours.name!r} of {named} is {_form(ours)}, and in {checkpoint} it is "
            f"{_form(theirs)}"
        )
    return f"{what}; {fix}"


def _told(tensor: Tensor) -> str:
    return f"{tensor.kind} {tensor.name!r}, {_form(tensor)},"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Returns the size of the whole state in bytes."""
    return sum(nbytes(tensor, tensor.whole()) for tensor in tensors)


def _existing(local: Mapping[str, torch.Tensor], tensor: Tensor, cell: Cell) -> torch.Tensor:
    """Returns the parameter's part that is in this process.  Raises AssertionError if the wrapped model does
    not have the parameter.
    """
    assert tensor.name in local, (
        f"parameter {tensor.name!r}: the wrapped model of the member in cell {cell!r} does not have it; a "
        "member without one of the parameters is not possible yet"
    )
    return local[tensor.name]


def _is_streamed(key: Key) -> bool:
    return key[0] == "parameter" or key[0].startswith("moment.")


def _part_of(part: Part, values: Mapping[Key, torch.Tensor]) -> Part:
    moments = {kind: values[f"moment.{kind}", part.name] for kind in part.moments}
    return replace(
        part, values=values["parameter", part.name], moments=moments, average=values.get((AVERAGE, part.name))
    )


class State:
    """The model and the optimizer of ``job``, wrapped for ``world``.  Their memory has no values until it is
    healed.

    With ``home`` the parameters and moments live in that slot, and only weights to compute with are on the
    device.  Raises AssertionError if the wrapped model holds other parts of the tensors than
    ``plan/placement.py`` says.
    """

    def __init__(
        self,
        job: Job,
        builder: Builder,
        rule: Rule,
        world: World,
        version: Version,
        home: ShardHome | None = None,
    ) -> None:
        blueprint = build_model(job, builder)
        self.tensors = tensors_of(blueprint, rule)
        shapes = {name: shape_of(parameter) for name, parameter in blueprint.named_parameters()}
        matrices = matrices_of(blueprint)
        trained = {name for name, parameter in blueprint.named_parameters() if parameter.requires_grad}
        self.gradient = tuple(
            each for each in self.tensors if each.kind == "parameter" and each.name in trained
        )
        """The trained parameters of the whole model, also those of other pipeline stages."""
        groups = parameter_groups(job.optim, blueprint)
        decayed = frozenset(name for name, group in groups.items() if decays(group, len(shapes[name])))
        self.job, self.world = job, world
        self.layers = Layers.of(blueprint)
        self.arithmetic = Arithmetic(blueprint, world, job.precision)
        self.model, self.parameters, self.sync, self.statistics, self.seeds = parallelize(
            blueprint, world, job
        )
        self.guard = Guard(self.model, self.parameters, world, job.model, compiles=job.compile)
        self._modules, self._put_into_training = [*self.model.modules()], False
        self.used: torch.Tensor | None = None
        """A number for each tensor of the gradient: 0 if no microbatch of the prepared step gave its
        parameter a gradient, else 1.  None counts as all 1.
        """
        self.tried = False
        """True once a microbatch was computed."""
        local = self.parameters.parts
        self.trained = {name: part for name, part in local.items() if name in self.parameters.trained}
        cell = cell_of(world.layout, world.rank)
        boxes = {each.name: tuple(box.slice for box in held(each, cell).boxes) for each in self.gradient}
        self.optimizer = Optimizer(job, rule, self.trained, boxes, decayed, shapes, matrices, groups)
        self.spikes = SpikeMemory(job, self.optimizer.kept)
        self.shard = Shard(version, cell, self._values(local, cell))
        assert (home is not None) is job.offloads, (
            "state that is offloaded lives in a slot, and no other does"
        )
        self.next_home: ShardHome | None = None
        """The slot into which the next update moves the state."""
        if home is not None:
            self._streamed = [
                {
                    key: value
                    for key, value in self.shard.values.items()
                    if key[1] == name and _is_streamed(key)
                }
                for name in local
            ]
            self.optimizer.visit = self._visit
            self._live_in(home)

    def _values(self, local: Mapping[str, torch.Tensor], cell: Cell) -> dict[Key, torch.Tensor]:
        buffers = dict(self.model.named_buffers())
        values = {}
        for tensor in self.tensors:
            match tensor.kind:
                case "parameter":
                    value = _existing(local, tensor, cell)
                case kind if kind in BUFFERS:
                    value = buffers[tensor.name]
                case "scalar":
                    own = {UPDATES.name: self.optimizer.updates, MISSED: self.optimizer.missed}
                    value = (own | self.optimizer.scalars | self.optimizer.kept)[tensor.name]
                case moment:
                    part = self.optimizer.parts[tensor.name]
                    own = {AVERAGE: part.average} if part.average is not None else {}
                    value = (own | {f"moment.{name}": each for name, each in part.moments.items()})[moment]
            expected, found = held(tensor, cell).shape, tuple(value.shape)
            assert found == expected, (
                f"{tensor.kind} {tensor.name!r}: the member in cell {cell!r} has memory of shape {found}, "
                f"and placement says {expected}; the axes of engine/parallelize.py must cut the model as "
                "the rows of plan/axes.py do"
            )
            values[tensor.kind, tensor.name] = value.detach()
        return values

    def begin_averages(self) -> None:
        """Sets the averages to the weights: before the first update, or where a branch begins to average."""
        for (kind, name), value in self.shard.values.items():
            if kind == AVERAGE and self.optimizer.rule.averages:
                value.copy_(self.shard.values["parameter", name])
                self.shard.let_go((kind, name))

    def evaluate_averages(self) -> None:
        """Puts the averages in the place of the weights.  A state with which a run goes on must not do so."""
        for name, value in self.trained.items():
            value.copy_(self.shard.values[AVERAGE, name])
        self.parameters.current = False

    # ---- state that lives in a slot

    def _live_in(self, home: ShardHome) -> None:
        values, parts = home.values, self.optimizer.parts
        self.shard.values |= {key: values[key] for unit in self._streamed for key in unit}
        self.shard.home, self.next_home, device = home, None, self.world.device
        self.parameters.live_in(
            {name: values["parameter", name] for name in self.parameters.parts},
            lambda name: fetch(home, ("parameter", name), device),
        )
        self.trained = {name: values["parameter", name] for name in self.trained}
        self.optimizer.parts = {
            name: replace(
                part, values=values["parameter", name], moments=Moments(home, name, part.moments, device)
            )
            for name, part in parts.items()
        }

    def _visit(self, update: Callable[[list[Part]], None]) -> None:
        """Updates the parts on the device, group by group, on their way to the next slot; the model gets the
        new weights.
        """
        assert self.shard.home is not None and self.next_home is not None
        groups = groups_of(self._streamed, group_bytes(self.job))
        with closing(through(self.world.device, self.shard.home, self.next_home, groups)) as there:
            for values in there:
                names = [name for kind, name in values if kind == "parameter"]
                update(
                    [_part_of(self.optimizer.parts[name], values) for name in names if name in self.trained]
                )
                for name in names:
                    self.parameters.take(name, values["parameter", name])

    def move(self) -> None:
        """Lets the shard live in the next slot, to which an update has brought the streamed tensors, and
        writes the other tensors there.
        """
        assert self.next_home is not None
        self._live_in(self.next_home)
        self.write_the_rest()

    def write_the_rest(self) -> None:
        """Writes the tensors that do not live in the slot into it: buffers and scalars."""
        assert self.shard.home is not None
        for key, value in self.shard.values.items():
            if not _is_streamed(key):
                put(self.shard.home, key, value)

    def read_the_rest(self) -> None:
        """Reads from the slot the tensors that do not live in it.  Raises
        :class:`~elastic.errors.StateDamaged`.
        """
        assert self.shard.home is not None
        for key, value in self.shard.values.items():
            if not _is_streamed(key):
                value.copy_(fetch(self.shard.home, key, value.device))

    def unused(self) -> frozenset[str]:
        """Returns the names of the trained parameters that no microbatch of the prepared step gave a
        gradient.
        """
        if self.used is None:
            return frozenset()
        used = self.world.to_host(self.used, key="used anywhere").tolist()
        return frozenset(each.name for each, is_used in zip(self.gradient, used, strict=True) if not is_used)

    def reserve(self) -> None:
        """Reserves the host memory of :meth:`unused`, and of the guard, before anything is launched that may
        hang.
        """
        self.world.reserve("used anywhere", torch.empty(len(self.gradient), dtype=torch.uint8))
        self.guard.reserve()

    def train(self) -> None:
        """Puts the model into training mode by its own ``train()``, which may leave some modules out.  It
        does nothing if that was done and all modules are still in training mode.
        """
        if not (self._put_into_training and all(module.training for module in self._modules)):
            self.model.train()
            self._put_into_training = True
