"""Functions and classes that a job gets as objects in place of names, and their fingerprints.

``Job(model=build)`` takes the object itself.  If it can be imported by a name, it is just that name.  Else it
belongs to a script or to a cell of a notebook, and the job has a :class:`Given`: the text ``object:build``,
which is all that ``job.json`` and other processes see, with the object beside it.  ``actors/users_code.py``
brings the object to workers.

A fingerprint is the same wherever the same code runs in the same version of Python.  It is made of what the
object computes with: code objects, defaults, closures, members of classes, and the globals to which they
refer, each of which is a part of its own, so that a difference can be named.  What can be imported counts by
its name; the files of such modules are read by ``elastic/code/sources.py``.
"""

from __future__ import annotations

import dis
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

OBJECT = "object"
"""Stands for a module in the name of an object that cannot be imported."""
MAIN = "__main__"
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
"""Types of values that are compared by their ``repr``."""
NO_MEMBERS = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__firstlineno__",
        "__static_attributes__",
        "__abstractmethods__",
        "_abc_impl",
    }
)
"""Members of classes that say nothing about what they compute."""


class Given(str):
    """The text ``object:build``, with the object that it stands for.  A copy in another process is the text
    alone.
    """

    value: Any

    def __new__(cls, value: Any, fingerprint: str = "") -> Given:
        made = super().__new__(cls, f"{OBJECT}:{_short(value)}")
        made.value = value
        if fingerprint:
            made.fingerprint = fingerprint
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)

    @cached_property
    def fingerprint(self) -> str:
        """The digest of all that the object computes with, except for what can be imported."""
        return _hash(*(f"{name} {digest}" for name, digest in sorted(parts_of([self])[0].items())))


def named(value: Any) -> str:
    """Returns ``pkg.module:name`` for an object that can be imported so, else a :class:`Given`."""
    name = getattr(value, "__qualname__", "")
    return f"{value.__module__}:{name}" if name.isidentifier() and _is_importable(value) else Given(value)


def _short(value: Any) -> str:
    name = str(getattr(value, "__qualname__", type(value).__qualname__)).rpartition(".")[2]
    return re.sub(r"\W", "", name) or "unnamed"


def _is_importable(value: Any) -> bool:
    """Returns whether another process gets the same object by importing its module."""
    home, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    module = sys.modules.get(home) if isinstance(home, str) else None
    if (
        module is None
        or home == MAIN
        or not isinstance(path, str)
        or getattr(module, "__spec__", None) is None
    ):
        return False
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is value


# ---- fingerprints


