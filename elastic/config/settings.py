"""From a TOML file and a command line to checked values, and from what pydantic finds wrong to sentences.

The settings themselves are declared in ``elastic/job.py``; everything here follows from their pydantic fields.  Options are
``--section.option value``.  An option's value is read as TOML reads it (``3``, ``true``, ``[0.9, 0.95]``), else it is text: nobody
has to quote twice.  tyro draws ``--help`` from the same fields; its own error boxes cannot name a file, so parsing is ours.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from elastic.errors import JobError

Model = type[BaseModel]
Where = Callable[[str], str]
"""Setting -> who set it: a file's name, or the command line."""

COMMAND_LINE = "command line"
FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def read_toml(path: Path) -> dict[str, Any]:
    """The file's values, unchecked.  Raises :class:`JobError` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobError(f"there is no job file {str(path)!r} (looked for {path.absolute()}); give the path of a TOML file") from None
    except OSError as error:
        raise JobError(f"the job file {str(path)!r} cannot be read: {error.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path.name} is not valid TOML: {error}; mend that line (`elastic train --help` lists the settings)") from None


def read_options(arguments: Sequence[str], model: Model) -> dict[str, Any]:
    """``["--workers.max", "3", "--seed=1"]`` -> ``{"workers.max": 3, "seed": 1}``.  Raises :class:`JobError`.

    Several values make a list (``--optim.betas 0.9 0.95``); ``--reproducible`` and ``--no-reproducible`` need none.
    """
    options: dict[str, Any] = {}
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("--") or argument == "--":
            raise JobError(f"{COMMAND_LINE}: {argument!r} is no option; write '--section.option value', say '--workers.max 3'")
        name, equals, text = argument[2:].partition("=")
        values = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.popleft())
        setting, value = _option(name.replace("-", "_"), values, model)
        options[setting] = value
    return options


def _option(name: str, values: Sequence[str], model: Model) -> tuple[str, Any]:
    positive = name.removeprefix("no_")
    if not values and _annotation(model, positive) is bool:
        return positive, name == positive
    annotation = _annotation(model, name)
    if annotation is None:
        raise JobError(f"{COMMAND_LINE}: {unknown(name, model, prefix='--')}")
    if not values:
        raise JobError(f"{COMMAND_LINE}: --{name} has no value; write '--{name} value'")
    read = values if annotation is str else [_read(value, annotation) for value in values]
    return name, read[0] if len(read) == 1 else read


def merge(values: dict[str, Any], options: Mapping[str, Any], file: str) -> dict[str, Any]:
    """``values`` with ``options`` put over them."""
    merged = dict(values)
    for setting, value in options.items():
        node = merged
        *sections, last = setting.split(".")
        for depth, section in enumerate(sections):
            child = node.get(section, {})
            if not isinstance(child, dict):
                raise JobError(f"{file}: {'.'.join(sections[: depth + 1])} = {child!r} must be a table of settings")
            node[section] = dict(child)
            node = node[section]
        node[last] = value
    return merged


def sentences(error: ValidationError, model: Model, where: Where) -> list[str]:
    """What is wrong, one sentence a setting, in the order of the settings."""
    found: dict[str, tuple[Any, list[str]]] = {}
    for problem in error.errors(include_url=False):
        setting = _setting(model, problem["loc"])
        if problem["type"] == "missing" and setting.endswith("]"):  # of a tuple: its values count
            setting = setting.rpartition("[")[0]
            text = f"{setting} = {list(problem['input'])!r} must have {len(get_args(_annotation(model, setting)))} values"
        elif problem["type"] == "extra_forbidden":
            text = unknown(setting, model)
        elif setting == "":
            text = _expected(problem)
        else:
            text = f"{setting} = {problem['input']!r} {_expected(problem)}" if problem["type"] != "missing" else _missing(setting)
        said = found.setdefault(setting, (problem["input"], []))[1]
        said.append(text)
    return [f"{where(setting)}: {line}" for setting, (_, said) in found.items() for line in _joined(said)]


def unknown(setting: str, model: Model, prefix: str = "") -> str:
    """The sentence for a setting that does not exist, naming the nearest that does."""
    wanted = re.sub(r"\[\d+\]", "[]", setting)
    known = [*leaves(model), *(name for name, field in model.model_fields.items() if _section(field.annotation))]
    near = nearest(wanted, [name for name in known if ("[]" in name) == ("[]" in wanted)])
    hint = f"did you mean '{prefix}{near}'?" if near else "see 'elastic train --help' for all settings"
    return f"unknown setting '{prefix}{setting}'; {hint}"


def nearest(setting: str, known: Sequence[str]) -> str | None:
    """The known setting most like ``setting``: the right one in a wrong place, a misspelt one, a misspelt last part."""
    last = setting.rpartition(".")[2]
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    if last in by_last:
        return by_last[last]
    for wanted, candidates in ((setting, {name: name for name in known}), (last, by_last)):
        match = difflib.get_close_matches(wanted, list(candidates), 1)
        if match:
            return candidates[match[0]]
    return None


def leaves(model: Model, prefix: str = "") -> Iterator[str]:
    """Every setting by its full name: ``seed``, ``workers.min`` …; those of a list's items as ``faults[].step``."""
    for name, field in model.model_fields.items():
        section, part = _section(field.annotation), _part(field.annotation)
        if section is None:
            yield f"{prefix}{name}"
        if part is not None:
            yield from leaves(part, f"{prefix}{name}." if section else f"{prefix}{name}[].")


