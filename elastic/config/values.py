"""The types of settings.  Each refuses a value that cannot work, in words that follow the name of the setting
and its value.

Each setting also says what another value does to a run that has begun: ``Free[Positive]``,
``Branch[Number]``, ``Refused[Code]``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, WrapValidator
from pydantic.fields import FieldInfo

from elastic.code.given import MAIN, Given, named
from elastic.code.imports import VARIABLE, did_you_mean, split
from elastic.errors import CodeError
from storage.objects.urls import folder_of

NAME_LETTERS = 200
"""Largest number of letters in the name of a run.  Names of files and shared memory add to it, and may have
255 bytes.
"""

JSON = (str, bool, int, float, list, tuple, dict)
"""Types of values that a job file can have.  Everything else that stands for code is the code itself."""

HIDDEN = "(not shown)"
"""The words in place of a value that may be a secret (:func:`is_secret`)."""
SECRET = re.compile(r"^metrics\.sinks\.|(^|[._-])(key|token|secret|password|credentials?)$", re.IGNORECASE)
"""The names of settings whose values may be secrets."""
SECRET_URL = re.compile(
    r"://[^/?#\s]*:[^/?#\s]*@|[?&]([^=&#\s]*[._-])?(key|token|secret|password|credential|sig|signature)=",
    re.I,
)
"""A URL with a password before its host, or with a query that signs it."""
CERTAIN = re.compile(
    r".*(api|access|secret|private|auth|signing|encryption)[_-]?keys?|.*(password|passwd|passphrase|secret|credential)s?|"
    r"(.*[_-])?pwd|pass|authorization|.*(api|access|auth|hf|hub|bearer|refresh|session|security|github|gitlab|wandb)[_-]?tokens?",
    re.IGNORECASE,
)
"""The names of arguments whose texts are secrets.  A name that merely ends with key or token may be that of a
column, or of a word.
"""
LIKELY = re.compile(r"(?=[A-Za-z+/=]*\d)(?=[0-9+/=]*[A-Za-z])[A-Za-z0-9+/=]{12,}")
"""A run of letters and digits in a text that was drawn at random."""
KNOWN = re.compile(
    r"\b(sk-(proj|ant|or|svcacct|admin)-[\w-]{16,}|sk-[A-Za-z0-9]{32,}|[rs]k_live_\w{16,}|hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{16,})|"
    r"\b(github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.)|"
    r"PRIVATE KEY-----|\b[Bb]earer (?=\S*\d)\S{16,}|(?i:\bauthorization\W{1,4}(basic|bearer|token) "
    r"\S|\bx-api-key: ?\S{8,})|"
    r"://[^/?#\s]*:[^/?#\s]+@|hooks\.slack\.com/\w+/\w|discord(app)?\.com/api/webhooks/\w|webhook\.office\.com/\w|"
    r"(?i:[?&]([^=&#\s]*[._-])?((secret|credential|sig|signature)=[^&#\s]|(key|token)=[^&#\s]{16,}))|"
    r"(?i:(^|[;,\s?&])(password|passwd|pwd|(api|access|account|secret|shared ?access)[ _-]?key)=[\"']?\w)"
)
"""The forms of secrets that are known by themselves: keys of services, headers and URLs that sign in, and
``password=…`` in a text.
"""

T = TypeVar("T")


class Change(StrEnum):
    """The effect of a new value of a setting when a run that has begun is started again."""

    FREE = "free"
    """The run goes on: the setting does not define its trajectory."""
    BRANCH = "branch"
    """The setting changes the weights from here on: another value begins a branch of the run, if the user
    asks for one.
    """
    REFUSED = "refused"
    """The state of the run does not fit another value, or the value says which run it is."""


Free = Annotated[T, Change.FREE]
Branch = Annotated[T, Change.BRANCH]
Refused = Annotated[T, Change.REFUSED]


def change_of(field: FieldInfo) -> Change | None:
    """Returns the change class with which the setting was declared; None for a section, because each of its
    settings has one.
    """
    return next((each for each in field.metadata if isinstance(each, Change)), None)


def change_at(model: type[BaseModel], setting: str) -> Change:
    """Returns the change class of ``setting`` of ``model``.  Its name has dots, and may go on inside a table,
    as ``model_args.dim``.
    """
    name, _, rest = setting.partition(".")
    field = model.model_fields[name]
    change = change_of(field)
    if change is not None:
        return change
    assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel), (
        f"{name} has neither a class nor settings"
    )
    return change_at(field.annotation, rest)


def free_settings(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the settings of ``model`` that are free, in the form that pydantic's ``exclude`` takes; a
    wholly free section is True.
    """
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if change_of(field) is Change.FREE:
            found[name] = True
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            free = free_settings(field.annotation)
            whole = all(free.get(each) is True for each in field.annotation.model_fields)
            found |= {name: whole or free} if free else {}
    return found


