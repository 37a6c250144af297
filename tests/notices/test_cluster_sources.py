"""A source that speaks of all nodes is watched by the coordinator alone, once for the whole cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from actors.notices import watch
from actors.notices.known_sources import open_cluster_sources
from actors.notices.port import ClusterSource, Notice
from actors.notices.watch import ClusterWatch
from elastic.config.sections import Notices
from elastic.control.run import Announced, Cluster
from elastic.ids import NodeId

pytestmark = pytest.mark.fast

N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")
SOON = Notice(time.time() + 60.0, text="drained")


class Head(ClusterSource):
    """Stands for the cluster's head."""

    def __init__(self) -> None:
        self.says: Mapping[NodeId, Notice] = {}
        self.answers, self.asked = True, 0

    def look(self) -> Mapping[NodeId, Notice]:
        self.asked += 1
        if not self.answers:
            raise OSError("no answer")
        return self.says


class Heard:
    """A coordinator that watches it."""

    def __init__(self, head: Head, cluster: Cluster) -> None:
        self.told, self.said = list[tuple[str, NodeId, Notice | None]](), list[str]()
        self.cluster = cluster
        self.watch = ClusterWatch("drain", head, lambda: self.cluster, self._tell, self.said.append)

    def _tell(self, source: str, node: NodeId, notice: Notice | None) -> None:
        self.told.append((source, node, notice))


NODES = Cluster(nodes={N1: True, N2: True})


def test_one_question_is_for_all_nodes_and_only_what_changes_is_told() -> None:
    head = Head()
    heard = Heard(head, Cluster(nodes={NodeId(f"n{number}"): True for number in range(1280)}))
    heard.watch.look()
    assert (heard.told, head.asked) == ([], 1), "the control"
    head.says = {N2: SOON}
    heard.watch.look()
    heard.watch.look()
    assert heard.told == [("drain", N2, SOON)]
    head.says = {}
    heard.watch.look()
    heard.watch.look()
    assert heard.told[1:] == [("drain", N2, None)] and head.asked == 5


def test_a_node_that_the_run_gets_later_is_told_then() -> None:
    head = Head()
    heard, head.says = Heard(head, NODES), {N3: SOON}
    heard.watch.look()
    assert heard.told == [], "the run has no such node"
    heard.cluster = Cluster(nodes={N1: True, N3: True})
    heard.watch.look()
    assert heard.told == [("drain", N3, SOON)]


def test_the_next_coordinator_takes_back_what_is_not_said_any_more() -> None:
    """The controls: what stands is told again, what another source has said stays, and a head that does not
    answer takes nothing back.
    """
    at, head = time.time() + 60.0, Head()
    before = {
        N1: (Announced("drain", at),),
        N2: (Announced("drain", at), Announced("aws", at)),
        N3: (Announced("aws", at),),
    }
    heard = Heard(head, Cluster(nodes={N1: True, N2: True, N3: True}, notices=before))
    head.answers, head.says = False, {N2: SOON}
    heard.watch.look()
    assert heard.told == [] and len(heard.said) == 1
    head.answers = True
    heard.watch.look()
    heard.watch.look()
    assert heard.told == [("drain", N1, None), ("drain", N2, SOON)]


def test_a_head_that_does_not_answer_is_said_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head()
    heard, head.says = Heard(head, NODES), {N1: SOON}
    heard.watch.look()
    head.answers = False
    for _ in range(4):
        heard.watch.look()
    assert heard.said == ["the source of notices 'drain' fails, and is asked again: no answer"]
    assert heard.told == [("drain", N1, SOON)]
    monkeypatch.setattr(watch, "SAID_S", 0.0)  # an hour is over
    heard.watch.look()
    assert len(heard.said) == 2


def test_auto_asks_the_head_and_a_job_may_not() -> None:
    for sources, found in ((("auto",), ["drain"]), (("drain",), ["drain"]), (("aws",), []), ((), [])):
        assert [*open_cluster_sources(Notices(sources=sources))] == found
