"""The blocks of a model: the modules that the engine wraps, compiles and gathers one by one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from torch import nn

from elastic.errors import ModelError
from elastic.models.spec import ShardingTable


def sharding_table(model: nn.Module) -> ShardingTable:
    """Returns the model's own table.  If it has none, the blocks are the children of its largest ModuleList.

    A block is a module that is called, because the engine acts on a block by wrapping its ``forward``.  A
    container, such as a ModuleList of the parts of a layer, is no block; where the largest list holds a
    container, the modules in the container are blocks.  Raises :class:`ModelError` for a container in the
    model's own table, for a name that is no module's, and for anything but a table.
    """
    own: Callable[[], ShardingTable] | None = getattr(model, "sharding", None)
    if own is not None:
        table, named = own(), f"sharding() of {type(model).__name__}"
        if not isinstance(table, ShardingTable):
            raise ModelError(
                f"{named} returned a {type(table).__name__}; return an elastic.models.spec.ShardingTable"
            )
        known = dict(model.named_modules(remove_duplicate=False))
        for name in table.blocks:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ModelError(
                    f"{named} names the block {name!r}, which is no module"
                    f"{f'; did you mean {near[0]!r}?' if near else '; name modules as named_modules() does'}"
                )
            if not _is_called(block := known[name]):
                raise ModelError(
                    f"{named} names {name!r}, a {type(block).__name__}, which "
                    "is never called, for it has no forward(); name modules that are called, such as its "
                    "children, or give it a forward() and call it"
                )
        return table
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not lists:
        return ShardingTable(blocks=())
    name, largest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return ShardingTable(blocks=tuple(_called(name, largest)))


def _is_called(module: nn.Module) -> bool:
    """Returns whether ``module`` has a ``forward``; without one nobody can call it."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _called(name: str, container: nn.Module) -> Iterator[str]:
    """Yields the names of the outermost modules in ``container`` that are called."""
    for child_name, child in container._modules.items():
        if child is not None and _is_called(child):
            yield f"{name}.{child_name}"
        elif child is not None:
            yield from _called(f"{name}.{child_name}", child)


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Returns the names of the weights with two dimensions inside the blocks."""
    table = sharding_table(model)
    return frozenset(
        name for name, parameter in model.named_parameters() if parameter.dim() == 2 and table.block_of(name)
    )
