"""A buddy has what members say that it has, also after the pairs change; and members say how often they can
send it a copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import WireError
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.copy_budget import REMEMBERED
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Copied
from elastic.protocol.copy_schedule import Copy
from elastic.state.keeper_store import KeeperStore, request
from elastic.state.region import Region
from elastic.state.snapshot import NEVER
from elastic.state.wire import Wire
from tests.state.nodes import (
    AT,
    SECRET,
    await_buddied,
    cluster,
    enter,
    equal,
    heal,
    later,
    outcome,
    pair,
    shard_of,
)
from tests.support.cells import cell
from tests.support.patience import PATIENCE_S, until


@pytest.mark.parametrize("medium", ["memory", "files"])
def test_a_buddy_has_what_its_node_lost(tmp_path: Path, medium: str) -> None:
    """Two nodes, each the other's buddy; one is gone, with its copies and with those it kept for the other."""
    with cluster(Layout(1, 2), 1, slots=4, folder=str(tmp_path) if medium == "files" else "") as (
        plan,
        nodes,
    ):
        plan = replace(plan, buddy_every=1)
        pair(nodes)
        enter(plan, nodes)
        copiers = [nodes[rank].workers[WorkerId(f"w{rank}")] for rank in range(2)]
        await_buddied(copiers, AT.step)
        for step in range(5, 9):
            for rank, snapshots in enumerate(copiers):
                snapshots.committed(
                    outcome(step, copied=step - 1, buddied=step - 1), shard_of(Version(step, 2), 2, rank)
                )
            await_buddied(copiers, step)
        assert {each.version.step for each in nodes[1].store.held() if each.worker == "w0"} == {7, 8}
        assert {region.on_disk for node in nodes for region in node.store._others.values()} == {
            medium == "files"
        }
        for lost, left in ((0, 1), (1, 0)):
            holders = [each for each in nodes[left].store.held() if each.version == Version(8, 2)]
            assert {(each.worker, each.cell) for each in holders} == {
                ("w0", cell(2, 0)),
                ("w1", cell(2, 1)),
            }, f"node {lost} is gone"
            there = later(plan, Layout(1, 1), [(WorkerId("n"), nodes[left].name)], [nodes[left]], holders)
            assert equal(heal(there, WorkerId("n"))[0], shard_of(Version(8, 2), 1, 0))
        nodes[1].store.release(Version(8, 2), Version(8, 2))
        assert {each.version.step for each in nodes[1].store.held() if each.worker == "w0"} == {7, 8}, (
            "the newest is what it is kept for"
        )
        nodes[1].store.release(Version(1, 3), Version(1, 3))
        assert {each.worker for each in nodes[1].store.held()} == {"w1"}


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 1)], ids=str)
def test_another_buddy_is_brought_what_the_one_before_had(
    monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """The node that kept copies for node 0 is lost.  The new world begins at the version that was there, in
    the same cut or another:
    nobody says that a buddy has it before the new buddy has it."""
    gate, begun, take = threading.Event(), threading.Event(), KeeperStore._take
    gate.set()

    def held_up(*arguments: Any) -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)
        take(*arguments)

    monkeypatch.setattr(KeeperStore, "_take", held_up)
    with cluster(Layout(3, 1) if layout.dp_shard == 1 else Layout(1, 3), 1, slots=4) as (plan, nodes):
        plan, left = replace(plan, buddy_every=1), nodes[:2]
        for one, other in ((0, 2), (2, 1), (1, 0)):
            nodes[one].store.pair(nodes[other].store.address)
        enter(plan, nodes)
        copiers = [node.workers[WorkerId(f"w{rank}")] for rank, node in enumerate(nodes)]
        await_buddied(copiers, AT.step)
        nodes[2].store.close()
        gate.clear()
        begun.clear()
        new = replace(plan, generation=3, layout=layout, members=plan.members[:2], nodes=plan.nodes[:2])
        pair(left)
        for rank, snapshots in enumerate(copiers[:2]):
            snapshots.enter(
                new, WorkerId(f"w{rank}"), shard_of(AT, layout.dp_shard, layout.coordinates(rank)["dp_shard"])
            )
        assert begun.wait(PATIENCE_S), "it is brought anew"
        assert copiers[0].settle()[:2] == (AT.step, -1)
        gate.set()
        await_buddied(copiers[:2], AT.step)
        kept = {(each.worker, each.cell) for each in nodes[1].store.held() if each.version == AT}
        assert ("w0", cell(layout.dp_shard, 0)) in kept
        third = KeeperStore(NodeId("third"), "127.0.0.1", SECRET)
        nodes[0].store.pair(third.address)  # while the world steps
        await_buddied(copiers[:2], AT.step)
        assert {(each.worker, each.version) for each in third.held()} == {("w0", AT)}
        third.close()


