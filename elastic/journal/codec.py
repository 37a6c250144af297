"""The codec turns events, decisions and :class:`RunState` into the JSON of the journal, and back, exactly.

A dataclass becomes an object with its name under ``$``, and a tuple becomes an array.  A float is written as
``float.hex()``, because JSON readers round, and know neither infinity nor NaN; so the same bits come back.
Reading follows the types that the dataclasses declare.  An unknown name is an error that says so: a journal
of another version is never guessed at.

A record holds an event and the decision: the state, the actions, the reason, and what ``changed`` in
:class:`RunState`, as a delta (``deltas.py``).  It also holds what unrecorded events had changed
``meanwhile``, so that the journal has everything that the decision was made from, and the ``commits`` that
the event brought.  A commit is written once; elsewhere its step and generation stand for it.  A plan is
written where it begins; where an event or a change repeats the plan of the state, its generation stands for
it.  The classes of tensors with which a worker joins are left out if the run has them after the record.
Recovery reads the decisions and does not make them again, so a journal stays readable when the rules have
changed.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, Union, get_args, get_origin, get_type_hints

from elastic.control.decision import Transition
from elastic.control.evolve import evolve
from elastic.control.liveness import Watch
from elastic.control.rules import Rules
from elastic.control.run import Finished, History, Running, RunState, Stopping, Waiting
from elastic.journal import packed
from elastic.journal.deltas import SAME, delta, patched
from elastic.plan.layout import LayoutRule
from elastic.protocol.actions import Pause, Retain
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import (
    Attached,
    Beat,
    Broken,
    Capacity,
    Crowded,
    Event,
    Fenced,
    Joined,
    Lost,
    Recovered,
    Renewed,
    SaveFailed,
    ShardSaved,
    StartFailed,
    Starting,
    StepDone,
    Tick,
    Together,
    parts,
)
from elastic.protocol.plan import Plan
from storage.slices import Tensor

FORMAT = 3

RETIRED = {"state_bytes", "copy_rule", "validate_every", "evicted"}
"""Fields that older versions wrote and that no decision uses any more."""
COMMIT = "Commit"
"""The name that stands for a commit that is written elsewhere."""
PLAN = "PlanOf"
"""The name that stands for the plan that the run had before the record."""
CLASSES = ("classes", "class_bytes")
"""The fields of a ``Joined`` that are left out if they are those of the run after the record."""

PLAIN = frozenset({type(None), bool, int, str})
"""Types of values that JSON writes as they are.  They are told apart before anything else: a large world's
records hold little else.
"""
MICROBATCHES, PACKED = ("losses", "counts", "samples"), "packed"
"""The fields of a commit with an entry for each microbatch, and the name of the packed field in their place:
see ``packed.py``.
"""
LAYERS = "layers"
"""The field of a commit with an entry for each layer.  It is packed, too, and left out where it is empty, as
in most commits.
"""

SELDOM = {
    each.name: each.default
    for each in fields(Outcome)
    if each.name
    in ("validated", "rescales", "spike", "quarantined", "most_loss", "warned_loss", "lr", "late", "reran")
}
"""Fields of a commit that are left out while they have their default, each with its default."""
QUIET: Mapping[type, tuple[str, ...]] = {
    StepDone: ("metrics", "quarantined", "quarantined_by"),
    SaveFailed: ("full",),
    Broken: ("computed",),
    ShardSaved: ("digest",),
    History: ("trusted", "dispute", "rerun"),
    Lost: ("node",),
    StartFailed: ("node",),
    RunState: ("enough", "why", "asked", "left", "mark", "worse"),
    Finished: ("step", "why"),
    Plan: ("ahead", "ends", "best", "worse"),
    Waiting: ("until",),
    Running: ("ahead", "connect_until", "attempts"),
    Stopping: ("hand_over", "ahead", "noticed"),
    Pause: ("hand_over",),
    Rules: (
        "patience",
        "min_delta",
        "validates_every",
        "evicts",
        "compare",
        "microbatches",
        "may_wait",
        "lemon_after",
        "lemon_window_s",
        "lemon_cool_s",
    ),
    Watch: ("hand_over_s", "validate_s", "join_s", "start_s"),
    LayoutRule: ("model",),
    Retain: ("at_once",),
    Tensor: ("split", "depth"),
}
"""Fields that are left out while they have their default, by type."""

Json = Any
Segment = tuple[Mapping[str, Json], Sequence[Mapping[str, Json]]]
"""A snapshot, and the records after it."""


class UnknownFormat(ValueError):
    """The journal was written by a version that this one does not understand."""


# ---- writing


def snapshot(run: RunState, code: str = "", rules: Rules | None = None) -> dict[str, Json]:
    """Returns the beginning of a segment of the journal: everything that is known about the run.

    ``code`` is the version of Elastic that writes it; ``rules`` are the rules by which the run is decided.
    """
    return {"format": FORMAT, "code": code, "rules": encode(rules), "run": encode(run)}


def worth_recording(event: Event, before: RunState, transition: Transition) -> bool:
    """Returns whether the event gets a record.

    A heartbeat, a tick, a renewal, a capacity or a slow start gets one only if it leads to an action or
    another state.  What it changed otherwise goes into the next record.
    """
    # a ``Together`` has either beats alone or no beats
    if isinstance(parts(event)[0], Beat | Tick | Renewed | Capacity | Starting):
        return bool(transition.actions) or transition.run.state is not before.state
    return transition.run is not before or bool(transition.actions)


def record(
    number: int,
    at: float,
    event: Event,
    before: RunState,
    transition: Transition,
    recorded: RunState | None = None,
    heard_until: float | None = None,
) -> dict[str, Json]:
    """Returns the record of one decision, made from ``before`` at the time ``at``.

    ``heard_until`` is the argument of ``advance``; None if it was equal to ``at``.

    ``recorded`` is the run after the last record; it differs from ``before`` if unrecorded events came
    between.

    The first record of a coordinator has the run in full: its version of Elastic may have fields that the
    version before did not write.
    """
    known = recorded or before
    after = transition.run
    if is_quiet(event, before, after):
        before, after = _unwatched(before), _unwatched(after)
    told = _commits(known)
    planned: Told = {(known.plan.generation,): known.plan} if known.plan is not None else {}
    joined: Told = {CLASSES: (after.members.classes, after.members.class_bytes)}
    event, brought = _with_news(event, before)
    commits = [each for each in brought if told.get((each.step, each.generation)) != each]
    told.update({(each.step, each.generation): each for each in commits})
    meanwhile = changes(known, before, {**told, **planned})
    changed = (
        _in_whole(after) if isinstance(event, Recovered) else changes(before, after, {**told, **planned})
    )
    return {
        "n": number,
        "at": at,
        **({"heard": heard_until} if heard_until is not None else {}),
        **({"commits": encode(tuple(commits))} if commits else {}),
        "event": encode(event, {**told, **planned, **joined}),
        **({"meanwhile": meanwhile} if meanwhile else {}),
        "state": type(after.state).__name__,
        "changed": changed,
        "actions": encode(transition.actions, told),
        "reason": transition.reason,
    }


def _in_whole(run: RunState) -> dict[str, Json]:
    return {name: delta(SAME, value, encode) for name, value in vars(run).items()}


def is_quiet(event: Event, before: RunState, after: RunState) -> bool:
    """Returns whether the event is a commit that only continues the world, so that the decision cannot depend
    on when each worker was last heard.

    The record of such a decision leaves these times out; otherwise each step, and each snapshot, would have a
    line for each worker.
    """
    return isinstance(event, StepDone) and after.state is before.state and after.members is before.members


def known_after(event: Event, before: RunState, after: RunState) -> RunState:
    """Returns the run as a reader knows it after the record of the decision that led from ``before`` to
    ``after``.
    """
    return _unwatched(after) if is_quiet(event, before, after) else after


def _unwatched(run: RunState) -> RunState:
    """Returns ``run`` without the counters and beats that were heard."""
    return evolve(run, watch=evolve(run.watch, counters={}, beats={}))


Told = Mapping[tuple[object, ...], object]
"""The values that a reader knows already: commits by step and generation, a plan by its generation, classes
by :data:`CLASSES`.
"""


def _commits(run: RunState) -> dict[tuple[object, ...], object]:
    """Returns the commits that a reader of ``run`` can look up."""
    there = (run.history.settled.outcome if run.history.settled else None, run.history.last)
    return {(each.step, each.generation): each for each in there if each is not None}


def _with_news(event: Event, before: RunState) -> tuple[Event, tuple[Outcome, ...]]:
    """Returns the event with only what is new of it, and the commits that it brings, each once."""
    if isinstance(event, StepDone):
        return event, (event.outcome,)
    if isinstance(event, Crowded):
        return _news(event, before)
    if not isinstance(event, Together):
        return event, ()
    news = [_news(each, before) for each in event.events]
    # the first to bring one counts
    commits = {(each.step, each.generation): each for _, brought in reversed(news) for each in brought}
    return Together(tuple(each for each, _ in news)), tuple(commits.values())


def _news(event: Crowded | Beat, before: RunState) -> tuple[Crowded | Beat, tuple[Outcome, ...]]:
    """Returns the fact with only those parts that tell something new, and the commits among them.

    Every member's answer to a fence brings the last commits that the member has seen, and these are the same
    for all members.  Of a plan before the present generation only the generation matters, so the members that
    a worker had there are left out.
    """
    if isinstance(event, Attached) and event.plan is not None and event.plan.generation < before.generation:
        return replace(event, plan=replace(event.plan, members=(), holders=(), nodes=(), hosts=())), ()
    if not isinstance(event, Fenced):
        return event, ()
    news = tuple(
        each
        for each in event.outcomes
        if each.generation == event.generation and before.history.is_news(each)
    )
    return replace(event, outcomes=news, seen=event.newest_seen), news


def changes(before: RunState, after: RunState, told: Told | None = None) -> dict[str, Json]:
    """Returns a delta for each field of ``after`` that differs."""
    change = delta(before, after, partial(encode, told=told), whole=(Outcome,))
    return {} if change is SAME else dict(change["~"])


# ---- reading


def fold(snapshot: Mapping[str, Json], records: Iterable[Mapping[str, Json]]) -> RunState:
    """Returns the run after the last of ``records``, which follow ``snapshot`` without a gap.  Raises
    :class:`UnknownFormat`.
    """
    snapshot, _ = checked((snapshot, ()))
    for each in records:
        snapshot = after(snapshot, each)
    return decode_run(snapshot["run"])


def checked(segment: Segment) -> Segment:
    """Returns ``segment``.  Raises :class:`UnknownFormat` if it has another format than this version writes."""
    if (found := segment[0]["format"]) != FORMAT:
        by = "a version of Elastic before 2026-11-25" if found < FORMAT else "a later version of Elastic"
        raise UnknownFormat(
            f"the journal has format {found}, which {by} wrote, but this version of Elastic reads "
            f"format {FORMAT}; use the other version"
        )
    return segment


def after(snapshot: Mapping[str, Json], record: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the beginning of the next segment, which is ``snapshot`` changed by ``record``."""
    record = written_out(record, snapshot["run"])
    return {**snapshot, "run": patched(before(snapshot["run"], record), {"~": record["changed"]})}


