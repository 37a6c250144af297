"""A parser of words as argparse has it, with clear sentences for a line that cannot be read.  It knows no settings of jobs."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from elastic.errors import JobError
from elastic.imports import did_you_mean

_REQUIRED = "the following arguments are required: "
"""The words with which argparse says what is missing."""
KINDS = {"int": "whole number", "float": "number"}
"""The names of types for users."""
EXAMPLES = {"job": "job.toml", "step": "400", "to": "folder", "source": "texts", "destination": "tokens", "dataset": "tokens"}
"""Words of an example, by the argument or the kind of value in whose place they are."""
NUMBER = re.compile(r"^-\.?\d")
"""A word that begins like this is a negative number, not an option.  argparse itself does not know ``-1e-3``."""


class PlainParser(argparse.ArgumentParser):
    """The parser of a command that takes no settings.  Options are never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "conflict_handler": "resolve", **options})
        self._negative_number_matcher = NUMBER

    def error(self, message: str) -> NoReturn:
        """Ends the command with the exit code of :class:`JobError` and one sentence, in place of argparse's usage."""
        said = self._said(message)
        more = f"; write `{self._example()}`" if "needs" in said else ""
        self.exit(JobError.exit_code, f"{self.prog}: {said}{more} (`{self.prog} --help` tells more)\n")

    def _said(self, message: str) -> str:
        """Returns what argparse says, in plain words."""
        if message.startswith(_REQUIRED):
            names = message.removeprefix(_REQUIRED).split(", ")
            about = {name: action.help for action in self._actions for name in action.option_strings}
            return f"it needs {' and '.join(f'{name} ({about[name]})' if name in about else name for name in names)}"
        if found := re.match(r"argument (\S+): invalid choice: '(.*?)'", message):
            known = [name for action in self._actions for name in action.choices or ()]
            return f"there is no {found[1]} {found[2]!r}; there are {', '.join(known)}{did_you_mean(found[2], known)}"
        if found := re.match(r"argument (\S+): invalid (\w+) value: (.*)", message):
            return f"{found[1]} = {found[3]} must be a {KINDS.get(found[2], found[2])}"
        if found := re.match(r"argument (\S+): expected (.*)", message):
            return f"{found[1]} needs {found[2].replace('argument', 'value')}"
        return message

    def _example(self) -> str:
        """Returns a line with all that the command needs."""
        words = [self.prog]
        for action in self._actions:
            name = str(action.metavar or action.dest)
            word = next(iter(action.choices), name) if action.choices else EXAMPLES.get(name.lower(), name)
            if action.option_strings and action.required:
                words += [action.option_strings[0], *[word] * (action.nargs if isinstance(action.nargs, int) else 1)]
            elif not action.option_strings and action.required:
                words.append(word)
        return " ".join(words)

    def own_options(self) -> list[str]:
        """Returns the options that are not settings."""
        return [*self._option_string_actions]
