"""The checks: source in, sentences about what is wrong out.  Nothing is imported, only parsed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from tests.architecture import table
from tests.architecture.table import Row


@lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    """Returns the tree of ``source``; several checks in a row look at the same file."""
    return ast.parse(source)


@lru_cache(maxsize=1)
def statements(source: str) -> tuple[ast.AST, ...]:
    """Returns the module, its statements, and the handlers and cases in these, of which :func:`nodes` are ten
    times as many.
    """
    found: list[ast.AST] = [parsed(source)]
    for node in found:
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(node, part, ())
    return tuple(found)


@lru_cache(maxsize=1)
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Returns all nodes of ``source``."""
    return tuple(ast.walk(parsed(source)))


def module_name(file: Path) -> str:
    """``elastic/plan/layout.py`` -> ``elastic.plan.layout``; a package has the name of its folder."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def row_of(module: str) -> Row | None:
    """Returns the row of the longest name that ``module`` begins with; "elastic" itself is only the package's
    own file.
    """
    names = [
        name
        for name in table.IMPORTS
        if module == name or (name != "elastic" and module.startswith(f"{name}."))
    ]
    return table.IMPORTS[max(names, key=len)] if names else None


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of every import anywhere in ``source``, also inside functions."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from ((node.lineno, f"{home}.{alias.name}") for alias in node.names)


def _home(name: str, modules: frozenset[str]) -> str:
    """Returns the module of ours that ``name`` lies in."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def _allows(row: Row, module: str) -> bool:
    return any(
        module == entry or (entry.endswith(".*") and f"{module}.".startswith(entry[:-1]))
        for entry in row.ours
    )


def wrong_imports(file: Path, source: str, modules: frozenset[str]) -> Iterator[str]:
    """Yields a sentence for each import that the table does not allow."""
    module = module_name(file)
    row = row_of(module)
    if row is None:
        yield f"{file}: no row of the import table covers {module}; add one"
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for line, name in imported(source, package):
        top = name.partition(".")[0]
        if (pickling := {*name.split(".")} & {*table.NO_MODULES}) and file.as_posix() not in table.PICKLES:
            yield f"{file}:{line}: imports {pickling.pop()}, which runs code when it reads"
        elif top in table.PACKAGES:
            if not _allows(row, _home(name, modules)):
                yield f"{file}:{line}: {module} may not import {_home(name, modules)}"
        elif top not in sys.stdlib_module_names and top not in row.others:
            yield f"{file}:{line}: {module} may not import {top}"


def wrong_calls(file: Path, source: str) -> Iterator[str]:
    """Yields a sentence for each wrong use of the environment, each pickling by torch, and each wrong handler
    that catches everything.
    """
    for node in nodes(source):
        match node:
            case ast.Attribute(
                value=ast.Name(id="os"), attr="environ" | "getenv" | "putenv" | "environb" as name
            ):
                if file.as_posix() not in table.ENVIRONMENT:
                    yield f"{file}:{node.lineno}: os.{name}; only {', '.join(table.ENVIRONMENT)} may"
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if f"{owner}.{name}" in table.NO_CALLS:
                yield f"{file}:{node.lineno}: {owner}.{name} pickles"
            case ast.ExceptHandler(type=None | ast.Name(id="Exception" | "BaseException")):
                if not file.as_posix().startswith(tuple(table.BOUNDARIES)):
                    yield f"{file}:{node.lineno}: catches everything, and is no process boundary"


def groups_made(file: Path, source: str) -> Iterator[str]:
    """Yields a sentence for each process group that is made or left anywhere but in ``World``."""
    if file.as_posix() == table.SEAM:
        return
    for node in nodes(source):
        match node:
            case ast.Attribute(attr=name) if name in table.GROUPS:
                found = {name}
            case ast.ImportFrom(module=module) if module:
                found = {*(alias.name for alias in node.names), *module.split(".")} & table.GROUPS
            case ast.Import():
                found = {part for alias in node.names for part in alias.name.split(".")} & table.GROUPS
            case _:
                continue
        for name in sorted(found):
            yield f"{file}:{node.lineno}: {name} makes or leaves a process group; only {table.SEAM} may"


def axes_named(file: Path, source: str) -> Iterator[str]:
    """Yields a sentence for each use of the name of an axis in code: texts for users may have them."""
    if file.as_posix() in table.KNOW_AXES or file.parent.as_posix() == table.AXIS_FILES:
        return
    for node in nodes(source):
        match node:
            case (
                ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)) | ast.arg(arg=name)
            ):
                pass
            case ast.Constant(value=str(name)):
                pass
            case _:
                continue
        if name in table.AXES and not (isinstance(node, ast.Constant) and file.as_posix() in table.SAY_AXES):
            yield f"{file}:{node.lineno}: {name} is the name of an axis; ask the layout or its rule instead"


def too_long(file: Path, source: str) -> Iterator[str]:
    """Yields a sentence for each long file and function: a reminder to look whether something in it has no
    name yet.
    """
    lines = source.count("\n")
    if lines > table.LONG_FILE:
        yield f"{file}: {lines} lines"
    for node in statements(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > table.LONG_FUNCTION:
                yield f"{file}:{node.lineno}: {node.name} has {length} lines"


def classes(file: Path, source: str) -> Iterator[tuple[str, str]]:
    """Yields (name, module) of each class in ``source``; who reads it, reads no underscore before a name."""
    yield from (
        (node.name.lstrip("_"), module_name(file))
        for node in statements(source)
        if isinstance(node, ast.ClassDef)
    )


def doubles(
    found: Iterable[tuple[str, str]], allowed: Mapping[str, str], what: str = "a class"
) -> Iterator[str]:
    """Yields a sentence for each name that ``what`` has in several modules or folders, without a line of
    ``allowed``, and for each line that nothing needs.
    """
    homes: dict[str, set[str]] = {}
    for name, home in found:
        homes.setdefault(name, set()).add(home)
    for name, its in sorted(homes.items()):
        if len(its) > 1 and name not in allowed:
            yield f"{name} is {what} in {' and in '.join(sorted(its))}: one word means one thing; rename one"
    for name in allowed:
        if len(homes.get(name, ())) < 2:
            yield f"{name} is no double any more: take its line out of the table"
