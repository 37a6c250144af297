"""The journal gives back each value bit for bit, and refuses what it does not know."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.machine import advance
from elastic.control.run import RunState, State
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.journal.codec import UnknownFormat, decode, decode_event, decode_run, encode, fold
from elastic.journal.deltas import Misfit
from elastic.plan.layout import USES, LayoutRule
from elastic.protocol.actions import Action
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Event, Here, Recovered, SaveFailed, StepDone, Tick
from elastic.protocol.lineage import Lineage
from tests.control.play import outcome, stepping

pytestmark = pytest.mark.fast


FEW = settings(max_examples=10)
"""Number of examples of a type.  Each example draws every field, and the next test draws the same types
inside another one.
"""


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Draws any value of the type ``kind``; floats include infinity, but not NaN, which equals nothing."""
    return st.from_type(kind)


st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(
    LayoutRule,
    st.builds(
        LayoutRule,
        st.none() | st.integers(1, 9),
        st.none() | st.integers(3, 9),
        st.integers(1, 3),
        st.sampled_from(USES),
        st.sampled_from([(), (("cp", 2), ("tp", 4))]),
    ),
)
st.register_type_strategy(WorkerId, st.integers(1, 99).map(lambda number: WorkerId(f"w{number}")))


def through_json(value: object) -> Any:
    """Returns ``value`` encoded, written as JSON and parsed again, as a line of a journal is."""
    return json.loads(json.dumps(encode(value), allow_nan=False))


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_events_come_back_as_they_were(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(strategy(kind))
    assert decode_event(through_json(event)) == event


@pytest.mark.parametrize("kind", get_args(Action), ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_actions_come_back_as_they_were(kind: type[Action], data: st.DataObject) -> None:
    action = data.draw(strategy(kind))
    assert decode(Action, through_json(action)) == action


@pytest.mark.parametrize("kind", get_args(State), ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_states_come_back_as_they_were(kind: type[State], data: st.DataObject) -> None:
    state = data.draw(strategy(kind))
    assert decode(State, through_json(state)) == state


@FEW
@given(strategy(RunState))
def test_runs_come_back_as_they_were(run: RunState) -> None:
    again = decode_run(through_json(run))
    assert again == run
    assert list(again.workers) == list(run.workers), "the order in which they joined decides who sits where"


@pytest.mark.parametrize("value", [0.1 + 0.2, -0.0, 5e-324, math.pi * 1e300, math.inf, -math.inf])
def test_floats_are_bit_for_bit(value: float) -> None:
    again = decode(float, through_json(value))
    assert (again, math.copysign(1, again)) == (value, math.copysign(1, value))


def test_nan_is_told_apart_from_nothing() -> None:
    record = Outcome(1, 1, math.nan, (math.nan,), (1,), ((0,),), False)
    again = decode(Outcome, through_json(record))
    assert math.isnan(again.squared_norm) and math.isnan(again.losses[0])


def test_what_another_version_wrote_is_refused_by_name() -> None:
    line = encode(StepDone(WorkerId("w1"), 1, outcome(1, 1)))
    with pytest.raises(UnknownFormat, match="'Teleported' where one of Attached, Beat, Broken"):
        decode_event({**line, "$": "Teleported"})
    with pytest.raises(UnknownFormat, match="StepDone of the journal has unknown fields: colour, mood"):
        decode_event({**line, "mood": 1, "colour": 2})
    with pytest.raises(UnknownFormat, match="'Here' where Outcome is expected"):
        decode_event({**line, "outcome": encode(Here(WorkerId("w1"), 1))})
    for number, by in ((4, "a later version of Elastic"), (2, "a version of Elastic before 2026-11-25")):
        with pytest.raises(
            UnknownFormat,
            match=(
                f"format {number}, which {by} wrote, but this version of Elastic reads format 3; use "
                "the other version"
            ),
        ):
            fold({"format": number, "run": {}}, [])


def test_a_field_with_a_default_may_be_missing() -> None:
    """A journal that is older than the field lacks it."""
    assert decode_event({"$": "Ready", "worker": "w1", "generation": 3}).form_s == 0.0


@given(rule=strategy(LayoutRule).filter(lambda rule: not rule.model))
def test_a_layout_rule_is_written_as_before_if_no_axis_divides_the_model(rule: LayoutRule) -> None:
    written = encode(rule)
    assert set(written) == {"$", "dp_replicate", "dp_shard", "min_shard", "use"}
    divided = replace(rule, model=(("pp", 2), ("tp", 4)))
    for each in (rule, divided):
        assert decode(LayoutRule, json.loads(json.dumps(encode(each)))) == each
    assert decode(LayoutRule, encode(divided)).group == 8


def test_what_has_no_place_in_a_journal_is_refused() -> None:
    with pytest.raises(TypeError, match="set has no form in the journal"):
        encode({1, 2})


def test_folding_the_records_gives_the_run() -> None:
    play = stepping(2)
    start, before = codec.snapshot(play.run, code="0.1"), play.run
    records = []
    for number, tell in enumerate(
        (
            lambda: play.steps(1, 3),
            lambda: play.lose("w2"),
            lambda: play.later(1.0),
            lambda: play.answer("w1", Version(2, 1), prepared=3),
            lambda: play.here("w1"),
        )
    ):
        tell()
        records.append(json.loads(json.dumps(codec.record(number, play.now, Tick(), before, play.last))))
        before = play.run
        assert fold(start, records) == play.run
    assert [each["n"] for each in records] == list(range(5))
    assert records[3]["state"] == "Forming" and [each["$"] for each in records[3]["actions"]] == [
        "Settle",
        "Form",
    ]
    assert "members" not in records[0]["changed"], "only what changed is written"


def test_records_without_a_change_may_be_left_out() -> None:
    """The record after them says what changed since the last one that was written."""
    play = stepping(2)
    start, before = codec.snapshot(play.run), play.run
    play.beat("n1", ("w1", 1, 0, 0))
    play.step(1)
    assert fold(start, [codec.record(0, 0.0, Tick(), before, play.last)]) == play.run


def test_a_coordinator_of_a_newer_version_goes_on_with_a_journal_that_lacks_its_fields() -> None:
    """R6: its first record has the run in full, so the records after it fit.  The control: without that
    record they do not.
    """
    play = stepping(2, save_every=1)
    play.step(1)
    older = codec.snapshot(play.run, "older", play.rules)
    for each in older["run"]["saves"]["pending"]:
        assert each.pop("refused") == []
    taken = advance(play.run, Recovered(2, play.run.members.seats, ("n1", "n2")), 1.0, play.rules)
    refused = SaveFailed(Version(1, 1), "s3://b cannot be reached", 1, again=True, worker=WorkerId("w1"))
    next_ = advance(taken.run, refused, 2.0, play.rules)
    records = [
        codec.record(0, 1.0, Recovered(2, play.run.members.seats, ("n1", "n2")), play.run, taken),
        codec.record(1, 2.0, refused, taken.run, next_),
    ]
    assert fold(older, records) == next_.run and next_.run.saves.pending[0].refused == ("w1",)
    with pytest.raises(Misfit):
        fold(older, records[1:])


def test_what_is_read_of_a_segment_without_folding_it_is_what_folding_gives() -> None:
    """R6: so a third coordinator finds what the second one, whose first record has the run in full, has left."""
    play = stepping(2, save_every=1)
    play.step(1)
    first, taken = (
        codec.snapshot(play.run, "", play.rules),
        Recovered(2, play.run.members.seats, ("n1", "n2")),
    )
    records = []
    for number, event in enumerate((taken, StepDone(play.plan.members[0], 1, outcome(2, 1)))):
        before = play.run
        play.tell(event)
        records.append(codec.record(number, 1.0, event, before, play.last))
        assert codec.incarnation_after((first, records)) == fold(first, records).incarnation == 2
        assert (
            decode(Lineage, codec.field_after((first, records), "history", "lineage"))
            == fold(first, records).history.lineage
        )
