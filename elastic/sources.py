"""The source files of a run's code.  A run does not go on with other code unless its user says so.

The files are those of the modules that the job names, but for the held-out data, on which no weight depends, and of every module that
these import, also inside of functions, outside of installed packages, the standard library and Elastic itself.  They are found by reading
imports, never by importing, so the answer depends on the files alone and not on what a process has loaded before.  A package with code that
imports by computed names counts with all its files.  A file is named by its module, so the same code has the same names in every folder.

Each set of files with which the run trained is a create-only object ``code/<number>.json`` in its folder, with the version from which it
goes on and what had changed.  A file has two digests: of its bytes, and of its syntax tree, which comments and formatting do not change.
The second one is compared only within one version of Python, because each version has trees of its own.
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
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from elastic.errors import JobError
from elastic.ids import Version
from elastic.imports import PACKAGES, ROOT, python_files, split
from elastic.objects import Given, parts_of
from storage.errors import Exists
from storage.numbered import Numbered
from storage.objects import ObjectStore

FORMAT = 1
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages."""
BY_COMPUTED_NAMES = ("import_module", "__import__", "iter_modules", "walk_packages")
"""Functions that import, or list, modules whose names are not in the source."""
SHOWN = 6
"""Largest number of files that a sentence names."""


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


@dataclass(frozen=True)
class Sources:
    """The digests of each file, of its bytes and of its syntax tree, and the version of Python that made the trees."""

    files: Mapping[str, tuple[str, str]]
    python: str = field(default_factory=_python)
    held_out: bool = False
    """True if files of the held-out data may be among them, as in the documents of older releases."""

    def differ(self, then: Sources) -> list[str]:
        """Returns what is different from ``then``, as ``pkg/model.py (changed)``, in order."""
        found = []
        for name in sorted(self.files.keys() | then.files.keys()):
            ours, theirs = self.files.get(name), then.files.get(name)
            if theirs is None:
                found.append(f"{name} (new)")
            elif ours is None:
                found += [] if then.held_out and _may_be_held_out(name, *theirs) else [f"{name} (gone)"]
            elif ours[0] != theirs[0] and (self.python != then.python or ours[1] != theirs[1]):
                found.append(f"{name} (changed)")
        return found