def _code(value: Any, check: Callable[[Any], str]) -> str:
    """Returns the name of code.  A function or a class is named, or stays beside its name if it cannot be
    imported.
    """
    if isinstance(value, Given):
        return value
    if callable(value) or (not isinstance(value, JSON) and value is not None):
        return named(value)
    path = check(value)
    try:
        module, _ = split(path)
    except CodeError:
        wrong = next((part for part in re.split("[.:]", path) if part and not part.isidentifier()), "")
        why = f"; {wrong!r} is not a name in Python, so rename this file or folder" if wrong else ""
        raise ValueError(f"must name code as 'package.module:name'{why}") from None
    if module == MAIN:
        raise ValueError(
            "names code of the running script; give the function or class itself, without quotes, or "
            "put it into a module"
        )
    return path


def _code_or_name(value: Any, check: Callable[[Any], str]) -> str:
    if not isinstance(value, str) or ":" in value:
        return _code(value, check)
    if not value.isidentifier():
        raise ValueError("must be a name without spaces and signs, or name code as 'package.module:name'")
    return value


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
    """Refuses ``true`` and text, which pydantic would accept as numbers.  The command line has already read
    its numbers.
    """
    if isinstance(value, bool | str):
        raise ValueError("must be a whole number")
    return value


def _number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("must be a finite number")
    return value


def _share(value: object, check: Callable[[object], float]) -> float:
    try:
        return check(value)
    except ValidationError:
        raise ValueError("must be a number more than 0 and less than 1") from None


def checkpoint_word(text: str) -> str:
    """Returns ``text``, which names a checkpoint as :func:`checkpoint_of` reads it, or nothing."""
    try:
        if text:
            checkpoint_of(text)
    except ValueError as error:
        raise ValueError(f"{error}{checkpoint_meant(text)}") from None
    return text


def checkpoint_meant(text: str) -> str:
    """Returns the end of a sentence about ``text``, which is no ``run@word``, that names the one that was
    probably meant; or "".
    """
    run, at, _ = text.partition("@")
    return did_you_mean(text, [f"{run}@latest", f"{run}@best"] if run and at else ["latest"])


def checkpoint_of(text: str) -> tuple[str, str]:
    """Returns the run and the word of ``run@word``: ``latest``, ``best``, a step, or a step and a generation
    with a dot between them.

    Raises :class:`ValueError` for another text.
    """
    run, _, word = text.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9._-]+@(latest|best|\d+(\.\d+)?)", text):
        raise ValueError(
            "must name a checkpoint of a run in the same bucket, as 'run@latest', 'run@best' or 'run@400'"
        )
    return run, word


def same_checkpoint(asked: str, found: str) -> bool:
    """Returns whether ``found``, which names a checkpoint exactly, may be what ``asked`` stood for."""
    if not asked or not found:
        return asked == found
    (run, word), (there, exact) = checkpoint_of(asked), checkpoint_of(found)
    return run == there and word in ("latest", "best", exact, exact.partition(".")[0])


PROFILED = 50
"""Largest number of steps of a profile."""


def step_range(text: str) -> str:
    """Returns ``text``, which names steps as :func:`steps_of` reads them."""
    if not re.fullmatch(r"(\d+(-\d+)?)?", text) or (text and not steps_of(text)) or 0 in steps_of(text):
        raise ValueError("must be a step, as '7', or the first and the last of several, as '5-7'")
    if len(steps_of(text)) > PROFILED:
        raise ValueError(
            f"has {len(steps_of(text))} steps, but a profile can hold at most {PROFILED}; name fewer steps"
        )
    return text


