"""The instrument of the benchmarks reads the right figures from a row of steps whose answer is known."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.benchmarks.peers import drive
from tests.benchmarks.peers.drive import spans
from tests.benchmarks.peers.toy import Mark
from tests.benchmarks.recovery import spread, table


class Recorded:
    """A system that has already run: (at, step, epoch, world) of each commit."""

    def __init__(self, *steps: tuple[float, int, int, int]) -> None:
        self.done = [Mark(at, "commit", step, epoch, world, 0, 7) for at, step, epoch, world in steps]
        self.done.append(Mark(13.5, "begin", 0, 0, 0, 0, 7))

    def marks(self) -> list[Mark]:
        return sorted(self.done, key=lambda mark: mark.at)


STEPS: list[tuple[float, int, int, int]] = [(float(step), step, 1, 2) for step in range(1, 12)]


def measured(*after: tuple[float, int, int, int]) -> dict[str, Any]:
    return drive.change(Recorded(*STEPS, *after), 1, 11.5)  # type: ignore[arg-type]


def test_a_survivor_goes_on() -> None:
    found = measured((14.0, 12, 2, 1))
    assert (found["next_commit_s"], found["first_microbatch_s"], found["pause_s"], found["lost_steps"]) == (
        2.5,
        2.0,
        3.0,
        0,
    )


def test_a_restart_from_a_checkpoint_loses_steps() -> None:
    """The control: the same strike on a system that goes back to step 8."""
    assert measured((14.0, 9, 2, 2))["lost_steps"] == 3


def test_a_commit_of_the_broken_world_is_not_the_next_one() -> None:
    assert measured((11.6, 12, 1, 2), (14.0, 13, 2, 1))["next_commit_s"] == 2.5


def test_growth_is_the_longest_pause_on_the_way() -> None:
    """The newcomer heals in a step that still counts one member, and is there in the next one."""
    system = Recorded((1.0, 1, 1, 1), (2.0, 2, 1, 1), (3.0, 3, 2, 1), (5.0, 4, 2, 2), (15.0, 5, 2, 2))
    found = drive.whole_again(system, 1, 1.5)  # type: ignore[arg-type]
    assert found == {"joined_s": 3.5, "pause_s": 2.0, "lost_steps": 0}


def test_both_members_may_tell_of_a_step() -> None:
    assert drive.step_s(
        Recorded(*STEPS, *((at + 0.1, step, 1, 2) for at, step, _, _ in STEPS)), 2
    ) == pytest.approx(1.0)  # type: ignore[arg-type]


def test_a_world_is_left_in_peace_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "DEADLINE_S", 0.1)
    monkeypatch.setattr(drive, "SETTLED", [10])
    assert drive.settled(Recorded(*STEPS), 2, Random(1)) == 1  # type: ignore[arg-type]
    for early in (Recorded(*STEPS[:-1]), Recorded(*STEPS, (12.0, 12, 2, 1))):
        with pytest.raises(TimeoutError, match="a settled world of 2"):
            drive.settled(early, 2, Random(1))  # type: ignore[arg-type]


def test_the_table_tells_of_what_failed() -> None:
    rows = [
        {"next_commit_s": 1.0, "lost_steps": 0, "growth": {"pause_s": 0.5}},
        {"next_commit_s": 3.0, "lost_steps": 4},
    ]
    assert (spread(rows, "next_commit_s"), spread(rows, "lost_steps"), spread(rows, "growth", "pause_s")) == (
        "2.00 (3.00)",
        "2 (4)",
        "0.50 (0.50)",
    )
    assert "no wheel for it" in table({"torchft": {"process": {"failed": "Traceback\nno wheel for it"}}})


def test_a_trace_of_ray_train_is_cut_at_each_commit() -> None:
    """It goes back to step 2: the third step is done again, and the pause ends where the next world begins."""
    marks = [
        Mark(at, what, step, epoch, world, 0, epoch)
        for at, what, step, epoch, world in [
            (0.0, "joined", 0, 1, 2),
            (1.0, "begin", 1, 1, 2),
            *((step + 1.0, "commit", step, 1, 2) for step in (1, 2, 3)),
            (9.0, "begin", 3, 2, 1),
            (11.0, "commit", 3, 2, 1),
            (13.0, "commit", 4, 2, 1),
        ]
    ]
    found = [(each["begin"], each["end"], each["bucket"], each["steps"]) for each in spans(marks, 4)]
    assert found == [
        (1.0, 2.0, "stepping", 1),
        (2.0, 3.0, "stepping", 1),
        (3.0, 4.0, "stepping", 1),
        (4.0, 9.0, "re-form", 0),
        (9.0, 11.0, "redone", 0),
        (11.0, 13.0, "stepping", 1),
    ]
    assert [each["data_ranks"] for each in spans(marks, 4)] == [2, 2, 2, 2, 1, 1]
