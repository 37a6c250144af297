"""A decision is performed once its record is safe; how long that took is told before anything else is heard."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import elastic
from actors.coordinator import Coordinator
from actors.ends import NODE_DIED
from elastic.control.decision import Transition
from elastic.control.inbox import Inbox
from elastic.control.run import RunState
from elastic.control.takeover import STOOD_S
from elastic.ids import NodeId
from elastic.journal import codec
from elastic.protocol import events as ev
from elastic.protocol.actions import StartWorkers
from storage import journal
from storage.journal import Journal
from storage.objects import ObjectStore
from tests.control.play import rules, stepping
from tests.support.full_disk import full_disk

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("record_s", [0.5 * STOOD_S, 4.0 * STOOD_S])
def test_who_stood_still_says_so_after_it_acted(record_s: float) -> None:
    """One call of the loop is made, with only the clock, the journal and Ray replaced.  The first case is the
    control of the second.
    """
    told: list[Any] = []
    coordinator = object.__new__(Coordinator)
    now = [100.0]

    def record(
        at: float, event: ev.Event, before: RunState, transition: Transition, heard_until: float
    ) -> None:
        told.append(event)
        now[0] += record_s if isinstance(event, ev.Capacity) else 0.0

    values = {
        "clock": lambda: now[0],
        "inbox": Inbox(lambda: now[0]),
        "state": RunState.begin(1, 100.0),
        "rules": rules(),
        "group": SimpleNamespace(perform=told.append),
        "_record": record,
        "_tell": lambda *_: None,
    }
    for name, value in values.items():
        setattr(coordinator, name, value)
    coordinator._advance(ev.Capacity(2))
    asked_for, (acted,) = told[0], [each for each in told if isinstance(each, StartWorkers)]
    assert isinstance(asked_for, ev.Capacity) and told.index(acted) == 1
    started = dict.fromkeys(acted.workers, 100.0 + (record_s if record_s > STOOD_S else 0.0))
    assert coordinator.state.members.starting == started, "from when they were really asked for"


@pytest.mark.parametrize("disk_fails", [False, True])
def test_a_stumble_over_a_full_disk_is_told_from_what_the_journal_has(
    tmp_path: Path, disk_fails: bool
) -> None:
    """The next coordinator finds the run of the last record that was written.  The control: nothing fails,
    and nobody stumbles.
    """
    begun, store = RunState.begin(1, 100.0), ObjectStore.open(str(tmp_path / "bucket"))
    coordinator = object.__new__(Coordinator)
    values = {
        "clock": lambda: 100.0,
        "inbox": Inbox(lambda: 100.0),
        "state": begun,
        "recorded": begun,
        "rules": rules(),
        "journal": Journal(
            store,
            "run",
            tmp_path / "local",
            0,
            codec.snapshot(begun, elastic.__version__, rules()),
            segment_s=3600.0,
        ),
        "replicas": SimpleNamespace(note=lambda _: None, secure=lambda _: None),
        "exported": SimpleNamespace(record=lambda _: None),
        "group": SimpleNamespace(perform=lambda _: None),
        "_tell": lambda *_: None,
    }
    for name, value in values.items():
        setattr(coordinator, name, value)
    coordinator._advance(ev.KeeperUp(NodeId("n1")))
    (file,) = (tmp_path / "local").iterdir()
    if disk_fails:
        with full_disk(file, 10), pytest.raises(OSError, match="File too large"):
            coordinator._advance(ev.KeeperUp(NodeId("n2")))
        coordinator._advance(ev.Stumbled("KeeperUp: OSError at journal.py:1"))
    else:
        coordinator._advance(ev.KeeperUp(NodeId("n2")))
    coordinator.journal.close()
    ((snapshot, records),) = journal.read(store, "run")
    assert [record["event"]["$"] for record in records] == [
        "KeeperUp",
        "Stumbled" if disk_fails else "KeeperUp",
    ]
    assert codec.fold(snapshot, records) == coordinator.state
    assert coordinator.state.cluster.keepers == (("n1",) if disk_fails else ("n1", "n2"))


def test_a_node_that_dies_without_worker_and_keeper_is_missed() -> None:
    """The coordinator says so, and forgets it.  The controls: a node whose keeper or worker tells, and a head that
    has just started and knows no node.
    """
    play = stepping(2)
    for node in ("n3", "n4"):
        play.tell(ev.NodeFound(NodeId(node)))
    play.tell(ev.KeeperLost(NodeId("n1"), "its process died"))  # w1 is still there
    coordinator = object.__new__(Coordinator)
    told = list[ev.Event]()
    coordinator.post_local = told.append  # type: ignore[method-assign]
    coordinator._miss(play.run, ())
    assert not told
    coordinator._miss(play.run, (NodeId("n4"),))
    assert told == [ev.KeeperLost(NodeId("n3"), NODE_DIED, with_its_node=True)]
    play.tell(told[0])
    assert play.run.cluster.nodes.keys() == {"n1", "n2", "n4"}
