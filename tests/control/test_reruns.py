"""R16: members that have computed different gradients from one microbatch: the step is done again, and who was
wrong is named.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.control.corruption import LIMIT
from elastic.control.run import Failed, Forming, Running, Stopping, Vote
from elastic.control.wrong_gradients import in_every_pair
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.plan.layout import Layout
from elastic.protocol import events as ev
from elastic.protocol.actions import Fence, Kill
from elastic.protocol.commit_record import CommitShape
from elastic.protocol.reruns import Computed, Differ, apart, compared
from tests.control.play import Play, reformed, stepping

pytestmark = pytest.mark.fast
STEP = 4
"""The step with reruns."""


def differ(play: Play, *computed: tuple[int, int, int], by: str = "") -> str:
    """A member tells which (world rank, microbatch, digest) do not agree in ``STEP``."""
    worker = WorkerId(by or play.plan.members[0])
    said = tuple(Computed(*each) for each in computed)
    return play.tell(ev.Broken(worker, play.generation, STEP, "differs", "they differ", computed=said))


def done_again(play: Play) -> None:
    """All who are left answer the fence with the state before ``STEP``, and form the next world."""
    for worker in play.run.state.pending if isinstance(play.run.state, Stopping) else ():
        play.answer(worker, play.run.version)
    play.later(play.rules.fence_s)
    assert isinstance(play.run.state, Forming) and play.plan.version.step == STEP - 1, play.run.state
    reformed(play)


def agree(play: Play, *reran: tuple[int, int], step: int = STEP) -> str:
    """The world commits a step with reruns on which all agree."""
    outcome = replace(play.commit(step), reran=tuple((0, *each) for each in reran))
    return play.tell(ev.StepDone(play.plan.members[0], play.generation, outcome))


def begun(workers: int) -> Play:
    play = stepping(workers, copy_every=1)
    play.steps(1, STEP - 1)
    return play


def killed(play: Play) -> list[str]:
    return [worker for action in play.did(Kill) for worker in action.workers]


def test_r16_the_step_is_done_again_and_tells_which_of_two_was_wrong() -> None:
    """Nothing is lost: the next world begins where the last one stood."""
    play = begun(2)
    said = differ(play, (0, 0, 10), (1, 0, 11))
    assert "w1 and w2 computed different gradients from the same microbatch in step 4, and nobody" in said
    assert play.did(Fence) and play.last.durable and play.run.history.rerun is not None
    assert differ(play, (0, 0, 10), (1, 0, 11), by="w2") == "w2 waits meanwhile"
    assert play.run.history.rerun.times == 1, "the same dispute"
    done_again(play)
    assert play.plan.members == ("w1", "w2") and not play.did(Kill)
    said = agree(play, (0, 10), (1, 20))
    assert "w2 computed other gradients in step 4 than the same step gave when it was done again" in said
    assert isinstance(play.run.state, Stopping) and play.run.history.rerun is None
    assert play.run.version.step == STEP, "the step stays: all have agreed"
    for worker in ("w1", "w2"):
        play.answer(worker, play.run.version)
    assert killed(play) == ["w2"]


@pytest.mark.parametrize("again", [66, 67], ids=["the same error", "another one"])
def test_r16_a_member_that_is_wrong_twice_differs_from_two_others(again: int) -> None:
    """Both times together tell whose word is right."""
    play = begun(3)
    differ(play, (1, 1, 66), (0, 1, 20))
    done_again(play)
    said = differ(play, (1, 1, again), (2, 1, 20))
    assert "w2 computed other gradients in step 4 than others did from the same microbatch" in said
    for worker in ("w1", "w3", "w2"):
        play.answer(worker, play.run.version)
    assert killed(play) == ["w2"]
    play.later(play.rules.fence_s)
    reformed(play)
    assert "w2" not in play.plan.members
    agree(play, (0, 10), (1, 20))
    assert play.run.history.rerun is None and isinstance(play.run.state, Running)


@pytest.mark.parametrize("reran", [((2, 30),), ((0, 12), (1, 20))], ids=["others", "neither"])
def test_r16_it_is_said_if_nobody_can_know_whose_gradients_were_wrong(
    reran: tuple[tuple[int, int], ...],
) -> None:
    """The microbatch is not run twice again, or both were wrong."""
    play = begun(2)
    differ(play, (0, 0, 10), (1, 0, 11))
    done_again(play)
    assert "which of w1 and w2 was wrong in step 4 is not known" in agree(play, *reran)
    assert isinstance(play.run.state, Running)


def test_r16_a_later_step_tells_nothing_of_an_earlier_one() -> None:
    """A step without reruns leaves the dispute open, as in a world of one data rank."""
    play = begun(2)
    differ(play, (0, 0, 10), (1, 0, 11))
    done_again(play)
    play.step(STEP)
    assert play.run.history.rerun is not None
    assert "is not known" in agree(play, (0, 10), (1, 20), step=STEP + 1)


def test_r16_who_is_one_of_the_two_each_time_was_wrong() -> None:
    """It is found at once if it differs from two others.  The control: two that differ twice from each other."""
    play = begun(3)
    assert "w2 computed other gradients in step 4 than others did" in differ(
        play, (1, 1, 66), (0, 1, 20), (2, 2, 30), (1, 2, 67)
    )
    play = begun(3)
    for _ in range(2):
        assert "nobody knows which are right" in differ(play, (1, 1, 66), (0, 1, 20))
        done_again(play)


def test_r16_workers_of_one_node_were_wrong_if_all_others_differ_from_one_of_them() -> None:
    """Two of one node differ from two of other nodes.  The control: they are on two nodes, and so are the others."""
    w1, w2, w3, w4 = (WorkerId(f"w{number}") for number in range(1, 5))
    n1, n2, n3 = (NodeId(f"n{number}") for number in range(1, 4))

    def said(nodes: tuple[NodeId, ...]) -> list[Vote]:
        workers = dict(zip((w1, w2, w3, w4), nodes, strict=True))
        return [Vote(each, workers[each], "", each) for each in (w1, w3, w4, w2)]

    assert [vote.worker for vote in in_every_pair(said((n1, n1, n2, n3)))] == [w1, w2]
    assert not in_every_pair(said((n1, n2, n3, n3))[:2]) and not in_every_pair(said((n1, n2, n1, n2)))
    assert not in_every_pair(said((n1, n1, n1, n1))), "who was wrong on a node is not told by its node"


def test_r16_gradients_of_different_parts_of_a_model_are_not_compared() -> None:
    """Two members divide the model, and both of a model group differ from the other two.  If only one was wrong in
    the one place, and another one in the other, the step that is done again tells both apart.
    """
    play = begun(2)
    said = (Computed(0, 0, 10, 0), Computed(1, 0, 11, 0), Computed(0, 0, 21, 1), Computed(1, 0, 20, 1))
    play.tell(ev.Broken(WorkerId("w1"), play.generation, STEP, "differs", "they differ", computed=said))
    done_again(play)
    outcome = replace(play.commit(STEP), reran=((0, 0, 10), (1, 0, 21)))
    told = play.tell(ev.StepDone(play.plan.members[0], play.generation, outcome))
    assert "w2 computed other gradients in step 4 than the same step gave" in told


def test_r16_a_step_that_is_told_with_later_ones_ends_the_dispute() -> None:
    """Its report was lost with the first member, so another one's answer to the fence brings it."""
    play = begun(2)
    differ(play, (0, 0, 10), (1, 0, 11))
    done_again(play)
    again = replace(play.commit(STEP), reran=((0, 0, 10), (0, 1, 20)))
    play.broken("w2")
    worker, newest = play.plan.members[1], Version(STEP + 1, play.generation)
    seen = (again, play.commit(STEP + 1))
    told = play.tell(ev.Fenced(worker, play.generation, (play.shard(worker, newest),), None, seen))
    assert "w2 computed other gradients in step 4 than the same step gave" in told
    assert play.run.history.rerun is None


