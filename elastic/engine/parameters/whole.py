"""Parameters that are whole where they are used: the model of every member computes with all of them, and
nothing is gathered for a block.

The model computes with copies in the dtype of the precision policy, which are made once a step; weights of
layers that multiply in fp8 are copied and gathered in fp8, unless the state is offloaded.  What a member
holds and updates is its part: all of a parameter, or, where shards cut the state, some of its rows.
Then the copies are gathered from the parts, those of a block while the blocks before it run (``gathers.py``).
That is stage 2 of ZeRO, and with ``deferred`` sums stage 1 (Rajbhandari and others 2020, section 5).  Where
the copies live on the host, they are gathered there, and visit the device (``visits.py``).

When the gradients of a unit (a bucket of blocks, or the rest of the model) are complete in a backward pass,
they are put together and summed, while the backward pass goes on.  Units are summed in a fixed order, so that
all members call their collectives in the same order even if some members do not use some parameters.  A hook
costs the host 2 µs, so only the parameters whose gradients came last so far have one.

Within one backward pass torch brings the gradient of a parameter once.  A backward pass within the backward
pass, as that of torch's checkpoint with ``use_reentrant=True``, brings a part of its own, and nobody can know
whether a further part follows.  Waiting for the end of the round would cost all parameters their overlap; so
a part that comes after the sum is an error.  A gradient that comes once never is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from elastic.config.sections import Parallel
from elastic.engine.fp8 import hold
from elastic.engine.fp8_weights import Fp8Weights, weights_of, whole_weights
from elastic.engine.parameters.base import Parameters, in_place_of, with_rows
from elastic.engine.parameters.both_ends import Behind, read_behind
from elastic.engine.parameters.buckets import ALONE, buckets_of
from elastic.engine.parameters.gathers import COLLECTIVES, Gathers, Weight, ends_of
from elastic.engine.parameters.ties import aliases_of, tie
from elastic.engine.parameters.units import SummedUnit
from elastic.engine.parameters.visits import Visits, absent
from elastic.engine.precision import Precision
from elastic.engine.streams import stream
from elastic.engine.sync.base import Scheme
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.models.spec import ShardingTable
from elastic.plan.placement import rows_of

TWICE = (
    "the model uses {!r} more than once, and a part of its gradient came after the gradient was "
    "summed over workers: a backward pass runs within the forward pass or within another backward "
    "pass, as torch's checkpoint does with use_reentrant=True; give checkpoint() use_reentrant=False, "
    "or leave it out and set recompute = 'block'"
)

SPARSE = (
    "the gradient of {!r} is sparse, and sparse gradients cannot be summed in a fixed order; leave out "
    "sparse=True where the model calls torch.nn.functional.embedding"
)


def apply_whole(
    model: nn.Module,
    world: World,
    table: ShardingTable,
    precision: Precision,
    scheme: Scheme,
    parallel: Parallel,
    *,
    offloads: bool = False,
    visits: Visits | None = None,
    behind: Behind | None = None,
) -> Whole:
    """Gives the parameters and buffers of ``model`` memory, and lets ``scheme`` sum the gradients.  The
    arguments are those of :class:`Whole`.
    """
    aliases = aliases_of(model)
    bucket = parallel.elements or (ALONE if world.size == 1 and visits is None else 0)
    more: dict[str, Any] = {"offloads": offloads, "bucket": bucket, "visits": visits, "behind": behind}
    whole = Whole(model, world, table, precision, scheme, **more)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty_like(buffer, device=world.device)
    tie(model, aliases)
    return whole


class Whole(Parameters):
    """The parameters of a model that computes with whole ones."""

    needs_every_pass = False

    def __init__(
        self,
        model: nn.Module,
        world: World,
        table: ShardingTable,
        precision: Precision,
        scheme: Scheme,
        *,
        offloads: bool = False,
        bucket: int = 0,
        visits: Visits | None = None,
        behind: Behind | None = None,
    ) -> None:
        """Gives the parameters of ``model``, which may be on the meta device, memory on the device of
        ``world``.

        A parameter that has memory there already keeps it, unless it is cut.  With ``offloads`` the parts are
        on the meta device until :meth:`live_in` sets them.  A bucket of joined blocks has at
        most ``bucket`` elements.  With ``visits`` the copies are in the host's memory, too.  ``behind`` are
        the places of weights with second sums.
        """
        self.world, self.scheme, self.shards, self.offloads = world, scheme, world.layout.shards, offloads
        self._visits = visits
        self._fetch: Callable[[str], Tensor] | None = None
        """Returns a parameter's part on the device; None until the parts live in the host's memory."""
        self._fresh = False
        """True if the model's weights are those of the parts; it matters only where the parts are in host
        memory.
        """
        known, buckets = dict(model.named_parameters()), buckets_of(model, table, bucket)
        self.parts = {name: self._part(parameter) for name, parameter in known.items()}
        self.trained = frozenset(name for name, parameter in known.items() if parameter.requires_grad)
        layers = weights_of(model, table) if precision.fp8 is not None and not offloads else {}
        self._fp8 = Fp8Weights(layers, whole_weights(model, layers), world, precision.fp8 or "tensor")
        self._computing = {
            name: self._copy(name, parameter, precision.compute) for name, parameter in known.items()
        }
        _replace(model, {id(known[name]): parameter for name, parameter in self._computing.items()})
        self._used = {
            name: with_rows(each.detach()) for name, each in self._computing.items()
        } | self._hold_fp8()
        if visits is not None:
            self._used = {name: with_rows(each) for name, each in visits.hold(model, self._computing).items()}
        """Memory of all values with which the model computes, on the device or on the host."""
        memory = {name: part.untyped_storage()._cdata for name, part in self.parts.items()}
        self.copies = [
            copy for name, copy in self._used.items() if copy.untyped_storage()._cdata != memory[name]
        ]
        self._seconds = read_behind(model, behind or {})
        self._units: list[SummedUnit] = []
        """The units in the order in which a backward pass completes them: the second sums, then the buckets."""
        self._next = 0
        """The number of units that are summed in the present round."""
        self._found: dict[str, Tensor] | None = None
        """The gradients of the step, once somebody has asked for them."""
        for number, (name, second) in enumerate(self._seconds.items()):
            self._add_unit([name], [second.of(self._computing[name])], precision.wire)
            second.came = partial(_came, weakref.ref(self), number)
        for each in buckets:
            if names := [name for name in each.parameters if name in self.trained]:
                self._add_unit(names, [self._computing[name] for name in names], precision.wire)
                # what is used first in the forward pass usually comes last in the backward pass
                self._watch(len(self._units) - 1, 0)
        blocks = [model.get_submodule(block) for block in table.blocks]
        order = (
            [[*each.parameters] for each in reversed(buckets)]
            if visits is None
            else visits.names(self._computing)
        )
        gathered = [[self._weight(name) for name in names] for names in order] if self.shards > 1 else []
        if visits is None:
            self._gathers = Gathers(model, world, gathered, blocks)
        else:  # before weights come from the host, they are gathered there
            self._gathers = Gathers(nn.Module(), world, gathered, ())
            visits.after(self._gathers.need)
        if precision.compute is not None and precision.casts_inputs:
            for module in (model, *blocks):
                _cast_inputs(module, precision.compute)

    def _part(self, parameter: nn.Parameter) -> Tensor:
        """Returns the memory of this member's part of ``parameter``."""
        whole = with_rows(parameter.detach())
        if self.offloads:
            return self._mine(whole).to("meta")
        if self.shards == 1:
            return whole if not whole.is_meta else torch.empty_like(whole, device=self.world.device)
        return torch.empty_like(self._mine(whole), device=self.world.device)

    def _mine(self, whole: Tensor) -> Tensor:
        """Returns this member's rows of a whole tensor."""
        first, last = rows_of(len(whole), self.world.layout, self.world.rank)
        return whole.detach()[first:last]

    def _copy(self, name: str, parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
        """Returns a parameter with which the model computes: the part itself if it is the whole parameter and
        has the ``dtype``.
        """
        if name in self._fp8.layers:
            return in_place_of(parameter, self._fp8.carrier(name))
        part = self.parts[name]
        dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        if self._visits is not None:
            part = absent(parameter.shape, dtype, self.world.device)
        elif self.shards > 1 or dtype != part.dtype or self.offloads:
            part = torch.empty(parameter.shape, dtype=dtype, device=self.world.device)
        return in_place_of(parameter, part if part.shape == parameter.shape else part.view(parameter.shape))

    def _hold_fp8(self) -> dict[str, Tensor]:
        """Gives the layers that multiply in fp8 memory of their weights, and returns it as bytes."""
        found = {}
        for name, layer in self._fp8.layers.items():
            part = self._fp8.parts[name]
            whole = part if self.shards == 1 else torch.empty_like(layer.weight, dtype=part.dtype)
            hold(layer, whole, self._fp8.inverse[name])
            found[name] = whole.view(torch.uint8)
        return found

    def _add_unit(self, names: list[str], computing: list[nn.Parameter], wire: torch.dtype | None) -> None:
        ends = ends_of(computing, self.world.layout)
        self._units.append(SummedUnit(self.scheme.reduction(wire), self.shards, names, computing, ends))

    def _watch(self, number: int, place: int) -> None:
        """Lets a parameter of a unit tell when its gradient came."""
        unit = self._units[number]
        if place not in unit.hooked:
            unit.hooked.add(place)
            unit.computing[place].register_post_accumulate_grad_hook(
                partial(_came, weakref.ref(self), number)
            )

    def refresh(self) -> None:
        with torch.no_grad():
            self._make_copies()
            self._gathers.finish()
        if self._visits is not None:
            self._visits.end(last=True)  # groups on the device have old values
            self._visits.begin()

    def begin_round(self, number: int, *, last: bool) -> None:
        self.scheme.round.number, self.scheme.round.last = number, last
        self._found = None
        if number == 0:
            self.forget_grads()
            with torch.no_grad():
                self._make_copies()
        if self._visits is not None:
            if number == 0:
                self._visits.end(last=True)  # somebody may have called the model since the last round
            self._visits.begin()
        self._next = 0
        for each in self._seconds.values():
            each.turn(is_open=False)

    def _make_copies(self) -> None:
        """Writes the present values into the parameters with which the model computes, or begins to gather
        them there.
        """
        if self.offloads and not self._fresh:
            assert self._fetch is not None, "live_in() has set it"
            for name in self.parts:
                self.take(name, self._fetch(name))
            self._fresh = True
        self._fp8.cast(self.parts)
        self._gathers.begin()
        if self.shards == 1 and not self.offloads:
            pairs = [
                (copy, self.parts[name]) for name, copy in self._used.items() if name not in self._fp8.layers
            ]
            pairs = [(copy, part) for copy, part in pairs if copy.dtype != part.dtype]
            if pairs:
                copies = [copy for copy, _ in pairs]
                with torch.autograd._unsafe_preserve_version_counter(tuple(copies)):
                    torch._foreach_copy_(copies, [part for _, part in pairs])
        self.current = True

    def live_in(self, parts: Mapping[str, Tensor], fetch: Callable[[str], Tensor]) -> None:
        self.parts, self._fetch = parts, fetch

    def take(self, name: str, values: Tensor) -> None:
        weight = self._mine(self._used[name])
        with torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(
                values if weight.device == values.device else values.to(weight.dtype), non_blocking=True
            )

    def end_forward(self) -> None:
        self._gathers.finish()
        for each in self._seconds.values():
            each.turn(is_open=True)
        if self._visits is not None:
            self._visits.turn()

    def _weight(self, name: str) -> Weight:
        """Returns a weight that is gathered; fp8 travels as bytes."""
        if name in self._fp8.layers:
            first, last = self._fp8.rows[name]
            part = self._fp8.parts[name].view(torch.uint8)[: last - first]
        else:
            part = self._mine(self._used[name]) if self.offloads else self.parts[name]
        return Weight(self._computing[name], self._used[name], part)

    def _came(self, number: int) -> None:
        """Sums the units that are complete, now that the backward pass has brought a gradient of unit
        ``number``.

        If the unit still misses a gradient, its parameter is watched, too.  So a parameter whose gradient has
        not come is watched until all have come, also if their order changes from one microbatch to the next.
        """
        while self._next < len(self._units) and (came := self._units[self._next].came()) is not None:
            self._sum(self._units[self._next], came)
        if number >= self._next and (missing := self._units[number].missing()) is not None:
            self._watch(number, missing)

    def end_round(self) -> None:
        for each in self._seconds.values():
            each.turn(is_open=False)
        for unit in self._units[: self._next]:
            for place, parameter in enumerate(unit.computing):
                if parameter.grad is not None:
                    raise ModelError(TWICE.format(unit.names[place]))
        came = {name for unit in self._units[: self._next] for name in unit.names}
        for unit in self._units[self._next :]:
            grads = zip(unit.names, unit.computing, strict=True)
            came |= {name for name, parameter in grads if parameter.grad is not None}
            self._sum(unit, unit.came_or_zeros())
        self.missing = self.trained - came
        if self._visits is not None:
            self._visits.end(last=self.scheme.round.last)
        if self.world.device.type == "cuda" and self.world.size > 1 and self.scheme.round.last:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _sum(self, unit: SummedUnit, came: list[Tensor]) -> None:
        """Sums the gradients of the next unit."""
        self._next += 1
        if sparse := next(
            (name for name, grad in zip(unit.names, came, strict=True) if grad.layout is not torch.strided),
            None,
        ):
            raise ModelError(SPARSE.format(sparse))
        flat = unit.flat(came)
        for parameter in unit.computing:
            parameter.grad = None
        if self._visits is not None:
            self._visits.release(unit.computing)
        if self.world.device.type != "cuda" or self.world.size == 1:
            return unit.add(flat, self.scheme.round)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            unit.add(flat, self.scheme.round)
            flat.record_stream(self._stream)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return stream(COLLECTIVES, self.world.device)

    def grads(self) -> dict[str, Tensor]:
        if self._found is None:
            found, seconds = dict[str, Tensor](), len(self._seconds)
            for unit in self._units[seconds:]:
                grads = unit.grads([self.parts[name] for name in unit.names])
                found.update(zip(unit.names, grads, strict=True))
            for unit in self._units[:seconds]:
                (name,) = unit.names
                found[name].add_(*unit.grads([self.parts[name]]))
                unit.total = None
            self._found = {name: found[name] for name in self.parts if name in found}
        return self._found

    def writes(self) -> Mapping[str, Hashable]:
        if self._visits is not None:  # visits give parameters other memory
            return {
                name: (each._version, len(each._backward_hooks or ()))
                for name, each in self._computing.items()
            }
        return {
            name: (each._version, each.data_ptr(), len(each._backward_hooks or ()))
            for name, each in self._computing.items()
        }

    def is_own(self, name: str, found: object) -> bool:
        return found is self._computing[name]

    def forget_grads(self) -> None:
        self._found = None
        for unit in self._units:
            unit.forget()


def _came(whole: weakref.ref[Whole], number: int, _: Tensor | None = None) -> None:
    """Tells the owner of a parameter, if it is still there, that its gradient came.

    The parameter's hook must not hold its owner, which holds the parameter: torch 2.11 hides hooks of a
    device's tensors from Python's garbage collector, and the weights of each world that is over would stay in
    the device's memory.
    """
    if (owner := whole()) is not None:
        owner._came(number)


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Lets ``module`` get floating-point inputs in ``dtype``, as FSDP2 does, so that worlds with and without
    FSDP2 compute the same.

    The cast stays outside of compiled code: compiled with other operations it may round at another place.
    """

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, cast, (args, kwargs))

    outside = torch.compiler.disable(hook) if module._compiled_call_impl is not None else hook
    module.register_forward_pre_hook(outside, with_kwargs=True)


def _replace(model: nn.Module, by: Mapping[int, nn.Parameter]) -> None:
    """Puts other parameters in the place of those with the given ids; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, by[id(parameter)])
