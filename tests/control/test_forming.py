"""These tests form worlds: they check each seat, the state that the world begins from, and the blame if it
does not come to be.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.control.run import Failed, Forming, Running, RunState, Stopping, Waiting
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.protocol import events as ev
from elastic.protocol.actions import Exit, Fence, Form, Go, Kill, StartWorkers
from tests.control.play import CLASSES, Play, but, reformed, rules, started, stepping

pytestmark = pytest.mark.fast


def test_a_run_begins_with_all_that_come_together() -> None:
    play = Play(rules(max_workers=3))
    play.tell(ev.KeeperUp(NodeId("n1")))
    assert play.tell(ev.Capacity(8)) == "start w1, w2 and w3: 0 workers of at most 3"
    assert play.last.actions == (StartWorkers((WorkerId("w1"), WorkerId("w2"), WorkerId("w3"))),)
    play.join("w1", "w2")
    assert isinstance(play.run.state, Waiting), (
        "w3 is about to join; a world of two would be stopped at once to take it in"
    )
    assert play.join("w3") == (
        "w3 joined on node n1; form generation 1 of w1, w2 and w3 (3×1) at step 0 (init)"
    )


def test_a_run_does_not_wait_for_ever_for_those_that_do_not_come() -> None:
    play = Play(rules(max_workers=3, grow_debounce_s=2.0))
    play.tell(ev.Capacity(8))
    play.join("w1")
    assert play.later(1.9) == ""
    assert play.later(0.1) == "form generation 1 of w1 (1×1) at step 0 (init)"


def test_all_are_ready_before_anybody_steps() -> None:
    play = started(2)
    assert play.here("w1", "w2") == ""
    assert play.ready("w1") == "" and play.last.actions == ()
    assert play.ready("w2") == "generation 1 runs"
    assert play.last.actions == (Go(1, (WorkerId("w1"), WorkerId("w2"))),)
    assert isinstance(play.run.state, Running)


def test_what_members_held_before_they_step_is_known_no_more_once_they_step() -> None:
    """They drop their older shards at Go, and change the newest one: from then on only the answer to a fence
    says what a worker holds.
    """
    play = stepping(3)
    play.lose("w1")
    play.answer("w2", Version(0, 0))
    play.answer("w3", Version(0, 0))
    play.here("w2", "w3")
    play.ready("w2")
    members = play.run.members.workers
    assert [len(members[worker].holdings) for worker in play.plan.members] == [1, 1], (
        "one is not ready: nobody steps"
    )
    play.ready("w3")
    members = play.run.members.workers
    assert isinstance(play.run.state, Running) and [
        members[worker].holdings for worker in play.plan.members
    ] == [(), ()]


def test_ready_may_overtake_here() -> None:
    play = started(2)
    play.ready("w1", "w2")
    assert isinstance(play.run.state, Running)


def test_whoever_does_not_take_the_plan_is_expelled() -> None:
    """One absent member lets everybody's group formation time out: the others are not to blame."""
    play = started(3)
    play.here("w1", "w3")
    assert play.later(9.9) == ""
    assert play.later(0.1).startswith(
        "w2 did not take the plan within 10 s after the other workers: expel w2: stop generation "
        "1 of 3 workers"
    )
    assert play.last.actions == (
        Kill((WorkerId("w2"),), "w2 did not take the plan within 10 s after the other workers", examine=True),
        Fence(1, (WorkerId("w1"), WorkerId("w3"))),
    )


def test_a_plan_that_reached_nobody_is_waited_for_longer() -> None:
    """The store may be slow to open; then all are late."""
    play = started(2)
    assert play.later(29.9) == ""
    assert play.later(0.1).startswith(
        "w1 and w2 did not take the plan within 30 s: expel w1 and w2: stop generation 1 of 2 workers"
    )


def test_if_all_were_there_the_store_is_blamed_and_nobody_killed() -> None:
    play = started(2)
    assert play.plan.store_node == "n1"
    play.here("w1", "w2")
    reason = play.later(30.0)
    assert (
        "all 2 were there, but w1 and w2 did not get ready within 30 s; probably the network is "
        "at fault, or the store on node n1"
    ) in reason
    assert not play.did(Kill)
    play.answer("w1", None)
    play.answer("w2", None)
    assert (play.generation, play.plan.store_node, play.plan.members) == (2, "n2", ("w1", "w2"))


