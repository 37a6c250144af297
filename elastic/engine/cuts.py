"""The cuts of a model: what its sharding table says of each parameter, for the axes that cut the model.

``split`` and ``depth`` are those of a tensor of the state (``storage/slices.py``); the rows of
``plan/axes.py`` cut by them.  No axis that cuts the model computes yet, so a table only has to fit its model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

from torch import nn

from elastic.engine.blocks import sharding_table
from elastic.errors import ModelError
from elastic.models.spec import Fused

SIZED = ("column", "row")
"""The fields of a table that map layers to sizes."""
LAYERS = (*SIZED, "vocabulary", "experts")
"""The fields that say how a weight is cut; a weight may be in one of them.  They name layers, and mean the
parameters of these layers, not those of modules inside of them.
"""
ENDS = ("first", "last")
"""The fields that name modules outside of the blocks, with everything in them."""


@dataclass(frozen=True)
class Cuts:
    """``split`` and ``depth`` of a parameter, and so of its moments."""

    split: tuple[int, ...] = ()
    depth: tuple[int, ...] = ()


def cuts_of(model: nn.Module) -> dict[str, Cuts]:
    """Returns the cuts of each parameter of ``model``, which no axis has rewritten yet.

    A parameter that several stages need, as one weight of embedding and head, is on every stage.  Raises
    :class:`ModelError` for a sharding table that does not fit the model.
    """
    fit = _Fit(model)
    splits, depths = fit.splits(), fit.depths()
    return {name: Cuts(splits.get(name, ()), depths.get(name, ())) for name, _ in model.named_parameters()}


class _Fit:
    """Compares a sharding table with its model."""

    def __init__(self, model: nn.Module) -> None:
        self.table, self.owner = sharding_table(model), type(model).__name__
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        for field in (*LAYERS, "sequence", *ENDS):
            self._check_form(field)
        self.matched = {
            (field, pattern): self._matching(field, pattern)
            for field in (*LAYERS, "sequence", *ENDS)
            for pattern in getattr(self.table, field)
        }
        """The names of the modules and parameters that each pattern matches."""

    @cached_property
    def _first_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in reversed(self.parameters.items())}

    def first_name(self, name: str) -> str:
        """Returns the name that a parameter has in the state, which is its first."""
        return self._first_names[id(self.parameters[name])]

    # ---- patterns

    def _check_form(self, field: str) -> None:
        given = getattr(self.table, field)
        if field in SIZED and not isinstance(given, Mapping):
            fix = f"must map layers to the features that stay together; write {field} = {{'*.name': 1}}"
            raise self._wrong(f"{field} = {given!r}", fix)
        if isinstance(given, str):
            raise self._wrong(f"{field} = {given!r}", f"must be a tuple; write {field} = ({given!r},)")

    def _matching(self, field: str, pattern: str) -> frozenset[str]:
        names = (*self.modules, *self.parameters)
        found = frozenset(name for name in names if fnmatchcase(name, pattern))
        if not found:
            endings = {name.rpartition(".")[2]: name for name in reversed(names)}
            near = difflib.get_close_matches(pattern.rpartition(".")[2], endings, 1)
            raise self._wrong(
                self._told(field, pattern),
                f"matches no module and no parameter{f'; did you mean {endings[near[0]]!r}?' if near else ''}; "
                "correct it (* stands for any letters), or leave it out",
            )
        return found

    def _told(self, field: str, pattern: str) -> str:
        """Returns a pattern as the table gives it."""
        given = getattr(self.table, field)
        return f"{field} = {{{pattern!r}: {given[pattern]}}}" if field in SIZED else f"{field} = {pattern!r}"

    def _wrong(self, what: str, why: str) -> ModelError:
        return ModelError(f"sharding() of {self.owner}: {what} {why}")

    # ---- split

    def splits(self) -> dict[str, tuple[int, ...]]:
        """Returns the split of each parameter that a pattern of :data:`LAYERS` means."""
        found: dict[str, tuple[tuple[int, ...], str, str]] = {}
        for field, pattern in self.matched:
            for name in self._meant(field, pattern) if field in LAYERS else ():
                split = self._split(field, pattern, name)
                before, *by = found.setdefault(self.first_name(name), (split, field, pattern))
                if (before, by[0]) != (split, field):
                    raise self._wrong(
                        f"{self._told(*by)} and {self._told(field, pattern)}",
                        f"both mean {name!r}; leave it to one of them",
                    )
        return {name: split for name, (split, *_) in found.items()}

    def _meant(self, field: str, pattern: str) -> Iterator[str]:
        """Yields the names of the parameters of the layers that a pattern matches, and those that it matches
        itself.
        """
        matched = self.matched[field, pattern]
        return (name for name in self.parameters if {name, name.rpartition(".")[0]} & matched)

    def _split(self, field: str, pattern: str, name: str) -> tuple[int, ...]:
        """Returns how tensor parallelism cuts a parameter; () if it does not."""
        shape, told = tuple(self.parameters[name].shape), self._told(field, pattern)
        dim = 1 if field == "row" else 0
        if field == "row" and len(shape) == 1 and name.endswith("bias"):
            return ()
        if dim >= len(shape):
            raise self._wrong(
                told,
                f"cuts dimension {dim} of a weight, and {name!r} has the shape {list(shape)}; name "
                f"layers whose weights have {dim + 1} dimensions or more",
            )
        if field == "experts":
            return ()
        value = getattr(self.table, field)[pattern] if field in SIZED else 1
        fused = value if isinstance(value, Fused) else Fused((shape[dim],), value)
        if not all(type(size) is int and size > 0 for size in (fused.unit, *fused.lengths)):
            raise self._wrong(told, "must have whole numbers from 1 on; 1 lets each feature go by itself")
        if sum(fused.lengths) != shape[dim]:
            raise self._wrong(
                told,
                f"has lengths of {sum(fused.lengths)} together, and dimension {dim} of {name!r} has "
                f"{shape[dim]}; give the lengths of the matrices in it",
            )
        if bad := [length for length in fused.lengths if length % fused.unit]:
            raise self._wrong(
                told,
                f"keeps {fused.unit} features together, and this does not divide {bad[0]}, the length of "
                f"dimension {dim} of {name!r}; give a number that divides it, as the size of a head",
            )
        return (dim, fused.unit, *(fused.lengths if len(fused.lengths) > 1 else ()))

    # ---- depth

    def depths(self) -> dict[str, tuple[int, ...]]:
        """Returns the depth of each parameter that one stage has: none, if the table does not say what is
        before and behind the blocks.
        """
        blocks, places = self.table.blocks, dict[str, set[int | None]]()
        ends = {0: self._outside("first"), len(blocks) - 1: self._outside("last")}
        if not any(ends.values()):
            return {}
        number = {block: place for place, block in enumerate(blocks)}
        for name in self.parameters:
            if block := self.table.block_of(name):
                found: set[int | None] = {number[block]}
            else:
                there = {*accumulate(name.split("."), "{}.{}".format)}
                found = {place for place, modules in ends.items() if there & modules} or {None}
            places.setdefault(self.first_name(name), set()).update(found)
        return {
            name: (place, len(blocks))
            for name, (place, *others) in places.items()
            if place is not None and not others
        }

    def _outside(self, field: str) -> frozenset[str]:
        """Returns the names of the modules and parameters of ``first`` or ``last``."""
        found = list[str]()
        for pattern in getattr(self.table, field):
            for name in sorted(self.matched[field, pattern]):
                if not self.table.blocks:
                    fix = "is of no use without blocks, of which stages are made; name the blocks, too"
                    raise self._wrong(self._told(field, pattern), fix)
                inner = (block for block in self.table.blocks if f"{block}.".startswith(f"{name}."))
                if inside := self.table.block_of(f"{name}.weight") or next(inner, ""):
                    raise self._wrong(
                        self._told(field, pattern),
                        f"matches {name!r}, and {inside!r} is a block; name only modules outside of the "
                        "blocks",
                    )
                found.append(name)
        return frozenset(found)
