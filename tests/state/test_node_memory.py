"""A node's memory for copies: nobody dies for lack of it, dead workers do not fill it, smaller copies give
back what larger ones took.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.copy_schedule import Copy
from elastic.state import keeper_store, node_memory
from elastic.state.keeper_store import KeeperStore
from elastic.state.region import Region, frame
from tests.state.nodes import AT, SECRET, TENSORS, cluster, enter, outcome, pair, shard_of
from tests.support.cells import cell
from tests.support.patience import PATIENCE_S

MIB = 2**20
WORKER = """
import sys
from elastic.ids import Version
from elastic.protocol.copy_schedule import Copy
from elastic.state.region import Region
from tests.support.cells import cell
region = Region.create(3, 8 * 2**20, 1)
for slot in range(2):
    region.data(slot)[:] = bytes([7]) * region.slot_bytes
region.finish(0, Copy(Version(4, 2), cell(2, int(sys.argv[1]))), region.slot_bytes)
print(region.descriptor, flush=True)
input()
"""


def taken(region: Region) -> int:
    return os.fstat(region.descriptor).st_blocks * 512


def limit(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    monkeypatch.setattr(node_memory, "free_memory", lambda: (free(), "the container (memory.max = 1)"))


@pytest.mark.parametrize("same", [True, False])
def test_deaths_in_a_row_do_not_fill_the_node(same: bool) -> None:
    """Five workers die by SIGKILL, each with one complete copy and one torn: the torn ones are given back,
    equal ones kept once.
    """
    store = KeeperStore(NodeId("n"), "127.0.0.1", SECRET)
    for number in range(5):
        command = [sys.executable, "-c", WORKER, "0" if same else str(number % 2)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        store.adopt(WorkerId(f"w{number}"), process.pid, int(process.stdout.readline()))
        process.kill()
        process.communicate()
        assert sum(taken(region) for _, region in store.regions()) >= 16 * MIB, (
            "the control: SIGKILL alone gives nothing back"
        )
        store.ended(WorkerId(f"w{number}"))
        assert store.region(WorkerId(f"w{number}"))[0]["wanted"] == 0, "nobody writes to it any more"  # type: ignore[index]
    copies = 1 if same else 2
    assert copies * 8 * MIB <= sum(taken(region) for _, region in store.regions()) <= (copies * 8 + 1) * MIB
    assert len(store.held()) == copies
    found = store._find(WorkerId("w4"), {"step": 4, "generation": 2, "cell": cell(2, 0)})
    assert found is not None and set(found[0].data(found[1])) == {7}, (
        "whoever still asks the last one for it is given the first one's"
    )
    store.close()


def test_a_node_without_memory_skips_copies_and_goes_on_with_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written where there is no room; the keeper says so, saves wait, and the first save with room
    brings copies back.
    """
    free, said = [2**40], list[str]()
    limit(monkeypatch, lambda: free[0])
    with cluster(Layout(1, 1), 1, slots=3) as (plan, nodes):
        enter(plan, nodes)
        (snapshots,), store = nodes[0].workers.values(), nodes[0].store
        store.say = said.append
        before, free[0] = taken(snapshots.region), 0
        snapshots.committed(outcome(5, copied=4), shard_of(Version(5, 2), 1, 0))
        report = snapshots.settle()
        assert (report.copied_through, report.behind) == (-1, 1) and taken(snapshots.region) == before
        assert [each.version for each in store.held()] == [AT], "what is protected stays"
        store.say_who_lacks_memory()
        store.say_who_lacks_memory()
        assert len(said) == 1 and "of memory for a copy of w0" in said[0]
        free[0] = 2**40
        assert snapshots.settle().behind == 0
        snapshots.committed(replace(outcome(6, copied=-1), saves=True), shard_of(Version(6, 2), 1, 0))
        assert snapshots.settle().copied_through == 6
        store.say_who_lacks_memory()
        assert len(said) == 2 and "again" in said[1]