def test_whoever_gets_stuck_twice_while_others_get_ready_is_expelled() -> None:
    play = started(2)
    for _ in range(2):
        play.here("w1", "w2")
        play.ready("w1")
        play.later(30.0)
        if isinstance(play.run.state, Stopping) and not play.run.state.expelled:
            play.answer("w1", None)
            play.answer("w2", None)
    assert isinstance(play.run.state, Stopping) and play.run.state.expelled == ("w2",)


def test_losing_the_store_while_forming_does_not_wait_for_the_deadline() -> None:
    play = started(2)
    play.here("w1", "w2")
    reason = play.tell(ev.KeeperLost(NodeId("n1"), "its node died"))
    assert reason.startswith(
        "the keeper of node n1 is lost (its node died); this keeper hosts the store of the world that "
        "is forming: stop generation 1"
    )
    play.answer("w1", None)
    play.answer("w2", None)
    assert play.plan.store_node == "n2"


def test_losing_a_keeper_of_a_world_that_runs_stops_nothing() -> None:
    play = stepping(2)
    play.tell(ev.KeeperLost(NodeId("n1"), "its process died"))
    assert isinstance(play.run.state, Running)


def test_without_a_keeper_no_store_and_no_world() -> None:
    play = Play(rules(max_workers=1))
    play.tell(ev.Capacity(1))
    play.tell(ev.Joined(WorkerId("w1"), NodeId("n1"), "cpu", CLASSES))
    assert isinstance(play.run.state, Waiting)
    assert play.tell(ev.KeeperUp(NodeId("n1"))).startswith("form generation 1 of w1")


def test_survivors_keep_their_seats_and_newcomers_come_after() -> None:
    play = stepping(3)
    play.tell(ev.Capacity(1))
    play.lose("w1")
    assert play.run.members.starting == {"w4": 0.0}
    play.join("w4")
    play.answer("w2", Version(0, 0))
    play.answer("w3", Version(0, 0))
    assert play.plan.members == ("w2", "w3", "w4")


def test_growth_is_at_a_boundary_and_loses_nothing() -> None:
    play = stepping(1, min_workers=1)
    play.rules = rules(max_workers=2)
    play.steps(1, 3)
    assert play.tell(ev.Capacity(1)) == "start w2: 1 worker of at most 2"
    reason = play.join("w2")
    assert reason.startswith(
        "w2 joined on node n1; grow from 1×1 to 2×1 (an expected stay of 3600 s saves 1800.0 s, and "
        "joining and leaving cost 0.0 s): generation 1 "
    )
    assert play.deeds == ["ConnectAhead", "Pause"]
    play.step(4)
    assert play.deeds == ["Pause"], "step 4 was on its way already: ask again"
    play.step(5, boundary=1)
    assert play.deeds == []
    reason = play.answer("w1", Version(5, 1), saw=5)
    assert reason == "form generation 2 of w1 and w2 (2×1) at step 5 (live)"
    assert play.run.history.fruitless == 0
    assert [each.worker for each in play.plan.holders] == ["w1"]


def test_growth_waits_for_others_that_are_about_to_join() -> None:
    play = stepping(1)
    play.rules = rules(max_workers=3)
    play.now = 5.0
    play.tell(ev.Capacity(2))
    play.join("w2")
    assert isinstance(play.run.state, Running)
    assert "grow from 1×1 to 3×1" in play.join("w3")


def test_a_worker_that_does_not_enlarge_the_world_stays_a_spare() -> None:
    play = stepping(2, layout=LayoutRule(None, 2, 2, "all"))
    play.rules = rules(max_workers=3, layout=LayoutRule(None, 2, 2, "all"))
    play.tell(ev.Capacity(1))
    play.join("w3")
    assert isinstance(play.run.state, Running) and play.run.members.starting == {}
    play.lose("w1")
    play.answer("w2", Version(0, 0))
    assert play.plan.members == ("w2", "w3"), "and takes the seat at once"


def test_who_is_left_out_never_takes_the_last_copy_with_it() -> None:
    """Layout 2×2 loses w2 (half b of replica 1); only two of w1 (a), w3 (a) and w4 (b) may sit, so one holder
    of half a is left out.
    """
    rule = LayoutRule(None, 2, 2, "fit")
    play = stepping(4, layout=rule)
    play.steps(1, 5)
    play.lose("w2")
    for worker in ("w1", "w3", "w4"):
        play.answer(worker, Version(5, 1))
    assert play.plan.members == ("w1", "w4")
    assert play.plan.version == Version(5, 1)


