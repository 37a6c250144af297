"""Loads code by its name, ``pkg.module:name``.  If a node cannot load it, or the code does not have an
argument, the error is a sentence that says why.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import inspect
import os
import pkgutil
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable
from types import ModuleType
from typing import Any

from elastic.code.given import OBJECT, Given
from elastic.errors import CodeError, JobError

PACKAGES = ("elastic", "actors", "storage")
VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
"""A text that stands for the value of an environment variable."""
LIBRARIES = (
    "torch",
    "ray",
    "numpy",
    "pyarrow",
    "pydantic",
    "rich",
    "blake3",
    "fsspec",
    "grpc",
    "tokenizers",
    "transformers",
)
"""The installed packages that Elastic imports: a file of the user's of that name would be imported in their
place.
"""
ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains our packages."""
STAR = re.compile(rb"\bimport\s*\*")
"""An import of all names of a module."""
MAKERS = {"globals", "vars", "locals", "exec", "setattr"}
"""Functions with which a module makes names that are not in its source."""
NO_MEMORY = re.compile(r"out of memory|can(?:'|no)t allocate memory", re.IGNORECASE)
version_of = functools.cache(metadata.version)
"""Returns the version of an installed package.  A process parses the description of a package once: that
takes 10 ms, and each save asks for three packages.
"""


def split(path: str) -> tuple[str, str]:
    """Splits ``"pkg.module:name"`` into module and name.  Raises :class:`CodeError` for any other form."""
    module, colon, name = path.partition(":")
    parts = [*module.split("."), name]
    if not colon or not all(part.isidentifier() for part in parts):
        raise CodeError(
            f"{path!r} does not name code; write 'package.module:name', for example "
            "'elastic.models.llama:build'"
        )
    return module, name


