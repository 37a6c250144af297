"""Commands, and the lines that name them.

A function is a command if it is decorated with :func:`command`.  Its parameters before the ``/`` are the
arguments of a line, and those after it are options; an option without a default must be given.  :data:`WORDS`
says how the words of each type are read.  The first argument may be a ``Job``, which the line names by its
job file, or the :class:`JobFile` itself; then the line may also give settings of the job.  The docstring has
a line for each parameter, ``name -n METAVAR: meaning``, after its first paragraph; a job needs no such line.

Signatures and docstrings are read from the sources, and a command is imported when it runs: neither help nor
a mistake in a line waits for Ray or PyTorch.  argparse reads the words of a command; a line that cannot be
read is told in a clear sentence.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from actors.cli.job_file import JobFile
from elastic.code.imports import did_you_mean, load
from elastic.errors import JobError

MODULES = (
    "train_command",
    "branch_commands",
    "run_commands",
    "chaos_command",
    "report_command",
    "replay_command",
    "compute_commands",
    "owed_command",
    "checkpoint_commands",
    "plain_commands",
)
"""The modules that have commands, in the order of the help."""
GROUPS = {
    "data": "Prepares datasets and looks at them.",
    "checkpoint": "Looks at the checkpoints of a run, and deletes some.",
}
"""The first words of commands that have two, and what such commands do."""
LISTS = "train"
"""The command whose help lists the settings of a job."""
Pair = Sequence[str]
"""The type of an option with two words."""
WORDS: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"type": int},
    "float": {"type": float},
    "Path": {"type": Path},
    "Pair": {"nargs": 2},
    "Sequence[str]": {"nargs": "+"},
    "list[str]": {"action": "append"},
}
"""The options of argparse by which a parameter of a type is read.  A list is an option that may be repeated;
all others are texts.
"""
PARAMETER = re.compile(r"^(\w+)(?: (-\w))?(?: ([\w.@]+))?: (.*(?:\n +.*)*)", re.MULTILINE)
"""The line of a docstring that tells what a parameter means."""
REQUIRED = "the following arguments are required: "
"""The words with which argparse says what is missing."""
KINDS = {"int": "whole number", "float": "number"}
"""The names of types for users."""
EXAMPLES = {
    "job": "job.toml",
    "step": "400",
    "to": "folder",
    "source": "texts",
    "destination": "tokens",
    "dataset": "tokens",
}
"""The words of an example, each by the argument or the kind of value that it stands for."""
READS: dict[str, Sequence[str]] = {}
"""The settings that each command reads from the job file of a run, even if other settings in the file have
mistakes, by the name of the command.
"""

Function = TypeVar("Function", bound=Callable[..., int | None])


def command(name: str, reads: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Declares that a function is the command ``name``, which reads the settings ``reads``.  The function
    returns its exit code, or nothing for 0.
    """
    READS[name] = reads
    return lambda function: function


@functools.cache
def commands() -> dict[str, tuple[str, Callable[..., int | None]]]:
    """Returns every command by its name: its place, as ``package.module:name``, and a function with its
    signature and its docstring.

    The function does nothing, as it is made without an import.
    """
    found = {}
    for module in MODULES:
        for node in ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")).body:
            match node:
                case ast.FunctionDef(
                    decorator_list=[ast.Call(ast.Name("command"), [ast.Constant(str(name)), *_])]
                ):
                    made = dict[str, Any]()
                    node.decorator_list, node.body = [], node.body[:1]  # only the docstring
                    exec(compile(ast.Module([node], []), f"{module}.py", "exec"), made)
                    found[name] = f"{__package__}.{module}:{node.name}", made[node.name]
    return found


def read(words: Sequence[str]) -> tuple[JobFile | None, Callable[[], int]]:
    """Returns the job file that a line names, and its command, which returns the exit code.

    Raises :class:`JobError` for a word that is neither the command's own nor a setting, and
    :class:`SystemExit` after help, and for another line that cannot be read.
    """
    name = next(
        (name for name in (" ".join(words[:2]), *words[:1]) if name in commands()), ""
    ) or _only_listed(words)
    from elastic.config.command_line import list_settings, take_options
    from elastic.job import Job

    place, declared = commands()[name]
    words = words[1 + name.count(" ") :]
    file: JobFile | None = None
    parser, parameters = parser_of(name, declared), inspect.signature(declared).parameters
    kinds = {key: each.annotation for key, each in parameters.items() if each.kind is each.POSITIONAL_ONLY}
    if of_job := any(kind.startswith("Job") for kind in kinds.values()):
        settings, words = take_options(words, Job, _options(declared))
        if name == LISTS and {"-h", "--help"}.intersection(words):
            parser.epilog, parser.usage = (
                None,
                f"{' '.join(parser.format_usage().split()[1:])} [--section.option value ...]",
            )
            list_settings(parser, Job)
    known, rest = parser.parse_known_args(words)
    given = [vars(known).pop(key) for key in kinds]
    unread = [word for word in rest if word.startswith("-")]
    if "Sequence[str]" in [*kinds.values()][-1:] and not unread:  # argparse stops to take them at an option
        given[-1], rest = [*given[-1], *rest], []
    if rest and not of_job:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        raise JobError(f"command line: {_refusal((unread or rest)[0], name)}")
    if of_job and given[0] is not None:
        file = given[0] = JobFile(given[0], settings)
    elif of_job and settings.words:
        raise JobError(
            f"command line: {' '.join(settings.to_show())} has no effect without a job file; name a job file"
        )

    def run() -> int:
        function = load(place)
        if file is not None and "Job" in kinds.values():
            given[0] = file.of_run(*READS[name])
        return function(*given, **vars(known)) or 0

    return file, run