def test_a_worker_nobody_asked_for_is_sent_away() -> None:
    """An earlier coordinator asked for the worker, or it took too long: its id is not in use, and never will
    be again.
    """
    play = stepping(2)
    play.lose("w2")
    before = play.run
    assert play.tell(ev.Joined(WorkerId("w2"), NodeId("n1"), "cpu", CLASSES)) == (
        "refused: w2 was not started by this run, or joined too late"
    )
    assert play.last.actions == (Kill((WorkerId("w2"),), "nobody waits for it"),)
    assert play.run is before


def test_a_worker_that_another_coordinator_asked_for_keeps_its_name() -> None:
    """R9: a superseded coordinator that does not know it has started w9; the next worker to be started gets a
    later id.
    """
    play = stepping(1)
    assert play.tell(ev.Joined(WorkerId("w9"), NodeId("n1"), "cpu", CLASSES)).startswith(
        "w9 was started by an earlier coordinator"
    )
    assert play.last.actions == (Kill((WorkerId("w9"),), "nobody waits for it"),)
    play.rules = rules(max_workers=2)
    assert play.tell(ev.Capacity(1)) == "start w10: 1 worker of at most 2"


def test_ids_are_never_used_again() -> None:
    play, seen = stepping(2), ["w1", "w2"]
    for _ in range(4):
        play.lose(play.plan.members[0])
        for worker in play.pending:
            play.answer(worker, play.run.version)
        play.tell(ev.Capacity(1))
        (new,) = play.run.members.starting
        assert new not in seen
        seen.append(new)
        reformed(play)
        play.step(play.run.step + 1)
        play.tell(ev.Joined(new, NodeId("n1"), "cpu", CLASSES))
        play.step(play.run.step + 1, boundary=1)
        play.answer(play.plan.members[0], play.run.version)
        reformed(play)


def test_failing_starts_do_not_spin() -> None:
    play = Play(rules(max_workers=2, grow_debounce_s=2.0))
    play.tell(ev.Capacity(1))
    assert play.tell(ev.StartFailed(WorkerId("w1"), "no room")) == "w1 did not start (no room)"
    assert play.tell(ev.Capacity(1)) == "" and play.last.actions == ()
    play.now = 2.0
    assert play.tell(ev.Capacity(1)) == "start w2: 0 workers of at most 2"


def test_one_that_never_comes_is_given_up_and_another_asked_for() -> None:
    play = Play(rules(max_workers=1, form_s=30.0))
    play.tell(ev.Capacity(1))
    play.now = 30.0
    assert play.tell(ev.Capacity(1)) == (
        "w1 neither joined nor made progress for 30 s; start w2: 0 workers of at most 1"
    )
    assert play.did(Kill) == [Kill((WorkerId("w1"),), "it neither joined nor made progress for 30 s")]


def test_waiting_has_a_budget() -> None:
    play = started(2, min_workers=2, wait_s=300.0)
    play.lose("w1")
    play.answer("w2", None)
    assert play.last.reason == "wait: 1 worker is too few for any layout (at least 2)"
    assert play.later(299.0) == ""
    assert play.later(1.0) == "waited 300 s for workers: 1 worker of at least 2"
    assert isinstance(play.run.state, Failed) and play.did(Exit) == [Exit((WorkerId("w2"),))]


def test_if_the_workers_are_enough_it_is_said_what_else_is_waited_for() -> None:
    """The number alone would read as if it were missing.  The control is the test before this one: a number
    that is too small.
    """
    play = Play(rules(wait_s=10.0))
    for node in ("n1", "n2"):
        play.tell(ev.NodeFound(NodeId(node)))
    play.tell(ev.Capacity(1))
    play.join("w1")  # the keeper of n2 does not come up
    said = (
        "waited 10 s for workers: 1 worker of at least 1, but 1 node is not checked yet, and the "
        "first world waits for their checks"
    )
    assert play.later(10.0) == said and isinstance(play.run.state, Failed)

    play = Play(rules(wait_s=10.0))
    play.tell(ev.Capacity(1))
    play.tell(ev.Joined(WorkerId("w1"), NodeId("n1"), "cpu", CLASSES))
    play.tell(ev.Capacity(0))
    assert play.later(10.0) == (
        "waited 10 s for workers: 1 worker of at least 1, but there is no keeper to host the "
        "store of the world"
    )