def _may_be_held_out(name: str, raw: str, tree: str) -> bool:
    """Returns whether a file on which the weights do not depend any more was perhaps never more than a file of the held-out data.

    It was none if it is not there any more.  If it is there, and was more, then the file or the setting that named it has changed, which is
    told.  That holds for an object, too, whose two digests are one.
    """
    return raw == tree or _users(name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")) is not None


# ---- the files


def sources_of(paths: Sequence[str]) -> Sources:
    """Returns the sources of the code that ``paths`` name as ``pkg.module:name``.

    Objects that were given in place of names count as files, by their fingerprints and those of the globals that they use.
    """
    named = [path for path in paths if not isinstance(path, Given)]
    objects, modules = parts_of(path for path in paths if isinstance(path, Given))
    files = files_of([*(split(path)[0] for path in named), *sorted(modules)])
    return Sources(files | {name: (digest, digest) for name, digest in objects.items()})


def files_of(modules: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the digests of the user's files among ``modules``, and of what they import."""
    found, seen, waiting = dict[str, tuple[str, str]](), set[str](), list(modules)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        if (spec := _users(name)) is None or spec.origin is None:
            continue
        file = Path(spec.origin)
        text = file.read_bytes()
        raw = tree = _digest(text)
        if file.suffix == ".py":
            imports: tuple[ast.AST, ...] = ()
            with suppress(SyntaxError, ValueError):  # it may be imported inside of a function that is never called
                tree, imports = _tree_of(text)
            waiting += _imported(imports, spec)
        is_package = spec.submodule_search_locations is not None
        found[name.replace(".", "/") + ("/__init__" if is_package else "") + file.suffix] = (raw, tree)
    return found


def _users(name: str) -> ModuleSpec | None:
    """Returns the spec of a module of the user's; None for any other one, and for what is no module."""
    top, _, rest = name.partition(".")
    if top in PACKAGES or top in sys.stdlib_module_names:
        return None
    spec = _spec_of(top)
    for part in (f"{top}.{rest[:end]}" for end in _ends(rest)):
        if spec is None or not spec.submodule_search_locations or not _is_users(spec):
            return None
        spec = _within(part, spec.submodule_search_locations)
    return spec if spec is not None and _is_users(spec) and not _is_distributed(spec) else None


def _is_distributed(spec: ModuleSpec) -> bool:
    """Returns whether an installer put the file of a module where it is, as ``pip install --target`` does into a folder of any name."""
    if spec.origin is None:
        return False
    file = Path(spec.origin)
    folder = file.parents[spec.name.count(".") + (spec.submodule_search_locations is not None)]
    return file.relative_to(folder).as_posix() in _distributed(str(folder))


@functools.lru_cache
def _distributed(folder: str) -> frozenset[str]:
    """Returns the paths of the files that installers put into a folder.  The files of the user may be beside them, in the same package.

    What an installer puts somewhere has a list of its files, which a project that is worked on (``*.egg-info``) has not.
    """
    lists = filter(None, (each.read_text("RECORD") for each in distributions(path=[folder])))
    return frozenset(row[0] for text in lists for row in csv.reader(text.splitlines()) if row)


def _within(name: str, places: Iterable[str]) -> ModuleSpec | None:
    """Returns the spec of a module in the folders of its package, which need not be imported."""
    try:
        return PathFinder.find_spec(name, [*places])
    except KeyError:  # a folder without __init__.py: importlib follows the path of its package, and looks for that among imported ones
        spec = ModuleSpec(name, None, is_package=True)
        folders = [Path(place, name.rpartition(".")[2]) for place in places]
        spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
        return spec


def _ends(rest: str) -> list[int]:
    """Returns where each part of a dotted name ends."""
    return [place for place, letter in enumerate(f"{rest}.") if letter == "."] if rest else []


def _spec_of(top: str) -> ModuleSpec | None:
    try:
        return find_spec(top)
    except (ImportError, ValueError):  # a module that was made by hand has none
        return None


def _is_users(spec: ModuleSpec) -> bool:
    if not spec.has_location or spec.origin is None:
        return spec.origin is None and spec.submodule_search_locations is not None  # a package without __init__.py
    file = Path(spec.origin).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    ours = any(file.is_relative_to(ROOT / name) for name in PACKAGES)
    return file.is_file() and not ours and not any(part in INSTALLED for part in file.parts) and not file.is_relative_to(library)


def _imported(imports: Iterable[ast.AST], spec: ModuleSpec) -> Iterator[str]:
    """Yields the names of modules that a module may import; some of ``from a import b`` are no modules."""
    package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
    for node in imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            except ImportError:  # beyond the top: it would fail
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        elif package:
            yield from _all_of(package)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _all_of(package: str) -> Iterator[str]:
    """Yields the names of all modules of a package."""
    spec = _users(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in python_files(Path(place)):
            parts = Path(file).relative_to(place).with_suffix("").parts
            yield ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))


@functools.lru_cache(1000)
def _tree_of(text: bytes) -> tuple[str, tuple[ast.AST, ...]]:
    """Returns the digest of a source's syntax tree, and the nodes that import.  A process parses each source once."""
    parsed = ast.parse(text)
    return _digest(ast.dump(parsed).encode()), tuple(node for node in ast.walk(parsed) if _imports(node))


def _imports(node: ast.AST) -> bool:
    by_computed_names = isinstance(node, ast.Name | ast.Attribute) and _last(node) in BY_COMPUTED_NAMES
    return by_computed_names or isinstance(node, ast.Import | ast.ImportFrom)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# ---- the documents


def stored(store: ObjectStore, name: str) -> Sources | None:
    """Returns the newest sources with which the run of that name trained, or None."""
    return of(found[-1]) if (found := every(store, name)) else None


def at(store: ObjectStore, name: str, version: Version) -> Sources | None:
    """Returns the sources with which the run of that name made ``version``, or None if it has noted none, or did not make it."""
    later = (each for each in reversed(every(store, name)) if version.generation > max(each.get("until", 0), each["generation"]))
    return None if (found := next(later, None)) is None else of(found)


def of(document: Mapping[str, Any]) -> Sources:
    """Returns the sources that are stored in one of :func:`every`."""
    files = {file: (raw, tree) for file, (raw, tree) in document["files"].items()}
    return Sources(files, document["python"], document.get("held_out", True))


def every(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    """Returns what is stored of each set of sources, oldest first: number, step, generation, until, changed, files.

    Without what is damaged: it is then not known with which code some steps were made.
    """
    return _documents(store, name).intact()


def begin(store: ObjectStore, name: str, now: Sources, version: Version, at: float, until: int = 0, before: Sources | None = None) -> str:
    """Writes the sources with which the run goes on from ``version``, unless they are those that are stored, and those of ``before``.

    What the generations up to ``until`` made, they made with other ones, also after ``version``.

    Returns the sentence that says what changed, or "".  Raises :class:`~storage.errors.Exists` if another command has begun the run with
    other code meanwhile.
    """
    documents, then = _documents(store, name), stored(store, name)
    number = documents.newest() + 1
    differs = next((found for each in (then, before) if then and each and (found := now.differ(each))), [])
    if then is not None and not differs:
        return ""
    about = {
        "format": FORMAT,
        "number": number,
        "at": at,
        "step": version.step,
        "generation": version.generation,
        "until": until,
        "changed": differs,
        "python": now.python,
        "held_out": now.held_out,
        "files": {file: list(digests) for file, digests in sorted(now.files.items())},
    }
    try:
        documents.add(number, about)
    except Exists:  # two commands begin the run at the same time, and one of them follows the other
        if (other := stored(store, name)) is None or now.differ(other):
            raise
        return ""
    return f"code {number} of {name} goes on from step {version.step}: {listed(differs)}" if differs else ""


def refused(name: str, bucket: str, differs: list[str], version: Version, python: str = "", *, looks: bool = False) -> JobError:
    """Returns the error of a run that would go on from ``version`` with other code, or of a command that only ``looks`` at it.

    ``python`` is the version of the stored sources.
    """
    other = f" (read by Python {_python()} here, and {python} there)" if python not in ("", _python()) else ""
    what = f"the code of the run {name!r} in bucket = {bucket!r} has changed since step {version.step}: {listed(differs)}{other}"
    if looks:
        return JobError(f"{what}; undo the change, or use the code of now all the same by --accept-code")
    return JobError(
        f"{what}; undo the change, or go on with it by --accept-code (launch(..., accept_code=True)), or begin at step 0 under another name"
    )


def listed(differs: list[str]) -> str:
    """Returns the files in words."""
    more = len(differs) - SHOWN
    return ", ".join(differs[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _documents(store: ObjectStore, name: str) -> Numbered:
    return Numbered(store, f"{name}/code", FORMAT)