def steps_of(text: str) -> range:
    """Returns the steps that ``text`` names: ``7`` is one, ``5-7`` are three, and nothing is none."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1) if text else range(0)


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
"""The units of a time that is written as text, in seconds."""


def duration(text: str) -> str:
    """Returns ``text``, which is a time as :func:`seconds_of` reads it, or nothing."""
    if text and (not re.fullmatch(r"\d+(\.\d+)?[smhd]", text) or not 0 < seconds_of(text) < math.inf):
        raise ValueError("must be a time with its unit (s, m, h or d), as '24h', '90m' or '7d'")
    return text


def seconds_of(text: str) -> float:
    """Returns the seconds in a time such as ``90m``; 0 for nothing."""
    return float(text[:-1]) * UNITS[text[-1]] if text else 0.0


def place(url: str) -> str:
    """Returns a path as absolute, since workers run in other folders.  A URL stays as it is."""
    if not url.strip():
        raise ValueError("must be a folder, or a URL such as s3://bucket/prefix")
    folder = folder_of(url)
    return url if folder is None else os.path.abspath(os.path.expanduser(folder))


def same_place(one: str, other: str) -> bool:
    """Returns whether two places, as :func:`place` returns them, are one and the same.

    Links are followed on this machine, and only to compare: a setting keeps them, since they may lead
    elsewhere on another node.
    """
    return _followed(one) == _followed(other)


def _followed(where: str) -> str:
    return where.rstrip("/") if folder_of(where) is None else os.path.realpath(where)


def literal_secrets(setting: str, value: object) -> Iterator[str]:
    """Yields the names of the arguments in a table, or in a value, that are secrets and not the names of
    environment variables.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from literal_secrets(f"{setting}.{key}", each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from literal_secrets(setting, each)
    elif isinstance(value, str) and _is_literal_secret(setting.rpartition(".")[2], value):
        yield setting


def _is_literal_secret(name: str, value: str) -> bool:
    if not value or VARIABLE.fullmatch(value):
        return False
    if KNOWN.search(value):
        return True
    if CERTAIN.fullmatch(name):
        # "<s>" is a token of text, and the others are places
        return value[0].isalnum() and "://" not in value
    return bool(SECRET.search(name) and LIKELY.search(value))


def stands_for_secret(setting: str, value: object) -> bool:
    """Returns whether a value is the variable of a secret: another value of it is no other job.

    In ``model_args`` the secret itself counts as its variable, since runs of older releases were begun with
    secrets there.
    """
    name = setting.rpartition(".")[2]
    if not isinstance(value, str):
        return False
    if VARIABLE.fullmatch(value):
        return bool(SECRET.search(name) or CERTAIN.fullmatch(name))
    return setting.startswith("model_args.") and _is_literal_secret(name, value)


def without_secrets(setting: str, value: Any, hides: Callable[[str, object], bool] | None = None) -> Any:
    """Returns a value with the same words in place of each in it that ``hides``, by default of each that may
    be a secret.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(f"{setting}.{key}", each, hides) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(setting, each, hides) for each in value]
    return HIDDEN if (hides or is_secret)(setting, value) else value


def is_secret(setting: str, value: object) -> bool:
    """Returns whether a text may be a secret, by the name of its setting, or as a URL; a table or a list, if
    something in it may be one.

    What others may see, as a page of a run or a command to paste, has no such value.
    """
    if isinstance(value, Mapping):
        return any(is_secret(f"{setting}.{key}", each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return any(is_secret(setting, each) for each in value)
    if not isinstance(value, str) or VARIABLE.fullmatch(value):
        return False
    return bool(
        SECRET.search(setting)
        or SECRET_URL.search(value)
        or KNOWN.search(value)
        or CERTAIN.fullmatch(setting.rpartition(".")[2])
    )


def shown(setting: str, value: object) -> str:
    """Returns a value as sentences have it, or words in its place if it may be a secret."""
    return HIDDEN if is_secret(setting, value) else repr(value)


def own_folder(path: str) -> str:
    """Returns a path as absolute, and nothing for nothing.  Refuses a URL."""
    return _own(path, "a folder")


def own_file(path: str) -> str:
    """Returns a path as :func:`own_folder` does."""
    return _own(path, "a file")


def _own(path: str, what: str) -> str:
    if not path.strip():
        return ""
    if (folder := folder_of(path)) is None:
        raise ValueError(f"must be {what} of a local disk, not a URL")
    return os.path.abspath(os.path.expanduser(folder))


def fault_word(vocabulary: Literal["OWN_KINDS", "Point"]) -> Callable[[str], str]:
    """Returns a check that a word belongs to ``vocabulary`` of ``elastic/protocol/faults.py``."""

    def check(word: str) -> str:
        from elastic.protocol import faults

        known = list(getattr(faults, vocabulary))
        if word not in known:
            raise ValueError(f"must be one of {', '.join(known)}{did_you_mean(word, known)}")
        return word

    return check


Auto = Literal["auto"]
Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[Whole, Field(ge=1)]
Seconds = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Share = Annotated[Number, Field(gt=0, lt=1), WrapValidator(_share)]
"""A setting that takes words beside it says its whole range: of two limits pydantic names only the one that a
value breaks.
"""
Code = Annotated[str, WrapValidator(_code)]
CodeOrName = Annotated[str, WrapValidator(_code_or_name)]
