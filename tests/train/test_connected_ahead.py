"""A world that is connected beside another one harms nothing and leaves nothing, however it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from elastic.engine.world import World
from elastic.errors import WorldBroken
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.plan import Plan
from elastic.train import next_world
from elastic.train.next_world import NextWorld
from tests.support.patience import PATIENCE_S, until

CPU, NOWHERE = torch.device("cpu"), ("nowhere", 0)


def plan(attempt: int = 1) -> Plan:
    return Plan(1, 2, Layout(1, 1), (WorkerId("w1"),), Version(3, 1), "live", (), NodeId("n"), ahead=attempt)


class Doings:
    """Forms worlds of this process alone; a test may hold them up while they form or connect."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.forming, self.forms, self.connecting, self.connects = (threading.Event() for _ in range(4))
        self.error: Exception | None = None

    def form(self, plan: Plan, store: tuple[str, int]) -> World:
        def met() -> None:
            self.forming.set()
            assert self.forms.wait(PATIENCE_S)

        store_, name = dist.HashStore(), f"1.{plan.ahead}"
        return World.form(
            store_, generation=2, layout=Layout(), rank=0, device=CPU, form_s=60.0, met=met, ahead=name
        )

    def connect(self, world: World) -> None:
        self.connecting.set()
        assert self.connects.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        world.connect(60.0, 60.0)

    def tell(self, plan: Plan, why: str) -> None:
        self.told.append((plan.ahead, why))


@pytest.fixture
def doings() -> Iterator[Doings]:
    """Yields doings that nothing holds up, and checks that torch knows no group afterwards."""
    made = Doings()
    made.forms.set()
    made.connects.set()
    yield made
    until(lambda: not any(each.name == "next world" for each in threading.enumerate()))
    until(lambda: not dist.distributed_c10d._world.pg_map, what="groups are left")


def test_a_world_that_cannot_be_connected_leaves_no_group(doings: Doings) -> None:
    """The control: one that can be connected is there until it is dropped."""
    ahead, doings.error = (
        NextWorld(CPU, doings.form, doings.connect, doings.tell),
        WorldBroken("a member is gone"),
    )
    ahead.begin(plan(), NOWHERE)
    until(lambda: doings.told == [(1, "WorldBroken: a member is gone")])
    with pytest.raises(WorldBroken, match="has not connected generation 2 ahead"):
        ahead.take(plan())
    until(lambda: not dist.distributed_c10d._world.pg_map, what="groups are left")
    doings.error = None
    ahead.begin(plan(2), NOWHERE)
    until(lambda: doings.told[1:] == [(2, "")])
    assert len(dist.distributed_c10d._world.pg_map) == 1
    ahead.drop()


def test_a_world_that_still_connects_is_not_taken_and_a_later_one_is(doings: Doings) -> None:
    doings.connects.clear()
    ahead = NextWorld(CPU, doings.form, doings.connect, doings.tell)
    ahead.begin(plan(), NOWHERE)
    assert doings.connecting.wait(PATIENCE_S)
    with pytest.raises(WorldBroken):
        ahead.take(plan())
    ahead.begin(plan(2), NOWHERE)
    doings.connects.set()
    until(lambda: doings.told == [(2, "")])
    world = ahead.take(plan(2))
    ahead.drop()
    until(lambda: len(dist.distributed_c10d._world.pg_map) == 1, what="only the one that was taken is left")
    world.close()


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "forming"])
def test_a_world_that_is_dropped_ends_no_connection_that_began_meanwhile(
    doings: Doings, connected: bool
) -> None:
    """The ports of a group are those on which this process listens more than before, since gloo does not tell them;
    other threads open sockets too, and one of them forms the next world if this one comes too late.
    """
    doings.forms.clear()
    ahead = NextWorld(CPU, doings.form, doings.connect, doings.tell)
    ahead.begin(plan(), NOWHERE)
    assert doings.forming.wait(PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        client, (accepted, _) = socket.create_connection(server.getsockname()), server.accept()
        if not connected:
            ahead.drop()
        doings.forms.set()
        if connected:
            until(lambda: doings.told == [(1, "")])
            ahead.drop()
        until(lambda: not dist.distributed_c10d._world.pg_map, what="it has not ended")
        with client, accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


@pytest.mark.parametrize("stuck", [False, True], ids=["ends", "stuck"])
def test_a_worker_that_ends_waits_for_all_worlds_that_it_dropped(
    doings: Doings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck: bool
) -> None:
    """One that does not end is told of, and waited for no longer than ``ENDS_S``."""
    ends, ended = threading.Event(), list[int]()
    forget = World.close

    def close(world: World) -> None:
        assert ends.wait(PATIENCE_S)
        forget(world)
        ended.append(world.generation)

    monkeypatch.setattr(World, "close", close)
    ahead = NextWorld(CPU, doings.form, doings.connect, doings.tell)
    for attempt in (1, 2):
        ahead.begin(plan(attempt), NOWHERE)
        until(lambda: len(doings.told) == attempt)  # noqa: B023 - called at once
    if stuck:
        monkeypatch.setattr(next_world, "ENDS_S", 0.01)
    else:
        threading.Timer(0.1, ends.set).start()
    ahead.close()
    assert ended == ([] if stuck else [2, 2])
    assert ("has not ended within 0.01 s" in capsys.readouterr().out) is stuck
    ends.set()


class OnDevice(NextWorld):
    """Stands on a machine without an accelerator, which nothing here needs."""

    def _leave_room(self) -> None:
        """Looks at no device."""

    def _beside(self, plan: Plan) -> nullcontext[None]:
        return nullcontext()


def test_a_world_whose_kernels_wait_for_a_lost_member_is_aborted_when_it_is_dropped(doings: Doings) -> None:
    """The abort of the present world waits for all kernels of the device, so it waits for these."""
    freed: list[bool] = []

    def connect(world: World) -> None:
        doings.connecting.set()
        freed.append(world.aborted.wait(PATIENCE_S))
        raise WorldBroken("it was aborted")

    ahead = OnDevice(torch.device("cuda"), doings.form, connect, doings.tell)
    ahead.begin(plan(), NOWHERE)
    assert doings.connecting.wait(PATIENCE_S)
    ahead.drop()
    until(lambda: not dist.distributed_c10d._world.pg_map, what="it has not ended")
    assert freed == [True] and doings.told == [], "nobody waits for it"
