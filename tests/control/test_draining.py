"""Notices that a machine will be taken, or may be taken (``elastic/control/draining.py``)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.draining import asked_at
from elastic.control.liveness import Watch
from elastic.control.run import Forming, Running, Stopped, Stopping, Waiting
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from elastic.protocol.actions import ConnectAhead, Kill, LetGo, ListCopies, Pair, Pause, StartWorkers
from elastic.protocol.commit_record import (
    ENDS,
    HAND_OVER,
    PAUSE,
    SAVE_AND_PAUSE,
    Validated,
    strongest,
)
from elastic.protocol.events import NodeAdvised, NodeDraining, NodeStays
from tests.control.play import CLASSES, Play, but, reformed, stepping
from tests.support.calls import calls

pytestmark = pytest.mark.fast

N1, N2, N3, N4, N5 = (NodeId(f"n{number}") for number in range(1, 6))
W2, W3, W4, W5 = (WorkerId(f"w{number}") for number in range(2, 6))
SHARDED = LayoutRule(dp_replicate=1, dp_shard=None, min_shard=1, use="all")
REPLICAS = LayoutRule(dp_replicate=None, dp_shard=1, min_shard=1, use="all")
REFORM_S, STEP_S = 2.0, 1.0


def running(layout: LayoutRule = REPLICAS, workers: int = 3, **changes: Any) -> Play:
    """Returns a run of ``workers`` workers at step 4, with a measured re-form of 2 s and steps of 1 s."""
    play = stepping(
        workers, **{"copy_every": 1, "buddy_every": 1, "layout": layout, "stall_s": 1e6, **changes}
    )
    play.steps(1, 4)
    play.run = but(play.run, "watch", reform_s=REFORM_S, step_s=STEP_S)
    return play


def notice(play: Play, node: NodeId = N3, lead_s: float = 120.0, source: str = "aws") -> str:
    return play.tell(NodeDraining(node, play.now + lead_s, source))


def stops(play: Play, boundary: int = PAUSE) -> None:
    """The world makes its next step, with ``boundary``, and all members answer."""
    step, members = play.run.step + 1, play.plan.members
    play.step(step, boundary)
    for member in members:
        play.answer(member, Version(step, play.generation))


def test_r5_the_world_leaves_at_the_last_boundary_that_leaves_time() -> None:
    """Twice the re-form and two steps before the deadline, and not earlier: paid seconds are used."""
    play = running()
    assert notice(play) == "node n3 will be taken in 120 s (aws)"
    play.later(120.0 - 2 * REFORM_S - 2 * STEP_S - 0.2)
    assert isinstance(play.run.state, Running) and play.did(Pause) == []
    assert "w3 leaves before the machine is taken" in play.later(0.3)
    assert play.did(Pause) == [Pause(1, play.plan.members, save=False)], "the others hold the whole state"
    stops(play)
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1", "w2")
    assert play.plan.version == Version(5, 1) and play.plan.tier == "live", "no step is lost"
    assert play.did(Kill) == [Kill((W3,), "its node is taken")]


def test_a_world_that_pauses_at_once_connects_no_other_one_beside() -> None:
    """Its members would connect the next world twice at the same time.  The control: a node that stays for a
    while.
    """
    play = running()
    play.connects = False
    notice(play, lead_s=5.0)
    assert play.did(Pause) and play.did(ConnectAhead) == []
    play = running()
    play.connects = False
    notice(play)
    assert play.did(Pause) == [] and [each.plan.members for each in play.did(ConnectAhead)] == [("w1", "w2")]


@pytest.mark.parametrize("layout", [REPLICAS, SHARDED])
def test_a_tick_while_a_notice_is_open_costs_no_more_in_a_larger_world(layout: LayoutRule) -> None:
    """The coordinator works out who holds what only if the workers or the notices have changed.  The control:
    the next tick after a worker has gone asks again about every member.
    """
    cost = {}
    for workers in (8, 64):
        play = running(layout, workers)
        notice(play)
        play.later(0.1)
        cost[workers] = calls(partial(play.later, 0.1))
        play.run = but(play.run, "members", workers=dict(play.run.workers))
        assert calls(partial(play.later, 0.1)) > cost[workers] + 4 * workers
    assert cost[64] < cost[8] + workers // 2


def test_a_state_that_the_others_do_not_hold_is_handed_over() -> None:
    """The keeper of the node that leaves has the copy of the boundary, and the next world reads it there."""
    play = running(SHARDED)
    notice(play, lead_s=5.0)
    assert play.did(Pause) == [Pause(1, play.plan.members, save=False, hand_over=True)]
    layout, cells = (
        play.plan.layout,
        {member: play.shard(member, Version(5, 1)) for member in play.plan.members},
    )
    assert layout.dp_shard == 3
    stops(play, HAND_OVER)
    assert isinstance(play.run.state, Stopping) and play.did(ListCopies), (
        "only the keepers know what was copied"
    )
    for node, member in zip((N1, N2, N3), ("w1", "w2", "w3"), strict=True):
        there = cells[member]
        play.tell(ev.Kept(node, 1, (Holding(there.worker, there.version, there.cell, node),)))
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1", "w2")
    assert (play.plan.version, play.plan.tier) == (Version(5, 1), "host")
    assert N3 in dict(play.plan.hosts), "the doomed node's keeper still serves its copy"


def test_a_new_coordinator_waits_for_what_was_handed_over() -> None:
    """The time that the keepers had for their answers ran out while there was no coordinator."""
    play = running(SHARDED)
    notice(play, lead_s=5.0)
    cells = {member: play.shard(member, Version(5, 1)) for member in play.plan.members}
    stops(play, HAND_OVER)
    play.now += 2 * play.rules.fence_s
    play.tell(ev.Recovered(2, (WorkerId("w1"), W2), (N1, N2, N3)))
    assert isinstance(play.run.state, Stopping) and play.did(ListCopies) == [ListCopies(1, (N1, N2, N3))]
    for node, there in zip((N1, N2, N3), cells.values(), strict=True):
        play.tell(ev.Kept(node, 1, (Holding(there.worker, there.version, there.cell, node),)))
    assert isinstance(play.run.state, Forming)
    assert (play.plan.version, play.plan.tier) == (Version(5, 1), "host"), "no step is lost"


@pytest.mark.parametrize(("copies", "save"), [(1, False), (0, True)])
def test_without_copies_the_state_goes_to_the_bucket(copies: int, save: bool) -> None:
    play = running(SHARDED, copy_every=copies, buddy_every=copies)
    notice(play, lead_s=5.0)
    assert play.did(Pause) == [Pause(1, play.plan.members, save=save, hand_over=not save)]


def test_if_all_nodes_are_taken_the_state_goes_to_the_bucket_in_time() -> None:
    play = running(workers=2)
    notice(play, N1)
    notice(play, N2)
    play.later(120.0 - play.rules.stop_s - 2 * STEP_S - 1.0)
    assert isinstance(play.run.state, Running)
    play.later(1.1)
    assert play.did(Pause) == [Pause(1, play.plan.members, save=True)]


def test_several_nodes_leave_in_one_pause() -> None:
    """The second node has 8 s more: less than a pause of the whole world costs."""
    play = running(workers=4)
    notice(play, N3, 20.0)
    notice(play, N4, 23.0)
    notice(play, N2, 200.0)
    assert "w3 and w4 leave" in play.later(14.1)
    stops(play)
    assert play.plan.members == ("w1", "w2"), "the third one has paid time left"


def comes(play: Play, worker: WorkerId, node: NodeId) -> None:
    play.tell(ev.KeeperUp(node))
    play.tell(ev.Joined(worker, node, "cpu", CLASSES))


def test_newcomers_take_the_seats_of_those_that_leave() -> None:
    """A replacement is asked for at the notice, on another node.  One for one they make no step shorter, so the
    time that is paid is used.
    """
    play = running()
    play.tell(NodeDraining(N3, play.now + 120.0, "aws"))
    play.later(5.0)
    play.tell(ev.Capacity(1))
    assert play.did(StartWorkers) == [StartWorkers((W4,), (N3,))], "it is placed elsewhere"
    comes(play, W4, N4)
    play.later(50.0)
    assert isinstance(play.run.state, Running)
    play.later(65.0)
    stops(play)
    assert set(play.plan.members) == {"w1", "w2", "w4"} and play.plan.version == Version(5, 1)


@pytest.mark.parametrize("number", [1, 2])
def test_newcomers_that_make_steps_shorter_do_not_wait_for_those_that_leave(number: int) -> None:
    """Two newcomers and one that leaves soon make a larger world; the control, one newcomer, does not."""
    play = running()
    play.rules = replace(play.rules, max_workers=5)
    notice(play, N3, 9.0)
    play.tell(ev.Capacity(number))
    for worker, node in ((W4, N4), (W5, N5))[:number]:
        comes(play, worker, node)
    play.later(0.1)
    assert (N3 in play.run.cluster.leaving) is (number == 2)


def test_notices_that_come_together_are_one_pause_also_if_a_spare_is_there() -> None:
    """One spare takes one seat of three, so three of four go on until the last boundary of both nodes."""
    play = running(workers=4)
    notice(play, N3, 60.0)
    play.tell(ev.Capacity(1))
    comes(play, W5, N5)
    play.later(1.0)
    notice(play, N4, 60.0)
    play.later(30.0)
    assert isinstance(play.run.state, Running)
    play.later(28.0)
    stops(play)
    assert set(play.plan.members) == {"w1", "w2", "w5"}


def test_a_withdrawn_notice_is_undone() -> None:
    play = running()
    notice(play)
    assert play.tell(NodeStays(N3, "aws")) == "node n3 is not taken after all (aws)"
    play.later(119.0)
    assert isinstance(play.run.state, Running) and play.run.cluster.notices == {}
    assert play.tell(NodeStays(N3, "aws")).startswith("refused: ")
    # after the pause was asked for: one pause, and nobody has left
    notice(play, lead_s=5.0)
    assert isinstance(play.run.state, Stopping)
    play.tell(NodeStays(N3, "aws"))
    stops(play)
    assert play.plan.members == ("w1", "w2", "w3")


def test_two_sources_must_both_withdraw() -> None:
    play = running()
    notice(play, lead_s=100.0)
    notice(play, lead_s=90.0, source="ray")
    play.tell(NodeStays(N3, "aws"))
    assert play.run.cluster.deadline(N3) == play.now + 90.0
    play.tell(NodeStays(N3, "ray"))
    assert play.run.cluster.deadline(N3) is None


def test_a_repeated_notice_is_refused() -> None:
    play = running()
    notice(play)
    assert notice(play, lead_s=120.3).startswith("refused: ")
    assert play.tell(NodeDraining(NodeId("n9"), 1.0, "aws")).startswith("refused: "), "an unknown node"


def test_nobody_leaves_because_of_advice() -> None:
    """R5: the node hosts no copies of others, and gets no new worker, until the advice expires."""
    play = running()
    said = play.tell(NodeAdvised(N3, play.now + 900.0, "aws"))
    assert said == "node n3 may be taken (aws); it gets nothing new"
    pairs = play.run.copies.buddies
    assert N3 not in pairs.values() and pairs.keys() == {N1, N2, N3}
    play.later(800.0)
    assert isinstance(play.run.state, Running) and N3 in play.plan.nodes
    assert play.later(101.0) == "node n3 may take part again: the advice has expired (aws)"
    assert play.run.cluster.notices == {}


def advised(play: Play, node: NodeId = N3, until_s: float = 900.0) -> None:
    """Advice comes, then the news that another node has room for two workers; n4 has its keeper."""
    play.tell(ev.KeeperUp(N4))
    play.tell(NodeAdvised(node, play.now + until_s, "aws"))
    play.tell(ev.Capacity(2))


def test_advice_warms_a_spare_that_takes_the_seat_when_a_notice_follows() -> None:
    """R5: in the pause in which the member leaves.  The control: without advice none is started."""
    play = running()
    advised(play)
    (start,) = play.did(StartWorkers)
    assert len(start.workers) == 1 and N3 in start.avoid, (
        "one for the worker on that node, although two have room"
    )
    play.tell(ev.Joined(start.workers[0], N4, "cpu", CLASSES))
    play.later(800.0)
    assert isinstance(play.run.state, Running) and W3 in play.plan.ranks, "nobody leaves because of advice"
    notice(play)
    assert not play.did(Pause), "the steps would be no shorter"
    play.later(115.0)
    assert play.did(Pause)
    stops(play)
    assert {*play.plan.members} == {"w1", "w2", start.workers[0]}
    other = running()
    other.tell(ev.KeeperUp(N4))
    other.tell(ev.Capacity(2))
    assert not other.did(StartWorkers)


def test_a_notice_for_all_members_divides_by_no_worker() -> None:
    """R5: nobody would be left, and a worker that is no member is on such a machine, too."""
    play = running(spares=1)
    play.tell(ev.Capacity(1))
    (start,) = play.did(StartWorkers)
    play.tell(ev.Joined(start.workers[0], N3, "cpu", CLASSES))
    for node in (N1, N2, N3):
        notice(play, node)
    assert isinstance(play.run.state, Running)


def test_the_spare_of_an_advice_ends_with_it() -> None:
    """No other worker does; and the spares of the job stay."""
    play = running(spares=1)
    play.tell(ev.Capacity(1))
    (own,) = play.did(StartWorkers)[0].workers
    play.tell(ev.KeeperUp(N4))
    play.tell(ev.Joined(own, N4, "cpu", CLASSES))
    advised(play)
    (warm,) = play.did(StartWorkers)[0].workers
    play.tell(ev.Joined(warm, N4, "cpu", CLASSES))
    assert play.run.workers.keys() == {"w1", "w2", "w3", own, warm}
    assert "no spare is needed any more" in play.later(901.0)
    assert play.run.workers.keys() == {"w1", "w2", "w3", own} and play.did(Kill)[0].workers == (warm,)
    play.tell(ev.Capacity(1))
    assert not play.did(StartWorkers)


def test_without_room_elsewhere_advice_starts_nothing() -> None:
    """The room that was known before may be on the node itself: the next look at the cluster tells."""
    play = running()
    play.run = but(play.run, "cluster", slots=1)
    play.tell(NodeAdvised(N3, play.now + 900.0, "aws"))
    assert not play.did(StartWorkers)
    play.tell(ev.Capacity(0))
    assert not play.did(StartWorkers)


def test_a_doomed_node_is_nobodys_buddy_and_hosts_no_store() -> None:
    play = running()
    play.tell(NodeDraining(N1, play.now + 60.0, "gcp"))
    pairs = play.run.copies.buddies
    assert N1 not in pairs.values() and pairs[N1] in (N2, N3)
    play.later(55.0)
    stops(play)
    assert play.plan.store_node != N1


def test_three_of_four_nodes_at_once() -> None:
    play = running(workers=4)
    for node in (N2, N3, N4):
        notice(play, node, 30.0)
    pairs = play.run.copies.buddies
    assert {pairs[node] for node in (N2, N3, N4)} == {N1}, "the only one that stays holds all copies"
    assert N1 in pairs, "a buddy that is taken is better than none"
    play.later(25.0)
    stops(play)
    assert play.plan.members == ("w1",) and play.plan.version == Version(5, 1)


def test_a_world_that_forms_does_without_the_node() -> None:
    """If the others hold the state; otherwise the world forms first, and hands over at its first boundary."""
    for layout, stopped in ((REPLICAS, True), (SHARDED, False)):
        play = running(layout)
        notice(play, N2, 5.0)
        play.tell(NodeStays(N2, "aws"))
        stops(play)
        assert isinstance(play.run.state, Forming) and len(play.plan.members) == 3
        notice(play, N3, 3.0)
        assert isinstance(play.run.state, Stopping) is stopped
        if not stopped:
            reformed(play)
            play.later(0.1)
            assert play.did(Pause) == [Pause(2, play.plan.members, save=False, hand_over=True)]


def test_a_spare_on_a_doomed_node_ends_at_once_and_a_late_joiner_too() -> None:
    play = running(workers=2, spares=1)
    play.tell(ev.Capacity(1))
    play.later(5.0)
    play.tell(ev.Capacity(1))
    play.tell(ev.KeeperUp(N3))
    play.tell(ev.Joined(W3, N3, "cpu", CLASSES))
    assert W3 in play.run.workers
    notice(play)
    assert play.did(Kill) == [Kill((W3,), "its node is taken")]
    play.later(5.0)
    play.tell(ev.Capacity(1))
    (late,) = play.run.members.starting
    play.tell(ev.Joined(late, N3, "cpu", CLASSES))
    assert play.did(Kill) == [Kill((late,), "its node is taken")] and late not in play.run.workers


def test_a_spare_on_the_node_of_a_member_that_leaves_takes_no_seat() -> None:
    """It ends when the member is to leave, or else the next world would stop as soon as it forms."""
    play = running(spares=1)
    play.later(5.0)
    play.tell(ev.Capacity(1))
    play.tell(ev.Joined(W4, N3, "cpu", CLASSES))
    notice(play)
    play.later(100.0)
    assert W4 in play.run.workers, "the paid time is used"
    play.later(20.0 - 2 * REFORM_S - 2 * STEP_S + 0.1)
    assert isinstance(play.run.state, Stopping) and play.did(Kill) == [Kill((W4,), "its node is taken")]
    stops(play)
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1", "w2")


def test_a_member_on_a_doomed_node_that_joins_again_stays_until_the_boundary() -> None:
    """It says to a new coordinator that it has joined, like every worker, and is a member all the same."""
    play = running()
    notice(play)
    play.tell(ev.Recovered(2, play.plan.members, (N1, N2, N3)))
    assert play.tell(ev.Joined(W3, N3, "cpu", CLASSES)) == "refused: w3 has joined already"
    assert W3 in play.run.workers and play.did(Kill) == []


def test_the_keeper_acknowledges_once_nothing_is_needed_there() -> None:
    play = running()
    notice(play, lead_s=5.0)
    stops(play)
    assert play.did(LetGo) == []
    reformed(play)
    play.later(0.1)
    assert play.did(LetGo) == [], "its copies may be needed as long as there are no others"
    play.run = but(play.run, "copies", copied=Version(6, 2), buddied=Version(6, 2))
    play.later(0.1)
    assert play.did(LetGo) == [LetGo((N3,))]
    play.later(0.1)
    assert play.did(LetGo) == [], "once"


def test_without_time_for_anything_the_machine_is_gone_and_that_is_a_crash() -> None:
    play = running()
    notice(play, lead_s=0.2)
    assert play.did(Pause), "the next boundary is tried"
    play.lose("w3", "its node died")
    play.tell(ev.KeeperLost(N3, "its node died", with_its_node=True))
    assert play.run.cluster.notices == {}
    for member in ("w1", "w2"):
        play.answer(member, Version(4, 1))
    assert play.plan.members == ("w1", "w2") and play.plan.version == Version(4, 1)


def test_growth_waits_for_a_node_that_leaves_soon() -> None:
    """One pause for both, instead of two; if the node stays for long, growth does not wait."""
    for lead_s, waits in ((12.0, True), (600.0, False)):
        play = running(workers=4)
        play.rules = type(play.rules)(**{**vars(play.rules), "max_workers": 8})
        for node in (N3, N4):
            notice(play, node, lead_s)
        play.later(2.0)
        play.tell(ev.Capacity(1))
        (new,) = play.run.members.starting
        play.tell(ev.KeeperUp(NodeId("n9")))
        play.tell(ev.Joined(new, NodeId("n9"), "cpu", CLASSES))
        play.later(3.0)
        assert isinstance(play.run.state, Running) is waits


def test_a_machine_that_is_not_taken_at_its_deadline_takes_part_again() -> None:
    """A notice that is long over when it is heard, such as a file of an earlier machine, is none."""
    play = running()
    assert notice(play, lead_s=-61.0).startswith("refused: ")
    notice(play, lead_s=5.0)
    stops(play)
    reformed(play)
    play.later(64.0)
    assert play.run.cluster.notices != {}
    assert "node n3 may take part again: its machine was not taken at the deadline (aws)" in play.later(2.0)
    assert (play.run.cluster.notices, play.run.cluster.leaving, play.run.cluster.let_go) == ({}, (), ())


HSDP = LayoutRule(dp_replicate=2, dp_shard=2, min_shard=1, use="all")
FREE = LayoutRule(dp_replicate=None, dp_shard=None, min_shard=1, use="all")
NO_COPIES: dict[str, Any] = {"copy_every": 0, "buddy_every": 0}


def joins(play: Play, node: str) -> None:
    """A worker is asked for, and joins on ``node``."""
    play.later(5.0)
    play.tell(ev.Capacity(1))
    (worker,) = play.run.members.starting
    play.tell(ev.KeeperUp(NodeId(node)))
    play.tell(ev.Joined(worker, NodeId(node), "cpu", CLASSES))


def answer_all(play: Play, step: int) -> None:
    for member in play.pending:
        play.answer(member, Version(step, 1))


def test_a_stop_for_another_reason_keeps_the_only_holder() -> None:
    """A spare could take the seat, but only the member that leaves has its part of the state."""
    play = running(SHARDED, spares=1, **NO_COPIES)
    joins(play, "n4")
    play.broken("w1")
    notice(play, N3, 600.0)
    answer_all(play, 4)
    assert play.plan.version == Version(4, 1)


def test_a_second_notice_after_the_boundary_keeps_the_last_holder() -> None:
    play = running(HSDP, 4, **NO_COPIES)
    play.rules = replace(play.rules, layout=FREE)
    notice(play, N3, 20.0)
    play.later(14.1)
    play.step(5, PAUSE)
    play.answer("w2", Version(5, 1))
    notice(play, N1, 9.0)
    answer_all(play, 5)
    assert play.plan.version == Version(5, 1)


def test_a_notice_after_the_boundary_of_growth_keeps_the_only_holder() -> None:
    play = running(SHARDED, **NO_COPIES)
    play.rules = replace(play.rules, max_workers=4)
    joins(play, "n4")
    play.later(3.0)
    play.step(5, PAUSE)
    notice(play, N3, 8.0)
    play.later(2.1)
    answer_all(play, 5)
    assert play.plan.version == Version(5, 1)


def test_a_loss_during_the_pause_keeps_the_holders_that_are_left() -> None:
    play = running(HSDP, 4, **NO_COPIES)
    play.rules = replace(play.rules, layout=FREE)
    cells = {member: play.shard(member, Version(5, 1)).cell for member in play.plan.members}
    leave = [member for member in cells if cells[member] == cells[W4]]
    for member in leave:
        notice(play, NodeId(f"n{member[1:]}"), 6.0)
    play.lose(next(member for member in cells if member not in leave))
    answer_all(play, 4)
    assert play.plan.version == Version(4, 1)


def test_a_save_that_cannot_begin_keeps_the_only_holder() -> None:
    play = running(SHARDED, **NO_COPIES)
    notice(play, N3, 600.0)
    play.tell(ev.KeeperLost(N3, "its process died"))
    play.later(594.5)
    play.step(5, SAVE_AND_PAUSE)
    answer_all(play, 5)
    assert play.plan.version == Version(5, 1)


def test_a_copy_that_failed_at_the_boundary_keeps_its_worker() -> None:
    """The keepers list none of the boundary, so the worker that leaves is still needed."""
    play = running(SHARDED)
    notice(play, N3, 5.0)
    stops(play, HAND_OVER)
    for node in (N1, N2, N3):
        play.tell(ev.Kept(node, 1, ()))
    assert isinstance(play.run.state, Forming)
    assert (len(play.plan.members), play.plan.version) == (3, Version(5, 1))


def test_notices_one_after_the_other_do_not_use_the_budget_up() -> None:
    play = running(REPLICAS, 8)
    notice(play, NodeId("n8"), 5.0)
    stops(play)
    for number in (7, 6, 5, 4):
        notice(play, NodeId(f"n{number}"), 5.0)
        answer_all(play, 5)
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1", "w2", "w3")


def test_a_stop_that_was_asked_for_is_saved_all_the_same() -> None:
    play = running(SHARDED)
    notice(play, N2, 5.0)
    play.tell(NodeStays(N2, "aws"))
    stops(play)
    notice(play, N3, 3.0)
    play.tell(ev.StopRequested("user"))
    reformed(play)
    play.later(0.1)
    assert play.did(Pause)[0].save


def test_a_stop_that_comes_after_the_boundary_was_agreed_is_saved_by_the_next_world() -> None:
    """The control: the boundary is saved, and the run ends with it."""
    for boundary in (PAUSE, SAVE_AND_PAUSE):
        play = running()
        notice(play, N3, 5.0)
        assert not play.did(Pause)[0].save
        play.tell(ev.StopRequested("user"))
        assert play.did(Pause)[0].save
        stops(play, boundary)
        if boundary == PAUSE:
            assert isinstance(play.run.state, Forming) and play.plan.version == Version(5, 1)
            reformed(play)
            play.later(0.1)
            assert play.did(Pause)[0].save
            stops(play, SAVE_AND_PAUSE)
        version, saved_by = play.run.version, play.plan.members
        assert isinstance(play.run.state, Stopping), "it waits for the save"
        play.save(version, *saved_by)
        assert isinstance(play.run.state, Stopped) and play.run.history.saved[-1] == version


def test_a_stop_in_a_world_that_a_notice_ends_before_it_steps_is_saved_by_the_next_one() -> None:
    """The control: a world that breaks ends with the stop, as before."""
    for noticed in (True, False):
        play = running()
        notice(play, N3, 5.0)
        stops(play)
        assert isinstance(play.run.state, Forming)
        notice(play, N2, 3.0) if noticed else play.broken("w2")
        assert isinstance(play.run.state, Stopping) and not play.run.state.planned
        play.tell(ev.StopRequested("user"))
        for member in play.pending:
            play.answer(member, Version(5, 1))
        assert isinstance(play.run.state, Forming if noticed else Stopped)


def test_a_state_that_must_be_saved_gets_the_time_for_it() -> None:
    play = running(SHARDED, **NO_COPIES)
    notice(play, N3, 120.0)
    play.later(120.0 - play.rules.stop_s - 2 * STEP_S + 0.1)
    assert play.did(Pause) == [Pause(1, play.plan.members, save=True)]


def test_a_copy_does_not_help_if_none_is_made_or_no_world_can_read_it() -> None:
    play = running(SHARDED)
    play.steps(5, 15)
    notice(play, N3, 3.0)
    assert play.did(Pause)[0].save, "the run has said that it is unprotected"
    play = running(SHARDED, min_workers=3)
    notice(play, N3, 5.0)
    assert play.did(Pause)[0].save, "the others are too few"


def test_a_run_that_waits_ends_no_holder_of_its_state() -> None:
    play = running(REPLICAS, 2, **NO_COPIES)
    play.rules = replace(play.rules, min_workers=2)
    notice(play, N2, 5.0)
    stops(play)
    assert isinstance(play.run.state, Waiting)
    notice(play, N1, 60.0)
    play.later(55.0)
    assert "w1" in play.run.workers


def test_a_deadline_that_is_put_off_is_not_left_early() -> None:
    play = running()
    notice(play, N3, 600.0)
    notice(play, N3, 5.0, "ray")
    play.tell(NodeStays(N3, "ray"))
    stops(play)
    assert play.plan.members == ("w1", "w2", "w3")


def test_a_withdrawal_mends_no_device() -> None:
    play = running()
    notice(play, N3, 30.0)
    play.broken("w3", "device", "a traceback", "CUDA error")
    play.tell(NodeStays(N3, "aws"))
    assert play.run.workers[W3].unfit == "CUDA error"


@pytest.mark.parametrize("least", [1, 2])
def test_a_world_that_forms_from_copies_does_without_a_second_node(least: int) -> None:
    """The copies that it reads are at a keeper, whoever leaves.  If too few workers would be left, it forms all the
    same: another world would have the same members, and stop again until the machine is gone.
    """
    play = running(SHARDED, min_workers=least)
    notice(play, N3, 5.0)
    cells = {member: play.shard(member, Version(5, 1)) for member in play.plan.members}
    stops(play, HAND_OVER)
    for node, member in zip((N1, N2, N3), ("w1", "w2", "w3"), strict=True):
        there = cells[WorkerId(member)]
        play.tell(ev.Kept(node, 1, (Holding(there.worker, there.version, there.cell, node),)))
    assert play.plan.tier == "host"
    notice(play, N2, 5.0)
    assert isinstance(play.run.state, Stopping if least == 1 else Forming)


def test_advice_about_every_node_leaves_the_run_its_workers() -> None:
    play = running(min_workers=3)
    for node in (N1, N2, N3):
        play.tell(NodeAdvised(node, play.now + 900.0, "aws"))
    assert play.run.cluster.closed(few=False) == (N1, N2, N3)
    assert play.run.cluster.closed(few=True) == ()
    play.lose("w3")
    play.later(play.rules.grow_debounce_s)
    play.tell(ev.Capacity(5))
    assert [len(start.workers) for start in play.did(StartWorkers)] == [1], (
        "there is no better place for spares"
    )


def test_the_strongest_request_counts() -> None:
    assert strongest((0.0, PAUSE, HAND_OVER)) == HAND_OVER
    assert strongest((HAND_OVER, SAVE_AND_PAUSE)) == SAVE_AND_PAUSE
    assert strongest((ENDS, HAND_OVER)) == ENDS


VALIDATE_S = 20.0


def validating(now: float, every: int = 10) -> Play:
    """Returns a run that has just made step 4, at the time ``now``.  It validates after every ``every`` steps,
    and knows that this takes 20 s.
    """
    play = running(validates_every=every)
    play.now = now
    play.run = but(play.run, "watch", validate_s=VALIDATE_S, stepped_at=now)
    return play


def steps_until_it_leaves(play: Play, every: int = 10) -> tuple[int, float]:
    """Lets the world step in real time, with ticks between, until it is asked to pause.  Returns the boundary,
    which is the next commit but one, and the seconds from then on until the deadline, which is 0.
    """

    def tick() -> bool:
        play.now += 0.1
        play.tell(ev.Tick())
        return isinstance(play.run.state, Stopping)

    asked = False
    for step in range(5, 200):
        takes_s = STEP_S + (VALIDATE_S if (step - 1) % every == 0 else 0.0)
        for _ in range(round(takes_s / 0.1)):
            asked = tick() or asked
        play.tell(ev.StepDone(play.plan.members[0], 1, replace(play.commit(step), validated=None)))
        if asked:
            return step + 1, -(play.now + STEP_S + (VALIDATE_S if step % every == 0 else 0.0))
    raise AssertionError("it never leaves")


@pytest.mark.parametrize(
    ("lead_s", "last"), [(9.0, 9), (12.0, 10), (20.0, 10), (29.9, 10), (36.0, 16), (60.0, 20)]
)
def test_a_validation_that_does_not_fit_is_not_begun(lead_s: float, last: int) -> None:
    """Step 5 ends in a second, step 10 in six, the validation after it takes twenty, and the next world needs
    four.  If the deadline is in between, the members stop before the validation, and else they use the time
    after it.
    """
    play = validating(-lead_s)
    notice(play, lead_s=lead_s)
    boundary, left_s = steps_until_it_leaves(play)
    assert left_s >= 2 * REFORM_S - 0.2, "there is time for the next world"
    assert boundary <= last <= boundary + 1, boundary


def test_a_run_that_knows_of_no_validation_is_late() -> None:
    """The control of the test before."""
    play = validating(-16.0, every=0)
    notice(play, lead_s=16.0)
    assert steps_until_it_leaves(play)[1] < 0.0


def asked_at_by_trying(watch: Watch, step: int, every: int, until: float, now: float) -> float:
    """Returns what ``asked_at`` does, commit by commit."""

    def took_s(after: int) -> float:
        return watch.step_s + (watch.validate_s if every and after and after % every == 0 else 0.0)

    at = [watch.stepped_at, max(watch.stepped_at + took_s(step), now)]
    while at[-1] <= until or len(at) < 3:
        at.append(at[-1] + took_s(step + len(at) - 1))
    *before, _ = at if at[-1] > until and len(at) > 3 else (*at, 0.0)
    if before[-1] > until:
        return now - (before[-1] - until)
    unused_s = until - before[-1]
    begins = before[-1] - took_s(step + len(before) - 2) - took_s(step + len(before) - 3)
    return begins + (unused_s if unused_s <= watch.step_s else watch.step_s / 2)


@given(
    step=st.integers(0, 30),
    every=st.integers(0, 12),
    step_s=st.integers(1, 16),
    validate_s=st.integers(0, 100),
    late_s=st.integers(0, 30),
    left_s=st.integers(0, 600),
)
def test_the_last_boundary_is_the_one_found_by_trying(
    step: int, every: int, step_s: int, validate_s: int, late_s: int, left_s: int
) -> None:
    """Times are multiples of an eighth of a second, so that no rounding decides."""
    watch = Watch(step_s=step_s / 8, validate_s=validate_s / 8, stepped_at=1000.0)
    given = (watch, step, every, 1000.0 + left_s / 8, 1000.0 + late_s / 8)
    assert asked_at(*given) == pytest.approx(asked_at_by_trying(*given))


def test_the_time_of_a_validation_is_measured_apart_from_that_of_a_step() -> None:
    play = running(validates_every=10)
    for step in range(5, 12):
        play.now += STEP_S + (VALIDATE_S if step == 11 else 0.0)
        found = Validated(1.0, 1) if step == 11 else None
        play.tell(ev.StepDone(play.plan.members[0], 1, replace(play.commit(step), validated=found)))
    watch = play.run.watch
    assert (round(watch.step_s, 3), round(watch.validate_s, 3)) == (STEP_S, VALIDATE_S)
    play.tell(ev.Recovered(2, play.plan.members, (N1, N2, N3)))
    assert play.run.watch.validate_s == watch.validate_s, "the next coordinator knows it, too"


def test_the_time_that_a_hand_over_took_is_left_the_next_time() -> None:
    """Three seconds from the boundary until the copies are listed, and twice that before the next deadline."""
    play = running(SHARDED, 4)
    notice(play, N4, lead_s=5.0)
    layout = play.plan.layout
    cells = {member: play.shard(member, Version(5, 1)) for member in play.plan.members}
    stops(play, HAND_OVER)
    play.now += 3.0
    for number, (member, held) in enumerate(cells.items(), 1):
        node = NodeId(f"n{number}")
        play.tell(ev.Kept(node, 1, (Holding(member, held.version, held.cell, node),)))
    assert layout.dp_shard == 4 and isinstance(play.run.state, Forming)
    assert play.run.watch.hand_over_s == pytest.approx(3.0)
    reformed(play)
    play.tell(ev.KeeperLost(N4, "its node died", with_its_node=True))
    play.steps(6, 7)
    reform_s, step_s = play.run.watch.reform_s, play.run.watch.step_s
    notice(play, N3, lead_s=60.0)
    play.later(60.0 - 2 * (reform_s + 3.0) - 2 * step_s - 0.2)
    assert isinstance(play.run.state, Running)
    play.later(0.3)
    assert isinstance(play.run.state, Stopping)


def wide(nodes: int, notices: int) -> tuple[Play, list[NodeDraining]]:
    """Returns a run of a worker on each node, and notices for some of the nodes."""
    play = running(LayoutRule(None, 8, 1, "all"), nodes)
    play.connects = False
    return play, [NodeDraining(NodeId(f"n{n}"), play.now + 120.0 + n, "aws") for n in range(1, notices + 1)]


def test_r5_notices_that_are_decided_together_cost_little_more_than_one() -> None:
    """Buddies are chosen once, and one next world is connected ahead.  The control: one after the other, each
    notice costs as much.
    """
    play, many = wide(64, 32)
    one = calls(partial(wide(64, 1)[0].tell, many[0]))
    together = calls(partial(play.tell, ev.Together(tuple(many))))
    assert together < 3 * one
    assert len(play.did(Pair)) == 1 and len(play.did(ConnectAhead)) == 1
    apart, _ = wide(64, 32)
    assert calls(lambda: [apart.tell(each) for each in many]) > 6 * together
    assert apart.run.cluster.notices == play.run.cluster.notices
    assert not set(apart.run.copies.buddies.values()) & {each.node for each in many}
    assert not set(play.run.copies.buddies.values()) & {each.node for each in many}


class Counted(str):
    """A name whose comparisons with other names are calls of a function in Python."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def test_a_tick_while_many_notices_are_open_compares_no_node_with_every_other() -> None:
    """A tick costs the same for twice the nodes, and at most twice as much for twice the notices."""
    cost = {}
    for nodes, notices in ((64, 16), (128, 16), (128, 32)):
        play, many = wide(nodes, notices)
        play.tell(ev.Together(tuple(replace(each, node=NodeId(Counted(each.node))) for each in many)))
        play.later(0.1)
        cost[nodes, notices] = calls(partial(play.later, 0.1))
    assert cost[128, 16] < 1.2 * cost[64, 16] and cost[128, 32] < 2.2 * cost[128, 16]
