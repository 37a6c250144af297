"""A job as the TOML file that a user would write: the product only reads them."""

from __future__ import annotations

import json
from typing import Any

from elastic.job import Job


def to_toml(job: Job) -> str:
    """Every setting written out.  Raises TypeError for a None inside ``args``: TOML has none."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in job.model_dump(mode="json").items())


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return _quoted(value)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{_quoted(key)} = {_toml(item)}" for key, item in value.items()) + "}"
        case _:
            raise TypeError(f"{value!r} cannot be written as TOML")


def _quoted(text: str) -> str:
    """JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
