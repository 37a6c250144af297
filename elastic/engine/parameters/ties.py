"""Ties between the parameters, and between the buffers, of a model: one tensor under several names."""

from __future__ import annotations

from torch import nn


def aliases_of(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Returns the groups of (module, attribute) that are one tied parameter, or one buffer."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in model.named_modules():
        own = (module.named_parameters, module.named_buffers)
        for name, tensor in (pair for named in own for pair in named(recurse=False, remove_duplicate=False)):
            owners.setdefault(id(tensor), []).append((module_name, name))
    return [group for group in owners.values() if len(group) > 1]


def tie(model: nn.Module, aliases: list[list[tuple[str, str]]]) -> None:
    """Ties parameters and buffers again after each owner got memory of its own."""
    for (first_module, first), *rest in aliases:
        tensor = getattr(model.get_submodule(first_module), first)
        for module_name, name in rest:
            setattr(model.get_submodule(module_name), name, tensor)
