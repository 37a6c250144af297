"""The source files of a job's code, and their digests.

The files are those of the modules that the job names, and of every module that these import, also inside of
functions.  Installed packages, the standard library, Elastic itself, and the code of held-out data, on which
no weight depends, are left out.  The files are found by reading imports, never by importing, so the answer
depends on the files alone and not on what a process has loaded before.  A package with code that imports by
computed names counts with all its files.  A file is named by its module, so the same code has the same names
in every folder.

A file has two digests: of its bytes, and of its syntax tree, which comments and formatting do not change.
The second one is compared only within one version of Python, because each version has trees of its own.
:mod:`elastic.runs.code` notes the digests in the run's folder.
"""

from __future__ import annotations

import ast
import csv
import functools
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from importlib.util import resolve_name
from pathlib import Path

from elastic.code.given import Given, parts_of
from elastic.code.imports import PACKAGES, ROOT, find, python_files, split

INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""
BY_COMPUTED_NAMES = ("import_module", "__import__", "iter_modules", "walk_packages")
"""Functions that import, or list, modules whose names are not in the source."""


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


@dataclass(frozen=True)
class Sources:
    """The digests of each file, of its bytes and of its syntax tree, and the version of Python that made the
    trees.
    """

    files: Mapping[str, tuple[str, str]]
    python: str = field(default_factory=_python)

    def differ(self, then: Sources) -> list[str]:
        """Returns what is different from ``then``, as ``pkg/model.py (changed)``, in order."""
        found = []
        for name in sorted(self.files.keys() | then.files.keys()):
            ours, theirs = self.files.get(name), then.files.get(name)
            if theirs is None:
                found.append(f"{name} (new)")
            elif ours is None:
                found.append(f"{name} (gone)")
            elif ours[0] != theirs[0] and (self.python != then.python or ours[1] != theirs[1]):
                found.append(f"{name} (changed)")
        return found


# ---- the files


def sources_of(paths: Sequence[str]) -> Sources:
    """Returns the sources of the code that ``paths`` name as ``pkg.module:name``.

    Objects that were given in place of names count as files, by their fingerprints and those of the globals
    that they use.
    """
    named = [path for path in paths if not isinstance(path, Given)]
    objects, modules = parts_of(path for path in paths if isinstance(path, Given))
    files = files_of([*(split(path)[0] for path in named), *sorted(modules)])
    return Sources(files | {name: (digest, digest) for name, digest in objects.items()})


def files_of(modules: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the digests of the user's files among ``modules``, and of what they import."""
    found, seen, waiting = dict[str, tuple[str, str]](), {""}, list(modules)
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        waiting.append(package := name.rpartition(".")[0])
        if (spec := _users(name)) is None or spec.origin is None:
            continue
        file, is_package = Path(spec.origin), spec.submodule_search_locations is not None
        text = file.read_bytes()
        raw = tree = _digest(text)
        if file.suffix == ".py":
            # broken code may be imported in a function that is never called
            with suppress(SyntaxError, ValueError):
                tree, imports = _read(text)
                waiting += _modules(imports, name if is_package else package)
        found[name.replace(".", "/") + ("/__init__" if is_package else "") + file.suffix] = (raw, tree)
    return found


def _users(name: str) -> ModuleSpec | None:
    """Returns the spec of a module or folder of the user's; None for any other module, and for a name that is
    no module.
    """
    if name.partition(".")[0] in sys.stdlib_module_names or (spec := find(name)) is None:
        return None
    if spec.origin is None or not spec.has_location:
        return spec if spec.origin is None and spec.submodule_search_locations is not None else None
    file, others = (
        Path(spec.origin).resolve(),
        (Path(sysconfig.get_path("stdlib")).resolve(), *(ROOT / each for each in PACKAGES)),
    )
    if not file.is_file() or INSTALLED & {*file.parts} or any(file.is_relative_to(each) for each in others):
        return None
    top = Path(spec.origin).parents[spec.name.count(".") + (spec.submodule_search_locations is not None)]
    return None if Path(spec.origin).relative_to(top).as_posix() in _distributed(str(top)) else spec


@functools.lru_cache
def _distributed(folder: str) -> frozenset[str]:
    """Returns the paths of the files that installers put into a folder, as ``pip install --target`` does into
    any folder.

    Files of the user may be beside them, in the same package.  An installer leaves a list of its files
    (``RECORD``); a project that is worked on (``*.egg-info``) has no such list.
    """
    lists = filter(None, (each.read_text("RECORD") for each in distributions(path=[folder])))
    return frozenset(row[0] for text in lists for row in csv.reader(text.splitlines()) if row)


@functools.lru_cache(1000)
def _read(source: bytes) -> tuple[str, frozenset[str]]:
    """Returns the digest of a source's syntax tree, and the names of what the source may import, as they
    stand there.  A process parses each source once.

    A relative name has its dots, ``*`` stands for all modules of the package, and some names of ``from a
    import b`` are no modules.
    """
    tree, found = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = "." * level + (module or "")
                found |= {
                    base,
                    *(f"{base}.{each.name}" if module else f"{base}{each.name}" for each in names),
                }
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in BY_COMPUTED_NAMES:
                found.add("*")
    return _digest(ast.dump(tree).encode()), frozenset(found)


def _modules(imports: Iterable[str], package: str) -> Iterator[str]:
    """Yields the full names of what a module of ``package`` imports."""
    for name in imports:
        if name == "*":
            yield from _all_of(package)
            continue
        with suppress(ImportError):  # a relative name beyond the top: its import would fail
            yield resolve_name(name, package)


def _all_of(package: str) -> Iterator[str]:
    """Yields the names of all modules of a package of the user's, if it is one."""
    spec = _users(package) if package else None
    for place in (spec and spec.submodule_search_locations) or ():
        for file in python_files(Path(place)):
            parts = Path(file).relative_to(place).with_suffix("").parts
            yield ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
