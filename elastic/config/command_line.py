"""The command line: every setting of a job is an option, in addition to the command's own options.

argparse does the work.  The options, their groups, help and defaults come from the declarations in ``elastic/job.py``.  This file adds what
argparse lacks: clear sentences for a line that cannot be read, options for the keys of free tables (``--model-args.dim``), and values that
are read as in TOML (``3``, ``true``, ``[0.9, 0.95]``), lists and tables also as in JSON, or else as text, so that users need not quote
twice.  One word for a list is a list of one.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from elastic.config.describe import default_of, kinds_of, meaning_of
from elastic.config.plain_line import PlainParser
from elastic.config.settings import COMMAND_LINE, Model, annotation_of, leaves, unknown
from elastic.config.values import is_secret
from elastic.errors import JobError

FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def read_options(arguments: Sequence[str], model: Model) -> dict[str, Any]:
    """Returns the settings that the options give: ``["--workers.max", "3", "--seed=1"]`` becomes ``{"workers.max": 3, "seed": 1}``.

    Raises :class:`JobError`.
    """
    settings: dict[str, Any] = Parser(settings=model, add_help=False).parse_args(arguments).settings
    return settings


class Parser(PlainParser):
    """The parser of one command that takes settings.

    ``settings`` is the model whose settings these are.  The result has ``settings``, the given values by setting, and
    ``line``, the option and the words that gave each, by setting too.  ``listed`` says that the help lists them.
    ``several`` names the positional argument that also takes words after an option.  ``beside`` holds the other commands; an option of one
    of them is not reported as a misspelt setting.

    If an option of the command has the name of a setting, such as ``--seed`` of ``elastic chaos``, the option of the command counts.
    """

    def __init__(
        self,
        *,
        settings: Model,
        listed: bool = False,
        several: str = "",
        beside: Mapping[str, argparse.ArgumentParser] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(exit_on_error=False, **options)
        self._model, self._several, self._beside = settings, several, beside or {}
        self._listed, self._complete = listed, False
        self.set_defaults(settings={}, line={})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses as argparse does.  Raises :class:`JobError` for an unknown word or a missing value."""
        words = [_dashed(word) for word in args]
        self._complete_settings()
        self._add_keys(self._model, words)
        try:
            known, rest = super().parse_known_args(words, namespace)
        except argparse.ArgumentError as error:
            action = self._option_string_actions.get(error.argument_name or "")
            if isinstance(action, _Setting):
                raise JobError(f"{COMMAND_LINE}: --{action.dest} has no value; write '--{action.dest} value'") from None
            self.error(str(error))
        unread = [word for word in rest if word.startswith("--") and word != "--"]
        if rest and self._several and not unread:
            getattr(known, self._several).extend(rest)
        elif rest:
            raise JobError(f"{COMMAND_LINE}: {self._refusal(self._model, _as_typed((unread or rest)[0], args))}")
        return known, []

    def format_help(self) -> str:
        self._complete_settings()
        return super().format_help()

    def own_options(self) -> list[str]:
        return [option for option, action in self._option_string_actions.items() if not isinstance(action, _Setting)]

    def _refusal(self, model: Model, word: str) -> str:
        if not word.startswith("--"):
            return f"{word!r} is no option; write '--section.option value', say '--workers.max 3'"
        typed = word.partition("=")[0]
        option = _dashed(typed)
        for other in self._beside.values():
            if isinstance(other, PlainParser) and option in other.own_options():
                return f"'{self.prog}' has no option '{option}', unlike '{other.prog}'; leave it out"
        if option == "--dry-run":
            return f"'{self.prog}' has no option '--dry-run'; `elastic estimate` checks a job and starts nothing"
        own = [_name(each) for each in self.own_options() if each.startswith("--")]
        return unknown(_name(option), model, typed, also=own)

    def _complete_settings(self) -> None:
        """Adds the options of the settings, after the command's own options, which count."""
        if not self._complete:
            self._complete = True
            self._add_settings(self._model)

    def _add_settings(self, model: Model) -> None:
        groups: dict[str, Any] = {}
        for name, field in leaves(model).items():
            section = name.rpartition(".")[0]
            if section.endswith("[]"):  # a list is one option, so the settings of its items have none
                continue
            if self._listed and section not in groups:
                about = meaning_of(model.model_fields[section].annotation) if section else None
                groups[section] = self.add_argument_group(f"settings in [{section}]" if section else "settings", about)
            self._add_setting(groups.get(section, self), name, field, self._listed)

    def _add_setting(self, group: Any, name: str, field: FieldInfo, listed: bool) -> None:
        option = name.replace("_", "-")
        if f"--{option}" in self._option_string_actions:  # an option of the command
            return
        about: dict[str, Any] = {"action": _Setting, "annotation": field.annotation, "dest": name, "help": argparse.SUPPRESS}
        if field.annotation is bool:
            group.add_argument(f"--no-{option}", nargs=0, const=False, **about)
            about |= {"nargs": "?", "const": True}
        elif get_origin(field.annotation) is tuple:
            about |= {"nargs": "+"}
        if listed:
            kinds = ["value"] if about.get("nargs") == "+" else kinds_of(field.annotation, field.metadata)
            metavar = "|".join(kind.strip("`") if "`" in kind else kind.split()[0].upper() for kind in kinds)
            default = f"default: {default_of(field)}" if default_of(field) else "required"
            about |= {"metavar": metavar, "help": f"{meaning_of(field)} ({default})".replace("%", "%%")}
        group.add_argument(f"--{option}", **about)

    def _add_keys(self, model: Model, words: Sequence[str]) -> None:
        """Adds an option for each key of a free table in the line; these keys are not declared anywhere."""
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in self._option_string_actions and annotation_of(model, _name(option)) is Any:
                self._add_setting(self, _name(option), FieldInfo(annotation=Any), listed=False)


