"""Lemons: a node on which workers fail again and again gets no worker for a time that doubles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.lemons import TYPICAL
from elastic.control.run import Lemon, Waiting
from elastic.ids import NodeId, WorkerId
from elastic.journal import codec
from elastic.protocol import events as ev
from elastic.protocol.actions import StartWorkers
from tests.control.play import Play, rules, stepping

pytestmark = pytest.mark.fast

N1, N2, N3 = (NodeId(f"n{number}") for number in (1, 2, 3))
LEMON = {"lemon_after": 3, "lemon_window_s": 100.0, "lemon_cool_s": 30.0, "refused_s": 1e9, "wait_s": 1e9}


def play(nodes: int = 3, **changes: object) -> Play:
    """Returns a run with nodes, and with no room for workers yet."""
    found = Play(rules(**{**LEMON, "max_workers": nodes, **changes}))
    for number in range(1, nodes + 1):
        found.tell(ev.KeeperUp(NodeId(f"n{number}")))
    return found


def fails(story: Play, node: NodeId, after_s: float = 10.0) -> str:
    """A worker is asked for, and does not start on ``node``."""
    story.later(after_s)
    story.tell(ev.Capacity(1))
    worker = next(reversed(story.run.members.starting))
    return story.tell(ev.StartFailed(worker, "out of memory", node=node))


def test_three_incidents_close_a_node_for_a_time_that_doubles() -> None:
    """The sentence has the numbers, and the next start avoids the node."""
    story = play()
    assert "gets no worker" not in fails(story, N1) + fails(story, N1)
    assert fails(story, N1).endswith(
        "node n1 gets no worker for 30 s: its workers failed 3 times within 20 s (the last time: w3 did not start)"
    )
    story.later(5.0)
    story.tell(ev.Capacity(1))
    assert [action.avoid for action in story.did(StartWorkers)] == [(N1,)]
    assert story.later(30.0).startswith("node n1 may have workers again, on trial")
    assert "gets no worker for 60 s: its workers failed 4 times within" in fails(story, N1)
    assert story.run.cluster.closed(few=False) == (N1,)
    assert "gets no worker" not in fails(story, N1), "it is closed already"
    assert "may have workers again" in story.later(60.0)
    assert ", and was closed 2 times before (" in fails(story, N1)


def test_what_fails_at_once_is_one_incident() -> None:
    story = play()
    story.tell(ev.Capacity(3))
    for worker in ("w1", "w2", "w3"):
        assert "gets no worker" not in story.tell(ev.StartFailed(WorkerId(worker), "no disk", node=N1))
    assert len(story.run.cluster.lemons[N1].failures) == 1


def test_a_node_has_a_clean_slate_after_the_window() -> None:
    story = play()
    fails(story, N1), fails(story, N1)
    story.later(100.0)
    assert N1 not in story.run.cluster.lemons
    assert "gets no worker" not in fails(story, N1)


def test_a_node_that_is_gone_is_forgotten() -> None:
    story = play()
    fails(story, N1)
    story.tell(ev.KeeperLost(N1, "its node died", with_its_node=True))
    assert not story.run.cluster.lemons


def test_a_node_that_will_be_taken_is_no_lemon() -> None:
    story = play()
    story.tell(ev.NodeDraining(N1, story.now + 500.0, "aws"))
    for _ in range(4):
        fails(story, N1)
    assert not story.run.cluster.lemons


@pytest.mark.parametrize(("after", "closes"), [(0, False), (1, True)])
def test_0_closes_no_node(after: int, closes: bool) -> None:
    story = play(lemon_after=after)
    assert ("gets no worker" in fails(story, N1)) is closes


def test_a_worker_that_dies_or_hangs_or_loses_its_device_counts_against_its_node() -> None:
    for what in ("dies", "hangs", "device"):
        story = stepping(2, **{**LEMON, "lemon_after": 1})
        if what == "dies":
            story.lose("w1")
        elif what == "device":
            story.broken("w1", "device", signature="CUDA error")
        else:
            story.step(1)
            for _ in range(22):
                story.now += 1.0
                story.beat("n1", ("w1", 1, 0, 0)), story.beat("n2", ("w2", 1, 1, 0))
        assert story.run.cluster.closed(few=False) == (N1,), what
        assert "w2" in story.run.workers


def test_the_last_node_is_used_before_its_time() -> None:
    """A bad node is better than none; nothing else came for ``refused_s``."""
    story = play(nodes=1, refused_s=10.0)
    fails(story, N1), fails(story, N1), fails(story, N1)
    assert isinstance(story.run.state, Waiting) and story.run.cluster.closed(few=True) == (N1,)
    assert "before its time" not in story.later(11.0), "another start is tried 2 s after a failure"
    assert story.later(1.0) == (
        "node n1 is used 18 s before its time: the run has 0 of at least 1 workers, and no other node has room "
        "for one"
    )
    story.tell(ev.Capacity(1))
    assert [action.avoid for action in story.did(StartWorkers)] == [()]
    assert "gets no worker for 60 s" in story.tell(ev.StartFailed(WorkerId("w4"), "again", node=N1))


def test_where_there_is_room_elsewhere_the_node_stays_closed() -> None:
    story = play(nodes=2, min_workers=2, refused_s=10.0)
    fails(story, N1), fails(story, N1), fails(story, N1)
    story.tell(ev.Capacity(1))
    story.later(5.0), story.tell(ev.Capacity(1))
    assert story.run.members.starting
    assert "before its time" not in story.later(20.0)


def test_the_journal_keeps_what_is_known() -> None:
    story = play()
    fails(story, N1), fails(story, N1), fails(story, N1)
    run = codec.decode_run(codec.encode(story.run))
    assert run.cluster.lemons == story.run.cluster.lemons and run.cluster.lemons[N1].closed
    assert run.cluster.lemons[N1] == Lemon((10.0, 20.0, 30.0), 1, 30.0, 60.0)


def test_an_event_without_a_node_is_written_as_before() -> None:
    assert "node" not in codec.encode(ev.Lost(WorkerId("w1"), "it died"))
    assert "node" not in codec.encode(ev.StartFailed(WorkerId("w1"), "no room"))


# ---- a dumb second opinion

INCIDENTS = st.lists(st.tuples(st.sampled_from((N1, N2, N3)), st.integers(3, 60)), max_size=30)


def closings(incidents: Sequence[tuple[NodeId, int]]) -> list[tuple[NodeId, float, float]]:
    """Returns the closings (node, since, until) of nodes on which workers fail as listed; each incident comes
    the given seconds after the one before.  Every rule is looked up in the whole history each time.
    """
    now, told, found = 0.0, list[tuple[NodeId, float]](), list[tuple[NodeId, float, float]]()
    for node, after_s in incidents:
        now += after_s
        own = [closing for closing in found if closing[0] == node]
        if any(since <= now < until for _, since, until in own):
            continue
        told.append((node, now))
        count = {each: sum(at > now - 100.0 for one, at in told if one == each) for each in (N1, N2, N3)}
        streak, then = 0, now
        for _, since, until in reversed(own):
            if then >= until + 100.0:
                break
            streak, then = streak + 1, since
        typical = min(count[each] for each in (N1, N2, N3) if each != node)
        if count[node] > TYPICAL * typical and count[node] >= (1 if streak else 3):
            found.append((node, now, now + 30.0 * 2 ** min(streak, 7)))
    return found


@given(INCIDENTS)
def test_closings_are_those_of_the_second_opinion(incidents: list[tuple[NodeId, int]]) -> None:
    story, found = play(), list[tuple[NodeId, float, float]]()
    for node, after_s in incidents:
        for _ in range(after_s):  # each second, so that nothing is due late
            story.later(1.0)
        if "gets no worker" in fails(story, node, after_s=0.0):
            lemon = story.run.cluster.lemons[node]
            found.append((node, lemon.since, lemon.until))
    assert found == closings(incidents)


@pytest.mark.parametrize("gone", [0, 20])
def test_nodes_that_are_gone_do_not_make_the_others_stand_out(gone: int) -> None:
    """The nodes that are there fail alike, so the job is to blame."""
    story, said = play(), ""
    for node in (NodeId(f"gone{number}") for number in range(gone)):
        story.tell(ev.KeeperUp(node))
        story.tell(ev.KeeperLost(node, "its node died", with_its_node=True))
    for _ in range(3):
        for node in (N1, N2, N3):
            said += fails(story, node, 2.0)
    assert "gets no worker" not in said and len(story.run.cluster.lemons) == 3
