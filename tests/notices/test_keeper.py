"""A keeper watches the sources of its job's notices."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from actors.keeper import Keeper
from actors.notices.known_sources import open_sources
from actors.notices.port import Notice
from actors.notices.teller import Teller
from actors.notices.watch import SourceWatch
from elastic.config.sections import Notices
from elastic.ids import NodeId
from elastic.protocol.authority import Replica
from elastic.protocol.events import Event, NodeAdvised, NodeDraining, NodeStays
from elastic.threads import keep_going
from tests.support.patience import until

pytestmark = pytest.mark.fast


AHEAD_S = 30.0
"""Seconds by which the coordinator's clock is ahead of the node's in these tests."""


class Told:
    """Stands for the coordinator: it keeps the events that are posted, and says its time."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.events: list[Event] = []
        self.ahead_s, self.answers = ahead_s, threading.Event()
        self.answers.set()

    def now(self) -> float:
        self.answers.wait()
        return time.time() + self.ahead_s

    def teller(self) -> Teller:
        return Teller(self.now, self.events.append)


def keeper_of(told: Told) -> Keeper:
    keeper = Keeper.__new__(Keeper)
    keeper.node, keeper._teller = NodeId("n1"), told.teller()
    return keeper


def test_a_keeper_tells_what_its_sources_say(tmp_path: Path) -> None:
    """The control: before the file is written, it is only told that there is nothing."""
    told, path = Told(), tmp_path / "taken"
    keeper = keeper_of(told)
    keeper._say, keeper._closed = lambda sentence: None, threading.Event()  # type: ignore[method-assign]
    sources = open_sources(Notices(sources=("file",), file=str(path)))
    keeper._sources = [
        SourceWatch(name, each, keeper._noticed, keeper._say) for name, each in sources.items()
    ]
    (watch,) = keeper._sources
    watch.look()
    watch.look()
    assert told.events == [NodeStays(NodeId("n1"), "file")], "the control"
    path.write_text("60\nthe rack is moved")
    thread = keep_going(lambda: watch.run(keeper._closed), "notices")
    until(lambda: len(told.events) == 2)
    event = told.events[1]
    assert isinstance(event, NodeDraining)
    assert (event.node, event.source, event.text) == ("n1", "file", "the rack is moved")
    assert 55 < event.deadline - time.time() <= 60
    path.unlink()
    until(lambda: len(told.events) == 3)
    assert told.events[2] == NodeStays(NodeId("n1"), "file")
    keeper._closed.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("ahead_s", [AHEAD_S, -AHEAD_S, 0.0])
def test_the_time_that_is_left_is_told_whatever_the_clocks_show(ahead_s: float) -> None:
    told = Told(ahead_s)
    keeper_of(told).announce("chaos", 20.0)
    told.teller().tell("aws", NodeId("n1"), Notice(time.time() + 900.0, advice=True))
    draining, advised = told.events
    assert isinstance(draining, NodeDraining) and isinstance(advised, NodeAdvised)
    assert draining.deadline - told.now() == pytest.approx(20.0, abs=1.0)
    assert advised.until - told.now() == pytest.approx(900.0, abs=1.0)


def test_a_coordinator_that_answers_late_is_told_the_time_that_is_left_then() -> None:
    """A withdrawal that comes meanwhile is told last, not overtaken by the notice that waited."""
    told = Told(AHEAD_S)
    keeper, deadline = keeper_of(told), time.time() + 20.0
    told.answers.clear()
    waits = [
        threading.Thread(target=keeper._noticed, args=("aws", each)) for each in (Notice(deadline), None)
    ]
    for thread in waits:
        thread.start()
        until(lambda: "aws" in {source for _, source in keeper._teller._newest})
    until(lambda: keeper._teller._newest[NodeId("n1"), "aws"] is None)
    told.answers.set()
    for thread in waits:
        thread.join(10)
    assert told.events[-1] == NodeStays(NodeId("n1"), "aws")


def test_a_keeper_tells_a_later_coordinator_all_again_by_its_clock() -> None:
    told, now = Told(AHEAD_S), time.time()
    keeper = keeper_of(told)
    keeper.replica, keeper._hearing = Replica(heeds=1), threading.Lock()
    for source, notice in (
        ("aws", Notice(now + 5.0)),
        ("gcp", None),
        ("azure", Notice(now + 9.0, advice=True)),
    ):
        keeper._noticed(source, notice)
    told.events.clear()
    told.ahead_s = -AHEAD_S
    keeper.attach(2)
    until(lambda: len(told.events) == 3)
    draining, stays, advised = told.events
    assert isinstance(draining, NodeDraining) and isinstance(advised, NodeAdvised)
    assert stays == NodeStays(NodeId("n1"), "gcp")
    assert draining.deadline == pytest.approx(now - AHEAD_S + 5.0, abs=1.0)
    assert advised.until == pytest.approx(now - AHEAD_S + 9.0, abs=1.0)


def test_without_a_coordinator_nothing_is_told() -> None:
    told = Told()

    def gone() -> float:
        raise OSError("nobody is there")

    Teller(gone, told.events.append).tell("aws", NodeId("n1"), Notice(5.0))
    assert told.events == []
