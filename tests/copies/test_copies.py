"""A shard's way: from the device into a slot, to a buddy, and into the shards of a world of another size; nothing that is bent is taken."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from elastic.control.commit import NO_COPIES, Copied, Outcome
from elastic.control.copying import Copy
from elastic.copies.digest import digests
from elastic.copies.region import BLOCK, Region, frame
from elastic.copies.stock import Stock, request
from elastic.copies.wire import Wire
from elastic.errors import CopyLost
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.copies import REMEMBERED, CopyRule
from elastic.plan.layout import Layout
from elastic.plan.plan import Plan
from elastic.plan.transfer import Holding, moves
from elastic.train import from_hosts
from elastic.train.copier import NEVER, Copier
from elastic.train.from_hosts import Access, read
from elastic.train.heal import nothing
from elastic.train.lane import STAGE, Lane
from elastic.train.state import DTYPES, Shard
from storage.slices import Tensor, shard_slice
from tests.support.patience import PATIENCE_S

SECRET = b"k" * 32
AUTO = CopyRule(copies=True, buddies=True)
TENSORS = (
    Tensor("w", "parameter", "F32", (10, BLOCK // 8)),
    Tensor("w", "moment.exp_avg", "F32", (10, BLOCK // 8)),
    Tensor("b", "parameter", "BF16", (7, 3)),
    Tensor("few", "parameter", "F32", (2, 5)),
    Tensor("seen", "buffer", "I64", (4,)),
    Tensor("updates", "scalar", "F32", ()),
)
AT = Version(4, 2)


def truth(version: Version) -> dict[Tensor, torch.Tensor]:
    """The whole state at ``version``: other bits for each."""
    generator = torch.Generator().manual_seed(version.step * 1000 + version.generation)
    return {
        tensor: torch.randint(0, 10_000, tensor.shape, generator=generator).to(DTYPES[tensor.dtype]) / (1 if tensor.dtype == "I64" else 7)
        for tensor in TENSORS
    }


def shard_of(version: Version, count: int, index: int) -> Shard:
    values = {}
    for tensor, value in truth(version).items():
        part = shard_slice(tensor, count, index)
        cut = value[part.start[0] : part.stop[0]] if tensor.shape else value
        values[tensor.kind, tensor.name] = cut.to(DTYPES[tensor.dtype]).clone()
    return Shard(version, count, index, values)


def empty(version: Version, count: int, index: int) -> Shard:
    shard = shard_of(version, count, index)
    return Shard(version, count, index, {key: torch.full_like(value, -1) for key, value in shard.values.items()})


def equal(one: Shard, other: Shard) -> bool:
    return all(torch.equal(one.values[key], other.values[key]) for key in one.values)


def outcome(step: int, copied: int = -1, buddied: int = -1) -> Outcome:
    return Outcome(step, AT.generation, 1.0, (1.0,), (1,), ((0,),), True, copied_through=copied, buddied_through=buddied)


@dataclass
class Node:
    name: NodeId
    stock: Stock
    workers: dict[WorkerId, Copier]


@contextmanager
def cluster(layout: Layout, per_node: int, slots: int = 2) -> Iterator[tuple[Plan, list[Node]]]:
    """Workers w0 … with their regions, so many a node, all at the state AT."""
    members = tuple(WorkerId(f"w{rank}") for rank in range(layout.world))
    nodes = [NodeId(f"node{rank // per_node}") for rank in range(layout.world)]
    plan = Plan(1, AT.generation, layout, members, AT, "init", (), nodes[0], tuple(nodes), copy_every=1)
    largest = frame(TENSORS, 1, 0)
    with ExitStack() as stack:
        found = {name: Node(name, Stock(name, "127.0.0.1", SECRET), {}) for name in dict.fromkeys(nodes)}
        for rank, member in enumerate(members):
            region = Region.create(slots, largest.bytes, largest.blocks)
            node = found[nodes[rank]]
            node.workers[member] = Copier(region, TENSORS, torch.device("cpu"), AUTO)
            node.stock.adopt(member, os.getpid(), region.descriptor)
        for node in found.values():
            stack.callback(node.stock.close)
        yield plan, list(found.values())


def enter(plan: Plan, nodes: Sequence[Node]) -> None:
    """Every worker copies its shard of AT."""
    for node in nodes:
        for worker, copier in node.workers.items():
            rank = plan.world_rank(worker)
            copier.enter(plan, worker, shard_of(AT, plan.layout.dp_shard, plan.layout.coordinates(rank)[1]))
            assert copier.settle()[:2] == (AT.step, NEVER)


def pair(nodes: Sequence[Node]) -> None:
    """Each of two is the other's buddy."""
    for one, other in ((0, 1), (1, 0)):
        nodes[one].stock.pair(nodes[other].stock.address)


