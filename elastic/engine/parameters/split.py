"""Parameters that are split over the shards of a replica; gradients are summed over all data ranks.

That is stage 3 of ZeRO (Rajbhandari and others 2020, section 5).  FSDP2 gathers the parameters of each block
before the block runs, and frees them afterwards; ``fsdp.py`` is the only module that knows how.  This module
has the rules of a step, and what a user is told who breaks one; its last functions name what cannot be split.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from elastic.engine.blocks import sharding_table
from elastic.engine.fp8_weights import Fp8Weights
from elastic.engine.parameters.base import Parameters
from elastic.engine.parameters.both_ends import Behind, SecondSum, read_behind
from elastic.engine.parameters.fsdp import (
    apply_fp8_gather,
    apply_fsdp,
    apply_sync,
    free,
    keep_streams,
    keep_their_kind,
    note,
    reduce_of,
    settle,
    split_parameters,
    wrapped,
)
from elastic.engine.parameters.order import Order
from elastic.engine.parameters.ties import aliases_of, tie
from elastic.engine.parameters.units import SummedUnit
from elastic.engine.precision import Precision
from elastic.engine.sync.base import Scheme
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.models.spec import ShardingTable

FREED = "out of bounds for storage of size 0"
"""Words of torch's error of an operation on weights that are not gathered."""
CHANGED_VIEW = (
    "the weights of a block are missing in the backward pass: probably the model or the loss changes "
    "an output of a block, or of the model, in place (x += y); write x = x + y"
)
MIXED = "mixed torch.Tensor and DTensor"
"""Words of torch's error of an operation on a weight that is not gathered, and on a plain tensor."""
OUTSIDE = (
    "with parallel.zero = 3 a weight can be read only while its block runs, and a weight was read at "
    "another time (by a penalty on weights in the loss, or by code that calls a part of a block by "
    "itself); set parallel.zero = 2, which gathers all weights once a step"
)
ABSENT = (
    "with parallel.zero = 3 every member must run each block in each microbatch, and {name} was not "
    "used in this microbatch; set parallel.zero = 2, or freeze parameters that are never used"
)
TWICE = (
    "{name} is used twice in one microbatch, and with parallel.zero = 3 the two gradients are added "
    "in no fixed order; set parallel.zero = 2, or, if every member always uses it twice, reproducible "
    "= false"
)
INNER = (
    "the loss runs a backward pass itself (torch.autograd.grad or backward()), which with "
    "parallel.zero = 3 sums the gradients of {name} too early; set parallel.zero = 2"
)


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


