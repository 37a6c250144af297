"""Reads a job file, and turns pydantic's complaints about its settings into sentences.

The settings are declared in ``elastic/job.py``.  Everything here follows from their pydantic fields.
"""

from __future__ import annotations

import codecs
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from elastic.code.imports import did_you_mean
from elastic.errors import JobError

Model = type[BaseModel]
Where = Callable[[str, str], str]
"""Returns the source of a setting, or (for "") of those that a sentence names: the name of a file, the
command line, or both.
"""
COMMAND_LINE = "command line"
SAVE_AS_UTF8 = (
    "save it as UTF-8 (in an editor: Save As, encoding UTF-8; in PowerShell: Out-File -Encoding utf8)"
)
ELSEWHERE = {
    "learning_rate": ("optim.lr",),
    "batch_size": ("global_batch", "microbatch"),
    "epochs": ("steps",),
    "num_workers": ("workers.max",),
    "gradient_accumulation_steps": ("global_batch", "microbatch"),
    "per_device_train_batch_size": ("microbatch",),
    "micro_batch_size": ("microbatch",),
    "local_batch_size": ("microbatch",),
    "num_train_epochs": ("steps",),
    "max_grad_norm": ("optim.clip_norm",),
    "keep": (
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "checkpoint.keep_best",
        "checkpoint.keep_younger",
    ),
    "validation.data": ("validation.dataset", "validation.args"),
    "workers": ("workers.max",),
    "optim": ("optim.kind",),
    "schedule": ("schedule.kind",),
}
"""Names that other trainers have, or newcomers expect, with the settings that do the same.  A section stands
here for one that has a value instead of settings."""

VALUES_ELSEWHERE = {
    ("recompute", "full"): "did you mean 'block'?",
    ("optim.kind", "adam"): "Adam is optim.kind = 'adamw' with optim.decay = 'l2'",
}
"""Words that other trainers have for the value of a setting, and how to say what they mean."""


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the values of the file, unchecked.  Raises :class:`JobError` if it cannot be read or is not
    TOML.
    """
    try:
        return tomllib.loads(_text(path.name, path.read_bytes()))
    except FileNotFoundError:
        raise JobError(
            f"there is no job file {str(path)!r} (looked for {path.absolute()}); give the path of a TOML file"
        ) from None
    except OSError as error:
        raise JobError(
            f"the job file {str(path)!r} cannot be read: {error.strerror}; give the path of a TOML file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise JobError(
            f"{path.name} is not valid TOML: {error}; correct this line (`elastic train --help` lists "
            "the settings)"
        ) from None


def _text(name: str, data: bytes) -> str:
    """Returns the text of a file that is UTF-8, or UTF-16 as editors and PowerShell of Windows write it.

    Raises :class:`JobError` for bytes that are neither.
    """
    code = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    what = "it has bytes of value 0, so it may be UTF-16, or no text at all"
    try:
        if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
            raise JobError(f"{name} is text in UTF-32, and TOML is UTF-8; {SAVE_AS_UTF8}")
        if "\0" not in (text := data.decode(code)):
            return text.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        if b"\0" not in data:
            number = data.count(b"\n", 0, error.start) + 1
            what = f"line {number} has the byte {data[error.start]:#04x}, which may be a letter of Latin-1"
    raise JobError(f"{name} is not text in UTF-8: {what}; {SAVE_AS_UTF8}")


def merge(values: dict[str, Any], options: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Returns ``values`` with ``options`` put over them.  ``file`` is the name of the file that ``values``
    come from.
    """
    merged = dict(values)
    for setting, value in options.items():
        node = merged
        *sections, last = setting.split(".")
        for depth, section in enumerate(sections):
            child = node.get(section, {})
            if not isinstance(child, dict):
                name = ".".join(sections[: depth + 1])
                raise JobError(f"{file}: {name} = {child!r} must be a table of settings{_inside(name)}")
            node[section] = dict(child)
            node = node[section]
        node[last] = value
    return merged