class _Setting(argparse.Action):
    """The option of one setting.  ``annotation`` is the setting's type, which decides how the words are read."""

    def __init__(self, option_strings: Sequence[str], dest: str, annotation: Any = None, **options: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **options)
        self.annotation = annotation

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        words = [word for word in (values if isinstance(values, list) else [values]) if isinstance(word, str)]
        read = words if self.annotation is str else [_read(word, self.annotation) for word in words]
        value = self.const if not read else read[0] if len(read) == 1 else read
        if get_origin(self.annotation) is tuple and not isinstance(value, list) and not _is_misread(value, self.annotation):
            value = [value]
        namespace.settings = namespace.settings | {self.dest: value}
        namespace.line = namespace.line | {self.dest: [option_string, *words]}


def words_to_show(known: argparse.Namespace) -> list[str]:
    """Returns the words of the line that gave the settings.  Others may see them: an option whose value may be a secret has none."""
    return [word for name, words in known.line.items() for word in (words[:1] if is_secret(name, known.settings[name]) else words)]


def _dashed(word: str) -> str:
    """Returns the word with dashes in the name of an option: ``--checkpoint.save_every`` and ``--checkpoint.save-every`` are the same."""
    option, equals, value = word.partition("=")
    return f"{option.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _as_typed(word: str, args: Sequence[str]) -> str:
    """Returns the word of the line that :func:`_dashed` made ``word`` of."""
    return next((typed for typed in args if _dashed(typed) == word), word)


def _name(option: str) -> str:
    """Returns the name of the setting that an option stands for."""
    return option.removeprefix("--").replace("-", "_")


def _read(text: str, annotation: Any) -> Any:
    """Returns the value of a word as TOML reads it, and also accepts ``.5``, ``007`` and ``yes``, which TOML does not know."""
    value = _literal(text)
    if annotation is bool:
        return FLAGS.get(str(value).lower(), value)
    if isinstance(value, str) and annotation is not Any:
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
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


def _is_misread(value: Any, annotation: Any) -> bool:
    """Returns whether the value of a list is a text that was meant as several values, and could not be read as such."""
    return isinstance(value, str) and (str not in get_args(annotation) or f"{value.strip()[:1]}{value.strip()[-1:]}" in ("[]", "()"))
