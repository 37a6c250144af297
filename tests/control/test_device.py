"""A worker that has lost its device is replaced; the same loss at the same step on a second worker is the
job's own error (R1, R20).
"""

from __future__ import annotations

import pytest

from elastic.control.run import Failed
from elastic.ids import Version, WorkerId
from elastic.protocol import events as ev
from elastic.protocol.actions import Kill, Settle
from tests.control.play import outcome, reformed, stepping

pytestmark = pytest.mark.fast
W1, W2 = WorkerId("w1"), WorkerId("w2")
ERROR = "Traceback ...\nRuntimeError: CUDA error"
LOST = "CUDA error: an illegal memory access was encountered"


def test_r1_a_worker_that_lost_its_device_is_replaced() -> None:
    """The survivor stays; nobody is accused the first time, and the step in flight is done again."""
    play = stepping(2)
    play.steps(1, 3)
    reason = play.broken("w2", "device", ERROR, LOST)
    assert reason == f"w2 cannot go on (device: {LOST}): stop generation 1 of 2 workers"
    play.answer("w1", Version(3, 1), prepared=4)
    play.answer("w2", Version(3, 1), prepared=4)
    assert play.did(Kill) == [Kill((W2,), "its process is unusable")]
    assert play.plan.members == ("w1",) and play.plan.tier == "live"
    assert {each.worker for each in play.plan.holders} == {"w1"}, (
        "what lies on a lost device is held by nobody"
    )
    play.tell(ev.Capacity(1))
    assert play.run.members.starting.keys() == {"w3"}
    reformed(play)
    play.step(4)
    assert play.run.history.failures == ()


def test_r1_a_commit_that_only_a_lost_device_has_seen_counts() -> None:
    play = stepping(2)
    play.steps(1, 3)
    play.broken("w2", "device", ERROR, LOST)
    play.answer("w2", None, saw=4)
    play.answer("w1", Version(3, 1), prepared=4)
    assert play.did(Settle) == [Settle(1, (W2, W1), outcome(4, 1))]
    assert (play.plan.members, play.plan.version) == ((W1,), Version(4, 1))


def test_r1_a_device_lost_while_the_world_forms_or_stops() -> None:
    play = stepping(2)
    play.broken("w1")
    play.broken("w2", "device", ERROR, LOST)
    play.answer("w1", Version(0, 0))
    play.answer("w2", Version(0, 0))
    assert play.plan.members == ("w1",) and play.generation == 2
    play.tell(ev.Capacity(1))
    play.join("w3")
    play.here("w1")
    play.broken("w1", "device", ERROR, "CUDA error: uncorrectable ECC error encountered")
    play.answer("w1", Version(0, 0))
    assert play.plan.members == ("w3",) and play.plan.tier == "init"


@pytest.mark.parametrize(
    ("step", "signature"), [(1, LOST), (2, LOST), (1, "CUDA error: uncorrectable ECC error encountered")]
)
def test_r20_the_same_device_error_at_the_same_step_on_a_second_worker_is_the_jobs(
    step: int, signature: str
) -> None:
    """The first case ends the run; the others are the controls: another step, another error."""
    play = stepping(2)
    play.broken("w2", "device", ERROR, LOST)
    play.answer("w2", Version(0, 0))
    play.answer("w1", Version(0, 0))
    reformed(play)
    play.steps(1, step - 1) if step > 1 else None
    play.broken("w1", "device", ERROR, signature)
    play.answer("w1", play.run.version)
    if (step, signature) == (1, LOST):
        assert play.run.state == Failed(f"job error: {LOST} at step 1, again on w2 and w1", ERROR)
    else:
        assert not play.run.over


def test_who_stands_still_because_of_another_says_so() -> None:
    """A loss raises on w2, and w1 notices first, or later.  The control: an error of its own, which w2 has
    had before at that step.
    """
    play, mine = stepping(2), ("job", "Traceback ...\nValueError: mine", "ValueError at loss.py:7")
    play.steps(1, 3)
    assert play.broken("w2", *mine) == (
        "w2 cannot go on (job: ValueError: mine): stop generation 1 of 2 workers"
    )
    assert play.broken("w1") == "w1 waits meanwhile"
    play.answer("w1", Version(3, 1))
    play.answer("w2", Version(3, 1))
    reformed(play)
    assert play.broken("w1", *mine) == (
        "w1 cannot go on (job: ValueError: mine), as w2 before it: stop generation 2 of 2 workers"
    )

    play = stepping(2)
    play.steps(1, 3)
    assert play.broken("w1") == (
        "w1 waits, because its world broke (peer: connection closed): stop generation 1 of 2 workers"
    )
    assert play.broken("w2") == "w2 waits meanwhile", "the story tells the cause once"