def sentences(error: ValidationError, model: Model, where: Where) -> list[str]:
    """Returns one sentence for each setting that is wrong, in the order of the settings."""
    found, meant = dict[str, list[str]](), dict[str, str]()
    for problem in error.errors(include_url=False):
        setting = _setting(model, problem["loc"])
        if problem["type"] == "missing" and setting.endswith("]"):  # a list has too few values
            setting = setting.rpartition("[")[0]
            text = (
                f"{setting} = {list(problem['input'])!r} must have "
                f"{len(get_args(annotation_of(model, setting)))} values"
            )
        elif problem["type"] == "extra_forbidden":
            text = unknown(setting, model)
        elif setting == "":
            text = _expected(problem)
        else:
            text = (
                f"{setting} = {problem['input']!r} {_expected(problem)}"
                if problem["type"] != "missing"
                else _missing(setting)
            )
        found.setdefault(setting, []).append(text)
        if setting:
            meant[setting] = meant.get(setting) or _meant(setting, problem, model)
    told = [
        (setting, line, where(setting, line)) for setting, said in found.items() for line in _joined(said)
    ]
    return [
        f"{origin}: {line}{meant.get(setting, '')}{_form(setting, model, origin)}"
        for setting, line, origin in told
    ]


def _meant(setting: str, problem: Any, model: Model) -> str:
    """Returns the end of a sentence that says what is probably meant by a value that is wrong, or nothing."""
    value = problem["input"]
    if problem["type"].startswith("model_"):
        return _inside(setting)
    if not isinstance(value, str):
        return ""
    if _fits(value, _type_at(model, setting), model.model_config):
        return f"; write {value} without quotes"
    if (setting, value.lower()) in VALUES_ELSEWHERE:
        return f"; {VALUES_ELSEWHERE[setting, value.lower()]}"
    return did_you_mean(value, words_of(annotation_of(model, setting.partition("[")[0])))


def _inside(section: str) -> str:
    """Returns the end of the sentence for a section that has a value: the settings in it that are probably
    meant, or nothing.
    """
    return f"; did you mean {_either(ELSEWHERE[section])}?" if section in ELSEWHERE else ""


def _type_at(model: Model, setting: str) -> Any:
    """Returns what a setting accepts, with its limits, or an item of a list such as ``optim.betas[0]``; None
    if that is not known.
    """
    name, _, index = setting.removesuffix("]").rpartition("[") if setting.endswith("]") else (setting, "", "")
    if (field := leaves(model).get(re.sub(r"\[\d+\]", "[]", name))) is None:
        return None
    if not index:
        return Annotated[field.annotation, *field.metadata]
    items = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    return items[0 if items[-1] is ... else int(index)] if items else None


def _fits(text: str, accepted: Any, config: ConfigDict) -> bool:
    """Returns whether ``text`` without its quotes is a number, true or false, and right for what is
    ``accepted``.
    """
    if accepted is None or not text.strip() or "\n" in text:
        return False
    # TOML and pydantic raise all of them for the worst texts
    with suppress(ValueError, OverflowError, RecursionError):
        value = tomllib.loads(f"value = {text}")["value"]
        TypeAdapter(accepted, config=config).validate_python(value)
        return isinstance(value, int | float)
    return False


def _either(settings: Iterable[str]) -> str:
    return " or ".join(map(repr, settings))