def later(plan: Plan, layout: Layout, homes: Sequence[tuple[WorkerId, NodeId]], nodes: Sequence[Node], holders: Sequence[Holding]) -> Plan:
    members, places = zip(*homes, strict=True)
    hosts = tuple((node.name, node.stock.address) for node in nodes)
    new = replace(plan, generation=3, layout=layout, members=members, nodes=places, tier="host", holders=tuple(holders), hosts=hosts)
    return replace(new, version=holders[0].version)


def heal(plan: Plan, worker: WorkerId) -> tuple[Shard, int]:
    index = plan.layout.coordinates(plan.world_rank(worker))[1]
    shard = empty(plan.version, plan.layout.dp_shard, index)
    todo = moves(TENSORS, plan.holders, plan.layout, plan.members, plan.nodes)
    with Lane(torch.device("cpu")) as lane:
        return shard, read(shard, TENSORS, plan, Access(worker, SECRET), todo, lane, nothing)


@pytest.mark.parametrize("new", [Layout(1, 1), Layout(1, 3), Layout(2, 2), Layout(1, 4)], ids=str)
@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("stage", [BLOCK, STAGE])
def test_any_world_is_filled_from_copies_alone(monkeypatch: pytest.MonkeyPatch, new: Layout, per_node: int, stage: int) -> None:
    """1×4 on one, two or four nodes; everybody died, newcomers read from their own node's memory and over sockets.

    In pieces of one block, or all of a tensor at once.
    """
    monkeypatch.setattr(from_hosts, "STAGE", stage)
    with cluster(Layout(1, 4), per_node) as (plan, nodes):
        enter(plan, nodes)
        held = [holding for node in nodes for holding in node.stock.held()]
        assert sorted((each.worker, each.shard_index) for each in held) == [(f"w{i}", i) for i in range(4)]
        homes = [(WorkerId(f"n{i}"), nodes[i % len(nodes)].name) for i in range(new.world)]
        there = later(plan, new, homes, nodes, held)
        for rank, (worker, _) in enumerate(homes):
            shard, used = heal(there, worker)
            right = shard_of(AT, new.dp_shard, new.coordinates(rank)[1])
            assert equal(shard, right) and used == sum(value.nbytes for value in right.values.values())