def test_members_say_how_often_they_can_copy_by_what_they_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy takes at least 60 ms, here and at the buddy; a node sends the copies of both its workers."""
    copied = Region.finish

    def slowly(*arguments: Any, **more: Any) -> None:
        time.sleep(0.06)
        copied(*arguments, **more)

    monkeypatch.setattr(Region, "finish", slowly)
    with cluster(Layout(1, 4), 2, slots=4) as (plan, nodes):
        plan = replace(plan, buddy_every=1)
        nodes[0].store.pair(nodes[1].store.address)
        enter(plan, nodes)
        snapshots = nodes[0].workers[WorkerId("w0")]
        said = list[Copied]()
        until(lambda: snapshots.region["brought_us"] >= 0.12e6)
        for step in range(5, 6 + REMEMBERED):
            time.sleep(0.02)
            snapshots.settle()
            snapshots.committed(
                outcome(step, copied=step - 1, buddied=AT.step), shard_of(Version(step, 2), 4, 0)
            )
            said.append(snapshots.settle())
    assert min(snapshots.pace._copies_s) >= 0.06 and snapshots.pace.step_s >= 0.02
    assert [each.copy_every for each in said[: REMEMBERED - 1]] == [0] * (REMEMBERED - 1), (
        "not before it has seen some"
    )
    assert said[-1].copy_every == snapshots.pace.copy_every() > 0 and said[-1].buddy_every > 0


def test_a_copy_under_way_to_a_buddy_is_not_pulled_from_under_it() -> None:
    """Half of the copy has arrived when older versions are released, and when the keeper ends."""
    where, data = Copy(Version(5, 2), cell(2, 1)), bytes(range(200)) * 5
    head = {
        "ask": "bring",
        "bytes": len(data),
        "blocks": 1,
        "slot_bytes": 4096,
        "slot_blocks": 1,
        "safe": None,
    }
    store = KeeperStore(NodeId("n"), "127.0.0.1", SECRET)
    with closing(Wire.connect(store.address, SECRET)) as wire:

        def half(then: Callable[[], None]) -> bool:
            wire.send(head | request(WorkerId("w1"), where), [bytes(8), data[:500]])
            until(lambda: store._coming[WorkerId("w1")])
            then()
            wire.send_raw([data[500:]])
            wire.send({"still": True})
            return bool(wire.head()["taken"])

        assert half(lambda: store.release(AT, AT))
        assert [each.version for each in store.held()] == [where.version]
        assert half(store.close)
        assert store.held() == ()


@pytest.mark.parametrize("overwritten", [True, False], ids=["overwritten", "control"])
def test_a_copy_that_is_overwritten_on_its_way_to_a_buddy_is_none_there(
    monkeypatch: pytest.MonkeyPatch, overwritten: bool
) -> None:
    """The buddy gets bytes of another version, with the right digests, and must not take them for the copy
    that was announced.
    """
    sent, send, filled = threading.Event(), KeeperStore._send, Region.filled
    with cluster(Layout(1, 2), 1, slots=4) as (plan, nodes):
        snapshots = nodes[0].workers[WorkerId("w0")]

        def overwrites(region: Region, slot: int) -> int:
            if overwritten and region.held(slot) == Copy(AT, cell(2, 0)):
                region.begin(slot)
                snapshots._copy(slot, Copy(Version(9, 2), cell(2, 0)), shard_of(Version(9, 2), 2, 0), False)
            return filled(region, slot)

        monkeypatch.setattr(KeeperStore, "_send", lambda *arguments: (send(*arguments), sent.set()))
        monkeypatch.setattr(Region, "filled", overwrites)
        enter(replace(plan, buddy_every=1), nodes)
        nodes[0].store.pair(nodes[1].store.address)
        assert sent.wait(PATIENCE_S)
        brought = [each for each in nodes[1].store.held() if each.worker == "w0"]
        assert snapshots.settle().buddied_through == (NEVER if overwritten else AT.step)
        assert [each.version for each in brought] == ([] if overwritten else [AT])
        if not overwritten:
            there = later(
                plan, Layout(1, 1), [(WorkerId("n"), nodes[1].name)], nodes[1:], nodes[1].store.held()
            )
            assert equal(heal(there, WorkerId("n"))[0], shard_of(AT, 1, 0))


def test_two_copies_that_come_at_once_take_two_slots_and_a_third_is_refused() -> None:
    """Two keepers bring copies of one worker, or one brings again after its connection broke.  Each copy
    keeps its own bytes.
    """
    worker, said = WorkerId("w1"), list[str]()
    copies = [Copy(Version(step, 2), cell(2, 1)) for step in (5, 6, 7)]
    data = [bytes([step]) * 1000 for step in (5, 6, 7)]
    head = {"ask": "bring", "bytes": 1000, "blocks": 1, "slot_bytes": 4096, "slot_blocks": 1, "safe": None}
    with closing(KeeperStore(NodeId("n"), "127.0.0.1", SECRET, said.append)) as store, ExitStack() as stack:
        one, two, three = (
            stack.enter_context(closing(Wire.connect(store.address, SECRET))) for _ in range(3)
        )

        def begin(wire: Wire, number: int, coming: int) -> None:
            wire.send(head | request(worker, copies[number]), [bytes(8), data[number][:500]])
            until(lambda: len(store._coming[worker]) >= coming)

        def end(wire: Wire, number: int) -> bool:
            wire.send_raw([data[number][500:]])
            wire.send({"still": True})
            return bool(wire.head()["taken"])

        begin(one, 0, 1)
        begin(two, 1, 2)
        with pytest.raises(WireError):
            three.send(head | request(worker, copies[2]), [bytes(8), data[2]])
            three.send({"still": True})
            three.head()
        assert end(one, 0) and end(two, 1)
        region = store._others[worker]
        assert {region.held(slot): bytes(region.data(slot)[:1000]) for slot in range(2)} == dict(
            zip(copies[:2], data[:2], strict=True)
        )
        assert any("has no free slot for" in sentence for sentence in said)


def test_a_second_copy_never_takes_the_slot_of_the_one_that_is_safe() -> None:
    """While one copy arrives, the only other slot has the version that all buddies have: the second copy has
    to wait.
    """
    worker, safe = WorkerId("w1"), Copy(Version(4, 2), cell(2, 1))
    head = {"ask": "bring", "bytes": 8, "blocks": 1, "slot_bytes": 4096, "slot_blocks": 1}
    with closing(KeeperStore(NodeId("n"), "127.0.0.1", SECRET)) as store, ExitStack() as stack:
        one, two = (stack.enter_context(closing(Wire.connect(store.address, SECRET))) for _ in range(2))
        one.send(head | {"safe": None} | request(worker, safe), [bytes(8), b"12345678"])
        one.send({"still": True})
        assert one.head()["taken"]
        one.send(
            head | {"safe": request(worker, safe)} | request(worker, Copy(Version(5, 2), cell(2, 1))),
            [bytes(8)],
        )
        until(lambda: store._coming[worker])
        with pytest.raises(WireError):
            two.send(
                head | {"safe": request(worker, safe)} | request(worker, Copy(Version(6, 2), cell(2, 1))),
                [bytes(8), b"abcdefgh"],
            )
            two.send({"still": True})
            two.head()
        assert safe in store._others[worker].all_held()


def test_slots_of_another_size_never_take_the_place_of_a_copy() -> None:
    """A worker makes its region once, so another size is refused, and the copy that is here stays."""
    worker, here = WorkerId("w1"), Copy(Version(4, 2), cell(2, 1))
    head = {"ask": "bring", "bytes": 8, "blocks": 1, "slot_bytes": 4096, "slot_blocks": 1, "safe": None}
    with closing(KeeperStore(NodeId("n"), "127.0.0.1", SECRET)) as store, ExitStack() as stack:
        one, two = (stack.enter_context(closing(Wire.connect(store.address, SECRET))) for _ in range(2))
        one.send(head | request(worker, here), [bytes(8), b"12345678"])
        one.send({"still": True})
        assert one.head()["taken"]
        with pytest.raises(WireError):
            two.send(
                head | {"slot_bytes": 8192} | request(worker, Copy(Version(5, 2), cell(2, 1))),
                [bytes(8), b"abcdefgh"],
            )
            two.send({"still": True})
            two.head()
        assert [each.version for each in store.held()] == [here.version]


def test_a_world_without_buddies_goes_on_in_the_slots_of_the_one_before() -> None:
    """The copies complete everywhere and those complete at buddies stay in their slots until the new world
    has a copy.
    """
    with cluster(Layout(1, 2), 1, slots=4) as (plan, nodes):
        paired = replace(plan, buddy_every=1)
        pair(nodes)
        enter(paired, nodes)
        snapshots = nodes[0].workers[WorkerId("w0")]
        await_buddied([snapshots], AT.step)
        snapshots.committed(outcome(5, copied=4, buddied=4), shard_of(Version(5, 2), 2, 0))
        snapshots.settle()
        snapshots.committed(outcome(6, copied=5, buddied=4), shard_of(Version(6, 2), 2, 0))
        snapshots.settle()
        alone = replace(
            plan,
            generation=3,
            layout=Layout(),
            members=(WorkerId("w0"),),
            nodes=(nodes[0].name,),
            version=Version(6, 2),
        )
        snapshots.enter(alone, WorkerId("w0"), shard_of(Version(6, 2), 1, 0))
        assert snapshots.settle()[:2] == (6, NEVER), "no buddy of this world has any"
        held = {copy for copy in snapshots.region.all_held() if copy}
        assert {
            Copy(Version(6, 2), cell(1, 0)),
            Copy(Version(5, 2), cell(2, 0)),
            Copy(AT, cell(2, 0)),
        } <= held
