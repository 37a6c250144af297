"""Copies of ``elastic.control``, or of the rules of members and authority, with one rule broken, to see that the simulator notices.

A mutant is a substitution in the source of one module.  The text must be there exactly once: when the product changes, the
mutant must be thought about again, and until then its test fails.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest

from elastic.protocol import member
from elastic.protocol.member import Member
from elastic.sim.coordinator import Advance

PACKAGE = "elastic.control"
SHARED = frozenset({"rules", "run"})
"""Modules that are not copied: vocabulary that the simulator uses too."""


@dataclass(frozen=True)
class Edit:
    """An edit replaces the text ``old`` by ``new`` in ``module`` of elastic.control."""

    module: str
    old: str
    new: str


def mutant_member(*edits: tuple[str, str]) -> type[Member]:
    """Returns the class ``Member`` of a copy of ``elastic/protocol/member.py`` in which each (old, new) of ``edits`` is substituted."""
    found: type[Member] = copied(member, *edits).Member
    return found


@dataclass(frozen=True)
class Mutant:
    """``edits``: more than one where a rule is kept in two places."""

    name: str
    edits: tuple[Edit, ...]

    def advance(self) -> Advance:
        """Returns the mutated ``advance``.  Raises :class:`LookupError` if a substitution no longer applies."""
        for stale in [name for name in sys.modules if name.split(".")[0] == self._package]:  # of another mutant of this name
            del sys.modules[stale]
        sys.modules[self._package] = ModuleType(self._package)
        advance: Advance = self._copied("machine").advance
        unread = [edit.module for edit in self.edits if f"{self._package}.{edit.module}" not in sys.modules]
        if unread:
            raise LookupError(f"mutant {self.name}: nothing imports {unread}")
        return advance

    @property
    def _package(self) -> str:
        return f"mutant_{self.name}"

    def _copied(self, name: str) -> ModuleType:
        """Returns a copy of the module ``name`` that imports copies, or the module itself if it is shared."""
        full_name = f"{self._package}.{name}"
        if name in SHARED:
            module = sys.modules[full_name] = importlib.import_module(f"{PACKAGE}.{name}")
        else:
            source = self._source(name)
            for imported in _imports(source):
                if f"{self._package}.{imported}" not in sys.modules:
                    self._copied(imported)
            module = sys.modules[full_name] = ModuleType(full_name)
            exec(compile(source.replace(PACKAGE, self._package), f"<{full_name}>", "exec"), module.__dict__)
        setattr(sys.modules[self._package], name, module)
        return module

    def _source(self, name: str) -> str:
        source = inspect.getsource(importlib.import_module(f"{PACKAGE}.{name}"))
        for edit in self.edits:
            if edit.module == name and source.count(edit.old) != 1:
                raise LookupError(f"mutant {self.name}: {edit.old!r} is {source.count(edit.old)} times in {name}.py, not once")
            source = source.replace(edit.old, edit.new) if edit.module == name else source
        return source


def _imports(source: str) -> list[str]:
    """Returns the modules of elastic.control that ``source`` imports."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    modules = [node.module.rpartition(".")[2] for node in found if node.module and node.module.startswith(f"{PACKAGE}.")]
    return modules + [alias.name for node in found if node.module == PACKAGE for alias in node.names]


# ---- the product's other values, which the simulator calls by the name of their module


def copied(module: ModuleType, *edits: tuple[str, str]) -> ModuleType:
    """Returns a copy of ``module`` in which each ``(old, new)`` of ``edits`` is substituted.

    Raises :class:`LookupError` if a substitution no longer applies.
    """
    source = inspect.getsource(module)
    for old, new in edits:
        if source.count(old) != 1:
            raise LookupError(f"{old!r} is {source.count(old)} times in {module.__name__}, not once")
        source = source.replace(old, new)
    copy = sys.modules[f"mutant_{module.__name__}"] = ModuleType(f"mutant_{module.__name__}")  # dataclasses look there
    exec(compile(source, f"<{copy.__name__}>", "exec"), copy.__dict__)
    return copy


@contextmanager
def broken(module: ModuleType, *edits: tuple[str, str]) -> Iterator[None]:
    """The simulator uses a copy of ``module`` with ``edits`` until the context ends."""
    copy = copied(module, *edits)
    with pytest.MonkeyPatch.context() as patch:
        for user in [each for name, each in sys.modules.items() if name.startswith("elastic.sim.")]:
            for name, value in list(vars(user).items()):
                if value is module:
                    patch.setattr(user, name, copy)
                elif getattr(value, "__module__", "") == module.__name__ and hasattr(copy, name):
                    patch.setattr(user, name, getattr(copy, name))
        yield