class Parser(argparse.ArgumentParser):
    """The parser of argparse, without abbreviations, that ends the command with one sentence for a line that
    cannot be read.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._negative_number_matcher = re.compile(r"^-\.?\d")  # argparse itself does not know -1e-3

    def error(self, message: str) -> NoReturn:
        """Ends the command with the exit code of :class:`JobError` and one sentence, in place of argparse's
        usage.
        """
        said = self._said(message)
        more = f"; write `{self._example()}`" if "needs" in said else ""
        self.exit(JobError.exit_code, f"{self.prog}: {said}{more} (`{self.prog} --help` tells more)\n")

    def _said(self, message: str) -> str:
        """Returns what argparse says, in plain words."""
        if message.startswith(REQUIRED):
            names = message.removeprefix(REQUIRED).split(", ")
            about = {name: action.help for action in self._actions for name in action.option_strings}
            return (
                "it needs "
                f"{' and '.join(f'{name} ({about[name]})' if name in about else name for name in names)}"
            )
        if found := re.match(r"argument (\S+): invalid choice: '(.*?)'", message):
            known = [name for action in self._actions for name in action.choices or ()]
            elsewhere = [name for name in commands() if found[2] in name.split()]
            hint = did_you_mean(found[2], known)
            known_or_meant = (
                f"did you mean `elastic {elsewhere[0]}`?"
                if elsewhere
                else f"there are {', '.join(known)}{hint}"
            )
            return f"there is no {found[1]} {found[2]!r}; {known_or_meant}"
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
            if action.required:
                number = action.nargs if isinstance(action.nargs, int) else 1
                words += [*action.option_strings[-1:], *[word] * number]
        return " ".join(words)


def _only_listed(words: Sequence[str]) -> NoReturn:
    """Ends a line without a command: prints the commands if it asks for help, or says which there are."""
    group = words[0] if words and words[0] in GROUPS else ""
    parser = Parser(
        prog=f"elastic {group}".strip(),
        description=GROUPS.get(group, "Trains large models on machines that come and go."),
        epilog=(
            "A command that takes a job file also takes the settings of the job, as --section.option value, "
            "after the file."
        ),
    )
    listed = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (_, each) in commands().items():
        first, _, second = name.partition(" ")
        if group in ("", first) and (shown := second if group else first) not in listed.choices:
            listed.add_parser(shown, help=GROUPS.get(shown, _told(each)[0]))
    parser.parse_args(words[bool(group) :])
    raise AssertionError(f"a command line without a command was read: {words}")


def parser_of(name: str, function: Callable[..., int | None]) -> Parser:
    """Returns the parser of a command.  Raises :class:`KeyError` for a parameter that has no line in the
    docstring.
    """
    about, more = _told(function)
    told = {key: told for key, *told in PARAMETER.findall(more)}
    parser = Parser(prog=f"elastic {name}", description=about)
    for key, each in inspect.signature(function).parameters.items():
        if each.annotation.startswith("Job"):
            told.setdefault(key, ["", "job", "the job file (TOML)"])
            parser.epilog = (
                f"Settings of the job, as --section.option value, may follow; `elastic {LISTS} --help` "
                "lists them."
            )
        short, metavar, meaning = told[key]
        options: dict[str, Any] = {"help": meaning} | WORDS.get(each.annotation.removesuffix(" | None"), {})
        if metavar:
            options["metavar"] = metavar
        if given := each.default is not each.empty:
            options["default"] = each.default
        if each.kind is not each.POSITIONAL_ONLY:
            parser.add_argument(
                *filter(None, [short]), f"--{key.replace('_', '-')}", required=not given, **options
            )
        elif given:
            parser.add_argument(key, **options | {"nargs": "*" if "nargs" in options else "?"})
        else:
            parser.add_argument(key, **options)
    return parser


def _told(function: Callable[..., int | None]) -> Sequence[str]:
    """Returns the first paragraph of a docstring, and the rest."""
    return (inspect.getdoc(function) or "").partition("\n\n")[::2]


def _options(function: Callable[..., int | None]) -> dict[str, bool]:
    """Returns the options of a command, and whether each takes a value."""
    options = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind is not each.POSITIONAL_ONLY
    ]
    return {f"--{each.name.replace('_', '-')}": each.annotation != "bool" for each in options}


def _refusal(word: str, name: str) -> str:
    """Returns the sentence for a word that the command does not take."""
    from elastic.config.command_line import no_setting
    from elastic.job import Job

    option = word.partition("=")[0].replace("_", "-")
    if option == "--dry-run":
        return (
            f"'elastic {name}' has no option '--dry-run'; `elastic estimate` checks a job and starts nothing"
        )
    if others := [other for other, (_, each) in commands().items() if option in _options(each)]:
        return f"'elastic {name}' has no option '{option}', unlike 'elastic {others[0]}'; leave it out"
    return no_setting(word, Job, _options(commands()[name][1]))
