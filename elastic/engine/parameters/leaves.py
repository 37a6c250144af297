"""Second leaves: a weight that is tied between the modules before the blocks and those behind them, as one
weight of embedding and head, is two leaves of autograd, one for each end of the model.

Each leaf has a sum of its own over the microbatches of a step, and both sums are added once at the end.  So
the bits are those of a pipeline, whose first and last stage sum what each of them uses.  Both leaves share
their memory, and whoever lists the parameters of the model finds the first leaf alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from elastic.engine.parameters.base import in_place_of
from elastic.engine.parameters.ties import aliases_of
from elastic.models.spec import ShardingTable

Behind = Mapping[str, list[tuple[str, str]]]
"""Maps the name of a weight with a second leaf to (module, attribute) of each place that reads the leaf."""


class SecondLeaf:
    """The leaf with which the modules behind the blocks compute."""

    def __init__(self) -> None:
        self.parameter: nn.Parameter | None = None
        """The leaf; None until the weight is read for the first time."""

    def of(self, first: nn.Parameter) -> nn.Parameter:
        """Returns the leaf, in the memory in which ``first`` is now; ``first`` itself while it is not
        gathered.
        """
        if isinstance(first, DTensor):
            return first
        if self.parameter is None:
            self.parameter = in_place_of(first, first.detach())
        elif self.parameter.untyped_storage()._cdata != first.untyped_storage()._cdata:
            self.parameter.data = first.detach()
        return self.parameter


class _Behind(dict[str, Any]):
    """The parameters of a module behind the blocks.  A reader of one name finds the second leaf."""

    def __init__(self, own: Mapping[str, nn.Parameter | None], leaves: Mapping[str, SecondLeaf]) -> None:
        super().__init__(own)
        self._leaves = leaves

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return self._leaves[name].of(found) if name in self._leaves else found


def second_leaves(model: nn.Module, table: ShardingTable) -> Behind:
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


def read_behind(model: nn.Module, places: Behind) -> dict[str, SecondLeaf]:
    """Lets the modules at ``places`` (:func:`second_leaves`) read second leaves, and returns these by the name
    of the weight.
    """
    leaves, of = {name: SecondLeaf() for name in places}, dict[str, dict[str, SecondLeaf]]()
    for name, behind in places.items():
        for module, attribute in behind:
            of.setdefault(module, {})[attribute] = leaves[name]
    for where, own in of.items():
        reader = model.get_submodule(where)
        reader.__dict__["_parameters"] = _Behind(reader._parameters, own)
    return leaves