def test_a_run_with_enough_workers_does_not_fail_for_want_of_more() -> None:
    """The second one is on its way for longer than a run waits at all.  The control: it fails if the second
    one is needed.
    """
    for least in (1, 2):
        play = Play(rules(min_workers=least, wait_s=10.0, grow_debounce_s=60.0))
        play.tell(ev.Capacity(2))
        play.join("w1")
        assert isinstance(play.run.state, Waiting)
        reason = play.later(10.0)
        assert reason == (
            "form generation 1 of w1 (1×1) at step 0 (init)"
            if least == 1
            else ("waited 10 s for workers: 1 worker of at least 2")
        )


def test_a_worker_too_few_is_not_left_behind_when_another_comes() -> None:
    play = stepping(2, min_workers=2)
    play.steps(1, 3)
    play.lose("w1")
    play.answer("w2", Version(3, 1))
    play.tell(ev.Capacity(1))
    reason = play.join("w3")
    assert reason == "w3 joined on node n1; form generation 2 of w2 and w3 (2×1) at step 3 (live)"


def test_generations_without_a_commit_are_counted_and_a_commit_forgives() -> None:
    play = stepping(2, max_fruitless=2)
    for round_ in range(1, 7):
        if round_ == 3:
            play.step(1)
        assert play.run.history.fruitless == (round_ - 1 if round_ <= 2 else 0 if round_ == 3 else round_ - 4)
        play.broken("w1")
        play.answer("w1", play.run.version)
        play.answer("w2", play.run.version)
        if isinstance(play.run.state, Failed):
            break
        reformed(play)
    assert isinstance(play.run.state, Failed)
    assert play.last.reason.startswith(
        "3 generations in a row committed no new step; at most 2 may.  The last one ended because: w1 "
        "waits, because its world broke (peer"
    )


def test_doing_again_what_was_given_up_forgives_nothing() -> None:
    """The data of step 6 never comes for the only worker; each worker replaces the one before, and gets no
    further.
    """
    play = stepping(1, max_fruitless=2, save_every=4)
    play.steps(1, 4)
    play.save(Version(4, 1), "w1")
    play.step(5)
    for worker in ("w2", "w3", "w4"):
        play.lose(play.plan.members[0])
        play.tell(ev.Capacity(1))
        play.join(worker)
        reformed(play)
        play.step(5)
    play.lose("w4")
    assert isinstance(play.run.state, Failed)
    assert play.run.history.furthest == Version(5, 1) and play.generation == 4
    assert "3 generations in a row committed no new step; at most 2 may" in play.run.state.reason


def test_a_generation_that_ends_on_the_way_to_where_another_was_is_not_counted() -> None:
    """A generation that begins from the checkpoint may break before the furthest step; this is no sign that
    the run never gets on.
    """
    play = stepping(1, max_fruitless=0, save_every=4)
    play.steps(1, 4)
    play.save(Version(4, 1), "w1")
    play.steps(5, 7)
    for worker in ("w2", "w3"):
        play.lose(play.plan.members[0])
        play.tell(ev.Capacity(1))
        play.join(worker)
        reformed(play)
        play.steps(5, 6)
        assert play.run.history.fruitless == 0 and play.run.history.furthest == Version(7, 1)
    play.steps(7, 8)
    assert play.run.history.fruitless == 0 and play.run.history.furthest == Version(8, 3)


def test_a_run_resumes_from_what_the_bucket_says() -> None:
    run = RunState.begin(
        4, 0.0, saved=(Version(20, 3), Version(10, 1)), lineage=((1, 12), (3, 25)), generation=3
    )
    play = Play(rules(max_workers=2), run)
    play.tell(ev.Capacity(2))
    reason = play.join("w1", "w2")
    assert reason.endswith(
        "form generation 4 of w1 and w2 (2×1) at step 20 (bucket), abandons steps 21–25 of generation 3"
    )
    assert play.did(Form)[0].plan.incarnation == 4


def test_what_is_not_on_the_lineage_is_not_resumed_from() -> None:
    run = RunState.begin(4, 0.0, saved=(Version(10, 1), Version(30, 2)), lineage=((1, 12),), generation=2)
    assert run.history.saved == (Version(10, 1),)
    assert run.generation == 2 and isinstance(run.state, Waiting)
    assert RunState.begin(4, 0.0, lineage=((7, 3),)).generation == 7


def test_lost_while_forming_stops_at_once() -> None:
    play = started(3)
    play.here("w1")
    assert play.lose("w2").startswith("w2 is lost (its process died): stop generation 1 of 3 workers")
    play.answer("w1", None)
    play.answer("w3", None)
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1", "w3")
    assert play.run.history.fruitless == 1