def test_slots_that_nobody_needs_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of three slots goes on with memory for two copies, since the unprotected slot gives its memory
    back.
    """
    with cluster(Layout(1, 1), 1, slots=3) as (plan, nodes):
        (snapshots,) = nodes[0].workers.values()
        one = -(-frame(TENSORS, cell(1, 0)).bytes // 4096) * 4096
        limit(monkeypatch, lambda: node_memory.SPARE + 2 * one - sum(snapshots.region._reserved))
        enter(plan, nodes)
        for step in range(5, 10):
            snapshots.committed(outcome(step, copied=step - 1), shard_of(Version(step, 2), 1, 0))
            assert snapshots.settle().copied_through == step
        assert sum(snapshots.region._reserved) == 2 * one


def test_a_smaller_copy_gives_back_what_a_larger_one_took() -> None:
    with cluster(Layout(1, 1), 1, slots=2) as (plan, nodes):
        enter(plan, nodes)
        (snapshots,) = nodes[0].workers.values()
        snapshots.committed(outcome(5, copied=4), shard_of(Version(5, 2), 1, 0))
        snapshots.settle()
        large = taken(snapshots.region)
        members = tuple(WorkerId(f"w{rank}") for rank in range(4))
        small = replace(
            plan,
            generation=3,
            version=Version(5, 2),
            layout=Layout(1, 4),
            members=members,
            nodes=(nodes[0].name,) * 4,
        )
        assert snapshots.region["wanted"] == 2 * frame(TENSORS, cell(1, 0)).bytes
        snapshots.enter(small, WorkerId("w0"), shard_of(Version(5, 2), 4, 0))
        assert snapshots.region["wanted"] == 2 * frame(TENSORS, cell(4, 0)).bytes, (
            "what other workers must leave for it"
        )
        snapshots.settle()
        kept = (
            snapshots.region.find(Copy(AT, cell(1, 0))),
            snapshots.region.find(Copy(Version(5, 2), cell(1, 0))),
        )
        assert sum(each is not None for each in kept) == 1, (
            "the protected copy of the layout before stays whole"
        )
        snapshots.committed(replace(outcome(6, copied=5), generation=3), shard_of(Version(6, 3), 4, 0))
        snapshots.settle()
        assert taken(snapshots.region) < large / 2


def test_a_buddy_without_memory_refuses_the_copy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    with cluster(Layout(1, 2), 1, slots=5) as (plan, nodes):
        nodes[1].store.say = said.append
        enter(plan, nodes)
        monkeypatch.setattr(keeper_store, "reserve", lambda *_: "no room")
        pair(nodes)
        for node in nodes:
            for worker, snapshots in node.workers.items():
                snapshots.enter(
                    replace(plan, buddy_every=1), worker, shard_of(AT, 2, plan.world_rank(worker))
                )
        snapshots = nodes[0].workers[WorkerId("w0")]
        until = patiently()
        while not any("no memory for a copy of w0 of another node" in each for each in said):
            until()
        assert snapshots.settle().buddied_through == -1
        monkeypatch.undo()
        until = patiently()
        while snapshots.settle().buddied_through != AT.step:
            until()


def patiently() -> Callable[[], None]:
    """Returns a call that waits a little, and fails once it was called for too long."""
    end = time.monotonic() + PATIENCE_S

    def wait() -> None:
        assert time.monotonic() < end
        time.sleep(0.02)

    return wait


@pytest.mark.parametrize(
    ("allowed", "free", "limit"),
    [
        ("3000000", 3_000_000 - 1_000_000 + 200_000, "the container (memory.max = 3000000)"),
        ("9000000000", 4_096_000, "the node (MemAvailable)"),
        ("max", 4_096_000, "the node (MemAvailable)"),
    ],
)
@pytest.mark.parametrize("group", ["own", "own/inner"])
def test_the_limit_that_is_reached_first_counts(
    tmp_path: Path, group: str, allowed: str, free: int, limit: str
) -> None:
    """A limit that a group above sets counts, too."""
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "cgroup").write_text(f"0::/{group}\n")
    folder = tmp_path / "groups" / "own"
    (folder / "inner").mkdir(parents=True)
    for name, text in (
        ("memory.max", allowed),
        ("memory.current", "1000000"),
        ("memory.stat", "anon 5\ninactive_file 200000\n"),
    ):
        (folder / name).write_text(f"{text}\n")
    places = tmp_path / "meminfo", tmp_path / "groups", tmp_path / "cgroup"
    assert node_memory.free_memory(*places) == (free, limit)
    assert node_memory.whole_memory(*places) == min(
        8_192_000, int(allowed) if allowed.isdigit() else 8_192_000
    )


def test_only_one_process_of_a_node_counts_on_its_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one waits for the first, but not for ever."""
    monkeypatch.setattr(node_memory, "FOLDER", tmp_path)
    entered = threading.Event()

    def enter_alone() -> None:
        with node_memory.alone():
            entered.set()

    other = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(other, fcntl.LOCK_EX)
    waiting = threading.Thread(target=enter_alone)
    waiting.start()
    assert not entered.wait(0.5)
    fcntl.flock(other, fcntl.LOCK_UN)
    assert entered.wait(PATIENCE_S)
    waiting.join()
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(node_memory, "PATIENCE_S", 0.3)
    enter_alone()
    os.close(other)
