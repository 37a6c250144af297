"""A silent node is dead or behind a network cut; nobody can tell which.  The missing beats of its keeper show
it, not a long wait.
"""

from __future__ import annotations

import pytest

from elastic.control.liveness import Heard, Watch, heard, silence, silent
from elastic.control.run import Forming, Running, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.protocol.actions import Fence, StartWorkers
from elastic.protocol.events import Capacity, KeeperLost, StopRequested
from tests.control.play import Play, stepping

pytestmark = pytest.mark.fast
N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")
W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
BEAT_S = 0.5


def beats(play: Play, seconds: float, *nodes: str, moves: bool = False) -> None:
    """Each of ``nodes`` beats; its worker stays at one microbatch of the next step, or at a new one each time
    if ``moves``.
    """
    for _ in range(round(seconds / BEAT_S)):
        play.now += BEAT_S
        for node in nodes:
            done = (play.run.step + 1, int(play.now / BEAT_S) if moves else 1, 0)
            play.beat(node, (node.replace("n", "w"), *done))


def in_step(**changes: float) -> Play:
    """Three nodes with a worker each, heard for a while; silence is noticed after 5 s."""
    play = stepping(3, **changes)
    play.steps(1, 2)
    beats(play, 10, "n1", "n2", "n3", moves=True)
    return play


def fenced_without_an_answer_of_w2() -> Play:
    """Returns a run 5.5 s after the last beat of node n2: w1 and w3 have answered the fence, w2 has not."""
    play = in_step(fence_s=10.0)
    beats(play, 5.5, "n1", "n3")
    play.answer("w1", Version(2, 1))
    play.answer("w3", Version(2, 1))
    return play


def test_a_world_that_stands_still_while_one_node_is_silent_is_fenced_long_before_it_is_a_stall() -> None:
    play = in_step()
    beats(play, 4.5, "n1", "n3")
    assert isinstance(play.run.state, Running)
    beats(play, 0.5, "n1", "n3")
    state = play.run.state
    assert isinstance(state, Stopping) and not state.planned and state.expelled == ()
    assert state.pending == (W1, W2, W3), "it may be its keeper alone: whoever is there answers"
    assert (
        "nothing was heard from node n2 for 5.0 s, though other nodes were heard, and no member moved for "
        "5.0 s"
    ) in state.cause


def test_who_is_silent_to_the_fence_too_is_not_waited_for() -> None:
    """``fence_s`` alone would end 15 s after the last beat at the earliest; a silent node is waited for until
    7.5 s after it.
    """
    play = fenced_without_an_answer_of_w2()
    beats(play, 1.5, "n1", "n3")
    assert play.pending == (W2,)
    beats(play, 0.5, "n1", "n3")
    state = play.run.state
    assert isinstance(state, Forming) and state.plan.members == (W1, W3) and play.run.step == 2
    assert W2 not in play.run.workers


def test_nobody_is_expelled_for_silence_before_the_others_have_answered() -> None:
    play = in_step(fence_s=60.0)
    beats(play, 5.5, "n1", "n3")
    play.answer("w1", Version(2, 1))
    beats(play, 20, "n1", "n3")
    assert play.pending == (W2, W3), "w3 is heard, and is waited for as long as ever"
    play.answer("w3", Version(2, 1))
    assert isinstance(play.run.state, Forming)


def test_a_keeper_that_falls_silent_alone_costs_a_new_world_and_no_member() -> None:
    play = in_step()
    beats(play, 5.5, "n1", "n3")
    for worker in ("w1", "w2", "w3"):
        play.answer(worker, Version(2, 1))
    assert isinstance(play.run.state, Forming) and play.run.state.plan.members == (W1, W2, W3)


def test_a_world_that_moves_is_left_alone_whoever_is_silent() -> None:
    play = in_step()
    beats(play, 30, "n1", "n3", moves=True)
    assert isinstance(play.run.state, Running)


def test_where_all_are_silent_it_may_be_us_who_hear_nothing() -> None:
    play = in_step(stall_s=1000.0)
    for _ in range(100):
        play.later(0.1)
    assert isinstance(play.run.state, Running)
    play.beat("n1")  # the first of the messages that waited
    assert isinstance(play.run.state, Running)
    beats(play, 4.5, "n1", "n3")
    assert isinstance(play.run.state, Running), "the others are heard for less than 5 s again"
    beats(play, 1, "n1", "n3")
    assert isinstance(play.run.state, Stopping)


def test_a_keeper_that_is_lost_is_replaced_and_no_silence() -> None:
    play = in_step(stall_s=1000.0)
    play.tell(KeeperLost(N2, "its process died"))
    beats(play, 20, "n1", "n3")
    assert isinstance(play.run.state, Running)


def test_a_boundary_that_a_silent_node_cannot_reach_is_given_up() -> None:
    play = in_step()
    play.tell(StopRequested("Ctrl-C"))
    state = play.run.state
    assert isinstance(state, Stopping) and state.planned
    beats(play, 5.5, "n1", "n3")
    state = play.run.state
    assert isinstance(state, Stopping) and not state.planned and state.pending == (W1, W2, W3)


def test_no_worker_is_started_on_a_silent_node() -> None:
    play = fenced_without_an_answer_of_w2()
    beats(play, 4.5, "n1", "n3")
    play.tell(Capacity(1))
    assert [start.avoid for start in play.did(StartWorkers)] == [(N2,)]


def test_the_fence_goes_to_the_silent_too() -> None:
    play = in_step()
    beats(play, 4.5, "n1", "n3")
    play.now += BEAT_S
    play.beat("n1", ("w1", 3, 1, 0))
    assert [fence.members for fence in play.did(Fence)] == [(W1, W2, W3)]


def test_silence_is_told_by_somebody_who_was_heard_all_the_time() -> None:
    told = Watch(beats={N1: Heard(0.0, 20.0), N2: Heard(0.0, 14.0), N3: Heard(19.0, 20.0)})
    assert silent(told, (N1, N2, N3), 20.0, 5.0, 5.0) == (N2,)
    assert silent(told, (N2, N3), 20.0, 5.0, 5.0) == (), "n3 was not heard itself for a part of that time"
    assert silent(told, (N1, N2), 23.0, 5.0, 5.0) == (), "nor is n1 any more"
    assert silence(told, (N1, N2), 20.0, 5.0) is not None
    assert heard(told, N3, 22.5, 5.0).since == 19.0 and heard(told, N3, 22.6, 5.0).since == 22.6
