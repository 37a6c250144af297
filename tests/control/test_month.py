"""N1, R5: what a coordinator remembers and writes grows with the machines that are there, and not with those that
have ever been there.
"""

from __future__ import annotations

import json

import pytest

from elastic.control import admission
from elastic.control.growth import HOSTS
from elastic.control.run import Running
from elastic.ids import NodeId
from elastic.journal import codec
from elastic.protocol import events as ev
from elastic.protocol.builds import Build
from tests.control.play import CLASSES, Play, stepping
from tests.support.calls import calls

APART_S = 52.0
"""Seconds from one machine to the next: a month has 50,000 of them."""


def comes_and_goes(play: Play, number: int) -> None:
    """A machine comes, and is refused, announced, advised, or a lemon, or its worker is a spare for a while."""
    node = NodeId(f"m{number:06}")
    play.later(APART_S)
    for event in (ev.NodeFound(node), ev.KeeperUp(node, "10.0.0.1:7"), ev.Capacity(1)):
        play.tell(event)
    (worker, *_) = play.run.members.starting
    kind = number % 6
    if kind < 4:
        play.tell(ev.Joined(worker, node, "cpu", CLASSES, Build(host=f"host{number:06}")))
    if kind == 1:
        play.tell(ev.NodeDraining(node, play.now + 30.0, "aws"))
    if kind == 2:
        play.tell(ev.NodeAdvised(node, play.now + 900.0, "aws"))
    if kind == 3:
        play.lose(worker)
    if kind == 4:
        play.tell(ev.NodeRefused(node, "it sees another bucket", shared=True))
    if kind >= 4:
        play.tell(ev.StartFailed(worker, "out of memory", misset=node, node=node))
    play.later(20.0)
    play.tell(ev.KeeperLost(node, "its node died", with_its_node=True))


def month(machines: int) -> tuple[Play, int, int]:
    """Returns the run after so many machines, the bytes of its state in the journal, and the calls of the decisions
    about one more.
    """
    play = stepping(2, spares=1, stall_s=1e9, lemon_after=1, lemon_window_s=1e9, lemon_cool_s=1e9)
    for number in range(machines):
        comes_and_goes(play, number)
    assert isinstance(play.run.state, Running) and play.run.generation == 1
    size = len(json.dumps(codec.snapshot(play.run)))
    return play, size, calls(lambda: comes_and_goes(play, 6 * machines))


def test_machines_that_are_gone_are_forgotten() -> None:
    enough = 2 * HOSTS
    play, size, cost = month(enough)
    cluster = play.run.cluster
    assert {*cluster.nodes, *cluster.homes} == {"n1", "n2"} and len(cluster.stays) == HOSTS
    assert not (cluster.refused or cluster.replaced or cluster.lemons or cluster.notices or cluster.leaving)
    _, later, later_cost = month(3 * enough)
    assert later < 1.05 * size and later_cost < 1.05 * cost


def test_a_run_that_forgets_no_machine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(admission, "gone", lambda decision, node: None)
    (few, size, _), (many, later, _) = month(HOSTS), month(3 * HOSTS)
    assert len(many.run.cluster.nodes) > 2 * len(few.run.cluster.nodes) and later > 1.5 * size


def test_a_keeper_that_comes_back_after_its_node_was_gone_is_a_new_one() -> None:
    """Its node has a new id, and it waits for its check like any other."""
    play = stepping(2)
    play.tell(ev.KeeperLost(NodeId("n2"), "its node died", with_its_node=True))
    assert play.run.cluster.nodes == {"n1": True} and "w2" not in play.run.workers
    again = play.tell(ev.KeeperLost(NodeId("n2"), "its node died", with_its_node=True))
    assert again == "refused: node n2 is gone already"
    play.tell(ev.NodeFound(NodeId("n2")))
    assert play.run.cluster.nodes == {"n1": True, "n2": False}


def test_a_keeper_that_dies_alone_leaves_its_node_known() -> None:
    """The refusals, failures and notices of a node whose machine is still there go on counting."""
    play = stepping(2, lemon_after=1, lemon_window_s=1e9, lemon_cool_s=1e9)
    node = NodeId("n2")
    play.lose("w2")
    play.tell(ev.NodeRefused(node, "it has no disk"))
    play.tell(ev.KeeperLost(node, "its process died"))
    assert play.run.cluster.nodes[node] and node in play.run.cluster.refused
    assert play.run.cluster.lemons[node].closed


def test_a_run_that_has_not_begun_keeps_the_reasons_of_refused_nodes() -> None:
    """It ends with them if no other machine comes."""
    play = Play()
    node = NodeId("n1")
    for event in (ev.NodeFound(node), ev.NodeRefused(node, "it has no disk")):
        play.tell(event)
    play.tell(ev.KeeperLost(node, "its node died", with_its_node=True))
    assert not play.run.cluster.nodes and play.run.cluster.refused[node].why == "it has no disk"
    assert "it has no disk" in play.later(play.rules.wait_s + 1.0)
