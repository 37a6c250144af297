"""R6: if three coordinators die of the same event, or before anything came of their start, the run saves,
stops and fails.
"""

from __future__ import annotations

from elastic.control.run import Failed, Running, Stopping
from elastic.control.takeover import MAX_DEATHS
from elastic.ids import Version, WorkerId
from elastic.protocol import events as ev
from tests.control.test_takeover import at_step, take_over


def test_an_event_that_three_coordinators_fail_at_ends_the_run_after_a_save() -> None:
    play = at_step(4)
    for _ in range(MAX_DEATHS):
        assert not play.run.gave_up
        play.tell(ev.Stumbled("StepDone: AssertionError at machine.py:1", "traceback"))
        if not play.run.gave_up:
            play = take_over(play)
    assert isinstance(play.run.state, Stopping) and play.run.state.save
    play.step(5, boundary=2)
    play.answer("w1", Version(5, 1))
    play.answer("w2", Version(5, 1))
    play.save(Version(5, 1), "w1", "w2")
    assert isinstance(play.run.state, Failed)
    assert play.run.state.reason == (
        "3 coordinators failed at the same event: StepDone: AssertionError at machine.py:1"
    )
    assert "resumes from step 5" in play.last.reason


def test_different_stumbles_are_not_added_up() -> None:
    play = at_step(4)
    for number in range(5):
        play.tell(ev.Stumbled(f"Beat: error {number}"))
    assert isinstance(play.run.state, Running) and not play.run.gave_up


def test_starts_that_come_to_nothing_end_the_run() -> None:
    """A coordinator whose process is killed leaves no record of its death."""
    play = at_step(4)
    for _ in range(MAX_DEATHS):
        play = take_over(play)
        play.tell(ev.Attached(WorkerId("w1"), play.plan, stepping=True))
        play.later(0.1)
        assert not play.run.gave_up
    assert take_over(play).run.gave_up == "3 coordinators in a row died before the run made progress"


def test_starts_that_come_to_something_never_end_the_run() -> None:
    play = at_step(4)
    for step in range(5, 15):
        play = take_over(play)
        play.step(step)
    assert isinstance(play.run.state, Running) and not play.run.gave_up and play.generation == 1
