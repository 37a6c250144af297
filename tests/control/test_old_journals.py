"""Journals of formats 1 and 2 are still read: each of their flat fields is found in the part of the run to which it belongs now."""

from __future__ import annotations

import copy
import gzip
from pathlib import Path
from typing import Any

import pytest

from elastic.control import codec
from elastic.control.old_journals import _in_cells
from elastic.control.run import Stopping
from elastic.ids import Version
from elastic.report.replay import _in_the_words_of
from storage.journal import parse

pytestmark = pytest.mark.fast

FOLDER = Path(__file__).parent / "journals"
FORMATS = {"kills": 1, "storm": 1, "simulated_2": 2}
MOVED = {
    "members": "workers starting next_worker start_after reference classes kind mixed seats declined",
    "cluster": "nodes refused keepers slots blamed homes stays",
    "history": "lineage saved last untold furthest fruitless settled failures",
    "copies": "hosts unreadable buddies copied buddied protected",
    "takeover": "startups stumbles blind_until unread",
    "watch": "lease_until reform_s",
}
RENAMED = {"stock": "asked", "stock_until": "answers_until", "silent": "unreported"}


def read(name: str) -> Any:
    return parse(gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()))


def left(snapshot: Any, records: Any) -> Any:
    """Returns the flat fields as the last record leaves them: in these formats each changed field is written whole."""
    known = dict(snapshot["run"])
    for record in records:
        known |= {**record.get("meanwhile", {}), **record["changed"]}
    return _in_cells(known)


@pytest.mark.parametrize("name", FORMATS)
def test_each_field_is_where_it_belongs_now(name: str) -> None:
    for snapshot, records in read(name):
        assert snapshot["format"] == FORMATS[name]
        flat, run = left(snapshot, records), codec.fold(snapshot, records)
        now = {each: getattr(getattr(run, part), each) for part, names in MOVED.items() for each in names.split()}
        now |= {old: getattr(run.copies, new) for old, new in RENAMED.items()}
        now |= {"saves": run.saves.pending} | {each: getattr(run, each) for each in ("incarnation", "generation", "stop", "gave_up")}
        for field, value in now.items():
            if field in flat:
                recorded = flat.pop(field)
                assert _in_the_words_of(recorded, codec.encode(value)) == recorded, field
        watch, state = flat.pop("watch"), flat.pop("state")
        assert all(_in_the_words_of(each, codec.encode(getattr(run.watch, field))) == each for field, each in watch.items() if field != "$")
        assert codec.encode(run.state)["$"] == state["$"] and flat.keys() <= codec.RETIRED | {"$"}


def test_all_fields_of_format_2_are_looked_at() -> None:
    """Negative control of the test above: a field that it does not name would be left."""
    names = {each for names in MOVED.values() for each in names.split()} | RENAMED.keys()
    own = {"$", "incarnation", "generation", "state", "watch", "saves", "stop", "gave_up"}
    assert _in_cells(read("simulated_2")[0][0]["run"]).keys() == names | own


def test_the_answers_to_a_fence_say_what_each_had_seen() -> None:
    """Answers of format 2 repeat their commits; today each answer names the newest commit that its member had seen."""
    found = 0
    for snapshot, records in read("simulated_2"):
        for number, record in enumerate(records, 1):
            old = record["changed"].get("state", {})
            if old.get("$") == "Stopping" and any(each["outcomes"] for each in old["answers"]):
                state = codec.fold(snapshot, records[:number]).state
                assert isinstance(state, Stopping)
                for was, answer in zip(old["answers"], state.answers, strict=True):
                    steps = [each["step"] for each in was["outcomes"] if each["generation"] == was["generation"]]
                    assert answer.worker == was["worker"] and answer.prepared == was["prepared"]
                    assert answer.seen == (Version(max(steps), was["generation"]) if steps else None)
                    found += bool(steps)
    assert found > 5


def test_a_field_that_no_version_had_is_refused() -> None:
    snapshot, records = copy.deepcopy(read("simulated_2")[0])
    with pytest.raises(codec.UnknownFormat, match="RunState of the journal has unknown fields: colour, mood"):
        codec.fold({**snapshot, "run": {**snapshot["run"], "mood": 1, "colour": 2}}, records)
    records[3]["changed"]["colour"] = 2
    with pytest.raises(codec.UnknownFormat, match="unknown fields: colour"):
        codec.fold(snapshot, records)
