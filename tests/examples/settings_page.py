"""``python -m tests.examples.settings_page > examples/guide/settings.md``: the page of all settings, made of ``Job`` and its docstrings."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from elastic import job as declared
from elastic.job import Fault, Job

HEAD = """# Settings

<!-- made by `python -m tests.examples.settings_page`; a test compares it with the code -->

A job is a TOML file.  Each setting of it is also an option, `--section.option value`, of every command that takes a job, and a keyword of
`elastic.Job(...)`.  A value that cannot work is refused before any worker starts; the message names the setting, its value and the fix.

**Change** says what happens when a run that has begun is resumed with another value:

- *free*: the run goes on; its weights do not depend on it.
- *new run*: it is another trajectory and is refused; give the run another name.

`data.args` is free as long as the samples stay the same, which the dataset's `fingerprint()` says.
"""


def page() -> str:
    """Return the page."""
    sections = [(name, field.annotation) for name, field in Job.model_fields.items() if _is_section(field.annotation)]
    tables = [_table("The job", "", Job), *(_table(f"`[{name}]`", f"{name}.", section) for name, section in sections)]
    return "\n".join([HEAD, *tables, _table("`[[faults]]`, for tests of your own", "faults[].", Fault)])


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _table(title: str, prefix: str, model: type[BaseModel]) -> str:
    about = f"{_cell(inspect.getdoc(model) or '')}\n\n" if prefix else ""
    return f"## {title}\n\n{about}| setting | value | default | change | meaning |\n|---|---|---|---|---|\n" + "".join(_rows(prefix, model))


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    meanings = docstrings(model)
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            continue
        default = "required" if field.default is PydanticUndefined else f"`{json.dumps(_plain(field.default), ensure_ascii=False)}`"
        change = "new run" if _defines(f"{prefix}{name}") else "free"
        value = _kind(field.annotation, field.metadata)
        yield f"| `{prefix}{name}` | {value} | {default} | {change} | {_cell(meanings.get(name, ''))} |\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _kind(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Return what the value of a setting may be, in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0], (*parts[1:], *limits))
    if origin in (Union, UnionType):
        return " or ".join(map(_kind, parts))
    if origin is Literal:
        return " or ".join(f'`"{part}"`' for part in parts)
    if origin is tuple:
        return "a list of tables" if Ellipsis in parts else f"{len(parts)} × {_kind(parts[0])}"
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}
    bounds = [f"{sign} {getattr(limit, name):g}" for limit in _flat(limits) for name, sign in _BOUNDS.items() if hasattr(limit, name)]
    return " ".join([words[origin or annotation], *(["and".join(f" {each} " for each in bounds).strip()] if bounds else [])])


_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _flat(limits: Sequence[Any]) -> Iterator[Any]:
    """Yield the limits, those inside of a ``Field`` too."""
    for limit in limits:
        yield from limit.metadata if isinstance(limit, FieldInfo) else (limit,)


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each setting of ``model``, by name."""
    tree = ast.parse(inspect.getsource(declared))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    found = {}
    for setting, after in pairwise(body):
        match setting, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def _defines(setting: str) -> bool:
    """Return whether ``setting`` defines the trajectory."""
    node: Any = Job(name="n", bucket="/b", optim={"kind": "m:R", "args": {"a": 1}}).trajectory()  # type: ignore[arg-type]
    for part in setting.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


if __name__ == "__main__":
    print(page(), end="")
