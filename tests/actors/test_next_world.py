"""R24: the world that a newcomer joins is connected beside the steps of the present one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.support.chaos import Trial, alone, assert_nothing_left, formed, samples, trial
from tests.support.toys import LIGHT, toy_job

STEPS = 150
NO_ROOM = "the device has 0 bytes of free memory"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    return alone(toy_job(folder, name="local", steps=STEPS, **LIGHT))


def grown(folder: Path, **changes: Any) -> tuple[Trial, list[int]]:
    """Returns a run that loses a worker and takes in another one, and the attempt with which each of its worlds
    was connected ahead.
    """
    faults = [{"point": "backward", "step": 6, "world_rank": 1}]
    chaos = trial(toy_job(folder, steps=STEPS, faults=faults, **LIGHT, **changes))
    return chaos, [each.ahead for each in formed(Run.open(chaos.job).records())]


def assert_same(chaos: Trial, expected: Any) -> None:
    """Checks that the run has the bits and samples of one without faults, and lost no step when it grew."""
    assert chaos.result.state == "Finished"
    assert (chaos.hash, chaos.losses) == (expected.hash, expected.losses)
    assert samples(chaos.ledger) == samples(expected.ledger)
    *_, last = formed(Run.open(chaos.job).records())
    assert (last.layout, last.tier, last.redone) == ((2, 1), "live", 0) and 6 < last.step < STEPS
    (survivor,) = (each for each in last.members if each in ("w1", "w2"))
    assert chaos.witness.seen[survivor].final["updates_applied"] == STEPS, "one process from first to last"
    assert_nothing_left(chaos)


@pytest.mark.must_run_in_ci
def test_r24_a_newcomers_world_is_connected_beside_the_steps(tmp_path: Path, expected: Any) -> None:
    """A world after a loss connects when it forms; a world that grows has been connected before its pause."""
    chaos, ahead = grown(tmp_path)
    assert_same(chaos, expected)
    assert ahead == [0, 0, 1]


@pytest.mark.full
def test_r24_a_member_without_room_costs_a_longer_pause_and_nothing_else(
    tmp_path: Path, expected: Any
) -> None:
    """The control: the same run, in which no world is connected ahead."""
    chaos, ahead = grown(tmp_path, loss="tests.support.mischief:roomless")
    assert_same(chaos, expected)
    assert ahead == [0, 0, 0]
    assert any(NO_ROOM in line.text for line in chaos.lines if isinstance(line, Sentence))
