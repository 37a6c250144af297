"""A coordinator asks keepers for their copies once a world has broken; the next one begins from copies if no
live state is whole.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.control.copy_inventory import paces, unbuddied_since, unprotected_since
from elastic.control.run import Forming, Waiting
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from elastic.protocol.actions import Form, ListCopies, Pair
from elastic.protocol.commit_record import Outcome
from tests.control.play import Play, but, outcome, stepping
from tests.support.cells import cell

pytestmark = pytest.mark.fast
SHARDS = LayoutRule(dp_replicate=1, dp_shard=None, min_shard=1, use="all")


def copied(step: int, through: int) -> Outcome:
    return replace(outcome(step, 1), copied_through=through)


def stepped(to: int = 5) -> Play:
    """Returns a run of layout 1×3 on three nodes, in which each step was copied while the next one ran."""
    play = stepping(3, layout=SHARDS, copy_every=1)
    for step in range(1, to + 1):
        play.tell(ev.StepDone(WorkerId("w1"), 1, copied(step, step - 1)))
    return play


def kept(play: Play, number: int, *steps: int, generation: int = 1) -> str:
    """The keeper of node ``number`` reports its worker's copies of the states at ``steps``."""
    node, worker = NodeId(f"n{number}"), WorkerId(f"w{number}")
    held = tuple(Holding(worker, Version(step, generation), cell(3, number - 1), node) for step in steps)
    return play.tell(ev.Kept(node, play.run.copies.asked, held))


def broken(play: Play) -> None:
    """Worker w3 dies while the two others are at step 5."""
    play.lose("w3")
    assert [each.keepers for each in play.did(ListCopies)] == [(NodeId("n1"), NodeId("n2"), NodeId("n3"))]
    play.answer("w1", Version(5, 1))
    play.answer("w2", Version(5, 1))


def test_a_dead_worker_s_shard_comes_from_its_keeper_and_no_step_is_lost() -> None:
    play = stepped()
    broken(play)
    assert isinstance(play.run.state, Waiting), "what the keepers hold may be newer than anything else"
    kept(play, 3, 4, 5)
    (form,) = play.did(Form)
    assert play.last.reason.endswith("(host)"), "at once: nothing newer can come"
    assert (form.plan.tier, form.plan.version) == ("host", Version(5, 1))
    assert {(each.worker, each.keeper) for each in form.plan.holders if each.worker == "w3"} == {("w3", "n3")}


def test_a_torn_copy_costs_the_last_step_and_versions_are_not_mixed() -> None:
    play = stepped()
    broken(play)
    for number, steps in ((3, (4,)), (1, (4, 5)), (2, (4, 5))):
        kept(play, number, *steps)
    (form,) = play.did(Form)
    assert (form.plan.tier, form.plan.version) == ("host", Version(4, 1))
    assert {each.version for each in form.plan.holders} == {Version(4, 1)}
    assert play.run.step == 4, "step 5 is given up, and done again"


def test_what_cannot_be_read_is_not_counted_on_again_before_a_commit() -> None:
    """Otherwise the next world would break in the same way, for ever."""
    play = stepped()
    play.tell(ev.ShardSaved(WorkerId("w1"), Version(2, 1)))
    play.run = but(play.run, "history", saved=(Version(2, 1),))
    broken(play)
    for number in (1, 2, 3):
        kept(play, number, 4, 5)
    assert isinstance(play.run.state, Forming) and play.plan.tier == "host"
    play.here("w1", "w2")
    play.broken("w2", "copy", "the copy of w3 on node n3 is damaged", "n3")
    assert play.run.copies.unreadable == ("n3",)
    for worker in ("w1", "w2"):
        play.tell(
            ev.Fenced(
                WorkerId(worker),
                2,
                (Holding(WorkerId(worker), Version(5, 1), cell(3, int(worker[1]) - 1)),),
                None,
            )
        )
    for number in (1, 2, 3):
        kept(play, number, 4, 5)
    assert isinstance(play.run.state, Forming) and (play.plan.tier, play.plan.version) == (
        "bucket",
        Version(2, 1),
    ), play.run.state
    play.here("w1", "w2")
    play.ready("w1", "w2")
    play.tell(ev.StepDone(WorkerId("w1"), 3, replace(outcome(3, 3), copied_through=2)))
    assert play.run.copies.unreadable == ()


def test_without_copies_for_long_it_is_said_and_shown() -> None:
    play = stepping(3, layout=SHARDS, copy_every=1)
    reasons = [play.tell(ev.StepDone(WorkerId("w1"), 1, copied(step, -1))) for step in range(1, 12)]
    assert [reason for reason in reasons if reason] == [
        "unprotected since step 0: not every worker of generation 1 has a later copy in host memory"
    ]
    assert unprotected_since(play.run) == 0
    play.tell(ev.StepDone(WorkerId("w1"), 1, copied(12, 11)))
    assert unprotected_since(play.run) is None
    later = [play.tell(ev.StepDone(WorkerId("w1"), 1, copied(step, 11))) for step in range(13, 22)]
    assert [reason for reason in later if reason] == [
        "unprotected since step 11: not every worker of generation 1 has a later copy in host memory"
    ]
    assert unprotected_since(play.run) == 11, "they came to an end"
    assert unprotected_since(stepping(3, layout=SHARDS).run) is None, "the job wants none"


