"""R24: which worlds are connected beside the steps, who waits for them, and who does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.control import ahead
from elastic.control.evolve import evolve
from elastic.control.run import Running, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.protocol import events as ev
from elastic.protocol.actions import ConnectAhead, Form
from elastic.protocol.commit_record import PAUSE
from elastic.protocol.plan import Plan
from tests.control.play import CLASSES, Play, but, stepping

pytestmark = pytest.mark.fast

REPLICAS = LayoutRule(dp_replicate=None, dp_shard=1, min_shard=1, use="all")
W1, W2, W3 = (WorkerId(f"w{number}") for number in (1, 2, 3))


def growing(workers: int = 2) -> Play:
    """Returns a world of one worker, which newcomers may join; nobody connects anything by himself."""
    play = stepping(1, grow_debounce_s=0.0, stall_s=1e6)
    play.rules = replace(play.rules, max_workers=workers, min_workers=1)
    play.connects = False
    play.steps(1, 3)
    play.tell(ev.Capacity(workers - 1))
    return play


def joins(play: Play, number: int) -> None:
    node = NodeId(f"n{number}")
    play.tell(ev.KeeperUp(node))
    play.tell(ev.Joined(WorkerId(f"w{number}"), node, "cpu", CLASSES))


def asked(play: Play) -> Plan:
    (action,) = (each for each in play.last.actions if isinstance(each, ConnectAhead))
    return action.plan


def connects(play: Play, plan: Plan, *workers: WorkerId, why: str = "") -> str:
    told = (ev.ConnectedAhead(each, plan.generation, plan.ahead, plan.incarnation, why) for each in workers)
    return [play.tell(each) for each in told][-1]


def next_plan(play: Play) -> Plan:
    """The world pauses at its next boundary; returns the plan of the next one."""
    step, members = play.run.step + 1, play.plan.members
    play.step(step, PAUSE)
    for member in members:
        play.answer(member, Version(step, play.generation))
    (form,) = (each for each in play.last.actions if isinstance(each, Form))
    return form.plan


def test_growth_waits_until_all_have_connected_and_takes_their_groups() -> None:
    play = growing()
    joins(play, 2)
    plan = asked(play)
    assert (plan.members, plan.generation, plan.ahead) == ((W1, W2), play.generation + 1, 1)
    assert not plan.holders, "nobody needs state to connect"
    play.step(4)
    assert connects(play, plan, W2) == "" and isinstance(play.run.state, Running)
    assert connects(play, plan, W2) == "" and isinstance(play.run.state, Running), "the same one again"
    assert "grow from 1×1 to 2×1" in connects(play, plan, W1)
    assert isinstance(play.run.state, Stopping)
    found = next_plan(play)
    assert (found.ahead, found.members, found.store_node) == (1, plan.members, plan.store_node)
    assert found.holders and found.version == Version(5, 1)


def test_who_has_no_room_costs_no_wait() -> None:
    play = growing()
    joins(play, 2)
    assert "its pause is longer: no room" in (said := connects(play, asked(play), W1, why="no room"))
    assert "grow from 1×1 to 2×1" in said and next_plan(play).ahead == 0


def test_an_answer_that_is_lost_is_waited_for_no_longer_than_a_world_may_form() -> None:
    play = growing()
    joins(play, 2)
    connects(play, asked(play), W2)
    assert play.later(play.rules.form_s - 1) == ""
    assert "grow from 1×1 to 2×1" in play.later(1) and next_plan(play).ahead == 0


def test_a_newcomer_that_dies_or_another_that_comes_begins_anew() -> None:
    """Groups connected for other members is not used; an answer to it changes nothing."""
    play = growing(3)
    joins(play, 2)
    first = asked(play)
    joins(play, 3)
    second = asked(play)
    assert (second.members, second.ahead) == ((W1, W2, W3), 2)
    assert "nobody waits" in connects(play, first, W1)
    play.lose("w2")
    third = asked(play)
    assert (third.members, third.ahead) == ((W1, W3), 3)
    connects(play, third, W1, W3)
    assert next_plan(play).ahead == 3


def test_a_member_lost_in_the_pause_forms_another_world() -> None:
    """The control: without the loss the same run takes what was connected."""
    for loses in (False, True):
        play = growing(3)
        joins(play, 2)
        joins(play, 3)
        connects(play, asked(play), W1, W2, W3)
        assert isinstance(play.run.state, Stopping)
        if loses:
            play.lose("w3")
        plan = next_plan(play)
        assert (plan.members, plan.ahead) == (((W1, W2), 0) if loses else ((W1, W2, W3), 2))


def test_a_coordinator_that_takes_over_asks_again() -> None:
    """An earlier coordinator may have asked for more than its journal says, so its attempts count for nothing."""
    play = growing()
    joins(play, 2)
    first = asked(play)
    connects(play, first, W2)
    play.run = evolve(play.run, incarnation=2)
    play.later(0.1)
    second = asked(play)
    late = replace(first, ahead=second.ahead)  # of an attempt that no journal has
    assert "nobody waits" in connects(play, late, W1)
    assert (second.incarnation, second.ahead) == (2, 2) != (first.incarnation, first.ahead)
    assert "nobody waits" in connects(play, first, W1)
    connects(play, second, W1, W2)
    assert next_plan(play).ahead == 2


def test_a_notice_has_the_world_without_the_node_connected_and_never_waits_for_it() -> None:
    """The control: nobody answers, and the world leaves at the same step."""
    for answers in (True, False):
        play = stepping(3, copy_every=1, buddy_every=1, layout=REPLICAS, stall_s=1e6)
        play.connects = False
        play.steps(1, 4)
        play.run = but(play.run, "watch", reform_s=2.0, step_s=1.0)
        play.tell(ev.NodeDraining(NodeId("n3"), play.now + 20.0, "aws"))
        plan = asked(play)
        assert plan.members == (W1, W2) and plan.store_node in ("n1", "n2")
        if answers:
            connects(play, plan, W1, W2)
        assert isinstance(play.run.state, Running), "paid seconds are used"
        play.later(15.0)
        assert isinstance(play.run.state, Stopping)
        assert next_plan(play).ahead == (1 if answers else 0)


def test_attempts_are_limited() -> None:
    """Each costs the members memory of their devices; growth goes on without."""
    play = growing(40)
    for number in range(2, ahead.ATTEMPTS + 2):
        joins(play, number)
        assert asked(play).ahead == number - 1
    joins(play, ahead.ATTEMPTS + 2)
    assert isinstance(play.run.state, Stopping) and next_plan(play).ahead == 0


def test_the_plan_is_made_once_for_the_same_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning a large world takes a tenth of a second, which no event may cost."""
    made = list[object]()
    make_plan = ahead.make_plan
    monkeypatch.setattr(ahead, "make_plan", lambda *args: made.append(args) or make_plan(*args))
    play = growing()
    joins(play, 2)
    for step in range(4, 24):
        play.step(step)
        play.later(0.1)
    assert len(made) == 1
