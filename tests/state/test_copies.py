"""A shard's way: from the device into a slot, to a buddy, and into the shards of a world of another size; no
damaged copy is used.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from elastic.errors import CopyLost, FencedOff
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import moves, reads_copies
from elastic.protocol.commit_record import NO_COPIES, Copied
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.plan import Plan
from elastic.state import hosts
from elastic.state.digest import digests
from elastic.state.hosts import TURN
from elastic.state.keeper_store import KeeperStore
from elastic.state.region import BLOCK, Region, frame
from elastic.state.snapshot import Snapshots
from elastic.state.staging import STAGE
from elastic.state.wire import Wire
from tests.state.nodes import AT, AUTO, SECRET, TENSORS, cluster, enter, equal, heal, later, outcome, shard_of
from tests.support.cells import cell
from tests.support.patience import PATIENCE_S


@pytest.mark.parametrize("new", [Layout(1, 1), Layout(1, 3), Layout(2, 2), Layout(1, 4)], ids=str)
@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("stage", [BLOCK, STAGE])
def test_any_world_is_filled_from_copies_alone(
    monkeypatch: pytest.MonkeyPatch, new: Layout, per_node: int, stage: int
) -> None:
    """All workers of 1×4 on one, two or four nodes have died; newcomers read from their own node's memory and
    over sockets.

    They read pieces of one block, or a whole tensor at once.
    """
    monkeypatch.setattr(hosts, "STAGE", stage)
    with cluster(Layout(1, 4), per_node) as (plan, nodes):
        enter(plan, nodes)
        held = [holding for node in nodes for holding in node.store.held()]
        assert sorted((each.worker, each.cell) for each in held) == [(f"w{i}", cell(4, i)) for i in range(4)]
        homes = [(WorkerId(f"n{i}"), nodes[i % len(nodes)].name) for i in range(new.world)]
        there = later(plan, new, homes, nodes, held)
        for rank, (worker, _) in enumerate(homes):
            shard, used = heal(there, worker)
            right = shard_of(AT, new.dp_shard, new.coordinates(rank)["dp_shard"])
            assert equal(shard, right) and used == sum(value.nbytes for value in right.values.values())


@pytest.mark.parametrize("before, turn, streams", [(2, TURN, 2), (2, TURN, 1), (1, BLOCK, 2), (1, TURN, 2)])
def test_as_many_read_at_once_as_there_are_streams(
    monkeypatch: pytest.MonkeyPatch, before: int, turn: int, streams: int
) -> None:
    """Two threads of a healing meet if there are two copies, or one copy of several turns; a single reader
    waits in vain.
    """
    monkeypatch.setattr(hosts, "TURN", turn)
    meets = streams == 2 and (before == 2 or turn < TURN)
    together = threading.Barrier(2)
    met = threading.local()

    def meet() -> None:
        if not hasattr(met, "once"):
            met.once = True
            together.wait(PATIENCE_S if meets else 0.5)

    with cluster(Layout(1, before), 1) as (plan, nodes):
        enter(plan, nodes)
        there = later(
            plan,
            Layout(1, 1),
            [(WorkerId("n"), nodes[0].name)],
            nodes,
            [each for node in nodes for each in node.store.held()],
        )
        if meets:
            assert equal(heal(there, WorkerId("n"), streams, meet)[0], shard_of(AT, 1, 0))
        else:
            with pytest.raises(threading.BrokenBarrierError):
                heal(there, WorkerId("n"), streams, meet)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "error", [CopyLost("lost", NodeId("n")), FencedOff("fenced")], ids=["lost", "fenced"]
)
def test_who_fails_stops_the_others_and_leaves_when_nobody_writes_any_more(
    monkeypatch: pytest.MonkeyPatch, error: Exception, which: int
) -> None:
    """The other thread is then in the middle of a copy of many pieces."""
    monkeypatch.setattr(hosts, "STAGE", BLOCK)
    together, calls, ended = threading.Barrier(2), Counter[int](), threading.Event()

    def hook() -> None:
        calls[threading.get_ident()] += 1
        if calls[threading.get_ident()] == 1:  # before the first piece
            return
        if together.wait(PATIENCE_S) == which:
            raise error
        time.sleep(1)
        ended.set()

    with cluster(Layout(1, 2), 1) as (plan, nodes):
        enter(plan, nodes)
        there = later(
            plan,
            Layout(1, 1),
            [(WorkerId("n"), nodes[0].name)],
            nodes,
            [each for node in nodes for each in node.store.held()],
        )
        with pytest.raises(type(error), match=str(error)):
            heal(there, WorkerId("n"), 2, hook)
        assert ended.is_set() and list(calls.values()) == [2, 2]


def test_of_two_failures_the_lost_copy_is_told() -> None:
    """The next plan must not use the lost copy; that the generation was fenced is known anyway."""
    together, met = threading.Barrier(2), threading.local()

    def hook() -> None:
        if hasattr(met, "once"):
            return
        met.once = True
        raise CopyLost("lost", NodeId("n")) if together.wait(PATIENCE_S) else FencedOff("fenced")

    with cluster(Layout(1, 2), 1) as (plan, nodes):
        enter(plan, nodes)
        there = later(
            plan,
            Layout(1, 1),
            [(WorkerId("n"), nodes[0].name)],
            nodes,
            [each for node in nodes for each in node.store.held()],
        )
        for _ in range(5):
            with pytest.raises(CopyLost):
                heal(there, WorkerId("n"), 2, hook)
            met = threading.local()


@pytest.mark.parametrize("turn, most", [(TURN, 1), (BLOCK, 20)])
def test_each_copy_is_asked_for_once_a_turn_by_whoever_reads_any(
    monkeypatch: pytest.MonkeyPatch, turn: int, most: int
) -> None:
    asked = list[str]()
    connect = Wire.connect
    monkeypatch.setattr(
        Wire, "connect", lambda address, secret: (asked.append(address), connect(address, secret))[1]
    )
    monkeypatch.setattr(hosts, "TURN", turn)
    with cluster(Layout(1, 4), 2) as (plan, nodes):
        enter(plan, nodes)
        held = [each for node in nodes for each in node.store.held()]
        homes = [(WorkerId(f"n{i}"), nodes[0].name) for i in range(3)]
        there = later(plan, Layout(1, 3), homes, nodes, held)
        todo = moves(TENSORS, there.holders, there.layout, there.members, there.nodes)
        for rank, (worker, _) in enumerate(homes):
            asked.clear()
            shard, _ = heal(there, worker)
            copies = len({(move.keeper, move.source) for move in todo if move.destination == worker})
            assert equal(shard, shard_of(AT, 3, rank)) and reads_copies(todo, worker)
            assert copies == len(asked) if most == 1 else copies < len(asked) < copies * most
        assert not reads_copies(todo, WorkerId("w0"))


def test_the_end_of_a_world_does_not_wait_for_a_copy_and_the_next_one_begins_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy still reads the old world's state; the time it takes does not count as a copy of the next
    world.

    The clock stands still, except that this copy takes 100 s.
    """
    now, lasts, goes_on = [1000.0], [100.0], threading.Event()
    monkeypatch.setattr(
        "elastic.state.snapshot.time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    )

    def held_up(data: memoryview, out: memoryview) -> None:
        assert goes_on.wait(PATIENCE_S)
        now[0] += lasts.pop() if lasts else 0.0
        digests(data, out)

    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        (snapshots,) = nodes[0].workers.values()
        with monkeypatch.context() as at:
            at.setattr("elastic.state.snapshot.digests", held_up)
            snapshots.committed(outcome(5, copied=4), shard_of(Version(5, 2), 1, 0))
            assert snapshots.region.find(Copy(Version(5, 2), cell(1, 0))) is None
            threading.Timer(0.2, goes_on.set).start()
            snapshots.enter(
                replace(plan, generation=3, version=Version(5, 2)),
                WorkerId("w0"),
                shard_of(Version(5, 2), 1, 0),
            )
        assert goes_on.is_set() and snapshots.settle().copied_through == 5
        assert {held for held in snapshots.region.all_held() if held} == {
            Copy(AT, cell(1, 0)),
            Copy(Version(5, 2), cell(1, 0)),
        }
        snapshots.committed(replace(outcome(6, copied=5), generation=3), shard_of(Version(6, 3), 1, 0))
        assert now == [1100.0] and max(snapshots.pace._copies_s) == snapshots.pace.step_s == 0


def test_a_step_is_not_committed_while_the_copy_of_the_one_before_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update after the commit writes the memory that the copy reads.  So the copy has the bits of its
    version, and no later ones.
    """
    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        (snapshots,) = nodes[0].workers.values()
        snapshots.settle()
        goes_on, version = threading.Event(), Version(5, 2)
        shard = shard_of(version, 1, 0)
        with monkeypatch.context() as at:
            at.setattr(
                "elastic.state.snapshot.digests",
                lambda data, out: (goes_on.wait(PATIENCE_S), digests(data, out)),
            )
            snapshots.committed(outcome(5, copied=4), shard)
            settling = threading.Thread(target=snapshots.settle)
            settling.start()
            settling.join(0.2)
            assert settling.is_alive() and snapshots.region.find(Copy(version, cell(1, 0))) is None
            goes_on.set()
            settling.join(PATIENCE_S)
        assert not settling.is_alive() and snapshots.region.find(Copy(version, cell(1, 0))) is not None
        for value in shard.values.values():
            value.zero_()  # the next update
        held = [each for each in nodes[0].store.held() if each.version == version]
        there = later(plan, Layout(1, 1), [(WorkerId("n"), nodes[0].name)], nodes, held)
        assert equal(heal(there, WorkerId("n"))[0], shard_of(version, 1, 0))


@pytest.mark.parametrize("failures", [1, 2])
def test_a_copy_that_fails_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failures: int
) -> None:
    """The retry matters: otherwise this world would begin no other copy, and state that only one member holds
    would be unprotected.
    """
    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        (snapshots,) = nodes[0].workers.values()
        left = ["no memory"] * failures

        def fail(data: torch.Tensor, out: torch.Tensor) -> None:
            if left:
                raise RuntimeError(left.pop())
            digests(data, out)

        monkeypatch.setattr("elastic.state.snapshot.digests", fail)
        snapshots.committed(outcome(5, copied=4), shard_of(Version(5, 2), 1, 0))
        assert snapshots.settle().copied_through == (5 if failures == 1 else -1)
        assert capfd.readouterr().err.count("RuntimeError: no memory") == failures
        assert (snapshots.region.find(Copy(Version(5, 2), cell(1, 0))) is not None) == (failures == 1)
        assert snapshots.region.find(Copy(AT, cell(1, 0))) is not None


def test_two_versions_are_there_and_the_older_one_is_read_when_it_is_wanted() -> None:
    with cluster(Layout(1, 2), 2) as (plan, nodes):
        enter(plan, nodes)
        for worker, snapshots in nodes[0].workers.items():
            snapshots.committed(outcome(5, copied=4), shard_of(Version(5, 2), 2, plan.world_rank(worker)))
            assert snapshots.settle() == Copied(5)
        held = nodes[0].store.held()
        assert sorted({each.version.step for each in held}) == [4, 5] and len(held) == 4
        for version in (AT, Version(5, 2)):
            there = later(
                plan,
                Layout(1, 1),
                [(WorkerId("n"), nodes[0].name)],
                nodes,
                [each for each in held if each.version == version],
            )
            assert equal(heal(there, WorkerId("n"))[0], shard_of(version, 1, 0))


def test_a_copy_that_is_not_complete_everywhere_is_never_the_only_one() -> None:
    """The next copy is begun only when all members have the one before, which one of the two slots therefore
    always holds.
    """
    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        snapshots, region = nodes[0].workers[WorkerId("w0")], nodes[0].workers[WorkerId("w0")].region
        snapshots.committed(outcome(5, copied=-1), shard_of(Version(5, 2), 1, 0))
        assert snapshots.settle().copied_through == 4, "somebody else has not finished"
        snapshots.committed(outcome(6, copied=4), shard_of(Version(6, 2), 1, 0))
        snapshots.committed(outcome(7, copied=4), shard_of(Version(7, 2), 1, 0))
        assert snapshots.settle().copied_through == 6 and {
            copy.version.step for copy in region.all_held() if copy
        } == {4, 6}
        snapshots.committed(outcome(8, copied=6), shard_of(Version(8, 2), 1, 0))
        snapshots.settle()
        assert {copy.version.step for copy in region.all_held() if copy} == {6, 8}


@pytest.mark.parametrize("turn", [TURN, BLOCK], ids=["one reads it", "two do"])
@pytest.mark.parametrize("where", ["here", "remote"])
def test_a_bent_byte_is_noticed_and_the_copy_counts_no_more(
    where: str, turn: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "TURN", turn)
    with cluster(Layout(1, 2), 1) as (plan, nodes):
        enter(plan, nodes)
        holders = [holding for node in nodes for holding in node.store.held()]
        home = nodes[1].name if where == "here" else nodes[0].name
        there = later(plan, Layout(1, 1), [(WorkerId("n"), home)], nodes, holders)
        assert equal(heal(there, WorkerId("n"))[0], shard_of(AT, 1, 0)), "the control"
        region = nodes[1].workers[WorkerId("w1")].region
        slot = region.find(Copy(AT, cell(2, 1)))
        assert slot is not None
        region.data(slot)[BLOCK + 100] ^= 1
        with pytest.raises(CopyLost, match="bytes do not match their digests") as lost:
            heal(there, WorkerId("n"))
        assert (
            lost.value.keeper == nodes[1].name
            and nodes[1].store.held() == ()
            and len(nodes[0].store.held()) == 1
        )
        assert "the copy of w1 at step 4 of generation 2 is damaged" in capfd.readouterr().out


def test_a_copy_that_is_overwritten_or_gone_is_an_error_that_names_its_keeper() -> None:
    with cluster(Layout(1, 2), 1) as (plan, nodes):
        enter(plan, nodes)
        holders = [holding for node in nodes for holding in node.store.held()]
        for home in (nodes[0].name, nodes[1].name):
            there = later(
                plan,
                Layout(1, 1),
                [(WorkerId("n"), home)],
                nodes,
                [replace(each, version=Version(9, 2)) for each in holders],
            )
            with pytest.raises(CopyLost, match="not there any more"):
                heal(there, WorkerId("n"))
        there = later(plan, Layout(1, 1), [(WorkerId("n"), nodes[0].name)], nodes, holders)
        nodes[1].store.close()
        with pytest.raises(CopyLost, match=r"the copy of w1 on node node1") as lost:
            heal(there, WorkerId("n"))
        assert lost.value.keeper == "node1"


@pytest.mark.parametrize("where", ["here", "remote"])
@pytest.mark.parametrize("overwritten", [True, False], ids=["overwritten", "control"])
def test_a_copy_that_is_overwritten_while_it_is_read_is_lost(
    monkeypatch: pytest.MonkeyPatch, where: str, overwritten: bool
) -> None:
    """Its worker goes on with two steps before the bytes are sent, or here once the first of them were read.
    What comes then is of another version, with the right digests."""
    with cluster(Layout(1, 1), 1) as (plan, nodes):
        enter(plan, nodes)
        (snapshots,) = nodes[0].workers.values()
        home = nodes[0].name if where == "here" else NodeId("elsewhere")
        there = later(plan, Layout(1, 1), [(WorkerId("n"), home)], nodes, nodes[0].store.held())
        steps = [5, 6] if overwritten else []

        def goes_on() -> None:
            while steps:
                step = steps.pop(0)
                snapshots.committed(outcome(step, copied=step - 1), shard_of(Version(step, 2), 1, 0))
                snapshots.settle()

        if where == "remote":
            find = KeeperStore._find
            monkeypatch.setattr(
                KeeperStore, "_find", lambda store, *arguments: (find(store, *arguments), goes_on())[0]
            )
        calls = itertools.count()

        def hook() -> None:
            if where == "here" and next(calls):  # the first call is before the first piece
                goes_on()

        if not overwritten:
            assert equal(heal(there, WorkerId("n"), hook=hook)[0], shard_of(AT, 1, 0))
            return
        with pytest.raises(CopyLost, match="a newer copy has overwritten it during the transfer"):
            heal(there, WorkerId("n"), hook=hook)
        assert not steps and {copy.version.step for copy in snapshots.region.all_held() if copy} == {5, 6}


def test_what_a_dead_worker_left_stays_until_it_is_released() -> None:
    with cluster(Layout(1, 2), 2) as (plan, nodes):
        enter(plan, nodes)
        store = nodes[0].store
        store.ended(WorkerId("w1"))
        store.release(AT, AT)
        assert {each.worker for each in store.held()} == {"w0", "w1"}, "of this very version"
        store.release(Version(0, 3), Version(0, 3))
        assert {each.worker for each in store.held()} == {"w0"}, "the living keep theirs"


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
    """The copy would die with its worker, so nobody is told that it is there."""
    region = Region.create(2, frame(TENSORS, cell(1, 0)).bytes, frame(TENSORS, cell(1, 0)).blocks)
    snapshots = Snapshots(region, TENSORS, torch.device("cpu"), AUTO)
    plan = Plan(1, 2, Layout(), (WorkerId("w0"),), AT, "init", (), NodeId("n"), copy_every=1)
    snapshots.enter(plan, WorkerId("w0"), shard_of(AT, 1, 0))
    assert snapshots.settle() == NO_COPIES
    store = KeeperStore(NodeId("n"), "127.0.0.1", SECRET)
    store.adopt(WorkerId("w0"), os.getpid(), region.descriptor)
    assert snapshots.settle() == Copied(AT.step) and [each.version for each in store.held()] == [AT]
    store.close()