def apply_split(
    model: nn.Module,
    world: World,
    table: ShardingTable,
    precision: Precision,
    scheme: Scheme,
    behind: Behind | None = None,
) -> Split:
    """Splits the parameters of ``model``, gives them and the buffers memory, and lets ``scheme`` sum the
    gradients.  ``behind`` are the places of weights with second sums.
    """
    aliases = aliases_of(model)
    before = {
        (module, name): parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    fp8 = apply_fp8_gather(model, world, table, precision.fp8) if precision.fp8 is not None else None
    apply_fsdp(model, world, table, precision)
    apply_sync(model, scheme, precision)
    model.to_empty(device=world.device)
    keep_their_kind(model, before)
    tie(model, aliases)
    if fp8 is not None:
        settle(model)
    if world.device.type == "cuda":
        keep_streams(model, world)
    return Split(model, scheme, fp8, read_behind(model, behind or {}), precision.wire)


class Split(Parameters):
    """The parameters of a model that is wrapped."""

    needs_every_pass = True
    order: Order

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme,
        fp8: Fp8Weights | None,
        seconds: Mapping[str, SecondSum],
        wire: torch.dtype | None,
    ) -> None:
        self.scheme, self._fp8 = scheme, fp8
        self._parameters, self._modules = split_parameters(model), wrapped(model)
        self.parts = {name: each.part for name, each in self._parameters.items()}
        self.trained = frozenset(name for name, each in self._parameters.items() if each.is_trained)
        self.copies = [*fp8.parts.values()] if fp8 is not None else []
        self.order = Order(scheme.world, [*self._modules])
        for place, module in enumerate(self._modules.values()):
            note(module, partial(self.order.gathers, place), partial(self.order.sums, place))
        shards = scheme.world.layout.shards
        self._seconds = {
            name: (second, SummedUnit(scheme.reduction(wire), shards, [name], ends=[0]))
            for name, second in seconds.items()
        }
        """The second sums, which FSDP2 does not know, and their units.  FSDP2 makes a gathered weight when it
        gathers it first, so a unit gets its parameter later.
        """
        self._reduces = {
            name: reduce
            for name, module in self._modules.items()
            if (reduce := reduce_of(module)) is not None
        }

    def refresh(self) -> None:
        """Frees gathered weights, so that the next pass gathers the present values; a pass without gradients
        leaves the weights of the model itself gathered.  Weights in fp8 are cast.
        """
        for module in self._modules.values():
            free(module)
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
        for second, _ in self._seconds.values():
            second.turn(is_open=False)
        for each in self._reduces.values():
            each.summed = each.passes = each.runs = 0
        for parameter in self._parameters.values():
            parameter.begin_round()

    def end_forward(self) -> None:
        """Checks that each module ran once in the forward pass, for which all weights were gathered.

        Members gather and sum module by module.  If one member leaves out a module, its next collective meets
        the collective of another module.  And an ordered sum takes one gradient of each module in a
        microbatch.

        So a pass with gradients raises :class:`ModelError` if a module did not run; if it ran twice and the
        scheme keeps the sums; or if a backward pass within the loss has summed it already.  A reentrant
        checkpoint runs a module without gradients.  Such runs count only if the module never ran with
        gradients.
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
        for second, _ in self._seconds.values():
            second.turn(is_open=True)

    def end_round(self) -> None:
        """Checks that each module was summed once in the backward pass.  Raises :class:`ModelError` if
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
        missing = {name for name, each in self._parameters.items() if each.missing}
        for name, (second, unit) in self._seconds.items():
            second.turn(is_open=False)
            holder = second.of(self._parameters[name].whole)
            missing -= {name} if holder.grad is not None else set()
            unit.computing = [holder]
            unit.add(unit.flat(unit.came_or_zeros()), self.scheme.round)
            holder.grad = None
            if self.scheme.round.last:
                self._parameters[name].add(*unit.grads([self.parts[name]]))
                unit.total = None
        self.missing = frozenset(missing)

    def grads(self) -> dict[str, Tensor]:
        return {name: each.grad() for name, each in self._parameters.items() if each.is_trained}

    def writes(self) -> Mapping[str, Hashable]:
        return {name: each.mark() for name, each in self._parameters.items()}

    def is_own(self, name: str, found: object) -> bool:
        return self._parameters[name].is_own(found)

    def forget_grads(self) -> None:
        for parameter in self._parameters.values():
            parameter.forget_grad()
        for _, unit in self._seconds.values():
            unit.forget()


def shared_across(model: nn.Module) -> tuple[str, str] | None:
    """Returns two names of one parameter that is in two blocks, or in one and in the rest of the model; None
    if there is none.

    FSDP2 gathers and frees the parameters of a block for that block alone, so such a model cannot be wrapped
    in stage 3 of ZeRO.
    """
    found = dict[int, tuple[str, str]]()
    for unit, name, parameter in _units(model):
        first_unit, first = found.setdefault(id(parameter), (unit, name))
        if unit != first_unit:
            return first, name
    return None


def without_dimensions(model: nn.Module) -> str:
    """Returns the name of a parameter without dimensions, or "".  FSDP2 cannot cut it, so such a model cannot
    be in stage 3 of ZeRO.
    """
    return next((name for name, parameter in model.named_parameters() if not parameter.dim()), "")


def unlike_within(model: nn.Module) -> tuple[str, str] | None:
    """Returns two trained parameters with different dtypes in one block, or in the rest of the model; None if
    there are none.

    FSDP2 sums all gradients of a block in one memory, and those of the rest as well, so such a model cannot
    be wrapped in stage 3 of ZeRO.
    """
    found = dict[str, tuple[torch.dtype, str]]()
    for unit, name, parameter in _units(model):
        dtype, first = (
            found.setdefault(unit, (parameter.dtype, name))
            if parameter.requires_grad
            else (parameter.dtype, name)
        )
        if parameter.dtype != dtype:
            return first, name
    return None


def _units(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yields (block, name, parameter) for each name of each parameter; the block "" is the rest of the
    model.
    """
    table = sharding_table(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield table.block_of(name), name, parameter
