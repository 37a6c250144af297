"""R24: the world that a newcomer joins is connected beside the steps of the present one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.view import View
from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.support.chaos import (
    ASK_S,
    Trial,
    Witness,
    alone,
    assert_nothing_left,
    formed,
    samples,
    trial,
)
from tests.support.patience import PATIENCE_S
from tests.support.toys import LIGHT, toy_job

STEPS, GATE, PACE_S = 40, 36, 0.1
"""Steps of a run; the one that waits until the world is about to grow; and seconds of a read until then, so
that steps go on while the newcomer starts.
"""
SAMPLES = 16 * STEPS
NO_ROOM = "the device has 0 bytes of free memory"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "grows").touch()
    return alone(job_of(folder, name="local"))


def job_of(folder: Path, **changes: Any) -> Job:
    """Returns a job that goes on as fast as it can once there is a file ``grows``."""
    last = Cursor(SAMPLES, 16, 0, "permutation").ids(GATE)[0]
    calm = str(folder / "grows")
    data = {
        "dataset": "tests.support.toys:Paced",
        "args": {"samples": SAMPLES, "calm": calm, "pace_s": PACE_S, "gates": {str(last): calm}},
    }
    # nobody moves at a gate
    deadlines = {"grow_debounce_s": 30, "stall_s": PATIENCE_S}
    return toy_job(folder, steps=STEPS, data=data, deadlines=deadlines, **LIGHT, **changes)


def grown(folder: Path, **changes: Any) -> tuple[Trial, list[int]]:
    """Returns a run that loses a worker and takes in another one, and the attempt with which each of its worlds
    was connected ahead.
    """

    def grows(_: Witness, view: View) -> bool:
        if about := (view.generation, view.state) == (2, "Stopping") or view.generation > 2:
            (folder / "grows").touch()
        return about

    grows.look_s = ASK_S  # type: ignore[attr-defined]
    faults = [{"point": "backward", "step": 6, "world_rank": 1}]
    chaos = trial(job_of(folder, faults=faults, **changes), grows)
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
