"""Second sums: a weight that is tied between the modules before the blocks and those behind them, as one weight
of embedding and head, has a sum of its gradients over the microbatches of a step for each end of the model.
Both sums are added once at the end.

So the bits are those of a pipeline, whose first and last stage sum what each of them uses.  The weight stays
one parameter: modules behind the blocks read it through a function of autograd, whose backward keeps the
gradient of that end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic.engine.parameters.ties import aliases_of
from elastic.models.spec import ShardingTable

Behind = Mapping[str, list[tuple[str, str]]]
"""Maps the name of a weight of both ends to (module, attribute) of each place that reads it behind the blocks."""


class SecondSum:
    """The gradients that one weight gets from the modules behind the blocks."""

    def __init__(self) -> None:
        self.is_open = False
        """True while the backward pass of a round runs.  Before it the user's own code may ask for gradients,
        of both ends together.
        """
        self.holder: nn.Parameter | None = None
        """The parameter whose ``grad`` is that of the present round; it is made when the weight has memory."""
        self.came: Callable[[], None] = lambda: None
        """Called once a gradient came."""
        self._read: tuple[nn.Parameter, Tensor] | None = None
        """The weight, and what its readers of the present round have: torch adds their gradients first."""

    def of(self, weight: nn.Parameter) -> nn.Parameter:
        """Returns the holder of gradients of ``weight``."""
        if self.holder is None:
            self.holder = nn.Parameter(weight.detach(), requires_grad=False)
        return self.holder

    def read(self, weight: nn.Parameter) -> Tensor:
        """Returns the weight for a reader behind the blocks."""
        if self._read is None or self._read[0] is not weight:
            self._read = weight, _ReadBehind.apply(weight, self)
        return self._read[1]

    def turn(self, *, is_open: bool) -> None:
        """Tells whether the backward pass of a round runs; where none does, readers read anew."""
        self.is_open = is_open
        self._read = self._read if is_open else None

    def take(self, weight: nn.Parameter, grad: Tensor) -> None:
        holder = self.of(weight)
        holder.grad = grad if holder.grad is None else holder.grad + grad
        self.came()


class _ReadBehind(torch.autograd.Function):
    """Gives a weight to a module behind the blocks."""

    @staticmethod
    def forward(weight: nn.Parameter, second: SecondSum) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.weight, ctx.second = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.second.is_open:
            return grad, None
        ctx.second.take(ctx.weight, grad)
        return None, None


class _Behind(dict[str, Any]):
    """The parameters of a module behind the blocks, which reads some of them for a second sum."""

    def __init__(self, own: Mapping[str, nn.Parameter | None], seconds: Mapping[str, SecondSum]) -> None:
        super().__init__(own)
        self._seconds = seconds

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if name not in self._seconds or isinstance(found, DTensor) or not torch.is_grad_enabled():
            return found
        return self._seconds[name].read(found)


def weights_of_both_ends(model: nn.Module, table: ShardingTable) -> Behind:
    """Returns the trained weights that modules of ``first`` and of ``last`` of the table share, with their
    places in ``last``.

    A weight with a hook on its gradient is left out: the hook would see two gradients in place of their sum.
    """
    names, found = {id(each): name for name, each in model.named_parameters()}, dict[str, Any]()
    for places in aliases_of(model):
        module, attribute = places[0]
        weight = getattr(model.get_submodule(module), attribute)
        behind = [place for place in places if _is_named(place, table.last)]
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad or weight._backward_hooks:
            continue
        if behind and any(_is_named(place, table.first) for place in places):
            found[names[id(weight)]] = behind
    return found


def _is_named(place: tuple[str, str], patterns: tuple[str, ...]) -> bool:
    """Returns whether a pattern means a parameter, or a module in which it is."""
    paths = [*accumulate([*filter(None, place[0].split(".")), place[1]], "{}.{}".format)]
    return any(fnmatchcase(path, pattern) for path in paths for pattern in patterns)


def read_behind(model: nn.Module, places: Behind) -> dict[str, SecondSum]:
    """Lets the modules at ``places`` (:func:`weights_of_both_ends`) read weights for second sums, and returns
    these sums by the name of the weight.
    """
    seconds, of = {name: SecondSum() for name in places}, dict[str, dict[str, SecondSum]]()
    for name, behind in places.items():
        for module, attribute in behind:
            of.setdefault(module, {})[attribute] = seconds[name]
    for where, own in of.items():
        reader = model.get_submodule(where)
        reader.__dict__["_parameters"] = _Behind(reader._parameters, own)
    return seconds