def test_the_end_of_a_world_does_not_wait_for_a_copy_and_the_next_one_begins_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what is left of the world before; and how long it took says nothing of the next one."""
    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        (copier,) = nodes[0].workers.values()
        goes_on = threading.Event()
        with monkeypatch.context() as at:
            at.setattr("elastic.train.copier.digests", lambda data, out: (goes_on.wait(PATIENCE_S), digests(data, out)))
            copier.committed(outcome(5, copied=4), shard_of(Version(5, 2), 1, 0))
            assert copier.region.find(Copy(Version(5, 2), 1, 0)) is None
            threading.Timer(0.2, goes_on.set).start()
            copier.enter(replace(plan, generation=3, version=Version(5, 2)), WorkerId("w0"), shard_of(Version(5, 2), 1, 0))
        assert goes_on.is_set() and copier.settle().copied_through == 5
        assert {held for held in copier.region.all_held() if held} == {Copy(AT, 1, 0), Copy(Version(5, 2), 1, 0)}
        copier.committed(replace(outcome(6, copied=5), generation=3), shard_of(Version(6, 3), 1, 0))
        assert max(copier.pace._copies_s) < 0.1 and copier.pace.step_s < 0.1


@pytest.mark.parametrize("failures", [1, 2])
def test_a_copy_that_fails_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failures: int) -> None:
    """Without it no other would be begun in this world, and what one holds alone would not be protected."""
    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        (copier,) = nodes[0].workers.values()
        left = ["no memory"] * failures

        def fail(data: torch.Tensor, out: torch.Tensor) -> None:
            if left:
                raise RuntimeError(left.pop())
            digests(data, out)

        monkeypatch.setattr("elastic.train.copier.digests", fail)
        copier.committed(outcome(5, copied=4), shard_of(Version(5, 2), 1, 0))
        assert copier.settle().copied_through == (5 if failures == 1 else -1)
        assert capfd.readouterr().err.count("RuntimeError: no memory") == failures
        assert (copier.region.find(Copy(Version(5, 2), 1, 0)) is not None) == (failures == 1)
        assert copier.region.find(Copy(AT, 1, 0)) is not None


def test_two_versions_are_there_and_the_older_one_is_read_when_it_is_wanted() -> None:
    with cluster(Layout(1, 2), 2) as (plan, nodes):
        enter(plan, nodes)
        for worker, copier in nodes[0].workers.items():
            copier.committed(outcome(5, copied=4), shard_of(Version(5, 2), 2, plan.world_rank(worker)))
            assert copier.settle() == Copied(5)
        held = nodes[0].stock.held()
        assert sorted({each.version.step for each in held}) == [4, 5] and len(held) == 4
        for version in (AT, Version(5, 2)):
            there = later(plan, Layout(1, 1), [(WorkerId("n"), nodes[0].name)], nodes, [each for each in held if each.version == version])
            assert equal(heal(there, WorkerId("n"))[0], shard_of(version, 1, 0))


def test_a_copy_that_is_not_complete_everywhere_is_never_the_only_one() -> None:
    """The next version is begun only when all have the one before: so of two slots one is always that."""
    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        copier, region = nodes[0].workers[WorkerId("w0")], nodes[0].workers[WorkerId("w0")].region
        copier.committed(outcome(5, copied=-1), shard_of(Version(5, 2), 1, 0))
        assert copier.settle().copied_through == 4, "somebody else has not finished"
        copier.committed(outcome(6, copied=4), shard_of(Version(6, 2), 1, 0))
        copier.committed(outcome(7, copied=4), shard_of(Version(7, 2), 1, 0))
        assert copier.settle().copied_through == 6 and {copy.version.step for copy in region.all_held() if copy} == {4, 6}
        copier.committed(outcome(8, copied=6), shard_of(Version(8, 2), 1, 0))
        copier.settle()
        assert {copy.version.step for copy in region.all_held() if copy} == {6, 8}


@pytest.mark.parametrize("where", ["here", "remote"])
def test_a_bent_byte_is_noticed_and_the_copy_counts_no_more(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(Layout(1, 2), 1) as (plan, nodes):
        enter(plan, nodes)
        holders = [holding for node in nodes for holding in node.stock.held()]
        home = nodes[1].name if where == "here" else nodes[0].name
        there = later(plan, Layout(1, 1), [(WorkerId("n"), home)], nodes, holders)
        assert equal(heal(there, WorkerId("n"))[0], shard_of(AT, 1, 0)), "the control"
        region = nodes[1].workers[WorkerId("w1")].region
        slot = region.find(Copy(AT, 2, 1))
        assert slot is not None
        region.data(slot)[BLOCK + 100] ^= 1
        with pytest.raises(CopyLost, match="digests differ") as lost:
            heal(there, WorkerId("n"))
        assert lost.value.keeper == nodes[1].name and nodes[1].stock.held() == () and len(nodes[0].stock.held()) == 1
        assert "the copy of w1 at step 4 of generation 2 is damaged" in capfd.readouterr().out


def test_a_copy_that_is_overwritten_or_gone_is_an_error_that_names_its_keeper() -> None:
    with cluster(Layout(1, 2), 1) as (plan, nodes):
        enter(plan, nodes)
        holders = [holding for node in nodes for holding in node.stock.held()]
        for home in (nodes[0].name, nodes[1].name):
            there = later(plan, Layout(1, 1), [(WorkerId("n"), home)], nodes, [replace(each, version=Version(9, 2)) for each in holders])
            with pytest.raises(CopyLost, match="not there any more"):
                heal(there, WorkerId("n"))
        there = later(plan, Layout(1, 1), [(WorkerId("n"), nodes[0].name)], nodes, holders)
        nodes[1].stock.close()
        with pytest.raises(CopyLost, match=r"the copy of w1 on node node1") as lost:
            heal(there, WorkerId("n"))
        assert lost.value.keeper == "node1"


def test_a_buddy_has_what_its_node_lost() -> None:
    """Two nodes, each the other's buddy; one is gone, with its copies and with those it kept for the other."""
    with cluster(Layout(1, 2), 1, slots=4) as (plan, nodes):
        plan = replace(plan, buddy_every=1)
        pair(nodes)
        enter(plan, nodes)
        copiers = [nodes[rank].workers[WorkerId(f"w{rank}")] for rank in range(2)]
        await_buddied(copiers, AT.step)
        for step in range(5, 9):
            for rank, copier in enumerate(copiers):
                copier.committed(outcome(step, copied=step - 1, buddied=step - 1), shard_of(Version(step, 2), 2, rank))
            await_buddied(copiers, step)
        assert {each.version.step for each in nodes[1].stock.held() if each.worker == "w0"} == {7, 8}
        for lost, left in ((0, 1), (1, 0)):
            holders = [each for each in nodes[left].stock.held() if each.version == Version(8, 2)]
            assert {(each.worker, each.shard_index) for each in holders} == {("w0", 0), ("w1", 1)}, f"node {lost} is gone"
            there = later(plan, Layout(1, 1), [(WorkerId("n"), nodes[left].name)], [nodes[left]], holders)
            assert equal(heal(there, WorkerId("n"))[0], shard_of(Version(8, 2), 1, 0))
        nodes[1].stock.release(Version(8, 2), Version(8, 2))
        assert {each.version.step for each in nodes[1].stock.held() if each.worker == "w0"} == {7, 8}, "the newest is what it is kept for"
        nodes[1].stock.release(Version(1, 3), Version(1, 3))
        assert {each.worker for each in nodes[1].stock.held()} == {"w1"}


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 1)], ids=str)
def test_another_buddy_is_brought_what_the_one_before_had(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    """The node that kept copies for the first is lost.  The new world begins at the version that was there, cut otherwise or not: nobody
    says that a buddy has it before the new one has."""
    gate, take = threading.Event(), Stock._take
    gate.set()

    def held_up(*arguments: Any) -> None:
        assert gate.wait(10)
        take(*arguments)

    monkeypatch.setattr(Stock, "_take", held_up)
    with cluster(Layout(3, 1) if layout.dp_shard == 1 else Layout(1, 3), 1, slots=4) as (plan, nodes):
        plan, left = replace(plan, buddy_every=1), nodes[:2]
        for one, other in ((0, 2), (2, 1), (1, 0)):
            nodes[one].stock.pair(nodes[other].stock.address)
        enter(plan, nodes)
        copiers = [node.workers[WorkerId(f"w{rank}")] for rank, node in enumerate(nodes)]
        await_buddied(copiers, AT.step)
        nodes[2].stock.close()
        gate.clear()
        new = replace(plan, generation=3, layout=layout, members=plan.members[:2], nodes=plan.nodes[:2])
        pair(left)
        for rank, copier in enumerate(copiers[:2]):
            copier.enter(new, WorkerId(f"w{rank}"), shard_of(AT, layout.dp_shard, layout.coordinates(rank)[1]))
        time.sleep(0.1)  # long enough for a keeper to look again
        assert copiers[0].settle()[:2] == (AT.step, -1)
        gate.set()
        await_buddied(copiers[:2], AT.step)
        kept = {(each.worker, each.shard_count, each.shard_index) for each in nodes[1].stock.held() if each.version == AT}
        assert ("w0", layout.dp_shard, 0) in kept
        third = Stock(NodeId("third"), "127.0.0.1", SECRET)
        nodes[0].stock.pair(third.address)  # while the world steps
        await_buddied(copiers[:2], AT.step)
        assert {(each.worker, each.version) for each in third.held()} == {("w0", AT)}
        third.close()


def await_buddied(copiers: Sequence[Copier], step: int) -> None:
    deadline = time.monotonic() + 10
    while any(copier.settle()[:2] != (step, step) for copier in copiers):
        assert time.monotonic() < deadline, [copier.settle() for copier in copiers]
        time.sleep(0.01)


def test_members_say_how_often_they_can_copy_by_what_they_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes 60 ms at least, here and at the buddy; of two workers of a node both are brought."""
    copied = Region.finish

    def slowly(*arguments: Any) -> None:
        time.sleep(0.06)
        copied(*arguments)

    monkeypatch.setattr(Region, "finish", slowly)
    with cluster(Layout(1, 4), 2, slots=4) as (plan, nodes):
        plan = replace(plan, buddy_every=1)
        nodes[0].stock.pair(nodes[1].stock.address)
        enter(plan, nodes)
        copier = nodes[0].workers[WorkerId("w0")]
        said, deadline = list[Copied](), time.monotonic() + 10
        while copier.region["brought_us"] < 0.12e6:
            assert time.monotonic() < deadline
        for step in range(5, 6 + REMEMBERED):
            time.sleep(0.02)
            copier.settle()
            copier.committed(outcome(step, copied=step - 1, buddied=AT.step), shard_of(Version(step, 2), 4, 0))
            said.append(copier.settle())
    assert min(copier.pace._copies_s) >= 0.06 and copier.pace.step_s >= 0.02
    assert [each.copy_every for each in said[: REMEMBERED - 1]] == [0] * (REMEMBERED - 1), "not before it has seen some"
    assert said[-1].copy_every == copier.pace.copy_every() > 0 and said[-1].buddy_every > 0


def test_what_a_dead_worker_left_stays_until_it_is_released() -> None:
    with cluster(Layout(1, 2), 2) as (plan, nodes):
        enter(plan, nodes)
        stock = nodes[0].stock
        stock.ended(WorkerId("w1"))
        stock.release(AT, AT)
        assert {each.worker for each in stock.held()} == {"w0", "w1"}, "of this very version"
        stock.release(Version(0, 3), Version(0, 3))
        assert {each.worker for each in stock.held()} == {"w0"}, "the living keep theirs"


def test_a_copy_under_way_to_a_buddy_is_not_pulled_from_under_it() -> None:
    """Half of it is there when older versions are released, and when the keeper ends."""
    where, data = Copy(Version(5, 2), 2, 1), bytes(range(200)) * 5
    head = {"ask": "bring", "bytes": len(data), "blocks": 1, "slot_bytes": 4096, "slot_blocks": 1, "safe": None}
    stock = Stock(NodeId("n"), "127.0.0.1", SECRET)
    with closing(Wire.connect(stock.address, SECRET)) as wire:

        def half(then: Callable[[], None]) -> bool:
            wire.send(head | request(WorkerId("w1"), where), [bytes(8), data[:500]])
            deadline = time.monotonic() + 10
            while stock._coming[WorkerId("w1")] == 0:
                assert time.monotonic() < deadline
            then()
            wire.send_raw([data[500:]])
            wire.send({"still": True})
            return bool(wire.head()["taken"])

        assert half(lambda: stock.release(AT, AT))
        assert [each.version for each in stock.held()] == [where.version]
        assert half(stock.close)
        assert stock.held() == ()


def test_digests_are_of_blocks_and_see_every_byte() -> None:
    data = torch.arange(3 * BLOCK + 10, dtype=torch.int64).to(torch.uint8)
    whole = digests(data)
    assert len(whole) == 4
    for at, block in ((0, 0), (BLOCK - 1, 0), (BLOCK, 1), (3 * BLOCK + 9, 3)):
        bent = data.clone()
        bent[at] += 1
        assert [bool(x) for x in digests(bent) != whole] == [i == block for i in range(4)]
    assert torch.equal(digests(data[BLOCK : 2 * BLOCK]), whole[1:2]) and len(digests(data[:0])) == 0
    assert torch.equal(digests(data.view(torch.int16)), whole), "whatever the type"


def test_a_copy_that_no_keeper_holds_is_none() -> None:
    """It would die with its worker: nobody is told that it is there."""
    region = Region.create(2, frame(TENSORS, 1, 0).bytes, frame(TENSORS, 1, 0).blocks)
    copier = Copier(region, TENSORS, torch.device("cpu"), AUTO)
    plan = Plan(1, 2, Layout(), (WorkerId("w0"),), AT, "init", (), NodeId("n"), copy_every=1)
    copier.enter(plan, WorkerId("w0"), shard_of(AT, 1, 0))
    assert copier.settle() == NO_COPIES
    stock = Stock(NodeId("n"), "127.0.0.1", SECRET)
    stock.adopt(WorkerId("w0"), os.getpid(), region.descriptor)
    assert copier.settle() == Copied(AT.step) and [each.version for each in stock.held()] == [AT]
    stock.close()


def test_a_world_without_buddies_goes_on_in_the_slots_of_the_one_before() -> None:
    """What was complete everywhere and what was complete at the buddies stay, each in its slot, until the new world has something."""
    with cluster(Layout(1, 2), 1, slots=4) as (plan, nodes):
        paired = replace(plan, buddy_every=1)
        pair(nodes)
        enter(paired, nodes)
        copier = nodes[0].workers[WorkerId("w0")]
        await_buddied([copier], AT.step)
        copier.committed(outcome(5, copied=4, buddied=4), shard_of(Version(5, 2), 2, 0))
        copier.settle()
        copier.committed(outcome(6, copied=5, buddied=4), shard_of(Version(6, 2), 2, 0))
        copier.settle()
        alone = replace(plan, generation=3, layout=Layout(), members=(WorkerId("w0"),), nodes=(nodes[0].name,), version=Version(6, 2))
        copier.enter(alone, WorkerId("w0"), shard_of(Version(6, 2), 1, 0))
        assert copier.settle().copied_through == 6
        held = {copy for copy in copier.region.all_held() if copy}
        assert {Copy(Version(6, 2), 1, 0), Copy(Version(5, 2), 2, 0), Copy(AT, 2, 0)} <= held
