"""A shard on a device is copied into pinned memory while the device computes: whole or not at all, with the
same bytes as from a CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from elastic.errors import CopyLost
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import moves
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.plan import Plan
from elastic.state import hosts, node_memory, pins, snapshot
from elastic.state.digest import digests
from elastic.state.hosts import Access
from elastic.state.keeper_store import KeeperStore
from elastic.state.region import BLOCK, Region, frame, pages
from elastic.state.shard import Shard
from elastic.state.snapshot import Snapshots
from elastic.state.staging import STAGE, StagedBlocks, StagingStream
from elastic.train.heal import nothing
from tests.state.test_copies import AT, AUTO, SECRET, TENSORS, equal, outcome, shard_of
from tests.support.cells import cell
from tests.support.patience import until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SLEEP_S = 0.5
PLAN = Plan(1, AT.generation, Layout(), (WorkerId("w0"),), AT, "init", (), NodeId("n"), copy_every=1)


def copier_on(device: str) -> Snapshots:
    whole = frame(TENSORS, cell(1, 0))
    region = Region.create(2, whole.bytes, whole.blocks)
    region["keeper"] = os.getpid()
    snapshots = Snapshots(region, TENSORS, torch.device(device), AUTO)
    snapshots.ready()
    return snapshots


def at(step: int, device: str) -> Shard:
    """Returns a shard as a worker holds it: the number of updates on the host, all else on ``device``."""
    shard = shard_of(Version(step, AT.generation), 1, 0)
    return Shard(
        shard.version,
        cell(1, 0),
        {key: value if key[0] == "scalar" else value.to(device) for key, value in shard.values.items()},
    )


def sleep_cycles() -> int:
    """Returns how many cycles of the device take ``SLEEP_S``."""
    cycles = int(1e8)
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    began = time.monotonic()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return int(cycles * SLEEP_S / (time.monotonic() - began))


def test_the_bytes_and_digests_are_those_of_the_other_way() -> None:
    copiers = [copier_on(device) for device in ("cpu", "cuda")]
    for snapshots, device in zip(copiers, ("cpu", "cuda"), strict=True):
        snapshots.enter(PLAN, WorkerId("w0"), at(4, device))
        for step in range(5, 9):
            assert snapshots.settle().copied_through == step - 1
            torch.cuda.synchronize()
            snapshots.committed(outcome(step, copied=step - 1), at(step, device))
        snapshots.settle()
    torch.cuda.synchronize()
    one, other = (snapshots.region for snapshots in copiers)
    assert (
        one.all_held()
        == other.all_held()
        == [Copy(Version(8, 2), cell(1, 0)), Copy(Version(7, 2), cell(1, 0))]
    )
    for slot in range(2):
        assert bytes(one.data(slot)) == bytes(other.data(slot)) and bytes(one.digests(slot)) == bytes(
            other.digests(slot)
        )


def begun_behind(cycles: int, first: Callable[[], None] = nothing) -> tuple[Snapshots, float]:
    """Returns a copier whose copy of step 5 waits until its stream has slept for ``cycles``, and the time
    when the copy was begun.
    """
    snapshots, later = copier_on("cuda"), at(5, "cuda")
    snapshots.enter(PLAN, WorkerId("w0"), at(4, "cuda"))
    assert snapshots.settle().copied_through == 4
    torch.cuda.synchronize()
    first()
    began = time.monotonic()
    with torch.cuda.stream(snapshots._way._stream):  # type: ignore[union-attr]
        torch.cuda._sleep(cycles)
    snapshots.committed(outcome(5, copied=4), later)
    return snapshots, began


def test_a_copy_is_none_until_it_is_done_and_who_asks_for_it_waits() -> None:
    def compute() -> None:
        torch.ones((), device="cuda").add_(1)

    # ``compute`` runs once before: CUDA loads a kernel when it is first used, and waits for the device
    snapshots, began = begun_behind(sleep_cycles(), compute)
    assert time.monotonic() - began < SLEEP_S / 2, "who begins one waits for nothing"
    compute()
    done = torch.cuda.Event()
    done.record()
    while not done.query() and time.monotonic() < began + SLEEP_S:
        time.sleep(0.001)
    assert (
        snapshots.region.find(Copy(Version(5, 2), cell(1, 0))) is None
        and time.monotonic() - began < SLEEP_S / 2
    ), "nor does the device"
    assert (
        snapshots.settle().copied_through == 5
        and snapshots.region.find(Copy(Version(5, 2), cell(1, 0))) is not None
    )
    assert 0.5 * SLEEP_S < snapshots._held_up_s < 2 * SLEEP_S


def test_two_pieces_at_most_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[int]()
    monkeypatch.setattr("elastic.state.snapshot.PIECE", 1)
    monkeypatch.setattr(
        "elastic.state.snapshot.digests", lambda data, out: (launched.append(data.nbytes), digests(data, out))
    )
    snapshots, _ = begun_behind(sleep_cycles(), launched.clear)
    time.sleep(SLEEP_S / 2)
    assert len(launched) == 2
    assert snapshots.settle().copied_through == 5 and len(launched) == len(TENSORS)


@pytest.mark.parametrize(
    "worker, node",
    [("w0", "n"), ("w1", "n"), ("w1", "m")],
    ids=["from its own pinned memory", "from that of another one", "over a wire"],
)
def test_a_shard_on_a_device_is_filled_piece_by_piece_and_no_bent_byte_is_taken(
    monkeypatch: pytest.MonkeyPatch, worker: str, node: str
) -> None:
    monkeypatch.setattr(hosts, "STAGE", BLOCK)
    monkeypatch.setattr(hosts, "TURN", BLOCK)  # so that both streams have work
    snapshots = copier_on("cuda")
    snapshots.enter(PLAN, WorkerId("w0"), at(AT.step, "cuda"))
    snapshots.settle()
    torch.cuda.synchronize()
    with closing(KeeperStore(NodeId("n"), "127.0.0.1", SECRET)) as keeper_store:
        keeper_store.adopt(WorkerId("w0"), os.getpid(), snapshots.region.descriptor)
        places = {"nodes": (NodeId(node),), "hosts": ((NodeId("n"), keeper_store.address),)}
        plan = replace(
            PLAN,
            generation=3,
            members=(WorkerId(worker),),
            tier="host",
            holders=tuple(keeper_store.held()),
            **places,
        )
        todo = moves(TENSORS, plan.holders, plan.layout, plan.members, plan.nodes)
        access = Access(WorkerId(worker), SECRET, snapshots.region)
        shard = at(AT.step + 1, "cuda")

        def fill() -> int:
            with (
                StagingStream(torch.device("cuda"), 0) as one,
                StagingStream(torch.device("cuda"), 1) as other,
            ):
                return hosts.read(shard, TENSORS, plan, access, todo, [one, other], nothing)

        assert fill() == sum(value.nbytes for value in shard.values.values()) and equal(
            shard, at(AT.step, "cuda")
        )
        (slot,) = [slot for slot, held in enumerate(snapshots.region.all_held()) if held is not None]
        assert torch.frombuffer(snapshots.region.data(slot), dtype=torch.uint8).is_pinned()
        snapshots.region.data(slot)[3 * BLOCK] ^= 1
        with pytest.raises(CopyLost, match="bytes do not match their digests"):
            fill()


def test_copies_take_no_more_of_the_device_than_the_first() -> None:
    snapshots = copier_on("cuda")
    snapshots.enter(PLAN, WorkerId("w0"), at(4, "cuda"))
    shard, taken = at(5, "cuda"), []
    for step in range(5, 40):
        snapshots.settle()
        torch.cuda.synchronize()
        snapshots.committed(
            outcome(step, copied=step - 1), Shard(Version(step, AT.generation), cell(1, 0), shard.values)
        )
        taken.append(torch.cuda.memory_allocated())
    assert max(taken[3:]) <= max(taken[:3])


def world(generation: int, count: int, step: int) -> Plan:
    members = tuple(WorkerId(f"w{rank}") for rank in range(count))
    version, nodes = Version(step, generation), (NodeId("n"),) * count
    return replace(
        PLAN, generation=generation, layout=Layout(1, count), members=members, version=version, nodes=nodes
    )


def live(snapshots: Snapshots, plan: Plan, steps: range) -> None:
    """Lives through ``steps`` of a world as its first member, and compares the last copy with the shard."""
    count, region = plan.layout.world, snapshots.region

    def shard(step: int) -> Shard:
        host = shard_of(Version(step, plan.generation), count, 0)
        return Shard(
            host.version,
            host.cell,
            {key: value if key[0] == "scalar" else value.to("cuda") for key, value in host.values.items()},
        )

    snapshots.enter(plan, WorkerId("w0"), shard(steps[0]))
    for step in steps[1:]:
        assert snapshots.settle().copied_through == step - 1
        torch.cuda.synchronize()
        snapshots.committed(replace(outcome(step, copied=step - 1), generation=plan.generation), shard(step))
    assert snapshots.settle().copied_through == steps[-1]
    last = Version(steps[-1], plan.generation)
    slot = region.find(Copy(last, cell(count, 0)))
    assert slot is not None and torch.frombuffer(region.data(slot), dtype=torch.uint8).is_pinned()
    values = shard_of(last, count, 0).values
    for tensor, place in frame(TENSORS, cell(count, 0)).places.items():
        expected = values[tensor.kind, tensor.name].contiguous().flatten().view(torch.uint8)
        assert bytes(region.data(slot)[place.offset : place.offset + place.bytes]) == bytes(expected.numpy())


def test_pinned_slots_follow_the_world_and_the_memory_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot has what its copy needs; what the next world needs too, while the node has room; and not more
    where the node has none.  What it gets for the next world comes in pieces, and copies go over their
    borders, both ways.
    """
    monkeypatch.setattr(pins, "PIECE", 4096)
    whole, half = frame(TENSORS, cell(1, 0)), frame(TENSORS, cell(2, 0)).bytes
    free, foreseen = [2**40], [0]
    for module in (node_memory, pins):
        monkeypatch.setattr(module, "free_memory", lambda: (free[0], "the node (MemAvailable)"))
    region = Region.create(3, whole.bytes, whole.blocks)
    region["keeper"], region["wanted"] = os.getpid(), 3 * half
    snapshots = Snapshots(region, TENSORS, torch.device("cuda"), AUTO, foresee=lambda plan: foreseen[0])
    way = snapshots._way
    assert isinstance(way, snapshot._Pinned)
    until(lambda: way.usable() == 3)

    assert way.pins.sizes() == [pages(half)] * 3, (
        "before the first world: what the world with the smallest parts needs"
    )
    live(snapshots, world(2, 2, 4), range(4, 9))
    assert way.pins.sizes() == [pages(half)] * 3
    foreseen[0] = whole.bytes
    live(snapshots, world(3, 2, 8), range(8, 13))
    until(lambda: way.pins.sizes() == [pages(whole.bytes)] * 3)
    assert way.pins.sizes() == [pages(whole.bytes)] * 3, (
        "room for the copies of the world that follows a loss"
    )
    foreseen[0] = 0
    live(snapshots, world(4, 1, 12), range(12, 16))
    slot = region.find(Copy(Version(15, 4), cell(1, 0)))
    assert slot is not None
    raw = torch.frombuffer(region.data(slot), dtype=torch.uint8)[: whole.bytes]
    there = torch.zeros(whole.bytes, dtype=torch.uint8, device="cuda")
    assert raw.is_pinned() and snapshots.cuts(raw), "the copy goes over borders"
    with StagingStream(torch.device("cuda"), 0, snapshots.cuts) as way_back:
        for first in range(0, whole.bytes, STAGE):
            way_back.send(StagedBlocks(there[first : first + STAGE], raw[first : first + STAGE], 0))
        way_back.arrived()
    assert torch.equal(there.cpu(), raw)
    live(snapshots, world(5, 2, 15), range(15, 19))
    assert way.pins.sizes() == [pages(whole.bytes)] * 3, (
        "what is pinned stays, because the node has memory enough"
    )
    free[0] = 0
    live(snapshots, world(6, 2, 18), range(18, 23))
    assert way.pins.sizes() == [pages(half)] * 3, "a node without memory gets back what copies do not need"
    assert os.fstat(region.descriptor).st_blocks * 512 < 4 * half
    free[0] = node_memory.SPARE + whole.bytes
    live(snapshots, world(8, 1, 22), range(22, 26))
    assert max(way.pins.sizes()) == pages(whole.bytes), "and copies that need more take it"


def launches(memory: torch.Tensor) -> str:
    """Returns how a launch ends on a thread that has just pinned ``memory``, which is pinned already."""
    pins.register(memory)
    try:
        torch.ones(1, device="cuda").add_(1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("forgets", [True, False], ids=["ours", "control"])
def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_next_launch(
    monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """CUDA keeps an error for each thread, and torch asks for it after a launch.  The control does not make
    CUDA forget it.
    """
    memory = torch.zeros(2**20, dtype=torch.uint8)
    end = pins.register(memory)
    assert not isinstance(end, str)
    if not forgets:
        monkeypatch.setattr(pins, "forget_error", lambda: None)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(launches, memory).result()
    assert ("already" in found) is not forgets, found
    end()
