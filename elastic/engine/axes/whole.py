"""Parameters that are not split: every member holds all of them, and gradients are summed over the replicas.

The model computes with copies in the dtype of the precision policy, which are made once a step.  When the gradients of a unit (a block, or
the rest of the model) are complete in a backward pass, they are put together and summed, while the backward pass goes on.  Units are
summed in a fixed order, so that all members call their collectives in the same one even if some do not use some parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from elastic.engine.axes.base import Parameters
from elastic.engine.precision import Precision
from elastic.engine.streams import stream
from elastic.engine.sync.base import Reduction, Scheme
from elastic.engine.world import World
from elastic.models.spec import ShardingTable


@dataclass
class _Unit:
    """Parameters whose gradients are summed together."""

    reduction: Reduction
    names: list[str] = field(default_factory=list)
    computing: list[nn.Parameter] = field(default_factory=list)
    """The parameters with which the model computes, in the order of ``names``."""
    waiting: int = 0
    """The number of gradients that the present backward pass has not brought yet."""
    total: Tensor | None = None
    """The sum of the gradients of a step, one after the other."""


class Whole(Parameters):
    """The parameters of a model that is not split."""

    def __init__(self, model: nn.Module, world: World, table: ShardingTable, precision: Precision, scheme: Scheme) -> None:
        """Takes ``model``, whose parameters have memory already."""
        self.world, self.scheme = world, scheme
        known = dict(model.named_parameters())
        self.parts = {name: parameter.detach() for name, parameter in known.items()}
        self.trained = frozenset(name for name, parameter in known.items() if parameter.requires_grad)
        computing = {name: _in_dtype(parameter, precision.compute) for name, parameter in known.items()}
        _replace(model, {id(known[name]): parameter for name, parameter in computing.items()})
        self._casts = [(computing[name], self.parts[name]) for name in known if computing[name] is not known[name]]
        self._units: list[_Unit] = []
        """The units in the order in which a backward pass completes them."""
        self._next = 0
        """The number of units that are summed in the present round."""
        rest = dict.fromkeys(name for name in known if name in self.trained)
        for block in reversed(table.blocks):
            self._add_unit([name for name in rest if name.startswith(f"{block}.")], computing)
            for name in self._units[-1].names if self._units else ():
                rest.pop(name, None)
        self._add_unit([*rest], computing)

    def _add_unit(self, names: list[str], computing: dict[str, nn.Parameter]) -> None:
        if names:
            unit = _Unit(self.scheme.reduction(), names, [computing[name] for name in names])
            self._units.append(unit)
            for parameter in unit.computing:
                parameter.register_post_accumulate_grad_hook(partial(self._came, unit))

    def begin_round(self, number: int, *, last: bool) -> None:
        self.scheme.round.number, self.scheme.round.last = number, last
        if number == 0:
            self.forget_grads()
            with torch.no_grad():
                if self._casts:
                    torch._foreach_copy_([copy for copy, _ in self._casts], [part for _, part in self._casts])
        self._next = 0
        for unit in self._units:
            unit.waiting = len(unit.names)

    def _came(self, unit: _Unit, _: Tensor) -> None:
        """Notes that the backward pass has brought a gradient of ``unit``."""
        unit.waiting -= 1
        while self._next < len(self._units) and not self._units[self._next].waiting:
            self._sum(self._units[self._next])

    def end_round(self) -> None:
        for unit in self._units[self._next :]:
            self._sum(unit)
        if self.world.device.type == "cuda" and self.world.size > 1 and self.scheme.round.last:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _sum(self, unit: _Unit) -> None:
        self._next += 1
        found = [parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) for parameter in unit.computing]
        flat = torch.cat([grad.detach().reshape(-1) for grad in found])
        for parameter in unit.computing:
            parameter.grad = None
        if self.world.device.type != "cuda" or self.world.size == 1:
            unit.total = unit.reduction.reduce(flat)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            unit.total = unit.reduction.reduce(flat)
            flat.record_stream(self._stream)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return stream("reduce", self.world.device)

    def grads(self) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for unit in self._units:
            assert unit.total is not None, "the last round has summed every unit"
            pieces = unit.total.split([self.parts[name].numel() for name in unit.names])
            found.update((name, piece.view(self.parts[name].shape)) for name, piece in zip(unit.names, pieces, strict=True))
        return {name: found[name] for name in self.parts if name in found}

    def forget_grads(self) -> None:
        for unit in self._units:
            unit.total = None
            for parameter in unit.computing:
                parameter.grad = None


def _in_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    """Returns ``parameter`` itself, or new memory in its place with the floating-point ``dtype``."""
    if dtype is None or dtype == parameter.dtype or not parameter.is_floating_point():
        return parameter
    return nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=parameter.requires_grad)


def _replace(model: nn.Module, by: dict[int, nn.Parameter]) -> None:
    """Puts other parameters in the place of those with the given ids; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, by[id(parameter)])
