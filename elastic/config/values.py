"""What the value of one setting may be: each refuses what cannot work, in words that follow the setting and its value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from elastic.errors import CodeError
from elastic.imports import split
from storage.objects.urls import folder_of

NAME_LETTERS = 200
"""Of a run, which with a few more is the name of files and segments: 255 bytes at most."""


def _code(path: str) -> str:
    try:
        split(path)
    except CodeError:
        raise ValueError("must name code as 'package.module:name'") from None
    return path


def folder_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or set(name) == {"."}:
        raise ValueError("must be a legal folder name: letters, digits, '.', '_' and '-' only")
    if len(name) > NAME_LETTERS:
        raise ValueError(f"must have {NAME_LETTERS} letters or fewer: it is part of names of files")
    return name


def interface_name(name: str) -> str:
    if not re.fullmatch(r"[^/\s]{1,15}", name):
        raise ValueError("must be an interface's name, 1 to 15 characters")
    return name


def _whole(value: object) -> object:
    """``true`` is no number, nor is text; a command line's number is one by now."""
    if isinstance(value, bool | str):
        raise ValueError("must be a whole number")
    return value


def _number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("must be a finite number")
    return value


def place(url: str) -> str:
    """Workers run in other folders: a path is made absolute where the job is read."""
    if not url.strip():
        raise ValueError("must be a folder, or a URL such as s3://bucket/prefix")
    folder = folder_of(url)
    return url if folder is None else os.path.abspath(os.path.expanduser(folder))


def fault_word(vocabulary: Literal["OWN_KINDS", "Point"]) -> Callable[[str], str]:
    def check(word: str) -> str:
        from elastic.sim import faults  # only jobs with faults need the simulator's vocabulary

        known = list(getattr(faults, vocabulary))
        if word not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return word

    return check


Auto = Literal["auto"]
Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[Whole, Field(ge=1)]
Seconds = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Code = Annotated[str, AfterValidator(_code)]
