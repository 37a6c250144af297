"""The vocabulary of faults: a schedule, drawn or written, is the same whoever performs it."""

from __future__ import annotations

from hashlib import sha256

import pytest

from elastic.protocol import faults
from elastic.protocol.faults import (
    AMOUNTS,
    FATAL,
    LASTING,
    OWN_KINDS,
    RECORDED,
    SIMULATED_POINTS,
    VICTIM,
    Fault,
    Kind,
    draw,
    from_json,
    to_json,
)

pytestmark = pytest.mark.fast


def test_a_schedule_is_a_function_of_its_arguments_and_sorted() -> None:
    drawn = draw(7, 200, 60.0, points=SIMULATED_POINTS)
    assert drawn == draw(7, 200, 60.0, points=SIMULATED_POINTS) != draw(8, 200, 60.0, points=SIMULATED_POINTS)
    assert [each.at for each in drawn] == sorted(each.at for each in drawn)
    assert {each.kind for each in drawn} == set(RECORDED) and {each.point for each in drawn} == {
        None,
        *SIMULATED_POINTS,
    }
    assert {each.state for each in drawn} == {"", *faults.STATES}


def test_it_comes_back_from_json_as_it_went_in() -> None:
    drawn = draw(1, 100, 60.0, points=SIMULATED_POINTS, since_s=5.0)
    assert from_json(to_json(drawn)) == drawn
    assert all(5.0 <= each.at <= 65.0 for each in drawn)


def test_json_says_only_what_is_not_usual() -> None:
    assert to_json([Fault(2.0, Kind.SIGKILL), Fault(3.0, Kind.LOSS, amount=0.5, duration_s=1.0)]) == (
        '[{"at": 2.0, "kind": "SIGKILL"},\n {"at": 3.0, "kind": "loss", "duration_s": 1.0, "amount": 0.5}]\n'
    )


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ('{"at": 1, "kind": "gone"}', "'gone' is not a valid Kind"),
        ('{"at": 1, "kind": "exit", "point": "lunch"}', "'lunch' is not a valid Point"),
        ('{"at": 1, "kind": "exit", "state": "Over"}', "state = 'Over' must be one of Waiting"),
        ('{"at": 1, "kind": "exit", "worker": 3}', "a fault has no worker; it has amount, at"),
    ],
)
def test_a_word_that_is_not_in_the_vocabulary_is_named(entry: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        from_json(f"[{entry}]")


def test_every_kind_has_a_victim_and_what_lasts_ends() -> None:
    assert set(VICTIM) == set(Kind) and set(VICTIM.values()) == {"worker", "node", "coordinator", "all"}
    for each in draw(3, 500, 60.0, tuple(Kind), for_good=0.0):
        assert (each.duration_s is not None) == (each.kind in LASTING)
        assert bool(each.amount) == (each.kind in AMOUNTS)
    assert {VICTIM[kind] for kind in (*OWN_KINDS, *FATAL)} == {"worker"}


def test_a_seed_means_the_same_schedule_as_ever() -> None:
    """Recorded seeds stay what they were: the order of kinds, their spans and amounts are part of it."""
    drawn = to_json(
        draw(7, 500, 60.0, points=SIMULATED_POINTS) + draw(8, 100, 60.0, OWN_KINDS, points=SIMULATED_POINTS)
    )
    assert (
        sha256(drawn.encode()).hexdigest()
        == "588188b69febc2b55a4dbc75a009b7863d96d741ea3f6471dc9821db06cef3c0"
    )
