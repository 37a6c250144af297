"""These tests check when newcomers are worth a new world (R4), and which worker takes the seat of a dead one
(R13).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.control.growth import HOSTS, UNKNOWN_S, after_leaving, judge
from elastic.control.liveness import Watch
from elastic.control.run import Cluster, Forming, Members, Running, RunState, Waiting, Worker
from elastic.ids import NodeId, WorkerId
from elastic.journal.codec import decode_run, encode
from elastic.protocol import events as ev
from elastic.protocol.actions import Form, Pause, StartWorkers
from elastic.protocol.builds import Build
from tests.control.play import CLASSES, Play, but, reformed, rules, stepping

pytestmark = pytest.mark.fast

PAUSE_S = 4.0


def joins(play: Play, worker: str, node: str, host: str) -> str:
    play.tell(ev.KeeperUp(NodeId(node)))
    return play.tell(ev.Joined(WorkerId(worker), NodeId(node), "cpu", CLASSES, Build(host)))


def comes_and_goes(play: Play, times: int, stay_s: float) -> list[str]:
    """The machine "shaky" comes ``times`` times, each time as a new node; returns the reason given at each
    joining.
    """
    said = []
    for each in range(times):
        play.later(1.0)
        play.tell(ev.Capacity(1))
        (worker,) = play.run.members.starting
        said.append(joins(play, worker, f"x{each}", "shaky"))
        if not isinstance(play.run.state, Running):
            members = play.plan.members
            for member in members:
                play.answer(member, play.run.version)
            play.later(PAUSE_S)
            reformed(play)
            play.step(play.run.step + 1)
        play.later(stay_s)
        play.lose(worker, "its node died")
        play.tell(ev.KeeperLost(NodeId(f"x{each}"), "its node died", with_its_node=True))
        if not isinstance(play.run.state, Running):
            play.answer("w1", play.run.version)
            play.later(PAUSE_S)
            reformed(play)
            play.step(play.run.step + 1)
    return said


def one_steady_worker() -> Play:
    play = stepping(1, form_s=1000.0)
    play.rules = rules(max_workers=2, form_s=1000.0, stall_s=1e6, lease_s=1e6)
    play.steps(1, 3)
    return play


def after_a_shaky_machine() -> tuple[Play, WorkerId]:
    """The machine "shaky" has come and gone twelve times; there is room again, and a worker is being started."""
    play = one_steady_worker()
    comes_and_goes(play, times=12, stay_s=6.0)
    play.later(1.0)
    play.tell(ev.Capacity(1))
    (worker,) = play.run.members.starting
    return play, worker


def test_a_machine_that_comes_and_goes_is_no_longer_taken_in() -> None:
    """R4: at first it is believed; then each stay of 10 s (a pause and 6 s) would cost two pauses of 4 s and
    bring 5 s of work.
    """
    play = one_steady_worker()
    said = comes_and_goes(play, times=12, stay_s=6.0)
    grown = ["grow from 1×1 to 2×1" in reason for reason in said]
    assert grown[0] and not grown[-1]
    assert grown == sorted(grown, reverse=True), "once is enough: it is not forgotten"
    declined = said[grown.index(False)]
    assert (
        "would cost more time than they save; they wait as spares (" in declined
        and "joining and leaving cost 8.0 s)" in declined
    )
    assert play.generation <= 2 * grown.index(False) + 1, "no world was formed anew for the others"


def test_a_steady_machine_is_taken_in_beside_a_shaky_one() -> None:
    """The control: what one machine did counts against it, and only a little against others."""
    play, worker = after_a_shaky_machine()
    assert "grow from 1×1 to 2×1" in joins(play, worker, "y", "steady")


def test_who_was_declined_is_taken_in_once_it_has_stayed() -> None:
    play, worker = after_a_shaky_machine()
    assert "wait as spares" in joins(play, worker, "x12", "shaky") and play.did(Pause) == []
    assert play.later(0.1) == "" and play.later(10.0) == "", "said once"
    play.later(400.0)
    assert play.did(Pause) and play.last.reason.startswith("grow from 1×1 to 2×1 (")


def test_who_was_declined_takes_the_seat_of_a_dead_one() -> None:
    """A world that must be formed anew takes whoever is there: that costs no pause of its own."""
    play, worker = after_a_shaky_machine()
    joins(play, worker, "x12", "shaky")
    play.broken("w1")
    play.answer("w1", play.run.version)
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1", worker)


@pytest.mark.parametrize(("newcomers", "members"), [(1, 4), (2, 6)])
def test_newcomers_that_shorten_no_step_stay_spares_in_a_new_world(newcomers: int, members: int) -> None:
    """The busiest of four or five members has three of twelve microbatches, of six two.  A pause with
    newcomers takes longer, so a loss takes them in only if steps get shorter, and then all of them.
    """
    play = stepping(5, microbatches=12)
    play.rules = replace(play.rules, max_workers=6)
    play.steps(1, 4)
    play.lose("w5")
    play.tell(ev.Capacity(newcomers))
    new = [*play.run.members.starting]
    for worker in new:
        joins(play, worker, f"x{worker}", f"x{worker}")
    assert len(new) == newcomers
    for member in ("w1", "w2", "w3", "w4"):
        play.answer(member, play.run.version)
    assert len(play.plan.members) == members and play.plan.members[:4] == ("w1", "w2", "w3", "w4")


def test_a_pause_with_newcomers_does_not_tell_how_long_one_without_takes() -> None:
    """The first one is the best guess; after that, pauses of both kinds are averaged apart."""
    play = one_steady_worker()
    comes_and_goes(play, times=1, stay_s=600.0)
    before = play.run.watch
    play.later(1.0)
    play.tell(ev.Capacity(1))
    (worker,) = play.run.members.starting
    joins(play, worker, "x9", "steady")
    play.answer("w1", play.run.version)
    play.later(5 * PAUSE_S)
    reformed(play)
    after = play.run.watch
    assert after.reform_s == before.reform_s == pytest.approx(PAUSE_S)
    assert before.join_s == pytest.approx(PAUSE_S) and after.join_s == pytest.approx(3 * PAUSE_S)


def world_of(stays: dict[str, float], *hosts: str, reform_s: float = PAUSE_S) -> RunState:
    workers = {
        WorkerId(f"w{n}"): Worker(NodeId(f"n{n}"), "cpu", 0.0, host=host) for n, host in enumerate(hosts, 1)
    }
    return RunState(
        1, 1, Waiting(0.0), Members(workers), Cluster(stays=stays), watch=Watch(reform_s=reform_s)
    )


def test_what_comes_together_is_judged_together() -> None:
    """A machine of four brings four times as much for the same two pauses."""
    seen = {"shaky": 14.0}
    alone = judge(world_of(seen, "a", "shaky"), [WorkerId("w1")], [WorkerId("w2")], 0.0, rules())
    many = world_of(seen, "a", *["shaky"] * 4)
    together = judge(many, [WorkerId("w1")], [WorkerId(f"w{n}") for n in range(2, 6)], 0.0, rules())
    assert alone.welcome == () and len(together.welcome) == 4


def test_a_longer_pause_asks_for_a_longer_stay() -> None:
    """The control of the rule itself: the same newcomer, the same past, only the pause differs."""
    for reform_s, welcome in ((0.5, True), (5.0, True), (20.0, False), (60.0, False)):
        verdict = judge(
            world_of({"b": 60.0}, "a", "b", reform_s=reform_s),
            [WorkerId("w1")],
            [WorkerId("w2")],
            0.0,
            rules(),
        )
        assert bool(verdict.welcome) is welcome, (reform_s, verdict)


def test_a_stranger_is_expected_to_stay_as_others_do() -> None:
    """One shaky host among many steady ones says little about a new host; many shaky hosts say much."""
    calm = world_of({"s1": 9.0}, *(f"h{n}" for n in range(20)), "new", reform_s=20.0)
    wild = world_of({f"s{n}": 9.0 for n in range(20)}, "h0", "new", reform_s=20.0)
    for run, welcome in ((calm, True), (wild, False)):
        members = [worker for worker in run.workers if run.workers[worker].host != "new"]
        (newcomer,) = set(run.workers) - set(members)
        assert bool(judge(run, members, [newcomer], 0.0, rules()).welcome) is welcome


def test_the_host_that_left_last_is_remembered_best() -> None:
    stays: dict[str, float] = {}
    for n in range(2 * HOSTS):
        stays = after_leaving(stays, f"h{n}", 100.0)
    assert len(stays) == HOSTS and list(stays)[-1] == f"h{2 * HOSTS - 1}"
    before = stays["h400"]
    assert before == (UNKNOWN_S * 100.0) ** 0.5
    assert after_leaving(stays, "h400", 0.0)["h400"] == before**0.5, "gone at once counts as a second"


def test_a_large_run_remembers_as_many_hosts_as_it_has_machines() -> None:
    """The run has 1,280 machines, and 320 are taken at once.  A host that comes and goes is remembered all the
    same.  The control: a run that remembers 256 has forgotten it.
    """
    for machines, remembered in ((1280, True), (0, False)):
        stays = after_leaving({}, "flaps", 5.0, machines)
        for n in range(320):
            stays = after_leaving(stays, f"h{n}", 1e5, machines - n)
        assert ("flaps" in stays) is remembered


def test_a_node_has_left_once_nothing_of_it_is_left() -> None:
    """If a keeper or a worker dies alone, no node has left; if all processes of a node die one by one, it
    has, though Ray may not report it as dead."""
    play = stepping(2)
    play.tell(ev.KeeperLost(NodeId("n2"), "its process died"))
    play.lose("w1")
    assert not play.run.cluster.stays and play.run.cluster.homes.keys() == {"n1", "n2"}
    play.lose("w2")
    assert play.run.cluster.stays.keys() == {"n2"} and play.run.cluster.homes.keys() == {"n1"}


def test_what_was_learned_is_in_the_journal() -> None:
    play = one_steady_worker()
    comes_and_goes(play, times=2, stay_s=6.0)
    assert (
        play.run.cluster.stays["shaky"] < UNKNOWN_S
        and play.run.watch.reform_s > 0
        and "x1" not in play.run.cluster.homes
    )
    assert decode_run(encode(play.run)) == play.run


# ---- spares


def with_a_spare() -> Play:
    play = Play(rules(max_workers=2, spares=1))
    play.tell(ev.Capacity(3))
    assert play.did(StartWorkers) == [StartWorkers((WorkerId("w1"), WorkerId("w2"), WorkerId("w3")))]
    assert play.last.reason == "start w1, w2 and w3: 0 workers of at most 2 and 1 spare"
    play.join("w1", "w2")
    assert play.plan.members == ("w1", "w2"), "it is not waited for"
    reformed(play)
    play.step(1)
    return play


def test_a_spare_is_no_member_and_takes_a_dead_workers_seat() -> None:
    """R13: one plan is made at once, of processes that are there; another spare is started when there is
    room.
    """
    play = with_a_spare()
    assert play.join("w3") == "w3 joined on node n1" and isinstance(play.run.state, Running)
    play.later(10.0)
    assert isinstance(play.run.state, Running) and play.plan.members == ("w1", "w2"), "and stays none"
    play.lose("w2")
    play.answer("w1", play.run.version)
    (form,) = play.did(Form)
    assert form.plan.members == ("w1", "w3") and form.plan.tier == "live" and play.did(StartWorkers) == []
    reformed(play)
    assert play.did(StartWorkers) == []


def test_without_a_spare_the_world_gets_smaller() -> None:
    """The control."""
    play = stepping(2)
    play.step(1)
    play.lose("w2")
    play.answer("w1", play.run.version)
    assert play.plan.members == ("w1",)


def test_a_spare_that_dies_disturbs_nobody() -> None:
    play = with_a_spare()
    play.join("w3")
    assert play.lose("w3") == "w3 is lost (its process died)"
    play.tell(ev.Capacity(1))
    assert play.did(StartWorkers) == [StartWorkers((WorkerId("w4"),))], "and is replaced"
    assert isinstance(play.run.state, Running) and play.generation == 1


def test_a_full_world_is_not_held_up_by_spares_that_are_on_their_way() -> None:
    play = Play(rules(max_workers=1, spares=2, grow_debounce_s=30.0))
    play.tell(ev.Capacity(3))
    play.join("w1")
    assert isinstance(play.run.state, Forming) and len(play.run.members.starting) == 2
    alone = replace(play.rules, max_workers=2, spares=1)
    play = Play(alone)
    play.tell(ev.Capacity(3))
    play.join("w1")
    assert isinstance(play.run.state, Waiting), "the control: members are waited for"


# ---- waiting for workers that are starting

W3 = WorkerId("w3")


def short_of_one(asked_s_ago: float, **changes: Any) -> Play:
    """One of two members is lost, and its replacement was asked for some time ago; a start takes 10 s."""
    play = stepping(2, **{"may_wait": True, **changes})
    play.now = 100.0
    play.steps(1, 3)
    play.run = but(play.run, "watch", reform_s=PAUSE_S, join_s=PAUSE_S, start_s=10.0, step_s=1.0)
    play.run = but(play.run, "members", starting={W3: play.now - asked_s_ago}, next_worker=4)
    play.lose("w2")
    play.answer("w1", play.run.version)
    return play


def test_a_world_waits_for_a_worker_that_is_about_to_join() -> None:
    play = short_of_one(9.0)
    assert play.run.state == Waiting(100.0, 101.0 + 3.5)
    assert play.last.reason.endswith(
        "wait up to 4.5 s for w3: expected cost in accelerator-seconds: 20 if the run waits for workers that are "
        "starting, 27 if the run goes on without newcomers"
    )
    play.later(1.0)
    play.join("w3")
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1", "w3")
    assert play.run.watch.start_s == 10.0


def test_it_waits_no_longer_than_it_wanted_to_and_not_again() -> None:
    play = short_of_one(9.0)
    play.later(4.4)
    assert isinstance(play.run.state, Waiting)
    play.later(0.2)
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1",)


def test_it_waits_for_nobody_who_does_not_come() -> None:
    play = short_of_one(9.0)
    play.tell(ev.StartFailed(W3, "no room"))
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1",)


@pytest.mark.parametrize(
    ("asked_s_ago", "changes"),
    [
        (1.0, {}),  # 9 s are too long
        (9.0, {"may_wait": False}),
    ],
)
def test_otherwise_it_goes_on_at_once(asked_s_ago: float, changes: dict[str, Any]) -> None:
    play = short_of_one(asked_s_ago, **changes)
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w1",)


def test_hosts_that_shorten_a_step_only_together_are_taken_in_together() -> None:
    """Four and five workers make four rounds of 16 microbatches, and six make three."""
    known = world_of({}, "a", "b", "c", "d", "e", "f")
    members = [WorkerId(f"w{n}") for n in range(1, 5)]
    new = [WorkerId("w5"), WorkerId("w6")]
    by_rounds = rules(microbatches=16)
    assert judge(known, members, new[:1], 0.0, by_rounds).welcome == ()
    assert judge(known, members, new, 0.0, by_rounds).welcome == tuple(new)
    assert judge(known, members, new[:1], 0.0, rules()).welcome == tuple(new[:1])
