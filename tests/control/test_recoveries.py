"""The records of the journal show how the time of a recovery was spent."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.report.recoveries import recoveries

pytestmark = pytest.mark.fast


def record(
    at: float, kind: str, *actions: str, members: tuple[str, ...] = ("w1",), **event: Any
) -> dict[str, Any]:
    plan = {"plan": {"generation": 2, "members": list(members)}}
    return {
        "at": at,
        "reason": kind,
        "event": {"$": kind, **event},
        "actions": [{"$": name, **plan} for name in actions],
    }


def dead_node(at: float, *workers: str) -> dict[str, Any]:
    """Returns the record of a node that died with ``workers``."""
    kill = {"$": "Kill", "workers": list(workers)}
    return {**record(at, "KeeperLost", node="n1", with_its_node=True), "actions": [kill]}


BEGUN = [
    record(0.0, "Joined", "Form", members=("w1", "w2")),
    record(0.1, "Ready", "Go", form_s=0.1, heal_s=0.1),
    record(1.0, "StepDone"),
]


@pytest.mark.parametrize(
    ("first", "planned"),
    [
        ([record(10.0, "Lost", "Fence", worker="w1")], False),
        ([record(9.0, "Lost", "Fence", worker="w3"), record(10.0, "Joined", "Pause")][1:], True),
        (
            [
                record(9.0, "Lost", worker="w3"),
                record(9.5, "Lost", worker="w1"),
                record(10.0, "Lost", worker="w2"),
            ],
            False,
        ),
        ([dead_node(10.0, "w1", "w2")], False),
    ],
    ids=["fenced", "paused", "nobody is left to be fenced", "their node is dead"],
)
def test_each_phase_is_told_apart(first: list[dict[str, Any]], planned: bool) -> None:
    records = [
        *BEGUN,
        *first,
        record(10.5, "Beat", "Form"),
        record(11.0, "Here"),
        record(13.0, "Ready", "Go", form_s=0.25, heal_s=(1.5).hex()),
        record(17.0, "StepDone"),
        record(18.0, "StepDone"),
    ]
    _, found = recoveries(records)
    assert (found.generation, found.planned, found.known_at, found.committed_at) == (2, planned, 10.0, 17.0)
    assert (found.decide_s, found.abort_s, found.form_s, found.heal_s, found.go_s, found.step_s) == (
        0.5,
        0.5,
        0.25,
        1.5,
        0.25,
        4.0,
    )


@pytest.mark.parametrize("fence", ["Fence", "StartWorkers"], ids=["fenced", "nobody is left to be fenced"])
def test_a_world_that_broke_before_its_first_commit_is_part_of_the_next_recovery(fence: str) -> None:
    begun = [
        record(10.0, "Lost", "Fence", worker="w9"),
        record(10.5, "Fenced", "Form"),
        record(11.0, "Ready", "Go", form_s=0.1, heal_s=0.1),
    ]
    again = [
        record(12.0, "Lost", fence, worker="w1"),
        record(12.5, "Fenced", "Form"),
        record(13.0, "Ready", "Go", form_s=0.1, heal_s=0.1),
        record(14.0, "StepDone"),
    ]
    assert [each.known_at for each in recoveries(begun + again)] == [12.0]


@pytest.mark.parametrize(
    ("cause", "lost", "why"),
    [
        ("peer", ["w1"], "w1 is lost"),
        ("peer", ["w1", "w2"], "w1 is lost"),
        ("peer", [], "w2 waits"),
        ("job", ["w1"], "w2 waits"),
    ],
    ids=["a death that shows later", "two", "no death", "an error of its own"],
)
def test_why_a_world_ended_is_the_death_and_not_that_another_member_waited_for_the_dead_one(
    cause: str, lost: list[str], why: str
) -> None:
    """Over the wire it is chance whether a death is heard of first, or a member whose peer is gone."""
    deaths = [record(10.1, "Lost", worker=worker) | {"reason": f"{worker} is lost"} for worker in lost]
    end = record(10.0, "Broken", "Fence", worker="w2", cause=cause) | {"reason": "w2 waits"}
    of_the_next_world = record(12.0, "Lost", worker="w8") | {"reason": "w8 is lost"}
    again = [
        record(11.0, "Beat", "Form"),
        of_the_next_world,
        record(13.0, "Ready", "Go", form_s=0.1, heal_s=0.1),
        record(14.0, "StepDone"),
    ]
    _, found = recoveries([*BEGUN, end, *deaths, *again])
    assert (found.reason, found.known_at) == (why, 10.0)