def test_r16_to_find_one_of_two_wrong_members_hides_no_other_one() -> None:
    play = begun(4)
    differ(play, (0, 0, 10), (1, 0, 66), (2, 2, 30), (3, 2, 77))
    done_again(play)
    assert "w2 computed other gradients" in differ(play, (2, 0, 10), (1, 0, 66))
    for worker in play.run.state.pending if isinstance(play.run.state, Stopping) else ():
        play.answer(worker, play.run.version)
    assert killed(play) == ["w2"]
    reformed(play)
    assert "w4 computed other gradients in step 4 than the same step gave" in agree(play, (0, 10), (2, 30))


def test_r16_disputes_count_anew_once_somebody_is_found() -> None:
    """A new worker on the same machine may be wrong, too."""
    play = begun(3)
    for _ in range(LIMIT - 1):
        differ(play, (1, 1, 66), (0, 1, 20))
        done_again(play)
    assert play.run.history.rerun is not None and play.run.history.rerun.times == LIMIT - 1
    differ(play, (1, 1, 66), (2, 1, 20))
    assert play.run.history.rerun.times == 0 and not play.run.stop


def test_r16_members_that_never_agree_end_the_run() -> None:
    play = begun(2)
    for digest in range(LIMIT):
        differ(play, (0, 0, 10 + digest), (1, 0, 20 + digest))
        if digest + 1 < LIMIT:
            done_again(play)
    for worker in ("w1", "w2"):
        play.answer(worker, play.run.version)
    play.later(play.rules.stop_s + play.rules.fence_s)
    assert isinstance(play.run.state, Failed), play.run.state
    assert f"different gradients {LIMIT} times in a row, the last time in step 4" in play.run.state.reason