def test_state_that_comes_at_a_crawl_is_said_with_the_interface() -> None:
    """The interface is not named if the state is small, since little data says nothing about the speed of a
    network.
    """
    play = started(2)
    crawl = ev.Ready(WorkerId("w1"), 1, heal_s=100.0, heal_bytes=10**9, interface="eth0")
    assert play.tell(crawl) == (
        "w1 got 1,000 MB at 10.0 MB/s over interface eth0: if its node has a faster interface, set "
        "network.interface to its name"
    )
    assert play.tell(crawl) == "", "said once"
    for heal_s, heal_bytes in ((10.0, 10**9), (100.0, 10**6), (0.0, 0)):
        assert "interface" not in started(2).tell(
            ev.Ready(WorkerId("w1"), 1, heal_s=heal_s, heal_bytes=heal_bytes, interface="eth0")
        )


# ---- a new run is initialised, however long that takes


def initialises(play: Play, worker: str, at: int, operation: str = ev.INITIALISES) -> str:
    """Beats of the keeper of ``worker``, which has come to operation ``at`` of its initialisation."""
    return play.tell(
        ev.Beat(NodeId("n1"), (ev.Progress(WorkerId(worker), play.generation, 0, 0, at, operation),))
    )


def test_form_s_does_not_limit_an_initialisation_that_gets_further() -> None:
    play = started(2)
    play.here("w1", "w2")
    assert initialises(play, "w1", 1) == "w1 initialises the model, as all other workers do"
    for at in range(2, 12):
        assert play.later(20.0) == "" and initialises(play, "w1", at) == ""
    assert isinstance(play.run.state, Forming) and play.later(29.9) == ""
    initialises(play, "w1", 11)  # nothing new
    assert "the initialisation in w1 made no progress for 30 s: expel w1" in play.later(0.1)


def test_if_all_stand_still_nobody_is_killed() -> None:
    play = started(2)
    play.here("w1", "w2")
    initialises(play, "w1", 1)
    initialises(play, "w2", 1)
    reason = play.later(30.0)
    assert (
        "the initialisation in w1 and w2 made no progress for 30 s; if a single operation of "
        "init_weights() takes longer, raise"
    ) in reason
    assert not play.did(Kill)


def test_form_s_does_not_limit_a_healing_that_gets_further() -> None:
    """A slow bucket may need many minutes for a large state, and some members more than others.  The
    controls: members that stand still; and one that holds up all others, which gets ten times as long from
    when the first is ready."""
    play = started(2)
    play.here("w1", "w2")
    for at in range(1, 12):
        assert initialises(play, "w1", at, ev.HEALS) == "" == play.later(20.0)
    assert isinstance(play.run.state, Forming) and play.later(9.9) == ""
    initialises(play, "w1", 11, ev.HEALS)  # nothing new
    assert "did not get ready within 30 s; probably the network is at fault, or the store" in play.later(0.1)

    play = started(2)
    play.here("w1", "w2")
    for at in range(1, 29):
        if at == 15:
            play.tell(ev.Ready(WorkerId("w2"), 1))
        assert initialises(play, "w1", at, ev.HEALS) == "" == play.later(20.0)
    assert initialises(play, "w1", 29, ev.HEALS) == "" == play.later(19.9)
    assert "but w1 did not get ready" in play.later(0.1)


def test_the_time_that_a_world_took_to_form_counts_from_its_plan() -> None:
    """Growing is judged by it.  The control: a world that initialises, or reads a slow bucket, says nothing
    of how long one that grows will take."""
    for begins in (True, False):
        play = started(2)
        if not begins:
            play.run = but(play.run, "state", plan=replace(play.plan, tier="live"))
        play.here("w1", "w2")
        for at in range(1, 4):
            initialises(play, "w1", at, ev.HEALS)
            play.later(20.0)
        play.tell(ev.Ready(WorkerId("w1"), 1))
        play.tell(ev.Ready(WorkerId("w2"), 1))
        assert isinstance(play.run.state, Running) and play.run.watch.reform_s == (0.0 if begins else 60.0)


def test_other_operations_do_not_move_the_deadline() -> None:
    """Negative control: a member that does something else, however busily, must be ready in time."""
    play = started(2)
    play.here("w1", "w2")
    for at in range(1, 3):
        initialises(play, "w1", at, "forms")
        play.later(14.9)
    assert "did not get ready within 30 s; probably the network is at fault, or the store" in play.later(0.3)
