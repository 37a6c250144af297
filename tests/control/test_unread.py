"""A coordinator takes over, and cannot read all that the one before recorded, which was cut off with all its
keepers or died with them.

It begins and settles nothing before the leases of unread generations have run out, and then uses a number
that none of them can have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic.control.run import Failed, Forming, Running, Stopped, Stopping, Waiting
from elastic.control.takeover import UNREAD
from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.protocol import events as ev
from elastic.protocol.actions import Fence, Form, Settle
from elastic.protocol.plan import Plan
from tests.control.play import Play, but, outcome, reformed, started, stepping
from tests.control.test_takeover import at_step, pausing, waiting

pytestmark = pytest.mark.fast


def usurped(play: Play, *gone: str) -> Play:
    """Another coordinator takes over on another node, and reads less than was written; it does not find the
    workers ``gone``.
    """
    play.now += 10.0
    alive = tuple(worker for worker in (*play.run.workers, *play.run.members.starting) if worker not in gone)
    play.tell(ev.Recovered(play.run.incarnation + 1, alive, (NodeId("n1"),), whole=False))
    return play


@pytest.mark.parametrize(
    "play", [lambda: at_step(3), lambda: started(2), pausing, lambda: at_step(20, target_step=20)]
)
def test_the_world_that_is_known_of_goes_on_no_more(play: Callable[[], Play]) -> None:
    """Its members may be the ones that an unread generation was begun without."""
    again = usurped(play())
    assert isinstance(again.run.state, Stopping) and not again.run.state.planned
    (fence,) = again.did(Fence)
    assert fence.members == ("w1", "w2")
    assert "no world is formed for 63 s" in again.last.reason


def test_nothing_is_settled_or_begun_before_unknown_leases_have_run_out() -> None:
    again = usurped(at_step(3))
    began = again.now
    again.answer("w1", Version(3, 1))
    again.answer("w2", Version(3, 1))
    while again.now < began + again.rules.lease_over_s:
        assert isinstance(again.run.state, Stopping) and not again.did(Settle) and not again.did(Form)
        again.later(9.0)
    (form,) = again.did(Form)
    assert (
        again.did(Settle)
        and form.plan.generation == 1 + 2 * UNREAD + 1
        and form.plan.version == Version(3, 1)
    )
    reformed(again)
    again.lose("w1")
    again.answer("w2", Version(3, 1))
    assert again.generation == 1 + 2 * UNREAD + 2, "one after the other from there"


def test_a_run_that_waits_begins_nothing_either_and_does_not_fail_meanwhile() -> None:
    again = usurped(waiting(), "w1")
    assert isinstance(again.run.state, Waiting)
    again.tell(ev.Capacity(2))
    assert list(again.run.members.starting) == ["w2", f"w{3 + 2 * UNREAD}"], "the next name may be taken, too"
    again.join(*again.run.members.starting)
    assert isinstance(again.run.state, Waiting)
    again.later(again.rules.lease_over_s)
    assert again.did(Form)[0].plan.generation == 2 * UNREAD + 1


def test_two_that_could_read_nothing_begin_nothing_under_one_number() -> None:
    """A process of the coordinator before may still be reported lost, and an answer of its world may be under
    way.
    """
    numbers = []
    for incarnation in (2, 3):
        play = waiting()
        play.tell(ev.Recovered(incarnation, (WorkerId("w1"),), (NodeId("n1"),), whole=False))
        play.tell(ev.Capacity(2))
        numbers.append((play.run.takeover.unread, *play.run.members.starting))
    assert not set(numbers[0]) & set(numbers[1])


def test_a_user_may_stop_it_meanwhile() -> None:
    again = usurped(waiting())
    again.tell(ev.StopRequested("Ctrl-C"))
    assert isinstance(again.run.state, Stopped)


def test_waiting_counts_from_when_it_could_have_begun() -> None:
    again = usurped(waiting(), "w1")
    again.later(again.rules.wait_s)
    assert isinstance(again.run.state, Waiting)
    again.later(again.rules.lease_over_s)
    assert isinstance(again.run.state, Failed)


def test_a_member_of_a_later_generation_says_so() -> None:
    """Its generation is in no record that was read: it is fenced and waited for, and the next generation
    takes a number that is free.
    """
    play = stepping(2)
    plan = play.plan
    later = Plan(
        1, 3, plan.layout, plan.members, Version(5, 2), "live", (), plan.store_node, lineage=((1, 4), (2, 5))
    )
    again = usurped(play)
    again.tell(ev.Attached(WorkerId("w1"), later, stepping=True))
    assert isinstance(again.run.state, Stopping) and again.generation == 3
    for worker in ("w1", "w2"):
        again.answer(worker, Version(5, 2))
    assert isinstance(again.run.state, Stopping)
    again.later(again.rules.lease_over_s)
    assert (
        isinstance(again.run.state, Forming)
        and again.plan.generation == 1 + 2 * UNREAD + 1
        and again.plan.version == Version(5, 2)
    )


def behind(play: Play) -> Play:
    """Another coordinator takes over, and cannot read what happens in ``play`` from here on."""
    return usurped(Play(play.rules, play.run))


def test_which_generations_committed_the_steps_that_no_journal_has_is_in_the_plan() -> None:
    """The journal ends at step 2 of generation 1, which committed two more steps; generation 2 one; only
    generation 3 can be asked.
    """
    play = at_step(2, workers=3)
    again = behind(play)
    play.steps(3, 4)
    for last, gone, left in ((4, "w1", ("w2", "w3")), (5, "w2", ("w3",))):
        play.lose(gone)
        version = play.run.version
        assert version.step == last
        for worker in left:
            play.answer(worker, version)
        reformed(play)
        play.step(last + 1)
    assert play.run.history.lineage == ((1, 4), (2, 5), (3, 6))
    again.tell(ev.Attached(WorkerId("w3"), play.plan, stepping=True))
    assert again.run.history.lineage == ((1, 4), (2, 5))
    again.answer("w3", Version(6, 3), saw=6)
    assert again.run.history.lineage == ((1, 4), (2, 5), (3, 6))


def test_what_the_journal_has_and_a_later_generation_did_again_is_given_up() -> None:
    """The journal ends at step 5; generation 2 began from the checkpoint of step 2 and made one step, after
    which generation 3 began.
    """
    play = at_step(5)
    play.run = but(play.run, "history", saved=(Version(2, 1),))
    again = behind(play)
    play.lose("w1")
    play.answer("w2", None)
    assert play.plan.version == Version(2, 1)
    reformed(play)
    play.step(3)
    play.join("w3")
    play.answer("w2", Version(3, 2))
    reformed(play)
    play.step(4)
    assert play.run.history.lineage == ((1, 2), (2, 3), (3, 4))
    again.tell(ev.Attached(WorkerId("w2"), play.plan, stepping=True))
    assert again.run.history.lineage == ((1, 2), (2, 3)) and again.run.history.saved == (Version(2, 1),)
    again.answer("w2", Version(4, 3), saw=4)
    assert again.run.version == Version(4, 3), "it is fewer steps than the journal knew of, and counts"


def test_what_a_later_generation_gave_up_is_no_checkpoint_any_more() -> None:
    """It began from step 0 despite a checkpoint of step 2, which was damaged, say, and only the coordinator
    that is gone knew that.
    """
    play = at_step(3)
    play.run = but(play.run, "history", saved=(Version(2, 1),))
    plan = play.plan
    later = Plan(1, 3, plan.layout, plan.members, Version(0, 0), "init", (), plan.store_node)
    again = usurped(play)
    assert again.run.history.saved == (Version(2, 1),)
    again.tell(ev.Attached(WorkerId("w1"), later, stepping=True))
    assert again.run.history.saved == () and again.run.history.lineage == ()
    again.answer("w1", Version(0, 0))
    again.answer("w2", Version(0, 0))
    again.later(again.rules.lease_over_s)
    assert isinstance(again.run.state, Forming) and again.plan.version == Version(0, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_that_may_have_begun_is_not_given_up_for_its_nodes(shared: bool) -> None:
    """The run is treated like one that has begun; the control is a coordinator that knows that nothing has
    run yet.
    """
    for unread in (True, False):
        play = waiting()
        play.lose("w1")
        again = usurped(play) if unread else play
        again.tell(ev.Capacity(0))
        for worker in tuple(again.run.members.starting):
            again.tell(ev.StartFailed(worker, "no room"))
        again.tell(ev.NodeRefused(NodeId("n2"), "node n2 sees another bucket", shared))
        again.later(again.rules.refused_s + 1.0)
        assert isinstance(again.run.state, Waiting if unread else Failed), (unread, shared)


def test_one_that_has_read_everything_goes_on_at_once() -> None:
    """The control."""
    play = at_step(3)
    play.tell(ev.Recovered(2, ("w1", "w2"), ("n1", "n2")))
    assert isinstance(play.run.state, Running)
    play.lose("w1")
    play.answer("w2", Version(3, 1))
    assert play.did(Form)[0].plan.generation == 2


@pytest.mark.parametrize("says", [True, False])
def test_one_that_has_left_a_later_generation_and_waits_says_so(says: bool) -> None:
    """The journal ends with w2's answer of generation 1; since then w2 has left generation 3.  In the control
    it says nothing of that.
    """
    play = at_step(4, workers=3)
    play.lose("w1")
    play.answer("w2", Version(4, 1), saw=4)
    held = play.shard("w2", Version(6, 3))
    again = usurped(Play(play.rules, play.run), "w3")
    play.answer("w3", Version(4, 1), saw=4)
    reformed(play)
    play.step(5)
    play.join("w4")
    for worker in ("w2", "w3"):
        play.answer(worker, Version(5, 2), saw=5)
    reformed(play)
    last = play.plan
    assert last.generation == 3 and last.lineage == ((1, 4), (2, 5))
    left = ev.Fenced(
        WorkerId("w2"), 3, (replace(held, cell=cell_of(last.layout, 0)),), None, (outcome(6, 3),)
    )
    again.tell(ev.Attached(WorkerId("w2"), last if says else None))
    again.tell(left)
    assert again.generation == (3 if says else 1)
    again.later(again.rules.lease_over_s)
    assert isinstance(again.run.state, Forming) and again.plan.members == ("w2",)
    assert again.plan.version == (Version(6, 3) if says else Version(4, 1))


def test_what_one_holds_that_was_left_out_of_the_last_generation_counts() -> None:
    """A coordinator that was cut off expelled w3, could not kill it, and began its last generation without
    it.
    """
    play = at_step(4, workers=3)
    last = replace(
        play.plan, generation=3, members=(WorkerId("w2"),), version=Version(5, 2), lineage=((1, 4), (2, 5))
    )
    held = replace(play.shard("w3", Version(5, 2)), cell=Cell(""))
    answer = ev.Fenced(WorkerId("w3"), 2, (held,), None, ())
    again = usurped(play)
    again.tell(ev.Attached(WorkerId("w2"), last, stepping=True))
    assert again.generation == 3 and again.run.workers[WorkerId("w3")].holdings != (held,)
    again.tell(answer)
    assert again.run.workers[WorkerId("w3")].holdings == (held,) and again.pending == ("w2",)
    aware = Play(again.rules, but(again.run, "takeover", blind_until=0.0))
    assert "refused: Fenced of w3 is of generation 2, but the run is at generation 3" in aware.tell(
        replace(answer, held=())
    )


def test_what_was_applied_after_an_answer_is_asked_for() -> None:
    """The journal ends with the answer of w2, which had prepared step 4; the coordinator then settled the
    step, and w2 applied it.
    """
    play = at_step(3, workers=3)
    play.lose("w1")
    play.answer("w2", Version(3, 1), prepared=4)
    again = usurped(play, "w3")
    again.tell(ev.Attached(WorkerId("w2"), play.plan))
    assert again.did(Fence)[0].members == again.pending == ("w2",)
    again.answer("w2", Version(4, 1), saw=4)
    again.later(again.rules.lease_over_s)
    assert (
        isinstance(again.run.state, Forming)
        and again.plan.version == Version(4, 1)
        and again.run.history.lineage == ((1, 4),)
    )