def before(run: Json, record: Mapping[str, Json]) -> Json:
    """Returns the run from which the decision of ``record`` was made.

    ``record`` is written out (see :func:`written_out`); ``run`` is the run after the record before.
    """
    return patched(run, {"~": record["meanwhile"]}) if "meanwhile" in record else run


def field_after(segment: Segment, part: str, name: str) -> Json:
    """Returns the field ``name`` of the run's value ``part`` after the last record of a segment."""
    snapshot, records = segment
    value = snapshot["run"][part].get(name, ())
    for record in records:
        for changed in (record.get("meanwhile", {}), record["changed"]):
            change = changed.get(part, {"~": {}})
            value = (
                change.get(name, ())
                if "$" in change
                else patched(value, change["~"][name])
                if name in change["~"]
                else value
            )
    return value


def incarnation_after(segment: Segment) -> int:
    """Returns the incarnation of the run after the last record of a segment; it builds nothing else."""
    snapshot, records = segment
    changes = (changed for record in records for changed in (record.get("meanwhile", {}), record["changed"]))
    found: int = max(
        [snapshot["run"]["incarnation"], *(each["incarnation"] for each in changes if "incarnation" in each)]
    )
    return found


def written_out(record: Mapping[str, Json], run: Json) -> Mapping[str, Json]:
    """Returns the record with each commit, the plan and the classes in full where a short form stood for it.

    ``run`` is the run after the record before.
    """
    settled = run["history"].get("settled")
    there = [settled and settled["outcome"], run["history"].get("last"), *record.get("commits", ())]
    told: dict[tuple[object, ...], Json] = {
        (each["step"], each["generation"]): each for each in there if each
    }
    told[CLASSES] = {name: field_after(({"run": run}, [record]), "members", name) for name in CLASSES}
    if plan := run["state"].get("plan"):
        told[(plan["generation"],)] = plan
    parts = {name: record[name] for name in ("event", "meanwhile", "changed", "actions") if name in record}
    return {**record, **{name: _in_full(each, told) for name, each in parts.items()}}