def source_of(file: str, options: Iterable[str]) -> Where:
    """Returns how to find the source of a setting of a job whose values are those of ``file``, but for those
    of ``options``.
    """

    def named(line: str) -> list[str]:
        """Returns the options that give what a sentence names, or at least something else in a section that
        it names.
        """
        exact = [name for name in options if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", line)]
        return exact or [
            name
            for name in options
            if "." in name and re.search(rf"(?<![\w.]){re.escape(name.partition('.')[0])}[.]", line)
        ]

    def where(setting: str, line: str) -> str:
        name = setting.partition("[")[0]
        inside = [each for each in options if name and each.startswith(f"{name}.")]
        if name and not inside:
            return COMMAND_LINE if any(f"{name}.".startswith(f"{each}.") for each in options) else file
        given = " and ".join(map(option_of, inside or named(line)))
        return f"{file} with {given}" if given else file

    return where


def located(text: str, model: Model, where: Where) -> str:
    """Returns ``text`` with the source of the setting before each line that begins with one, as ``model =
    'a:b': …`` does.
    """

    def told(line: str) -> str:
        found = re.match(r"([a-z_]\w*(?:\.\w+)*)(?:\[\d+\])?[\w.\[\]]*(?: = |: | has )", line)
        known = (
            found is not None
            and annotation_of(model, found[1]) is not None
            and section_of(annotation_of(model, found[1])) is None
        )
        return f"{where(found[1], line)}: {line}" if found is not None and known else line

    return "\n".join(map(told, text.splitlines()))


def unknown(setting: str, model: Model, typed: str = "", also: Iterable[str] = ()) -> str:
    """Returns the sentence for a setting that does not exist.  It names the nearest setting, or the nearest
    of ``also``.

    If none is near, it lists the settings of the section.  ``typed`` is the option that stands for the
    setting on the command line.
    """
    wanted = re.sub(r"\[\d+\]", "[]", setting)
    known = [
        *leaves(model),
        *(name for name, field in model.model_fields.items() if section_of(field.annotation)),
        *also,
    ]
    if part := section_of(model.model_fields[wanted].annotation) if wanted in model.model_fields else None:
        inside = ", ".join(option_of(f"{wanted}.{name}") for name in part.model_fields)
        return f"'{typed or setting}' is a section; its settings are {inside}"
    near = nearest(wanted, [name for name in known if ("[]" in name) == ("[]" in wanted)])
    section = wanted.rpartition(".")[0]
    beside = [name.rpartition(".")[2] for name in known if section and name.rpartition(".")[0] == section]
    if near:
        hint = f"did you mean {_either(option_of(name) if typed else name for name in near)}?"
    elif beside:
        hint = f"{f'[[{section[:-2]}]]' if '[]' in section else f'[{section}]'} has {', '.join(beside)}"
    else:
        hint = "see 'elastic train --help' for all settings"
    return f"unknown setting '{typed or setting}'; {hint}"


def option_of(setting: str) -> str:
    """Returns the option that stands for a setting."""
    return f"--{setting.replace('_', '-')}"


def nearest(setting: str, known: Sequence[str]) -> tuple[str, ...]:
    """Returns the known settings that are probably meant by ``setting``: one, rarely two, or none.

    One whose whole name ends ``setting`` comes first, then one with other marks between its words, then what
    newcomers call just so, then one with the same last part (the right name in a wrong section), then what
    other trainers call so.  Next comes one of the same section whose last part is spelt alike, then one that
    is spelt alike as a whole, then one whose last part is.  Without a section the last two change places, and
    with a known one the likeness must be greater.
    """
    section, _, last = setting.rpartition(".")
    parts = setting.split(".")
    if inner := next(
        (tail for at in range(1, len(parts) - 1) if (tail := ".".join(parts[at:])) in known), ""
    ):
        return (inner,)
    if undotted := tuple(name for name in known if _undotted(name) == _undotted(setting)):
        return undotted
    by_last = {name.rpartition(".")[2]: (name,) for name in reversed(known)}
    if found := ELSEWHERE.get(setting) or by_last.get(last) or ELSEWHERE.get(last):
        return found
    beside = {
        part: names for part, names in by_last.items() if section and names[0].rpartition(".")[0] == section
    }
    # a common section is no likeness
    ours = {section, *(name for names in beside.values() for name in names)} if beside else set()
    others = {name: (name,) for name in known if name not in ours}
    tried: list[tuple[str, Mapping[str, tuple[str, ...]]]] = [
        (last, beside),
        (setting, others),
        (last, ELSEWHERE | by_last),
    ]
    for wanted, candidates in tried if section else reversed(tried):
        cutoff = 0.7 if beside and candidates is not beside else 0.6
        if match := difflib.get_close_matches(wanted, list(candidates), 1, cutoff):
            return candidates[match[0]]
    return ()


def _undotted(name: str) -> str:
    """Returns a name with the same mark between all its words: ``data_args`` for ``data.args``."""
    return name.replace("-", "_").replace(".", "_")


def leaves(model: Model, prefix: str = "") -> dict[str, FieldInfo]:
    """Returns every setting by its full name: ``seed``, ``workers.min`` and, for the items of a list,
    ``faults[].step``.
    """
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section, part = section_of(field.annotation), part_of(field.annotation)
        if section is None:
            found[f"{prefix}{name}"] = field
        if part is not None:
            found |= leaves(part, f"{prefix}{name}." if section else f"{prefix}{name}[].")
    return found


def section_of(annotation: Any) -> Model | None:
    """Returns the model that a ``[section]`` fills, or None if the type is not a section."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def part_of(annotation: Any) -> Model | None:
    """Returns the model of a section, or of the items of a list of sections, or None."""
    return next(filter(None, map(section_of, (annotation, *get_args(annotation)))), None)


def annotation_of(model: Model, setting: str) -> Any:
    """Returns the type of ``setting``: ``Any`` for a key of a free table such as ``model_args``, None if
    there is no such setting.
    """
    first, _, rest = setting.partition(".")
    if first not in model.model_fields:
        return None
    annotation = model.model_fields[first].annotation
    if not rest:
        return annotation
    section = section_of(annotation)
    if section is not None:
        return annotation_of(section, rest)
    return Any if _is_table(annotation) else None


def _setting(model: Model, loc: tuple[int | str, ...]) -> str:
    """Returns pydantic's location as the user writes it, without the tags of unions."""
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
        if _is_table(annotation):  # below a table, keys and tags alternate
            return name + "".join(
                f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc[depth + 1 :: 2]
            )
        part = part_of(annotation)
    return name


def words_of(annotation: Any) -> Iterator[str]:
    """Yields the fixed words that a setting of this type takes."""
    if get_origin(annotation) is Literal:
        yield from (each for each in get_args(annotation) if isinstance(each, str))
    elif get_origin(annotation) is not dict:
        for each in get_args(annotation):
            yield from words_of(each)


def _form(setting: str, model: Model, origin: str) -> str:
    """Returns the end of a sentence that shows how a list or a table is written on the command line, if
    ``setting`` is one and is there.
    """
    if origin != COMMAND_LINE or "[" in setting or annotation_of(model, setting) is None:
        return ""
    option, annotation = option_of(setting), annotation_of(model, setting)
    if get_origin(annotation) is tuple and part_of(annotation) is not None:
        return f"; write {option} '[{{ key = value }}]'"
    if get_origin(annotation) is tuple:
        one, two = ('"one"', '"two"') if str in get_args(annotation) else ("1", "2")
        return f"; write {option} {one} {two}, or {option} '[{one}, {two}]'"
    return f"; write {option} '{{ key = value }}', or {option}.key value" if _is_table(annotation) else ""


def _is_table(annotation: Any) -> bool:
    """Returns whether the type is a free table, such as ``model_args``."""
    return get_origin(annotation) is dict


def _missing(setting: str) -> str:
    option = "" if "[" in setting else f" or by --{setting} on the command line"
    return f"{setting} is missing; set it in the file ({setting.rpartition('.')[2]} = ...){option}"


EXPECTED = {
    "greater_than_equal": "must be {ge:g} or more",
    "greater_than": "must be more than {gt:g}",
    "less_than_equal": "must be {le:g} or less",
    "less_than": "must be less than {lt:g}",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
    "too_short": "must have {min_length} values",
    "too_long": "must have {max_length} values",
    "invalid-json-value": (
        "must be text, a number, true or false, a list or a table: it travels to every worker"
    ),
    "missing": "is missing",
    "int": "must be a whole number",
    "float": "must be a finite number",
    "finite": "must be a finite number",
    "bool": "must be true or false",
    "string": "must be text",
    "tuple": "must be a list",
    "list": "must be a list",
    "model": "must be a table of settings",
    "dict": "must be a table of settings",
}
"""The demands that a value does not meet, by the type of pydantic's complaint, or the first word of it."""


def _expected(problem: Any) -> str:
    """Returns the demand that the value does not meet: ``must be …``."""
    kind = problem["type"]
    demand = EXPECTED.get(kind) or EXPECTED.get(kind.partition("_")[0]) or f"cannot be used: {problem['msg']}"
    return demand.format(**problem.get("ctx", {}))


def _joined(said: Sequence[str]) -> list[str]:
    """Returns the alternatives of one setting as one sentence.  A check over several settings has a sentence
    on each of its lines.
    """
    first, *others = dict.fromkeys(said)
    alternatives = [re.sub(r"^.*? must (be )?", "", text, count=1) for text in others]
    return ", or ".join([first, *alternatives]).splitlines()
