"""The groups of parameters that have a learning rate and a weight decay of their own (``optim.groups``)."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from elastic.code.imports import did_you_mean
from elastic.config.sections import Optim, ParameterGroup
from elastic.errors import JobError

REST = ParameterGroup(names=("*",))
"""The group of the parameters that no group of the job names."""


def parameter_groups(optim: Optim, model: nn.Module) -> dict[str, ParameterGroup]:
    """Returns the group of each trained parameter: the first one with a pattern that matches."""
    return {
        name: next((group for group in optim.groups if _matches(group.names, names)), REST)
        for name, names in _trained(model).items()
    }


def decays(group: ParameterGroup, dimensions: int) -> bool:
    """Returns whether the weights of a parameter of ``group`` decay."""
    return dimensions >= 2 if group.weight_decay == "auto" else group.weight_decay > 0


def check_groups(optim: Optim, model: nn.Module, named: str) -> list[str]:
    """Returns the lines of a table of the groups; none if ``optim`` has no groups.  ``named`` is the name of
    the model in messages.

    Raises :class:`JobError` for a pattern that gives no parameter to its group.
    """
    trained, owners = _trained(model), parameter_groups(optim, model)
    for number, group in enumerate(optim.groups):
        for pattern in group.names:
            what = f"optim.groups[{number}].names: {pattern!r} matches"
            matched = [name for name, names in trained.items() if _matches((pattern,), names)]
            if not matched:
                frozen = any(fnmatchcase(name, pattern) for name, _ in model.named_parameters())
                meant = did_you_mean(pattern, trained) or (
                    f"; its first parameter is {next(iter(trained), 'none')!r}"
                )
                raise JobError(
                    (
                        f"{what} only frozen parameters of {named!r}, which no optimizer changes; "
                        "leave this pattern out"
                    )
                    if frozen
                    else (
                        f"{what} no parameter of {named!r}{meant}; correct this pattern (* stands "
                        "for any letters), or leave it out"
                    )
                )
            if all(owners[name] in optim.groups[:number] for name in matched):
                raise JobError(
                    f"{what} only parameters of earlier groups, such as {matched[0]!r}, and the first "
                    "group that matches counts; leave this pattern out, or move its group up"
                )
    if not optim.groups:
        return []
    found = [(group, model.get_parameter(name)) for name, group in owners.items()]
    return table_of(optim, ((group, decays(group, each.dim()), each.numel()) for group, each in found))


def table_of(optim: Optim, parameters: Iterable[tuple[ParameterGroup, bool, int]]) -> list[str]:
    """Returns the lines of a table of the groups from the group of each parameter, whether it decays, and how
    many numbers it has.
    """
    found: dict[tuple[int, float], list[int]] = {}
    for group, does, numbers in parameters:
        number = optim.groups.index(group) if group in optim.groups else len(optim.groups)
        decay = optim.weight_decay if group.weight_decay == "auto" else group.weight_decay
        found.setdefault((number, decay if does else 0.0), []).append(numbers)
    rows = [("group", "tensors", "numbers", "lr", "weight decay")]
    for (number, decay), sizes in sorted(found.items()):
        name, scale = "all others", 1.0
        if number < len(optim.groups):
            name, scale = " ".join(optim.groups[number].names), optim.groups[number].lr_scale
        rows.append((name, f"{len(sizes):,}", f"{sum(sizes):,}", f"{optim.lr * scale:g}", f"{decay:g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _trained(model: nn.Module) -> dict[str, list[str]]:
    """Returns all names of each trained parameter, by its first name.  A tied parameter has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}
