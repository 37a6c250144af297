"""Stragglers: who is named by the time of its own work, and who leaves because of it
(``elastic/control/stragglers.py``, ``evicting.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.evicting import REST
from elastic.control.run import Forming, Running, Stopping
from elastic.control.stragglers import ENOUGH, WINDOW, Stragglers, judge
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal.codec import changes, decode, encode
from elastic.plan.layout import Layout, LayoutRule
from elastic.protocol import events as ev
from elastic.protocol.actions import ConnectAhead, Kill, Pause, StartWorkers
from elastic.protocol.commit_record import HAND_OVER, LATE, MOST_LATE, PAUSE, Late, Outcome, Usage, late_among
from elastic.protocol.plan import Plan
from tests.control.play import CLASSES, Play, outcome, stepping

pytestmark = pytest.mark.fast

W1, W2, W3, W4 = (WorkerId(f"w{number}") for number in range(1, 5))
N3, N4 = NodeId("n3"), NodeId("n4")
REPLICAS = LayoutRule(dp_replicate=None, dp_shard=1, min_shard=1, use="all")
SHARDED = LayoutRule(dp_replicate=1, dp_shard=None, min_shard=1, use="all")
USUAL_S = 0.25


# ---- one step: who is late in it


def late_by_hand(forward_s: list[float], kinds: list[int], least_s: float) -> list[int]:
    """Returns the world ranks that are late in one data group, found by counting."""
    found = []
    for rank, (mine, kind) in enumerate(zip(forward_s, kinds, strict=True)):
        peers = [each for each, other in zip(forward_s, kinds, strict=True) if other == kind and each > 0]
        slower = [each for each in peers if sum(other <= each for other in peers) * 2 >= len(peers)]
        if mine > 0 and mine >= LATE * min(slower) and mine - min(slower) > least_s:
            found.append(rank)
    return found


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 1.1, 1.4, 1.5, 2.0, 3.0, 7.0]), st.integers(0, 1)),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([0.0, 0.6, 1.5]),
)
def test_the_late_are_those_far_above_the_median_of_their_kind(
    members: list[tuple[float, int]], least_s: float
) -> None:
    forward_s, kinds = [each for each, _ in members], [kind for _, kind in members]
    late = late_among(forward_s, kinds, Layout(len(members), 1), least_s)
    expected = late_by_hand(forward_s, kinds, least_s)
    assert len(late) == min(len(expected), MOST_LATE) and {each.rank for each in late} <= {*expected}
    factors = [each.forward_s / each.usual_s for each in late]
    assert factors == sorted(factors, reverse=True)


def test_all_slow_alike_and_slow_by_little_are_not_late() -> None:
    assert late_among([9.0] * 4, [0] * 4, Layout(4, 1), 0.0) == ()
    assert late_among([1.0, 1.0, 1.0, 1.49], [0] * 4, Layout(4, 1), 0.0) == ()
    assert late_among([0.0] * 4, [0] * 4, Layout(4, 1), 0.0) == (), "nothing was measured"
    two = late_among([1.0, 2.0], [0, 0], Layout(2, 1), 0.0)
    assert two == (Late(1, 2.0, 1.0),), "of two the slower one is late"
    assert late_among([1.0, 2.0], [0, 0], Layout(2, 1), 1.0) == (), "it costs the step too little"
    assert late_among([1.0, 1.0, 4.0, 4.0], [0, 0, 7, 7], Layout(4, 1), 0.0) == (), "another kind is slower"


def test_a_stage_is_compared_with_itself() -> None:
    """The second stage of this pipeline has three times the work of the first."""
    layout = Layout(2, 1, more=(("pp", 2),))
    assert late_among([1.0, 1.0, 3.0, 3.0], [0] * 4, layout, 0.0) == ()
    assert [each.rank for each in late_among([1.0, 1.0, 3.0, 6.0], [0] * 4, layout, 0.0)] == [3]


# ---- many steps: who is a straggler


def seen(late: Mapping[int, float], step: int = 1, forward_s: float = 1.0) -> Outcome:
    """Returns a commit in which the members ``late`` took so many times the median."""
    found = tuple(Late(rank, factor * USUAL_S, USUAL_S) for rank, factor in late.items())
    return replace(outcome(step, 1), usage=Usage(1.0, forward_s=forward_s), usage_ranks=(0,) * 5, late=found)


def plan_of(*members: WorkerId) -> Plan:
    nodes = tuple(NodeId(f"node {member}") for member in members)
    return Plan(1, 1, Layout(len(members), 1), members, Version(0, 0), "init", (), nodes[0], nodes=nodes)


def after(steps: Iterable[Mapping[int, float]]) -> tuple[Stragglers, list[str]]:
    """Returns what is known after the steps, and all that was said."""
    known, said = Stragglers(), list[str]()
    for late in steps:
        known, more = judge(known, plan_of(W1, W2, W3), seen(late))
        said += more
    return known, said


def test_r15_a_worker_that_takes_twice_as_long_is_named_within_20_steps() -> None:
    """B5 too: the sentence says who, where, how slow, and how often."""
    known, said = after([{1: 2.0}] * (ENOUGH - 1))
    assert said == [] and known.named == ()
    known, said = after([{1: 2.0}] * 20)
    assert known.named == (W2,)
    assert said == [
        "w2 on node node w2 is slow, and all others wait for it: in 12 of 16 steps its forward pass of a microbatch "
        "took 2.0 times the median or longer, 0.5 s instead of 0.25 s"
    ]
    assert ENOUGH < WINDOW < 20


@pytest.mark.parametrize("factor", [3.0, 1000.0])
def test_a_pause_a_compilation_or_noise_names_nobody(factor: float) -> None:
    """One long step counts as one, however long.  The control: the same worker in each step."""
    assert after([{1: factor}, *[{}] * 9] * 30)[1] == []
    assert after([{1: factor}, {}] * 100)[1] == [], "late in every second step"
    assert after([{rank % 3: factor} for rank in range(300)])[1] == [], "another one in each step"
    assert len(after([{1: factor}] * 100)[1]) == 1, "it is said once"


@given(st.lists(st.sets(st.integers(0, 2), max_size=2), max_size=120))
def test_the_verdict_is_that_of_one_who_remembers_all_steps(steps: list[set[int]]) -> None:
    known, plan, named = Stragglers(), plan_of(W1, W2, W3), set[WorkerId]()
    for number in range(len(steps)):
        known, said = judge(known, plan, seen(dict.fromkeys(steps[number], 2.0)))
        before, newest = set(named), steps[max(number + 1 - WINDOW, 0) : number + 1]
        for rank, worker in enumerate(plan.members):
            late = sum(rank in each for each in newest)
            if late >= ENOUGH:
                named.add(worker)
            elif not late:
                named.discard(worker)
        assert {worker for worker, each in known.workers.items() if each.named} == named
        assert len(said) == len(before ^ named)


def test_a_straggler_that_recovers_is_forgotten_and_may_be_named_again() -> None:
    known, said = after([*[{2: 2.0}] * 16, *[{}] * 15])
    assert len(said) == 1 and known.named == (), "it is a straggler, but not slow now"
    known, said = after([*[{2: 2.0}] * 16, *[{}] * 16])
    assert said[1:] == ["w3 is no longer slow: it was late in none of 16 steps"] and known == Stragglers()
    assert len(after([*[{2: 2.0}] * 16, *[{}] * 16, *[{2: 2.0}] * 12])[1]) == 3


def test_steps_without_a_measurement_do_not_count() -> None:
    known, _ = after([{1: 2.0}] * 11)
    again, said = judge(known, plan_of(W1, W2, W3), seen({}, forward_s=0.0))
    assert again is known and said == []


def test_what_is_known_survives_the_journal() -> None:
    known, _ = after([{1: 2.0, 2: 3.0}] * 12)
    assert decode(Stragglers, encode(known)) == known and known.named == (W3, W2)
    play = running()
    slow(play, 1)
    assert "stragglers" in changes(running().run, play.run)


# ---- what the run does about it


def running(
    layout: LayoutRule = REPLICAS, workers: int = 3, *, evicts: bool = True, **changes: object
) -> Play:
    """Returns a run of so many workers at step 0, whose stragglers are evicted."""
    return stepping(
        workers,
        **{
            "layout": layout,
            "evicts": evicts,
            "stall_s": 1e6,
            "copy_every": 1,
            "target_step": 1000,
            **changes,
        },
    )


def slow(play: Play, steps: int, worker: WorkerId = W3, factor: float = 2.0) -> str:
    """Returns all that is said while ``worker`` is slow for so many steps of the present world."""
    said = []
    for _ in range(steps):
        step = play.run.step + 1
        late = seen({play.plan.members.index(worker): factor}) if worker in play.plan.ranks else seen({})
        done = replace(late, step=step, generation=play.generation, copied_through=step - 1)
        said.append(play.tell(ev.StepDone(play.plan.members[0], play.generation, done)))
    return "; ".join(filter(None, said))


def stops(play: Play, boundary: int = PAUSE) -> str:
    """The world makes its next step, with ``boundary``, and all members answer."""
    step, members = play.run.step + 1, play.plan.members
    play.step(step, boundary)
    return [play.answer(member, Version(step, play.generation)) for member in members][-1]


def goes(play: Play) -> None:
    members = play.plan.members
    play.here(*members)
    play.ready(*members)


def test_r15_a_straggler_is_only_reported_unless_the_job_evicts() -> None:
    play = running(evicts=False)
    assert "w3 on node n3 is slow" in slow(play, 40)
    assert isinstance(play.run.state, Running) and play.generation == 1 and play.run.stragglers.leaving == ()


def test_r15_a_straggler_leaves_at_a_boundary_and_no_step_is_lost() -> None:
    play = running()
    assert slow(play, 11) == ""
    said = slow(play, 1)
    assert "w3 on node n3 is slow" in said and "w3 leaves because it is slow: generation 1 pauses" in said
    assert play.did(Pause) == [Pause(1, play.plan.members, save=False)], "the others hold the whole state"
    stops(play)
    assert isinstance(play.run.state, Forming) and play.plan.members == (W1, W2)
    assert play.plan.version == Version(13, 1) and play.plan.tier == "live", "no step is lost"
    assert play.did(Kill) == [Kill((W3,), "it is slow")] and W3 not in play.run.stragglers.workers
    goes(play)
    play.tell(ev.Capacity(1))
    assert play.did(StartWorkers) == [StartWorkers((W4,), ())], "a new process may be as fast as the others"


def test_a_spare_takes_the_seat() -> None:
    play = running(workers=3, spares=1)
    play.tell(ev.Capacity(1))
    play.tell(ev.KeeperUp(N4))
    play.tell(ev.Joined(W4, N4, "cpu", CLASSES))
    slow(play, 12)
    stops(play)
    assert {*play.plan.members} == {W1, W2, W4} and play.plan.version == Version(13, 1)


def connecting() -> tuple[Play, Plan]:
    """Returns a run with a spare whose straggler leaves, and the plan of the world that nobody has connected yet."""
    play = running(workers=3, spares=1, min_workers=3)
    play.connects = False
    play.tell(ev.Capacity(1))
    play.tell(ev.KeeperUp(N4))
    play.tell(ev.Joined(W4, N4, "cpu", CLASSES))
    slow(play, 12)
    (ahead,) = (each.plan for each in play.did(ConnectAhead))
    return play, ahead


def test_r24_the_others_and_the_spare_connect_beside_the_steps() -> None:
    """The pause takes their groups.  The control: one has no room, and the next world connects in its pause."""
    for why in ("", "no room"):
        play, ahead = connecting()
        assert {*ahead.members} == {W1, W2, W4}, "the straggler is not asked"
        slow(play, 3)
        assert isinstance(play.run.state, Running), "the world steps on meanwhile"
        told = [ev.ConnectedAhead(each, ahead.generation, ahead.ahead, 1, why) for each in ahead.members]
        assert "w3 leaves because it is slow" in "".join(map(play.tell, told[: 1 if why else 3]))
        stops(play)
        assert play.plan.members == ahead.members and play.plan.ahead == (0 if why else ahead.ahead)
        assert play.plan.version == Version(16, 1), "no step is lost"


def test_a_straggler_that_leaves_waits_for_an_answer_no_longer_than_a_world_may_form() -> None:
    play, _ = connecting()
    play.later(play.rules.form_s - 1)
    assert isinstance(play.run.state, Running)
    assert "w3 leaves because it is slow" in play.later(1)


def test_a_straggler_stays_if_the_spare_is_lost_while_the_next_world_connects() -> None:
    play, _ = connecting()
    play.lose("w4")
    assert isinstance(play.run.state, Running) and play.run.stragglers.leaving == ()
    assert play.later(play.rules.form_s) == ""


def test_a_machine_that_is_taken_does_not_wait_for_the_world_without_a_straggler() -> None:
    play, _ = connecting()
    play.tell(ev.NodeDraining(NodeId("n1"), play.now + 1.0, "aws"))
    assert isinstance(play.run.state, Stopping)


def test_what_only_the_straggler_holds_is_handed_over() -> None:
    play = running(SHARDED)
    assert "their copies are handed over" in slow(play, 12)
    assert play.did(Pause) == [Pause(1, play.plan.members, save=False, hand_over=True)]
    stops(play, HAND_OVER)
    assert isinstance(play.run.state, Stopping), "only the keepers know what was copied"


def test_nobody_is_evicted_if_too_few_are_left() -> None:
    """It is said once.  The control: once there is another worker, the straggler leaves."""
    play = running(workers=2, min_workers=2, spares=1)
    assert "w2 stays: 1 other worker cannot form a world (workers.min = 2)" in slow(play, 12, W2)
    assert slow(play, 30, W2) == "" and isinstance(play.run.state, Running)
    play.tell(ev.Capacity(1))
    play.tell(ev.KeeperUp(N3))
    play.tell(ev.Joined(W3, N3, "cpu", CLASSES))
    assert isinstance(play.run.state, Stopping)


def test_one_worker_is_evicted_in_a_hundred_steps() -> None:
    play = running(workers=4)
    slow(play, 12)
    stops(play)
    goes(play)
    assert f"may be from step {12 + REST} on" in slow(play, 80, W4)
    assert isinstance(play.run.state, Running)
    slow(play, 12 + REST - play.run.step, W4)
    assert isinstance(play.run.state, Stopping) and play.run.stragglers.leaving == (W4,)


def test_the_second_one_makes_its_node_a_lemon() -> None:
    """The control: a job that closes no nodes."""
    for lemon_after in (3, 0):
        _second_one(lemon_after)


def _second_one(lemon_after: int) -> None:
    play = running(workers=4, lemon_after=lemon_after, lemon_cool_s=3600.0)
    slow(play, 12)
    stops(play)
    goes(play)
    play.tell(ev.Capacity(1))
    w5 = WorkerId("w5")
    assert play.did(StartWorkers) == [StartWorkers((w5,), ())]
    play.tell(ev.Joined(w5, N3, "cpu", CLASSES))
    play.later(5.0)
    stops(play)
    goes(play)
    assert w5 in play.plan.ranks
    slow(play, 12 + REST - play.run.step, WorkerId("nobody"))
    said = slow(play, 16, w5)
    closed = "node n3 gets no worker for 3600 s: its workers failed 2 times within 5 s (the last time: w5 was slow)"
    assert (closed in said) is (lemon_after > 0)
    stops(play)
    goes(play)
    play.tell(ev.Capacity(1))
    assert play.did(StartWorkers) == [StartWorkers((WorkerId("w6"),), (N3,) if lemon_after else ())]
    assert ("node n3 may have workers again, on trial" in play.later(3600.0)) is (lemon_after > 0)
    assert play.run.cluster.closed(few=False) == ()


def test_a_crash_on_the_way_to_the_boundary_keeps_a_straggler_that_is_needed() -> None:
    """Too few would be left once w1 is gone.  The control: with enough others it leaves all the same."""
    for least, members in ((2, (W2, W3)), (1, (W2,))):
        play = running(min_workers=least)
        slow(play, 12)
        play.lose("w1")
        for member in (W2, W3):
            play.answer(member, Version(12, 1))
        assert isinstance(play.run.state, Forming) and play.plan.members == members
        assert play.plan.version == Version(12, 1) and play.run.stragglers.leaving == ()
