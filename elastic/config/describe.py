"""Describes settings to people, in words that ``--help`` and the guide's page of settings share; also makes
that page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from elastic.config.settings import Model, leaves, part_of, section_of
from elastic.config.values import Change

PLAIN = {int: "integer", float: "number", str: "text", Any: "value"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

PAGE = """\
# Settings

Every setting of a job: in `job.toml`, as an option after the file (`--workers.max 8`), or as an argument of `Job`.  This page is what
`elastic settings` prints.  The last column says what happens when a run that has begun is started again with another value:

- **free**: the run goes on.  The setting does not change the weights that the run ends with, except for the two whose rows say so:
  another number of threads or GPUs makes workers of another kind, which may add in another order.
- **branch**: the setting changes the weights from here on.  The run goes on with another value if `elastic train --branch` asks for it.
  Write the new value into the job file, too.
- **refused**: the state of the run does not fit another value, or the value says which run it is."""


def meaning_of(described: Any) -> str:
    """Returns the docstring of a setting or of a section, in one line."""
    text = described.description if isinstance(described, FieldInfo) else described.__doc__
    return " ".join((text or "").split()).replace("``", "`")


def default_of(field: FieldInfo) -> str:
    """Returns the default value as TOML writes it, or "" if the setting is required."""
    return "" if field.is_required() else json.dumps(field.get_default())


def kinds_of(annotation: Any, metadata: Sequence[Any] = ()) -> list[str]:
    """Returns the kinds of value that a setting may have: ``["integer ≥ 1", "`auto`"]``.  A word that stands
    for itself is in backticks.
    """
    match get_origin(annotation):
        case origin if origin is Annotated:
            inner, *metadata = get_args(annotation)
            return kinds_of(inner, metadata)
        case origin if origin in (Union, UnionType):
            return [kind for each in get_args(annotation) for kind in kinds_of(each)]
        case origin if origin is Literal:
            return [f"`{word}`" for word in get_args(annotation)]
        case origin if origin is dict:
            return ["table"]
        case origin if origin is tuple:
            first, *others = get_args(annotation)
            number = "" if others == [...] else f"{1 + len(others)} × "
            return ["list of tables" if section_of(first) else f"list of {number}{kinds_of(first)[0]}"]
    if annotation is bool:
        return ["`true`", "`false`"]
    limits = [limit for each in metadata for limit in getattr(each, "metadata", [each])]
    bounds = [
        f"{sign} {getattr(limit, bound):g}"
        for limit in limits
        for bound, sign in BOUNDS.items()
        if hasattr(limit, bound)
    ]
    return [" ".join([PLAIN[annotation], " and ".join(bounds)]).strip()]


def settings_page(model: Model, change: Callable[[str], Change]) -> str:
    """Returns the page of the guide that lists all settings of ``model``, in markdown.

    ``change`` says of each what another value does to a run that has begun.
    """
    sections: dict[str, list[str]] = {}
    for name, field in leaves(model).items():
        default = "required" if field.is_required() else f"`{default_of(field)}`"
        kinds = " or ".join(kinds_of(field.annotation, field.metadata))
        row = f"| `{name}` | {kinds} | {default} | {meaning_of(field)} | {change(name)} |"
        sections.setdefault(name.rpartition(".")[0], []).append(row)
    head = ["| setting | type | default | what it means | change |", "|---|---|---|---|---|"]
    tables = ["\n".join([*_heading(model, section), *head, *rows]) for section, rows in sections.items()]
    return "\n\n".join([PAGE, *tables]) + "\n"


def _heading(model: Model, section: str) -> list[str]:
    if not section:
        return ["## The job", "", meaning_of(model), ""]
    *outer, name = section.removesuffix("[]").split(".")
    for each in outer:
        model = model.model_fields[each].annotation  # type: ignore[assignment]  # of a section
    field = model.model_fields[name]
    title = f"[[{section[:-2]}]]" if section.endswith("[]") else f"[{section}]"
    return [f"## `{title}`", "", meaning_of(part_of(field.annotation)), ""]
