"""Writes a job as the TOML file that a user would write, because the product only reads such files."""

from __future__ import annotations

import json
from typing import Any

from elastic.job import Job


def to_toml(job: Job) -> str:
    """Returns the file with every setting.  Raises TypeError for a None inside ``args``, which TOML does not
    have.
    """
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
    """Returns a value as TOML.  JSON's escapes are TOML's, except that TOML wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
