"""Records which functions of the product run in a process, when, and in which thread.

It is for processes that a test does not start itself, such as the actors of a Ray cluster.  :func:`seam`
makes a folder; every Python that starts with this folder on ``PYTHONPATH`` loads this file before anything
else, and imports the product through :class:`Finder`.  That compiles each file from its source with one
statement more at the beginning of every function: a note of the function, the monotonic time and the thread.
No file of the product knows of it, and no compiled file is kept.

Why not ``sys.setprofile``: in Python 3.11 it reaches only threads that Python starts after the call.  Ray
runs actor methods of a concurrency group (``Worker.obey``, ``Coordinator.post``) in threads of its own, which
it would miss.

The methods that ``@dataclass`` generates belong to no file.  A class whose ``__init__`` is generated notes
each instance that is made, under the file that declares the class, as ``made``.  An instance that is
unpickled is not made.

The notes of one process lie in two files: ``PID.calls`` (16 bytes a note) and ``PID.functions`` (a line for
each function of each file that was imported).  Both survive SIGKILL.
"""

from __future__ import annotations

import ast
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGES = ("elastic", "actors", "storage")
NOTE = struct.Struct("<QII")
"""Monotonic nanoseconds, number of the function from 1, number of the thread."""
SPACE = 1 << 30
"""Bytes of address space for the notes of one process; the file has holes, so only what is written takes
room.
"""
CALL, MADE = "__flow_called__", "__flow_made__"
SITE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("flow_recorder", {file!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.meta_path.insert(0, module.Finder(module.Recorder({folder!r}), {root!r}))
"""


def seam(folder: Path, root: Path) -> Path:
    """Makes ``folder`` and returns the folder in it for ``PYTHONPATH``.  ``root`` contains the packages of
    the product.
    """
    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(SITE.format(file=__file__, folder=str(folder), root=str(root)))
    return site


class Recorder:
    """The notes of this process.  Its files are made when the first function gets its number."""

    def __init__(self, folder: str) -> None:
        self.folder, self.pid = Path(folder), os.getpid()
        self.functions = 0
        self._lock = threading.Lock()
        self._table = -1
        self._notes: Any = None
        self._next = itertools.count().__next__

    def number(self, file: str, function: str) -> int:
        """Returns a new number for a function."""
        with self._lock:
            if self._notes is None:
                self._open()
            self.functions += 1
            os.write(self._table, f"{json.dumps([file, function])}\n".encode())
            return self.functions

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._table = os.open(self.folder / f"{self.pid}.functions", flags, 0o600)
        descriptor = os.open(self.folder / f"{self.pid}.calls", flags, 0o600)
        os.ftruncate(descriptor, SPACE)
        self._notes = mmap.mmap(descriptor, SPACE)
        os.close(descriptor)
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """Makes a forked child note nothing, because it shares the memory."""
        self._notes = bytearray(SPACE >> 16)
        self._next = itertools.repeat(0).__next__

    def called(self, number: int) -> None:
        NOTE.pack_into(
            self._notes, NOTE.size * self._next(), time.monotonic_ns(), number, threading.get_native_id()
        )

    def made(self, number: int) -> Callable[[type], type]:
        """Returns a decorator for a class: it notes each instance, where ``@dataclass`` has generated
        ``__init__``.
        """

        def decorate(made: type) -> type:
            init = vars(made).get("__init__")
            if getattr(getattr(init, "__code__", None), "co_filename", "") != "<string>":
                return made

            def noted(self: Any, *arguments: Any, **named: Any) -> None:
                called(number)
                init(self, *arguments, **named)

            called = self.called
            noted.__wrapped__ = init  # type: ignore[attr-defined]  # signatures stay as they were
            noted.__name__, noted.__qualname__, noted.__module__ = (
                init.__name__,
                init.__qualname__,
                init.__module__,
            )
            made.__init__ = noted  # type: ignore[misc]
            return made

        return decorate


class Noting(ast.NodeTransformer):
    """Lets each function of one file begin with a note."""

    def __init__(self, number: Callable[[str], int]) -> None:
        self.number, self.within = number, list[str]()

    def _name(self, name: str) -> int:
        return self.number(".".join([*self.within, name]))

    def _inside(self, node: Any) -> Any:
        self.within.append(getattr(node, "name", "<lambda>"))
        self.generic_visit(node)
        self.within.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        number = self._name(node.name)
        self._inside(node)
        taught = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        node.body.insert(int(taught), ast.Expr(_call(CALL, number)))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        number = self._name("<lambda>")
        self._inside(node)
        node.body = ast.BoolOp(ast.Or(), [_call(CALL, number), node.body])  # the note is None
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        number = self._name(f"{node.name} made")
        self._inside(node)
        node.decorator_list.insert(0, _call(MADE, number))
        return node


def _call(name: str, number: int) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number)], [])


class Loader(SourceFileLoader):
    """Compiles a file of the product with notes; neither reads nor writes compiled files."""

    def __init__(self, name: str, path: str, recorder: Recorder, root: str) -> None:
        super().__init__(name, path)
        self.recorder, self.file = recorder, os.path.relpath(path, root)

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        tree = Noting(lambda function: self.recorder.number(self.file, function)).visit(tree)
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update({CALL: self.recorder.called, MADE: self.recorder.made})
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finds the product's modules, and gives them a :class:`Loader`."""

    def __init__(self, recorder: Recorder, root: str) -> None:
        self.recorder, self.root = recorder, root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if (
            spec is not None
            and spec.origin is not None
            and spec.origin.endswith(".py")
            and spec.origin.startswith(f"{self.root}{os.sep}")
        ):
            spec.loader = Loader(name, spec.origin, self.recorder, self.root)
        return spec


@dataclass(frozen=True)
class Call:
    """One note."""

    at: float
    """Monotonic seconds."""
    file: str
    function: str
    thread: int

    @property
    def made(self) -> bool:
        """True if the call is of a generated ``__init__``, and not of a function in the file."""
        return self.function.endswith(" made")


def recorded(folder: Path) -> dict[int, list[Call]]:
    """Returns what each process noted, by its pid, in order."""
    return {int(path.stem): list(_calls(path)) for path in sorted(folder.glob("*.calls"))}


def _calls(path: Path) -> Iterator[Call]:
    functions = [json.loads(line) for line in path.with_suffix(".functions").read_text().splitlines()]
    with path.open("rb") as notes:
        while at_number_thread := notes.read(NOTE.size):
            at, number, thread = NOTE.unpack(at_number_thread)
            if not number:
                return
            yield Call(at / 1e9, *functions[number - 1], thread)