def load(path: str, setting: str = "") -> Any:
    """Returns the object that ``"pkg.module:name"`` names, or the object that was given in place of a name.

    ``setting`` is the setting of the job that names it, for messages.  Raises :class:`CodeError` if the path
    is malformed, the module is not found or fails to import, or it lacks the name.
    """
    if isinstance(path, Given):
        return path.value
    module_name, name = split(path)
    named = f"{setting} = {path!r}" if setting else repr(path)
    if module_name == OBJECT:
        raise CodeError(
            f"{named} is code of the script or notebook that began the run, and this command does not "
            "have it; in that script call launch(Job(...)) with the same functions to go on, or "
            "evaluate_here or rerun_here of elastic.train.alone.revisit to look at the run"
        )
    module = _module(named, module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        found = {known: _is_own(value, module_name) for known, value in vars(module).items()}
        raise _without_name(named, path, _place(module), found) from None


def check_name(path: str, setting: str) -> None:
    """Raises as :func:`load` does if a fault shows without an import: there is no such module, or its source
    has no such name.
    """
    if isinstance(path, Given):
        return
    module_name, name = split(path)
    if (spec := find(module_name)) is None:
        load(path, setting)  # which finds what only an import shows, or says what is not there
    elif spec.origin is not None and spec.origin.endswith(".py"):
        found = _names_in(Path(spec.origin).read_bytes())
        if (
            found is not None
            and name not in found
            and f"{module_name}.{name}" not in sys.modules
            and not spec.submodule_search_locations
        ):
            raise _without_name(f"{setting} = {path!r}", path, spec.origin, found)


def _without_name(named: str, path: str, place: str, found: Mapping[str, bool]) -> CodeError:
    """Returns the error of a module without the name.  ``found`` maps each name in the module to whether the
    module defines it itself.
    """
    module, name = split(path)
    public = [known for known in found if not known.startswith("_")]
    near = difflib.get_close_matches(name, public, 1)
    there = ", ".join(sorted(known for known in public if found[known])[:8]) or "no public names"
    hint = f"did you mean '{module}:{near[0]}'?" if near else f"it has {there}"
    return CodeError(f"{named}: the module {module} ({place}) has no {name!r}; {hint}")


def find(module: str) -> ModuleSpec | None:
    """Returns the spec of a module, or None, without an import of the packages that it is in.

    The folders of a package decide, and not the modules that this process has imported.  A folder without
    ``__init__.py`` is found, too.
    """
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a module that was made by hand has none
        return None
    for part in rest:
        if spec is None:
            return None
        name, places = f"{spec.name}.{part}", [*(spec.submodule_search_locations or ())]
        try:
            spec = PathFinder.find_spec(name, places)
        # a folder without __init__.py: importlib looks for the path of its package among imported ones
        except KeyError:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [
                folder for place in places if os.path.isdir(folder := os.path.join(place, part))
            ]
    return spec


def _names_in(source: bytes) -> dict[str, bool] | None:
    """Returns the names that a module binds, and for each whether the module defines it itself, without an
    import; None if the module may make names that its source does not show.
    """
    try:
        table = symtable(source.decode(), "", "exec")
    except (SyntaxError, ValueError):  # the import says where
        return None
    names = {each.get_name(): each for each in table.get_symbols()}
    if (
        "__getattr__" in names
        or STAR.search(source)
        or any(names[each].is_referenced() for each in MAKERS & names.keys())
    ):
        return None
    bound = {
        name: each
        for name, each in names.items()
        if each.is_assigned() or each.is_imported() or each.is_declared_global()
    }
    return {name: not each.is_imported() for name, each in bound.items()}


def _is_own(value: Any, module: str) -> bool:
    """Returns whether ``module`` defines ``value`` itself and has not imported it, as far as ``value``
    shows.
    """
    return not isinstance(value, ModuleType) and getattr(value, "__module__", module) in (module, None)


def _module(named: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise CodeError(f"{named}: {_failed(name, error)}") from error
        first = ", ".join(repr(entry) for entry in sys.path[:3])
        raise CodeError(
            f"{named}: Python finds no module {error.name!r} on this machine (its path begins with "
            f"{first}); install the package on every node, or add its folder to "
            f"PYTHONPATH{_near(error.name)}"
        ) from None
    # the user's module may raise anything while it is imported; all of it is a named error
    except Exception as error:
        raise CodeError(f"{named}: {_failed(name, error)}") from error


def _near(module: str) -> str:
    """Returns the end of a sentence that names the neighbour of the missing ``module`` that is spelt most
    like it; "" if none is near.
    """
    package = module.rpartition(".")[0]
    places, head = (sys.modules[package].__path__, f"{package}.") if package else (sys.path[:3], "")
    return did_you_mean(module, [f"{head}{each.name}" for each in pkgutil.iter_modules(places)])


def _failed(module: str, error: Exception) -> str:
    """Says where an import failed: the innermost frame, which is usually the user's, or the line that is no
    valid Python.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return (
            f"importing {module} failed with {type(error).__name__}: {error.msg} (in {error.filename}, "
            f"line {error.lineno}); correct this file"
        )
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not f.filename.startswith("<frozen")), frames[-1])
    return (
        f"importing {module} failed with {_what(error)} (in {frame.filename}, line {frame.lineno}); "
        "correct the module, or install what it needs"
    )


def arguments(setting: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments as the code gets them: a text ``${NAME}`` is the value of that environment variable
    in this process.

    Raises :class:`JobError` if there is no such variable.  Stored jobs keep only the name of the variable.
    """
    return {key: _argument(f"{setting}.{key}", each) for key, each in args.items()}


def _argument(setting: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return arguments(setting, value)
    if isinstance(value, list):
        return [_argument(setting, each) for each in value]
    if not isinstance(value, str) or (named := VARIABLE.fullmatch(value)) is None:
        return value
    if (found := os.environ.get(named[1])) is None:
        where = f"the environment variable {named[1]} is not set on {platform.node()}"
        raise JobError(
            f"{setting} = '{value}': {where}; set the variable for this command, and on a cluster "
            "before `ray start`"
        )
    return found


def failure(error: Exception) -> str:
    """Describes in one line what the called code raised and where: the innermost frame outside of installed
    packages and of ours, and its caller if that is such a frame, too.

    If there is no such frame, the innermost frame of ours is named, or else the innermost of all.  The
    caller's own frame is left out, since it only says that the code was called.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]
    others = [frame for frame in frames if "site-packages" not in frame.filename]
    users = [frame for frame in others if not _is_ours(frame)]
    frame = next((found[-1] for found in (users, others, frames) if found), None)
    if frame is None:
        return _what(error)
    by = "".join(f", called in {each.filename}, line {each.lineno}" for each in users[-2:-1])
    return f"{_what(error)} (in {frame.filename}, line {frame.lineno}{by})"


def less_memory(error: BaseException) -> str:
    """Returns the advice for an error that says that memory ran out, on a GPU or a CPU; "" for any other
    error.
    """
    if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
        return ""
    return (
        "the memory is not enough: lower microbatch, set recompute to 'block' or precision to 'bf16', or "
        "let more workers share the state (workers.max, parallel.zero = 2 or 3); `elastic estimate` tells "
        "what a job takes"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence that names the one of ``known`` that is spelt most like ``word``; "" if
    none is near.
    """
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), lower, 1)
    return f"; did you mean {str(lower[near[0]])!r}?" if near else ""


def unknown_argument(
    setting: str,
    named: str,
    code: Callable[..., Any],
    args: Mapping[str, Any],
    error: Exception,
    given: int = 0,
) -> str:
    """Returns the sentence for an argument that ``code`` does not have, if that is why ``code(**args)``
    raised ``error``; else "".

    ``setting`` holds the arguments, and ``named`` is the setting that names the code, with its value.  The
    first ``given`` arguments of the code are ours and not the user's, so they are not named.  If the code
    hands arguments on to a function, the arguments of that function are named, too.
    """
    said = re.match(
        r"(?:([\w.<>]+)\(\) )?(?:got an unexpected keyword argument '(\w+)'|takes no arguments)", str(error)
    )
    if (
        said is None
        or not isinstance(error, TypeError)
        or (name := said[2] or next(iter(args), "")) not in args
    ):
        return ""
    own = getattr(code, "__qualname__", "")
    other = None if said[1] in (own, f"{own}.__init__") else _in_frame(error, said[1] or "")
    takes = [*_arguments_of(code, given), *(_arguments_of(other) if other is not None else ())]
    there = f"it takes {', '.join(dict.fromkeys(takes)) or 'none'}"
    meant = did_you_mean(name, takes)
    return f"{setting}.{name} = {args[name]!r}: {named} has no argument {name!r}; {there}{meant}"


def _arguments_of(code: Callable[..., Any], given: int = 0) -> list[str]:
    """Returns the names of the arguments that ``code`` takes by name, without the first ``given`` that it
    takes by place.
    """
    try:
        found = inspect.signature(code).parameters.values()
    except (TypeError, ValueError):  # code of C has no signature
        return []
    placed = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][
        :given
    ]
    return [
        each.name
        for each in found
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each not in placed
    ]


