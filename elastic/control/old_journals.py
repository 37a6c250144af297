"""Old journals: formats 1 and 2 are converted as if this version had written them.

In both formats, ``RunState`` was flat, a record held each changed field whole, and the answers to a fence repeated all their commits.  In
format 1, ``changed`` is relative to the record before: it also holds what unrecorded events had changed, unless the decision changed it
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.control.deltas import patched
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of

FORMATS = (1, 2)

Json = Any
PARTS = {
    "Members": "workers starting next_worker start_after reference classes kind mixed seats declined",
    "Cluster": "nodes refused keepers slots blamed homes stays",
    "History": "lineage saved last untold furthest fruitless settled failures",
    "CopyInventory": "hosts stock stock_until unreadable silent buddies copied buddied protected",
    "Takeover": "startups stumbles blind_until unread",
    "Watch": "lease_until reform_s",
}
FIELD = {
    "Members": "members",
    "Cluster": "cluster",
    "History": "history",
    "CopyInventory": "copies",
    "Takeover": "takeover",
    "Watch": "watch",
}
PART_OF = {name: part for part, names in PARTS.items() for name in names.split()}
"""Maps each field of the flat ``RunState`` that moved to the value that it belongs to now."""
OWN = frozenset({"incarnation", "generation", "state", "stop", "gave_up"})
RENAMED = {"stock": "asked", "stock_until": "answers_until", "silent": "unreported"}
ACTIONS = {"TakeStock": "ListCopies"}
QUIET = ("watch", "slots", "lease_until")
"""The fields that unrecorded events change, in format 1."""


def converted(
    snapshot: Mapping[str, Json], records: Sequence[Mapping[str, Json]], retired: set[str], to: int
) -> tuple[Mapping[str, Json], list[Mapping[str, Json]]]:
    """Returns a segment in format ``to``.  Raises :class:`KeyError` with the names of fields that no version had."""
    known = _in_cells(snapshot["run"])
    new: Mapping[str, Json] = {**snapshot, "format": to, "run": _run(known, retired)}
    found: list[Mapping[str, Json]] = []
    for record in map(_in_cells, records):
        meanwhile, changed = record.get("meanwhile", {}), record["changed"]
        if snapshot["format"] == 1:
            meanwhile, changed = _quiet(known, record)
            known = {**known, **changed}
        actions = [{**each, "$": ACTIONS.get(each["$"], each["$"])} for each in record["actions"]]
        parts: dict[str, Json] = {"meanwhile": _changes(meanwhile, retired)} if meanwhile else {}
        if commits := _commits(record["event"]):
            parts["commits"] = commits
        found.append({**record, **parts, "changed": _changes(changed, retired), "actions": actions})
    return new, found


def with_there(forming: Json) -> Json:
    """Returns the state ``Forming`` with one entry for each member that is there, where older versions listed them and the ready ones."""
    if "ready" not in forming:
        return forming
    rest = {name: value for name, value in forming.items() if name not in ("here", "ready")}
    return {**rest, "there": {worker: worker in forming["ready"] for worker in forming["here"]}}


def _in_cells(json: Json) -> Json:
    """Returns ``json`` in the words that fit several axes.

    Formats 1 and 2 knew one axis: a holding had the number of shards and its index among them, and ``rows`` described the state.
    """
    if isinstance(json, list):
        return [_in_cells(each) for each in json]
    if not isinstance(json, Mapping):
        return json
    found = {key: _in_cells(each) for key, each in json.items()}
    if "shard_count" in found:
        count, index = found.pop("shard_count"), found.pop("shard_index")
        found["cell"] = cell_of(Layout(1, count), index)
    if "rows" in found:
        lengths = found.pop("rows")
        found.setdefault("classes", [{"$": "Tensor", "name": "", "kind": "parameter", "dtype": "F32", "shape": [n]} for n in lengths])
    return found


def _commits(event: Json) -> list[Json]:
    return [event["outcome"]] if event["$"] == "StepDone" else list(event.get("outcomes", ()))


def _quiet(known: Json, record: Mapping[str, Json]) -> tuple[dict[str, Json], dict[str, Json]]:
    """Returns what unrecorded events had changed before a decision of format 1, as far as that is known, and what the decision changed.

    The slots after the decision are the slots before it less the workers that were started.
    """
    started = sum(len(action["workers"]) for action in record["actions"] if action["$"] == "StartWorkers")
    quiet = {name: value for name, value in record["changed"].items() if name in QUIET}
    left = {**known, **quiet}["slots"]
    return {**quiet, "slots": left + started}, {**record["changed"], "slots": left}


def _run(flat: Json, retired: set[str]) -> Json:
    """Returns today's ``RunState`` of a flat one."""
    empty: dict[str, Json] = {field: {"$": part} for part, field in FIELD.items()}
    known = {name: each for name, each in flat.items() if name != "$"}
    return patched({"$": "RunState", **empty, "saves": {"$": "Saves"}}, {"~": _changes(known, retired)})


def _changes(flat: Mapping[str, Json], retired: set[str]) -> dict[str, Json]:
    """Returns the delta of the flat fields that changed."""
    changes: dict[str, Json] = {}

    def note(field: str, name: str, value: Json) -> None:
        changes.setdefault(field, {"~": {}})["~"][name] = _whole(value)

    unknown = sorted(flat.keys() - OWN - PART_OF.keys() - {"watch", "saves"} - retired)
    if unknown:
        raise KeyError(", ".join(unknown))
    for name, value in flat.items():
        if name == "state":
            changes["state"] = _state(value)
        elif name in OWN:
            changes[name] = value
        elif name == "saves":
            note("saves", "pending", value)
        elif name == "watch":
            for each in value.keys() - {"$"}:
                note("watch", each, value[each])
        elif name in PART_OF:
            note(FIELD[PART_OF[name]], RENAMED.get(name, name), value)
    return changes


def _whole(value: Json) -> Json:
    return {"=": value} if isinstance(value, dict) and "$" not in value else value


def _state(state: Json) -> Json:
    """Returns the state with answers in today's form; the commits that they brought are in the history."""
    return {**state, "answers": [_answer(each) for each in state["answers"]]} if state["$"] == "Stopping" else state


def _answer(fenced: Json) -> Json:
    seen = [each for each in fenced.get("outcomes", ()) if each["generation"] == fenced["generation"]]
    newest = max(seen, key=lambda each: each["step"], default=None)
    version = newest and {"$": "Version", "step": newest["step"], "generation": newest["generation"]}
    return {"$": "Answer", "worker": fenced["worker"], "held": fenced["held"], "prepared": fenced["prepared"], "seen": version}