def test_r16_a_dispute_about_gradients_outlives_its_coordinator() -> None:
    play = begun(2)
    differ(play, (0, 0, 10), (1, 0, 11))
    assert codec.decode_run(codec.encode(play.run)) == play.run
    told = ev.Broken(WorkerId("w1"), 1, STEP, "differs", "", computed=(Computed(0, 0, 10),))
    assert codec.decode_event(codec.encode(told)) == told


def test_who_is_compared_with_whom() -> None:
    """Everybody with somebody else, and in other worlds with others; whoever idles is left out."""
    for ranks in range(2, 7):
        distances = [apart(ranks, generation) for generation in range(2 * ranks)]
        assert {*distances} == {*range(1, ranks)}
    assert apart(1, 5) == 0 and not CommitShape(1, 1, 4, 2, Layout(), rerun_every=1).reruns(4)
    shape = CommitShape(1, 3, 2, 2, Layout(3), rerun_every=2)
    assert [shape.reruns(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert [shape.first_of(rank) for rank in range(3)] == [0, 1, None]
    assert [shape.again_of(rank) for rank in range(3)] == [None, 0, 1], "two ranks further"
    groups, own = ((0, 1, 2),), (10.0, 20.0, 0.0)
    assert compared(2, groups, 2, (0, 1, None), own, (99.0, 10.0, 20.0)) == ((0, 0, 10), (0, 1, 20))
    with pytest.raises(Differ) as told:
        compared(2, groups, 2, (0, 1, None), own, (99.0, 10.0, 21.0))
    assert told.value.computed == (Computed(1, 1, 20), Computed(2, 1, 21))
    # each stage of a model in two parts compares its own gradients
    assert compared(2, ((0, 2), (1, 3)), 1, (0, 1), (1.0, 2.0, 3.0, 4.0), (3.0, 4.0, 1.0, 2.0)) == (
        (0, 1, 3),
        (0, 0, 1),
        (1, 1, 4),
        (1, 0, 2),
    )