def parts_of(given: Iterable[Given]) -> tuple[dict[str, str], set[str]]:
    """Returns the digests of the objects and of the globals to which they refer, by name, and the modules
    that they use.
    """
    walk = _Walk()
    for each in given:
        walk.waiting.append((walk.free(str(each)), each.value))
    while walk.waiting:
        name, value = walk.waiting.pop()
        walk.found[name] = walk.digest(value)
    return walk.found, walk.modules


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class _Walk:
    """Digests values.  Each object is digested once.  Where an object contains itself, a mark stands in its
    place.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.modules: set[str] = set()
        self.waiting: list[tuple[str, Any]] = []
        self._names: set[str] = set()
        self._done: dict[int, tuple[str, Any]] = {}
        """Digests by id, with the object, so that no other one gets its id."""
        self._active: dict[int, int] = {}

    def free(self, name: str) -> str:
        """Returns a name that is not taken: two lambdas have the same."""
        number = 1
        while (free := name if number == 1 else f"{name} ({number})") in self._names:
            number += 1
        self._names.add(free)
        return free

    def digest(self, value: Any) -> str:
        if isinstance(value, PLAIN) and type(value) in PLAIN:
            return _hash(type(value).__name__, repr(value))
        if (key := id(value)) in self._done:
            return self._done[key][0]
        if key in self._active:
            return _hash("cycle", str(len(self._active) - self._active[key]))
        self._active[key] = len(self._active)
        try:
            digest = _hash(type(value).__name__, *self._inside(value))
        finally:
            del self._active[key]
        self._done[key] = digest, value
        return digest

    def _inside(self, value: Any) -> Iterator[str]:
        """Yields what makes the value: digests, and names."""
        match value:
            case ModuleType():
                self.modules.add(value.__name__)
                yield value.__name__
            case type() | FunctionType() if _is_importable(value):
                self.modules.add(value.__module__)
                yield f"{value.__module__}:{value.__qualname__}"
            case type():
                yield from self._of_class(value)
            case FunctionType():
                yield from self._of_function(value)
            case CodeType():
                yield from self._of_code(value)
            case MethodType():
                yield from map(self.digest, (value.__func__, value.__self__))
            case BuiltinFunctionType():
                yield f"{value.__module__}:{value.__qualname__}"
            case property():
                yield from map(self.digest, (value.fget, value.fset, value.fdel))
            case staticmethod() | classmethod():
                yield self.digest(value.__func__)
            case CellType():
                yield "empty" if value == CellType() else self.digest(value.cell_contents)
            case tuple() | list() if type(value) in (tuple, list):
                yield from map(self.digest, value)
            case set() | frozenset() if type(value) in (set, frozenset):
                yield from sorted(map(self.digest, value))
            case dict() | MappingProxyType() if type(value) in (dict, MappingProxyType):
                yield from (self.digest(each) for pair in value.items() for each in pair)
            case _:
                yield from self._of_instance(value)

    def _of_class(self, kind: type) -> Iterator[str]:
        yield kind.__qualname__
        yield self.digest(type(kind))
        yield from map(self.digest, kind.__bases__)
        for name, member in sorted(vars(kind).items()):
            if name not in NO_MEMBERS:
                yield from (name, self.digest(member))

    def _of_function(self, function: FunctionType) -> Iterator[str]:
        yield from map(
            self.digest,
            (function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__),
        )
        home = str(function.__globals__.get("__name__", MAIN))
        if home != MAIN and getattr(sys.modules.get(home), "__spec__", None) is not None:
            self.modules.add(home)  # its globals are in the module's files
            return
        for name in sorted(_globals_of(function.__code__)):
            if name in function.__globals__:
                yield from (
                    name,
                    self._of_global(f"{home}.{name}", function.__globals__[name], function.__code__),
                )

    def _of_global(self, name: str, value: Any, code: CodeType) -> str:
        """Returns the digest of what can be imported.  Anything else becomes a part of its own."""
        if isinstance(value, ModuleType):
            self.modules |= {f"{value.__name__}.{each}" for each in code.co_names} & sys.modules.keys()
            return self.digest(value)
        if _is_importable(value):
            return self.digest(value)
        if name not in self._names:
            self.waiting.append((self.free(name), value))
        return name

    def _of_code(self, code: CodeType) -> Iterator[str]:
        arguments = code.co_argcount + code.co_kwonlyargcount
        yield code.co_code.hex()
        yield repr(
            (
                code.co_argcount,
                code.co_posonlyargcount,
                code.co_kwonlyargcount,
                code.co_flags,
                code.co_varnames[:arguments],
            )
        )
        yield repr((code.co_names, code.co_freevars, code.co_cellvars))
        yield from map(self.digest, code.co_consts)
        self.modules |= {
            each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME" and each.argval
        }

    def _of_instance(self, value: Any) -> Iterator[str]:
        """Yields the digests of what pickling would store of an instance; of a tensor, its type, shape and
        values.
        """
        yield self.digest(type(value))
        torch = sys.modules.get("torch")
        try:
            if torch is not None and isinstance(value, torch.Tensor) and value.device.type != "meta":
                plain = value.detach().cpu().contiguous()
                yield repr((plain.dtype, tuple(plain.shape)))
                yield hashlib.sha256(plain.flatten().view(torch.uint8).numpy()).hexdigest()
                return
            reduced = value.__reduce_ex__(4)
        except Exception:  # some things cannot be taken apart, such as locks and files: their type must do
            return
        if isinstance(reduced, str):
            yield reduced
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        yield from map(self.digest, (make, arguments, state))
        yield from map(self.digest, items or ())
        yield from map(self.digest, pairs or ())


def _globals_of(code: CodeType) -> set[str]:
    """Returns the names of globals that the code reads, also inside of its functions."""
    read = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return read.union(*(_globals_of(each) for each in code.co_consts if isinstance(each, CodeType)))