def test_without_copies_on_other_nodes_for_long_it_is_said_and_shown() -> None:
    """Copies are complete in their own node's memory, and none reaches a buddy: the loss of a node would cost
    more than anybody thinks.
    """
    play = stepping(3, layout=SHARDS, copy_every=1, buddy_every=2)
    for number in (1, 2, 3):
        play.tell(ev.KeeperUp(NodeId(f"n{number}"), f"n{number}:7"))
    assert play.plan.buddy_every == 2

    def told(first: int, last: int, buddied: int) -> list[str]:
        steps = range(first, last + 1)
        reasons = [
            play.tell(
                ev.StepDone(WorkerId("w1"), 1, replace(copied(step, step - 1), buddied_through=buddied))
            )
            for step in steps
        ]
        return [reason for reason in reasons if reason]

    assert told(1, 20, -1) == [
        "other nodes hold no copy newer than step 0: if a node is lost, the steps after step 0 may be lost"
    ]
    assert (unbuddied_since(play.run), unprotected_since(play.run)) == (0, None)
    assert told(21, 22, 20) == [] and unbuddied_since(play.run) is None
    assert len(told(23, 45, 20)) == 1 and unbuddied_since(play.run) == 20
    alone = stepping(3, layout=SHARDS, copy_every=1)
    for step in range(1, 30):
        alone.tell(ev.StepDone(WorkerId("w1"), 1, copied(step, step - 1)))
    assert unbuddied_since(alone.run) is None, "the job wants none"


def test_of_copies_that_are_seldom_the_rhythm_counts_that_members_agreed_on() -> None:
    play = stepping(3, layout=SHARDS, copy_every=1)
    assert paces(play.run) == (1, 0)
    for step in range(1, 30):
        assert not play.tell(ev.StepDone(WorkerId("w1"), 1, replace(copied(step, 0), copy_every=4)))
    assert (paces(play.run), unprotected_since(play.run)) == ((4, 0), None)
    for step in range(30, 41):
        play.tell(ev.StepDone(WorkerId("w1"), 1, replace(copied(step, 0), copy_every=4)))
    assert unprotected_since(play.run) == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_keeper_that_comes_back_and_those_beside_it_hear_who_their_buddies_are(number: int) -> None:
    """The keeper has a new address and knows nothing, so its pair and those with it are told, even if they are as
    before.
    """
    play = stepping(3, layout=SHARDS, copy_every=1, buddy_every=1)
    node, told = NodeId(f"n{number}"), dict(play.run.copies.buddies)
    for event in (ev.KeeperLost(node, "its process died"), ev.KeeperUp(node, address="10.0.0.9:7")):
        play.tell(event)
        (pair,) = play.did(Pair)
        told |= {each: buddy for each, buddy, _ in pair.buddies}
        assert told == play.run.copies.buddies and (node in told.values()) <= isinstance(event, ev.KeeperUp)
    assert node in [each for each, _, _ in pair.buddies]
    assert all(address == "10.0.0.9:7" for _, buddy, address in pair.buddies if buddy == node)


def test_a_keeper_that_restarts_between_two_decisions_hears_its_buddy_with_those_beside_it() -> None:
    """Its end and its return are decided together.  The control: a keeper that only says again that it is up."""
    play = stepping(3, layout=SHARDS, copy_every=1, buddy_every=1)
    node = NodeId("n2")
    up = ev.KeeperUp(node, address="10.0.0.9:7")
    play.tell(ev.Together((ev.KeeperLost(node, "its process died"), up)))
    (pair,) = play.did(Pair)
    buddies = play.run.copies.buddies
    beside = {each for each, buddy in buddies.items() if node in (each, buddy)}
    assert {each for each, _, _ in pair.buddies} == beside and len(beside) == 2
    assert [address for each, buddy, address in pair.buddies if buddy == node] == ["10.0.0.9:7"]
    play.tell(up)
    assert not play.did(Pair)


def test_who_has_no_buddy_any_more_is_told_so() -> None:
    play = stepping(2, layout=SHARDS, copy_every=1, buddy_every=1)
    reason = play.tell(ev.KeeperLost(NodeId("n2"), "its process died"))
    (lost,) = play.did(Pair)
    assert (NodeId("n1"), NodeId(""), "") in lost.buddies
    assert (
        "no second node in the zone of node n1 can hold copies" in reason
        and "add a node to the zone" in reason
        and "cross_zone" not in reason
    )
    play.tell(ev.KeeperUp(NodeId("n2")))
    reason = play.tell(ev.KeeperLost(NodeId("n2"), "its process died"))
    assert "in the zone of node n1 can hold copies" in reason, "again, since it had one meanwhile"
    assert "can hold copies" not in play.tell(ev.KeeperLost(NodeId("n2"), "its process died")), (
        "but not again and again"
    )
