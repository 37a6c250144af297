"""A delta, applied, gives the other value exactly; and it is as short as what changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.evolve import evolve
from elastic.control.run import Answer, Members, RunState, Stopping, Worker
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal.codec import decode_run, encode
from elastic.journal.deltas import SAME, Misfit, delta, patched
from elastic.protocol.commit_record import Outcome
from tests.control.play import outcome, stepping
from tests.control.test_codec import FEW, through_json

pytestmark = pytest.mark.fast

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
SMALL = st.lists(st.integers(0, 3), max_size=6).map(tuple)
NAMES = st.lists(st.sampled_from("abcde"), unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: st.integers(0, 2) for key in keys})
)


def between(before: Any, after: Any) -> Any:
    """Returns the delta after it was written as JSON and parsed again."""
    change = delta(before, after, encode, whole=(Outcome,))
    return SAME if change is SAME else json.loads(json.dumps(change))


@FEW
@given(st.from_type(RunState), st.from_type(RunState))
def test_any_run_becomes_any_other(before: RunState, after: RunState) -> None:
    change = between(before, after)
    again = patched(through_json(before), change) if change is not SAME else through_json(before)
    assert decode_run(again) == after
    assert list(again["members"]["workers"]) == list(after.members.workers), "the order of entries counts"


@given(SMALL, SMALL)
def test_any_tuple_becomes_any_other(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    change = between(before, after)
    assert (change is SAME) == (before == after)
    assert change is SAME or patched(list(before), change) == list(after)


@given(NAMES, NAMES)
def test_any_dictionary_becomes_any_other(before: dict[str, int], after: dict[str, int]) -> None:
    change = between(before, after)
    again = before if change is SAME else patched(before, change)
    assert list(again.items()) == list(after.items())


def test_what_is_patched_stays_as_it_is() -> None:
    """Negative control of sharing: patching leaves the old value unchanged, so another delta can be applied
    to it.
    """
    before = {"a": [1, 2], "b": {"x": 1}}
    kept = json.loads(json.dumps(before))
    assert patched(before, {"~": {"a": {"at": 0, "cut": 1, "put": [7, 8]}, "b": {"~": {"x": 2}}}}) == {
        "a": [7, 8, 2],
        "b": {"x": 2},
    }
    assert before == kept


@pytest.mark.parametrize("change", [{"at": 1, "cut": 1, "put": []}, {"~": {"x": 1}}, {"without": [0, 2]}])
@pytest.mark.parametrize("known", [None, 3, []])
def test_a_delta_of_something_else_is_refused(known: Any, change: Any) -> None:
    with pytest.raises(Misfit):
        patched(known, change)


@pytest.mark.parametrize(
    ("after", "change"),
    [
        ((W1, W2, W3, WorkerId("w4")), {"at": 3, "cut": 0, "put": ["w4"]}),
        ((W1, W3), {"at": 1, "cut": 1, "put": []}),
        ((W1, WorkerId("w9"), W3), {"at": 1, "cut": 1, "put": ["w9"]}),
        ((W2,), {"without": [0, 2]}),
        ((), {"at": 0, "cut": 3, "put": []}),
    ],
)
def test_of_a_tuple_only_what_changed_is_written(after: tuple[WorkerId, ...], change: Any) -> None:
    assert between((W1, W2, W3), after) == change


def test_of_nested_values_only_what_changed_is_written() -> None:
    worker = Worker(NodeId("n1"), "cpu", 0.0)
    before = Members({W1: worker, W2: worker, W3: worker})
    after = evolve(before, workers={W1: worker, W3: evolve(worker, unfit="broken")})
    assert between(before, after) == {
        "~": {"workers": {"~": {"w3": {"~": {"unfit": "broken"}}}, "-": ["w2"]}}
    }
    moved = evolve(before, workers={W2: worker, W1: worker, W3: worker})
    assert "=" in between(before, moved)["~"]["workers"], "another order cannot be said by what was added"
    assert between(before, evolve(before)) is SAME


def test_a_value_of_another_type_is_written_whole() -> None:
    play = stepping(2)
    running, _ = play.run.state, play.lose("w2")
    assert isinstance(play.run.state, Stopping) and between(running, play.run.state)["$"] == "Stopping"


def test_values_that_must_stay_whole_do() -> None:
    """A commit is known by its step and generation, so nothing of it is said as a difference from the one
    before.
    """
    before, after = outcome(1, 1), outcome(2, 1)
    assert "~" in delta(before, after, encode)
    assert delta(before, after, encode, whole=(Outcome,)) == encode(after)


def test_an_item_of_a_tuple_changes_in_its_place() -> None:
    answers = tuple(Answer(worker, (), None) for worker in (W1, W2, W3))
    after = (answers[0], evolve(answers[1], seen=Version(3, 1)), answers[2])
    assert between(answers, after) == {
        "~": {"1": {"~": {"seen": {"$": "Version", "step": 3, "generation": 1}}}}
    }
