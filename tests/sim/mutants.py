"""Copies of the product with one rule broken, to see that the simulator notices.

A mutant is a substitution in the source of one module, or several where a rule is kept in several places.
The text must be there exactly once: when the product changes, the mutant must be thought about again, and
until then its test fails.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType

import pytest

from elastic.plan import placement, routes, seats
from elastic.protocol import authority, member, reruns, uploads
from elastic.sim.coordinator import Advance

PACKAGE, COPY = "elastic.control", "mutant_control"
SHARED = frozenset({"rules", "run"})
"""Modules of elastic.control that are not copied: vocabulary that the simulator uses too."""
BESIDES = {
    **{"authority": authority, "member": member, "reruns": reruns, "uploads": uploads},
    **{"placement": placement, "routes": routes, "seats": seats},
}
"""The modules of elastic.protocol and elastic.plan that may be broken.  The simulator uses their values itself;
those of elastic.control it only calls.
"""

GIVEN_UP, TWICE = "which was given up", "is given twice"
FOLLOWED, OVERWRITTEN = "that was followed by another performs", "was overwritten before it was in the bucket"
"""Words of the oracle that notice broken rules of both packages."""


@dataclass(frozen=True)
class Edit:
    """An edit replaces the text ``old`` by ``new`` in ``module`` of elastic.control, or in one of
    ``BESIDES``.
    """

    module: str
    old: str
    new: str

    def applied(self, source: str) -> str:
        """Returns ``source`` with the edit.  Raises :class:`LookupError` if the edit no longer applies."""
        if source.count(self.old) != 1:
            raise LookupError(f"{self.old!r} is {source.count(self.old)} times in {self.module}.py, not once")
        return source.replace(self.old, self.new)

    def applies(self) -> bool:
        """Returns True, or raises :class:`LookupError`."""
        return bool(
            self.applied(
                inspect.getsource(
                    BESIDES.get(self.module) or importlib.import_module(f"{PACKAGE}.{self.module}")
                )
            )
        )


Patch = Callable[[pytest.MonkeyPatch], object]


class Breach:
    """A rule that is broken: by edits, more than one where the rule is kept in several places, or by a patch.

    The simulator must say ``notices`` of the first seed that breaks a promise.  ``at`` is the scenario, and
    the seed that is tried before its other seeds.  If the product changes and this seed breaks no promise any
    more, the test takes longer, and proves the same.
    """

    def __init__(self, name: str, notices: str, at: tuple[str, int], *how: Edit | Patch) -> None:
        self.name, self.notices, (self.scenario, self.seed) = name, notices, at
        self.edits = [each for each in how if isinstance(each, Edit)]
        self.patches = [each for each in how if not isinstance(each, Edit)]


@contextmanager
def mutant(*edits: Edit) -> Iterator[Advance]:
    """Gives ``advance`` of a copy of elastic.control, and lets this copy and the simulator use copies of
    ``BESIDES``, until the context ends.

    The copies have ``edits``; without any, they are the control of all mutants.  Raises :class:`LookupError`
    if one no longer applies.
    """
    with pytest.MonkeyPatch.context() as patch:
        advance = mutated(*(edit for edit in edits if edit.module not in BESIDES))
        for name, module in BESIDES.items():
            _use(copied(module, *(edit for edit in edits if edit.module == name)), module, patch)
        yield advance


# ---- the coordinator's decisions, which the simulator is given


def mutated(*edits: Edit) -> Advance:
    """Returns ``advance`` of a copy of elastic.control with ``edits``.  Raises :class:`LookupError` if one no
    longer applies.
    """
    for stale in [name for name in sys.modules if name.split(".")[0] == COPY]:  # of the mutant before
        del sys.modules[stale]
    sys.modules[COPY] = ModuleType(COPY)
    advance: Advance = _control("machine", edits).advance
    unread = [edit.module for edit in edits if f"{COPY}.{edit.module}" not in sys.modules]
    if unread:
        raise LookupError(f"nothing imports {unread}")
    return advance


def _control(name: str, edits: Sequence[Edit]) -> ModuleType:
    """Returns a copy of the module ``name`` that imports copies, or the module itself if it is shared."""
    original = importlib.import_module(f"{PACKAGE}.{name}")
    if name in SHARED:
        module = sys.modules[f"{COPY}.{name}"] = original
    else:
        source = inspect.getsource(original)
        for imported in _imports(source):
            if f"{COPY}.{imported}" not in sys.modules:
                _control(imported, edits)
        for edit in edits:
            source = edit.applied(source) if edit.module == name else source
        module = _executed(f"{COPY}.{name}", source.replace(PACKAGE, COPY))
    setattr(sys.modules[COPY], name, module)
    return module


@cache
def _imports(source: str) -> list[str]:
    """Returns the modules of elastic.control that ``source`` imports."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    modules = [
        node.module.rpartition(".")[2]
        for node in found
        if node.module and node.module.startswith(f"{PACKAGE}.")
    ]
    return modules + [alias.name for node in found if node.module == PACKAGE for alias in node.names]


# ---- the product's other values, which the simulator calls by the name of their module


def copied(module: ModuleType, *edits: Edit) -> ModuleType:
    """Returns a copy of ``module`` with ``edits``.  Raises :class:`LookupError` if one no longer applies."""
    source = inspect.getsource(module)
    for edit in edits:
        source = edit.applied(source)
    return _executed(f"mutant_{module.__name__}", source)


def _use(copy: ModuleType, module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Lets the simulator, and the copy of elastic.control, use ``copy`` in place of ``module``."""
    users = ("elastic.sim.", f"{COPY}.")
    for user in [each for name, each in sys.modules.items() if name.startswith(users)]:
        for name, value in list(vars(user).items()):
            if value is module:
                patch.setattr(user, name, copy)
            elif getattr(value, "__module__", "") == module.__name__ and hasattr(copy, name):
                patch.setattr(user, name, getattr(copy, name))


@cache
def _compiled(source: str, name: str) -> CodeType:
    """Compiles a module that has no edit once for all mutants."""
    return compile(source, name, "exec")


def _executed(name: str, source: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)  # dataclasses look there
    exec(_compiled(source, f"<{name}>"), module.__dict__)
    return module
