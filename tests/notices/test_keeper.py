"""A keeper watches the sources of its job's notices."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.keeper import Keeper
from actors.notices.known_sources import open_sources
from actors.notices.port import Notice
from actors.notices.watch import SourceWatch
from elastic.config.sections import Notices
from elastic.ids import NodeId
from elastic.protocol.authority import Replica
from elastic.protocol.events import Event, NodeAdvised, NodeDraining, NodeStays
from elastic.threads import keep_going
from tests.support.patience import until

pytestmark = pytest.mark.fast


class Told:
    """Stands for the coordinator's handle: it keeps the events that are posted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.post = SimpleNamespace(remote=self.events.append)


def test_a_keeper_tells_what_its_sources_say(tmp_path: Path) -> None:
    """The control: nothing is told before the file is written."""
    keeper, told, path = Keeper.__new__(Keeper), Told(), tmp_path / "taken"
    keeper.node, keeper.coordinator, keeper._notices = NodeId("n1"), told, {}
    keeper._say, keeper._closed = lambda sentence: None, threading.Event()  # type: ignore[method-assign]
    sources = open_sources(Notices(sources=("file",), file=str(path)))
    keeper._sources = [
        SourceWatch(name, each, keeper._noticed, keeper._say) for name, each in sources.items()
    ]
    (watch,) = keeper._sources
    watch.look()
    assert told.events == [], "the control"
    path.write_text("60\nthe rack is moved")
    thread = keep_going(lambda: watch.run(keeper._closed), "notices")
    until(lambda: told.events)
    (event,) = told.events
    assert isinstance(event, NodeDraining)
    assert (event.node, event.source, event.text) == ("n1", "file", "the rack is moved")
    assert 55 < event.deadline - time.time() <= 60
    path.unlink()
    until(lambda: len(told.events) == 2)
    assert told.events[1] == NodeStays(NodeId("n1"), "file")
    keeper._closed.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_keeper_tells_a_later_coordinator_all_again() -> None:
    keeper, told = Keeper.__new__(Keeper), Told()
    keeper.node, keeper.coordinator = NodeId("n1"), told
    keeper.replica, keeper._hearing = Replica(heeds=1), threading.Lock()
    keeper._notices = {"aws": Notice(5.0), "gcp": None, "azure": Notice(9.0, advice=True)}
    keeper.attach(2)
    assert told.events == [
        NodeDraining(NodeId("n1"), 5.0, "aws"),
        NodeStays(NodeId("n1"), "gcp"),
        NodeAdvised(NodeId("n1"), 9.0, "azure"),
    ]
