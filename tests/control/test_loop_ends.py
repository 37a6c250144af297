"""A run ends before the last step of its job because its loops ask for it, or are left (U4)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic.control.run import Finished, Finishing, Forming, Running
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.protocol import events as ev
from elastic.protocol.commit_record import ENDS, GO_ON, Validated
from elastic.protocol.plan import Plan
from tests.control.play import Play, reformed, stepping

pytestmark = pytest.mark.fast
W1, W2 = WorkerId("w1"), WorkerId("w2")


def left(play: Play, *workers: str, step: int = 3) -> str:
    """The loops of ``workers`` have left a step behind as the last one."""
    return [play.tell(ev.Ends(WorkerId(worker), play.generation, step)) for worker in workers][-1]


def test_the_loops_of_all_members_end_the_run() -> None:
    """U4: the save of that step is begun by the last of them, and the journal keeps what is known.  The
    control: one of two does not.
    """
    play = stepping(2)
    play.steps(1, 3)
    assert (
        left(play, "w1") == "step 3 is the last: the loop was left"
        and play.last.durable
        and isinstance(play.run.state, Running)
    )
    assert codec.decode_run(json.loads(json.dumps(codec.encode(play.run)))) == play.run
    assert left(play, "w2") == "step 3 is the last: its checkpoint is on the way" and isinstance(
        play.run.state, Finishing
    )
    assert play.save(Version(3, 1), "w1", "w2").endswith("finished at step 3: the loop was left")
    assert play.run.state == Finished(3, "the loop was left")


def test_one_member_asks_in_its_commit_and_all_end() -> None:
    """U4: what it asks for is part of the step.  A member that dies then changes nothing: the next world is
    there to save that step.
    """
    play = stepping(2)
    play.steps(1, 2)
    assert play.tell(ev.Ends(W2, 1, 0, "good enough")) == "the loop of w2 ends the run: good enough"
    assert not play.run.enough and not play.run.why
    assert play.step(3, ENDS) == "step 3 is the last: good enough" and play.run.enough == 3
    play.lose("w1")
    play.answer("w2", Version(3, 1))
    assert play.plan.ends == 3 == codec.decode(Plan, json.loads(json.dumps(codec.encode(play.plan)))).ends
    reformed(play)
    assert isinstance(play.run.state, Finishing) and play.run.saves.find(Version(3, 1)) is not None
    play.tell(ev.ShardSaved(W2, Version(3, 1), 2))
    play.tell(ev.Saved(Version(3, 1), "digest"))
    assert play.run.state == Finished(3, "good enough")


def test_what_was_asked_in_a_world_that_broke_before_its_commit_is_no_reason() -> None:
    """U4: the next world goes on, and ends otherwise.  The control: the reason of a commit counts, also if it
    comes after the commit.
    """
    for asks in (False, True):
        play = stepping(2)
        play.steps(1, 2)
        play.tell(ev.Ends(W2, 1, 0, "good enough"))
        play.lose("w2")
        play.answer("w1", Version(2, 1))
        assert isinstance(play.run.state, Forming) and (play.run.asked, play.run.why) == ("", "")
        reformed(play)
        play.step(3, ENDS if asks else GO_ON)
        if asks:
            play.tell(ev.Ends(W1, 2, 3, asked=True))
            assert play.run.why == "the loop asked to stop"
            play.tell(ev.Ends(W1, 2, 0, "bad enough"))
        else:
            left(play, "w1")
        assert (play.run.enough, play.run.why) == (3, "bad enough" if asks else "the loop was left")


def test_patience_has_no_reason_of_a_loop() -> None:
    """U4, L1: a request that nobody has committed is none, so a start with more patience goes on."""
    play = stepping(2, save_every=2, patience=1)
    play.steps(1, 2)
    play.tell(ev.Ends(W2, 1, 0, "good enough"))
    for number, loss in ((3, 1.0), (4, None), (5, 2.0)):
        play.tell(
            ev.StepDone(
                W1,
                1,
                play.commit(number)
                if loss is None
                else replace(play.commit(number), validated=Validated(loss, 1)),
            )
        )
    assert (play.run.enough, play.run.why) == (4, "")


def test_a_loop_that_ends_alone_ends_all_of_them() -> None:
    """U4: the others wait for it in vain, so the world stands still; the next one is told the last step.
    Nobody is to blame.
    """
    play = stepping(2)
    play.steps(1, 3)
    left(play, "w1")
    play.beat("n1", ("w1", 3, 0, 0))
    play.beat("n2", ("w2", 3, 1, 1))
    play.now += 100
    assert (
        "the loop of w1 ended the run after step 3 and the loops of other workers wait for it"
        in play.beat("n2", ("w2", 3, 1, 1)) + play.later(0)
    )
    play.answer("w1", Version(3, 1))
    play.answer("w2", Version(3, 1))
    assert (play.plan.ends, play.plan.version, len(play.plan.members)) == (3, Version(3, 1), 2)


def test_a_loop_that_was_left_while_its_world_broke_tells_the_next_one() -> None:
    """U4: the world that is being formed does not know the last step, so another one is formed."""
    play = stepping(2)
    play.steps(1, 3)
    play.lose("w2")
    play.answer("w1", Version(3, 1))
    assert isinstance(play.run.state, Forming) and not play.plan.ends
    play.here("w1")
    left(play, "w1")
    play.answer("w1", Version(3, 1))
    assert isinstance(play.run.state, Forming) and play.plan.ends == 3


def test_journals_without_such_an_end_look_as_before() -> None:
    for value in (stepping(2).run, stepping(2).plan, Finished()):
        assert not {"why", "asked", "left", "ends"} & codec.encode(value).keys()