def _in_frame(error: Exception, path: str) -> Callable[..., Any] | None:
    """Returns the class or function that the innermost frame of ``error`` knows by ``path``, as
    ``Net.__init__``.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    first, *rest = path.removesuffix(".__init__").split(".")
    found = functools.reduce(
        lambda at, name: getattr(at, name, None), rest, {**frame.f_globals, **frame.f_locals}.get(first)
    )
    return found if callable(found) else None


class Elsewhere(Exception):
    """An exception of another process.  Its text is the traceback that a user is to see."""


def users_traceback(error: BaseException, *, or_ours: bool = True) -> str:
    """Returns the traceback of ``error`` without the frames of our own packages.

    If all frames are ours, they stay.  Without ``or_ours``, "" is returned then: the sentence about the error
    says as much.
    """
    if isinstance(error, Elsewhere):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not _is_ours(frame)]
    if not others and not or_ours:
        return ""
    head = "Traceback (most recent call last):\n"
    return "".join([head, *traceback.format_list(others or frames), *traceback.format_exception_only(error)])


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return any(Path(frame.filename).is_relative_to(ROOT / name) for name in PACKAGES)


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "a folder without __init__.py"


def check_packages(*folders: Path) -> None:
    """Raises :class:`CodeError` if another folder or file shadows one of our packages, or a package that they
    import.

    It checks what this process would import, and ``folders`` that will come first on the path of other
    processes (the working folder of a submitted job).
    """
    for name in PACKAGES:
        spec = find(name)
        imported = (
            [*(spec.submodule_search_locations or [spec.origin or name])][:1] if spec is not None else []
        )
        for place in (*map(Path, imported), *(found for folder in folders for found in _named(folder, name))):
            if place.resolve() != ROOT / name:
                raise CodeError(
                    f"{place} hides Elastic's own package {name!r} ({ROOT / name}); rename your file "
                    "or folder"
                )
    for folder in {Path(sys.path[0]).resolve(), *(folder.resolve() for folder in folders)}:
        others = [entry for entry in sys.path if Path(entry).resolve() != folder]
        for place in (found for name in LIBRARIES for found in _named(folder, name)):
            # else the folder is where the package itself is worked on
            if PathFinder.find_spec(place.stem, others) is not None:
                raise CodeError(
                    f"{place} hides the package {place.stem!r}, which Elastic imports; rename your "
                    "file or folder"
                )


@functools.cache
def own_digest() -> str:
    """Returns a digest of our own sources, since a version number does not change with every edit.  A process
    reads them once.
    """
    return _digest([ROOT / name for name in PACKAGES])


def code_digest(paths: Iterable[str]) -> str:
    """Returns the top-level package or module of each of ``paths`` (``pkg.module:name``, loaded before), with
    a digest of its sources.

    An object that was given in place of a name has its fingerprint.

    Our own packages are left out, but the version of a library that one of our modules names as its
    ``LIBRARY`` is added.  Other packages that the code imports are not read, nor are files beside a module
    that is a single file: code of several files belongs in a package.
    """
    paths = [*dict.fromkeys(paths)]
    names = {split(path)[0] for path in paths} - {OBJECT}
    tops = sorted({name.partition(".")[0] for name in names} - set(PACKAGES))
    libraries = sorted(
        {getattr(sys.modules[name], "LIBRARY", "") for name in names if name.partition(".")[0] in PACKAGES}
        - {""}
    )
    digests = (f"{top} {_digest(_places(sys.modules[top]))}" for top in tops)
    objects = (f"{path} {path.fingerprint}" for path in paths if isinstance(path, Given))
    return ", ".join((*digests, *objects, *(f"{library} {version_of(library)}" for library in libraries)))


def _places(module: ModuleType) -> list[Path]:
    """Returns the folders of a package (several if it lacks ``__init__.py``), or the file of a module."""
    folders = [Path(entry) for entry in getattr(module, "__path__", ())]
    file = getattr(module, "__file__", None)  # a module of C, such as builtins, has none
    return folders or ([Path(file)] if file else [])


def _digest(places: Iterable[Path]) -> str:
    """Returns 12 digits of a sha256 over the names and bytes of all ``*.py``, independent of where their
    folder lies.
    """
    digest = hashlib.sha256()
    for place in places:
        for file in python_files(place) if place.is_dir() else [str(place)]:
            with open(file, "rb") as source:
                text = source.read()
            digest.update(f"{place.name}{file[len(str(place)) :]} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]


def python_files(folder: Path) -> list[str]:
    """Returns the paths of all ``*.py`` files below ``folder``, without hidden folders (environments,
    checkpoints of notebooks).
    """
    found = []
    for here, below, files in os.walk(folder):
        below[:] = [name for name in below if not name.startswith((".", "__pycache__"))]
        found += [os.path.join(here, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.split(os.sep))


def _named(folder: Path, name: str) -> Sequence[Path]:
    """Returns the paths of the package and of the module ``name`` in ``folder``, as far as they are there.

    A folder without ``__init__.py`` is left out: Python prefers any package on the path to it.
    """
    files = {folder / name: folder / name / "__init__.py", folder / f"{name}.py": folder / f"{name}.py"}
    return [place for place, file in files.items() if file.exists()]