def _in_full(json: Json, told: Mapping[tuple[object, ...], Json]) -> Json:
    if isinstance(json, list):
        return [_in_full(each, told) for each in json]
    if not isinstance(json, Mapping):
        return json
    if json.get("$") == PLAN:
        if (json["generation"],) not in told:
            raise UnknownFormat(
                f"the journal refers to the plan of generation {json['generation']}, which it does not hold"
            )
        return told[json["generation"],]
    if json.get("$") == Joined.__name__ and CLASSES[0] not in json:
        return {**json, **told[CLASSES]}
    if json.get("$") != COMMIT:
        return {key: _in_full(each, told) for key, each in json.items()}
    if (json["step"], json["generation"]) not in told:
        raise UnknownFormat(
            f"the journal refers to the commit of step {json['step']} of generation {json['generation']}, "
            "which it does not hold"
        )
    return told[json["step"], json["generation"]]


# ---- values


def encode(value: object, told: Told | None = None) -> Json:
    """Returns ``value`` as JSON.  Raises :class:`TypeError` for a value that does not belong in a journal.

    A commit in ``told`` is written as its step and generation alone, a plan as its generation; classes are
    left out.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is tuple:
        return [each if type(each) in PLAIN else encode(each, told) for each in value]  # type: ignore[attr-defined]
    if kind is float:
        return value.hex()  # type: ignore[attr-defined]
    if kind is dict:
        return {key: encode(each, told) for key, each in value.items()}  # type: ignore[attr-defined]
    if told and isinstance(value, Outcome) and told.get((value.step, value.generation)) == value:
        return {"$": COMMIT, "step": value.step, "generation": value.generation}
    if told and isinstance(value, Plan) and told.get((value.generation,)) == value:
        return {"$": PLAN, "generation": value.generation}
    if isinstance(value, Outcome):
        left_out = (
            *MICROBATCHES,
            LAYERS,
            *(name for name, nothing in SELDOM.items() if getattr(value, name) == nothing),
        )
        rest = {name: encode(getattr(value, name), told) for name in _hints(Outcome) if name not in left_out}
        layers = {LAYERS: packed.pack_layers(value.layers)} if value.layers else {}
        return {
            "$": "Outcome",
            **rest,
            **layers,
            PACKED: packed.pack(value.losses, value.counts, value.samples),
        }
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} has no form in the journal: {value!r}")
    silent = [name for name in QUIET.get(kind, ()) if getattr(value, name) == getattr(kind, name)]
    if told and isinstance(value, Joined) and told.get(CLASSES) == (value.classes, value.class_bytes):
        silent += CLASSES
    parts = {name: getattr(value, name) for name in _hints(kind) if name not in silent}
    return {
        "$": kind.__name__,
        **{name: each if type(each) in PLAIN else encode(each, told) for name, each in parts.items()},
    }


def spelled_out(json: Json) -> Json:
    """Returns the JSON of a commit with a list for each of its packed fields; any other as it is."""
    if PACKED not in json:
        return json
    rest = {name: each for name, each in json.items() if name != PACKED}
    if LAYERS in rest:
        rest[LAYERS] = encode(packed.unpack_layers(rest[LAYERS]))
    return {
        **rest,
        **{name: encode(each) for name, each in zip(MICROBATCHES, packed.unpack(json[PACKED]), strict=True)},
    }


def parts_of(event: Json) -> Sequence[Json]:
    """Returns the facts that an encoded event tells: several only if they were decided together."""
    told: Sequence[Json] = event["events"] if event["$"] == "Together" else (event,)
    return told


def decode_event(json: Json) -> Event:
    event: Event = decode(Event, json)
    return event


def decode_run(json: Json) -> RunState:
    run: RunState = decode(RunState, json)
    return run


def decode(hint: Any, json: Json) -> Any:
    """Returns the value of type ``hint`` from which :func:`encode` made ``json``."""
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
        return (
            json
            if json is None
            else decode(next(each for each in options if each is not types.NoneType), json)
        )
    by_name: dict[str, type] = {each.__name__: each for each in options if isinstance(each, type)}
    if json.get("$") not in by_name:
        raise UnknownFormat(
            f"the journal has {json.get('$')!r} where one of {', '.join(sorted(by_name))} is expected"
        )
    return decode(by_name[json["$"]], json)


def _decode_tuple(options: tuple[Any, ...], json: Json) -> tuple[Any, ...]:
    if len(options) == 2 and options[1] is Ellipsis:
        return tuple(decode(options[0], each) for each in json)
    return tuple(decode(option, each) for option, each in zip(options, json, strict=True))


def _decode_fields(kind: Any, json: Json) -> Any:
    hints = _hints(kind)
    if json.get("$") != kind.__name__:
        raise UnknownFormat(f"the journal has {json.get('$')!r} where {kind.__name__} is expected")
    if PACKED in json:
        return _decode_fields(kind, spelled_out(json))
    unknown = sorted(json.keys() - hints.keys() - RETIRED - {"$"})
    if unknown:
        raise UnknownFormat(f"{kind.__name__} of the journal has unknown fields: {', '.join(unknown)}")
    return kind(**{name: decode(hint, json[name]) for name, hint in hints.items() if name in json})


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
