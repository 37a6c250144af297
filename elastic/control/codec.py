"""Events, decisions and :class:`RunState` <-> the JSON of the journal, exactly.

A dataclass becomes an object with its name under ``$``; tuples become arrays; floats are written as ``float.hex()``, so that what
comes back is bit for bit what went in (JSON readers round, and know neither infinity nor NaN).  Reading follows the types that the
dataclasses declare, and refuses by name what it does not know: a journal of another version is an error, not a guess.

A record holds an event and the decision: the state, actions and reason, and the fields of ``RunState`` that it ``changed``; before
them, what unrecorded events had changed ``meanwhile``, so that everything a decision was made from is in the journal.  Recovery folds
these; it does not decide again, so a journal stays readable when the rules have changed since.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from elastic.control.decision import Transition
from elastic.control.rules import Rules
from elastic.control.states import RunState
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of
from elastic.protocol.events import Beat, Capacity, Event, Renewed, Tick
from storage.slices import Tensor

FORMAT = 2
READABLE = (1, FORMAT)
"""In format 1 ``changed`` counts from the record before: what unrecorded events had changed is in it where the decision left it so."""

RETIRED = {"state_bytes", "copy_rule"}
"""Fields that older versions wrote and no decision is made from any more."""

Json = Any


class UnknownFormat(ValueError):
    """The journal was written by a version that this one does not understand."""


# ---- records


def snapshot(run: RunState, code: str = "", rules: Rules | None = None) -> dict[str, Json]:
    """What a segment of the journal begins with: all that was known.  ``code``: version that wrote it; ``rules``: what it decides by."""
    return {"format": FORMAT, "code": code, "rules": encode(rules), "run": encode(run)}


def worth_recording(event: Event, before: RunState, transition: Transition) -> bool:
    """Heartbeats and the passing of time only count when something comes of them; what they changed goes with the next record."""
    if isinstance(event, Beat | Tick | Renewed | Capacity):
        return bool(transition.actions) or transition.run.state is not before.state
    return transition.run is not before or bool(transition.actions)


def record(
    number: int, at: float, event: Event, before: RunState, transition: Transition, recorded: RunState | None = None
) -> dict[str, Json]:
    """One decision, made from ``before``.  ``recorded``: the run as the record before left it, where unrecorded ones came between."""
    meanwhile = changes(recorded, before) if recorded is not None else {}
    return {
        "n": number,
        "at": at,
        "event": encode(event),
        **({"meanwhile": meanwhile} if meanwhile else {}),
        "state": type(transition.run.state).__name__,
        "changed": changes(before, transition.run),
        "actions": encode(transition.actions),
        "reason": transition.reason,
    }


def changes(before: RunState, after: RunState) -> dict[str, Json]:
    """The fields of ``after`` that differ, encoded."""
    pairs = ((each.name, getattr(before, each.name), getattr(after, each.name)) for each in fields(RunState))
    return {name: encode(new) for name, old, new in pairs if new is not old and new != old}


def fold(snapshot: Mapping[str, Json], records: Iterable[Mapping[str, Json]]) -> RunState:
    """The run as the last of ``records`` left it; they follow ``snapshot`` without a gap."""
    if snapshot["format"] not in READABLE:
        raise UnknownFormat(f"the journal has format {snapshot['format']}, this version reads {' and '.join(map(str, READABLE))}")
    for each in records:
        snapshot = after(snapshot, each)
    return decode_run(modern(snapshot["run"]))


def after(snapshot: Mapping[str, Json], record: Mapping[str, Json]) -> dict[str, Json]:
    """What the next segment begins with."""
    return {**snapshot, "run": {**snapshot["run"], **record.get("meanwhile", {}), **record["changed"]}}


# ---- what older formats called otherwise


def modern(json: Json) -> Json:
    """Return ``json`` of any readable format in the words of this one.

    Formats 1 and 2 knew one axis: a holding had the number and the index of its shard, and the state was known by its numbers of rows.
    """
    if isinstance(json, list):
        return [modern(each) for each in json]
    if not isinstance(json, dict):
        return json
    found = {key: modern(each) for key, each in json.items()}
    if "shard_count" in found:
        count, index = found.pop("shard_count"), found.pop("shard_index")
        found["cell"] = cell_of(Layout(1, count), index)
    if "rows" in found:
        lengths = found.pop("rows")
        found.setdefault("classes", [encode(Tensor("", "parameter", "F32", (length,))) for length in lengths])
    return found


# ---- values


def encode(value: object) -> Json:
    """As JSON; raises :class:`TypeError` for what has no place in a journal."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    if isinstance(value, dict):
        return {key: encode(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {"$": type(value).__name__, **{name: encode(getattr(value, name)) for name in _hints(type(value))}}
    raise TypeError(f"{type(value).__name__} has no form in the journal: {value!r}")


def decode_event(json: Json) -> Event:
    event: Event = decode(Event, json)
    return event


def decode_run(json: Json) -> RunState:
    run: RunState = decode(RunState, json)
    return run


def decode(hint: Any, json: Json) -> Any:
    """The value of type ``hint`` that :func:`encode` made ``json`` of."""
    kind = get_origin(hint)
    if kind in (Union, types.UnionType):
        return _decode_union(get_args(hint), json)
    if kind is tuple:
        return _decode_tuple(get_args(hint), json)
    if kind is dict:
        return {key: decode(get_args(hint)[1], each) for key, each in json.items()}
    if is_dataclass(hint):
        return _decode_fields(hint, json)
    if hint is float:
        return float.fromhex(json) if isinstance(json, str) else json
    return json


def _decode_union(options: tuple[Any, ...], json: Json) -> Any:
    if json is None or not isinstance(json, dict):
        return json if json is None else decode(next(each for each in options if each is not types.NoneType), json)
    by_name: dict[str, type] = {each.__name__: each for each in options if isinstance(each, type)}
    if json.get("$") not in by_name:
        raise UnknownFormat(f"the journal has {json.get('$')!r} where one of {', '.join(sorted(by_name))} is expected")
    return decode(by_name[json["$"]], json)


def _decode_tuple(options: tuple[Any, ...], json: Json) -> tuple[Any, ...]:
    if len(options) == 2 and options[1] is Ellipsis:
        return tuple(decode(options[0], each) for each in json)
    return tuple(decode(option, each) for option, each in zip(options, json, strict=True))


def _decode_fields(kind: Any, json: Json) -> Any:
    hints = _hints(kind)
    if json.get("$") != kind.__name__:
        raise UnknownFormat(f"the journal has {json.get('$')!r} where {kind.__name__} is expected")
    unknown = sorted(json.keys() - hints.keys() - RETIRED - {"$"})
    if unknown:
        raise UnknownFormat(f"{kind.__name__} of the journal has unknown fields: {', '.join(unknown)}")
    return kind(**{name: decode(hint, json[name]) for name, hint in hints.items() if name in json})


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