def print_help(model: Model, prog: str) -> None:
    """Every setting with its meaning and default, from the declarations."""
    import tyro  # slow to import, and only help needs it

    required: dict[str, Any] = {name: "..." for name, field in model.model_fields.items() if field.is_required()}
    try:
        tyro.cli(model, args=["--help"], prog=prog, default=model.model_construct(None, **required))
    except SystemExit:
        return


def _read(text: str, annotation: Any) -> Any:
    """As TOML reads it; and what TOML does not take for a number (``.5``, ``007``) or a truth (``yes``), but everybody else does."""
    value = _literal(text)
    if annotation is bool:
        return FLAGS.get(str(value).lower(), value)
    if isinstance(value, str) and annotation is not Any:
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
    return value


def _literal(text: str) -> Any:
    """As TOML reads it, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _section(annotation: Any) -> Model | None:
    """The model that a ``[section]`` fills, or None for another type."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _part(annotation: Any) -> Model | None:
    """The model of a section, or of the items of a list of sections."""
    return next(filter(None, map(_section, (annotation, *get_args(annotation)))), None)


def _annotation(model: Model, setting: str) -> Any:
    """The type of ``setting``; ``Any`` inside a free table such as ``model_args``; None if there is no such setting."""
    first, _, rest = setting.partition(".")
    if first not in model.model_fields:
        return None
    annotation = model.model_fields[first].annotation
    if not rest:
        return annotation
    section = _section(annotation)
    if section is not None:
        return _annotation(section, rest)
    return Any if _is_table(annotation) else None


def _setting(model: Model, loc: tuple[int | str, ...]) -> str:
    """Pydantic's location as the user would write it, without the tags of unions."""
    name = ""
    part: Model | None = model
    for depth, step in enumerate(loc):
        if isinstance(step, int):
            name += f"[{step}]"
            continue
        if part is None or (step not in part.model_fields and depth < len(loc) - 1):
            break
        name += f".{step}" if name else step
        annotation = part.model_fields[step].annotation if step in part.model_fields else None
        if _is_table(annotation):  # below it, keys and tags alternate
            return name + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc[depth + 1 :: 2])
        part = _part(annotation)
    return name


def _is_table(annotation: Any) -> bool:
    """A free table, such as ``model_args``."""
    return get_origin(annotation) is dict


def _missing(setting: str) -> str:
    option = "" if "[" in setting else f" or by --{setting} on the command line"
    return f"{setting} is missing; set it in the file ({setting.rpartition('.')[2]} = ...){option}"


def _expected(problem: Any) -> str:
    """``must be …``, the same words for the same demand."""
    kind, context = problem["type"], problem.get("ctx", {})
    match kind.partition("_")[0], kind:
        case _, "greater_than_equal":
            return f"must be {context['ge']:g} or more"
        case _, "greater_than":
            return f"must be more than {context['gt']:g}"
        case _, "less_than_equal":
            return f"must be {context['le']:g} or less"
        case _, "less_than":
            return f"must be less than {context['lt']:g}"
        case _, "literal_error":
            return f"must be {context['expected']}"
        case _, "value_error":
            return str(context["error"])
        case "int", _:
            return "must be a whole number"
        case "float" | "finite", _:
            return "must be a finite number"
        case "bool", _:
            return "must be true or false"
        case "string", _:
            return "must be text"
        case _, "too_short" | "too_long":
            return f"must have {context.get('max_length', context.get('min_length'))} values"
        case _, "invalid-json-value":
            return "must be text, a number, true or false, a list or a table: it travels to every worker"
        case _, "missing":
            return "is missing"
        case "tuple" | "list", _:
            return "must be a list"
        case "model" | "dict", _:
            return "must be a table of settings"
        case _:
            return f"cannot be used: {problem['msg']}"


def _joined(said: Sequence[str]) -> list[str]:
    """The alternatives of one setting as one sentence; the lines of a check over several settings as one each."""
    first, *others = dict.fromkeys(said)
    alternatives = [text.partition(" must be ")[2] or text for text in others]
    return ", or ".join([first, *alternatives]).splitlines()
