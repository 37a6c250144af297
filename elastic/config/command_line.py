"""The settings of a job on a command line: every setting is an option, ``--section.option value``.

The options follow from the declarations in ``elastic/job.py``, and a key of a free table is one, too
(``--model-args.dim``).  Values are read as in TOML (``3``, ``true``, ``[0.9, 0.95]``), lists and tables also
as in JSON, or else as text, so that users need not quote twice. One word for a list is a list of one.
"""

from __future__ import annotations

import json
import re
import tomllib
from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from elastic.config.describe import default_of, kinds_of, meaning_of
from elastic.config.settings import COMMAND_LINE, Model, annotation_of, leaves, option_of, unknown
from elastic.config.values import is_secret
from elastic.errors import JobError

FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
VALUE = re.compile(r"$|[^-]|-$|-\.?\d|-[^=]* ", re.DOTALL)
"""A word that begins like this is a value, and no option: it may be a negative number, or have a space."""


@dataclass(frozen=True)
class Options:
    """The settings that a line gives, and the option and the words that gave each."""

    settings: dict[str, Any] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)

    def to_show(self) -> list[str]:
        """Returns the words that give the same settings.  Others may see them: an option whose value may be a
        secret has no value.
        """
        shown = (
            words[:1] if is_secret(name, self.settings[name]) else words for name, words in self.words.items()
        )
        return [word for words in shown for word in words]


def read_options(words: Sequence[str], model: Model) -> dict[str, Any]:
    """Returns the settings that the options give: ``["--workers.max", "3", "--seed=1"]`` becomes
    ``{"workers.max": 3, "seed": 1}``.

    Raises :class:`JobError`, also for a word that gives no setting.
    """
    options, rest = take_options(words, model)
    if rest:
        # an option that is unknown has taken no words
        word = min(rest, key=lambda each: not each.startswith("--"))
        raise JobError(f"{COMMAND_LINE}: {no_setting(word, model)}")
    return options.settings


def take_options(
    words: Sequence[str], model: Model, own: Mapping[str, bool] | None = None
) -> tuple[Options, list[str]]:
    """Returns the settings of ``model`` in a line, and the words that give none.

    ``own`` are the options of the command itself, and whether each takes a value.  One that has the name of a
    setting, such as ``--seed`` of ``elastic chaos``, is an option of the command.  Raises :class:`JobError`
    for a setting without a value, and for an option of the command that has a setting in the place of its
    value.
    """
    options, rest, waiting, own = Options(), list[str](), deque(words), own or {}
    while waiting:
        word = waiting.popleft()
        typed, equals, text = word.partition("=")
        option, name = typed.replace("_", "-"), _name(typed)
        if option in own:
            rest.append(f"{option}{equals}{text}")
            continue
        kind, flag = _kind(name, model), True
        if kind is None and not equals and _kind(name.removeprefix("no_"), model) is bool:
            kind, flag, name = bool, False, name.removeprefix("no_")
        if kind is None or not word.startswith("--"):
            rest.append(word)
            continue
        if rest and own.get(rest[-1]):
            raise JobError(f"{COMMAND_LINE}: {rest[-1]} has no value; write '{rest[-1]} value'")
        given, most = [text] * bool(equals), len(waiting) if get_origin(kind) is tuple else int(flag)
        while waiting and not equals and len(given) < most and VALUE.match(waiting[0]):
            given.append(waiting.popleft())
        if not given and kind is not bool:
            raise JobError(f"{COMMAND_LINE}: --{name} has no value; write '--{name} value'")
        options.settings[name] = _value(given, kind) if given else flag
        options.words[name] = [option, *given]
    return options, rest


def no_setting(word: str, model: Model, own: Iterable[str] = ()) -> str:
    """Returns the sentence for a word that gives no setting of ``model``, and is none of the ``own`` options
    of the command.
    """
    if not word.startswith("--"):
        return f"{word!r} is no option; write an option as '--section.option value', say '--workers.max 3'"
    typed = word.partition("=")[0]
    return unknown(_name(typed), model, typed, also=map(_name, own))


def list_settings(parser: ArgumentParser, model: Model) -> None:
    """Adds the settings to the help of ``parser``, in groups of their sections."""
    groups = dict[str, Any]()
    for name, setting in leaves(model).items():
        section = name.rpartition(".")[0]
        if section.endswith("[]"):  # a list is one option, so the settings of its items have none
            continue
        if section not in groups:
            about = meaning_of(model.model_fields[section].annotation) if section else None
            groups[section] = parser.add_argument_group(
                f"settings in [{section}]" if section else "settings", about
            )
        several = get_origin(setting.annotation) is tuple
        kinds = ["value"] if several else kinds_of(setting.annotation, setting.metadata)
        metavar = "|".join(kind.strip("`") if "`" in kind else kind.split()[0].upper() for kind in kinds)
        default = f"default: {default_of(setting)}" if default_of(setting) else "required"
        about = f"{meaning_of(setting)} ({default})".replace("%", "%%")
        number = "+" if several else "?" if setting.annotation is bool else None
        groups[section].add_argument(option_of(name), metavar=metavar, help=about, nargs=number)


def _name(option: str) -> str:
    """Returns the name of the setting that an option stands for."""
    return option.removeprefix("--").replace("-", "_")


def _kind(name: str, model: Model) -> Any:
    """Returns the type of a setting that an option can give: ``Any`` for a key of a free table, None if there
    is no such setting.
    """
    if name in (declared := leaves(model)) and "[" not in name:
        return declared[name].annotation
    return Any if annotation_of(model, name) is Any else None


def _value(words: Sequence[str], kind: Any) -> Any:
    read = words if kind is str else [_read(word, kind) for word in words]
    value = read[0] if len(read) == 1 else list(read)
    if get_origin(kind) is tuple and not isinstance(value, list) and not _is_misread(value, kind):
        return [value]
    return value


def _read(text: str, kind: Any) -> Any:
    """Returns the value of a word as TOML reads it, and also accepts ``.5``, ``007`` and ``yes``, which TOML
    does not know.
    """
    value = _literal(text)
    if kind is bool:
        return FLAGS.get(str(value).lower(), value)
    if isinstance(value, str) and kind is not Any:
        for number in (int, float):
            with suppress(ValueError):
                return number(text)
    return value


def _literal(text: str) -> Any:
    """Returns the value as TOML reads it, or a list or a table as JSON has it, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(text), list | dict):
                return value
        return text


def _is_misread(value: Any, kind: Any) -> bool:
    """Returns whether the value of a list is a text that was meant as several values, and could not be read
    as such.
    """
    return isinstance(value, str) and (
        str not in get_args(kind) or f"{value.strip()[:1]}{value.strip()[-1:]}" in ("[]", "()")
    )
