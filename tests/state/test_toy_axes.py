"""Layouts of all axes, and of two that only tests have, go through all that moves state: exchange, host
copies, checkpoints, resuming, export.

What each member must end with is cut by numpy (``toy_axes.local``).  The product's only part in an axis is a
row of its table.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from elastic.control.corruption import in_dispute, votes_of
from elastic.control.run import Saving
from elastic.engine.optim.base import Optimizer, rule_of
from elastic.engine.world import World
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan import placement
from elastic.plan.copy_budget import CopyRule
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding, missing, moves
from elastic.protocol.commit_record import Outcome
from elastic.protocol.plan import Plan
from elastic.state.hosts import Access, read
from elastic.state.keeper_store import KeeperStore
from elastic.state.region import Region, frame
from elastic.state.shard import DTYPES, Shard
from elastic.state.snapshot import Snapshots
from elastic.state.staging import StagingStream
from elastic.state.uploader import SavePart, upload
from elastic.train.gauges.counters import Counters
from elastic.train.heal import from_bucket, from_members
from elastic.train.own_faults import Faults
from elastic.train.session import make_snapshots
from elastic.train.step import Share, used_anywhere
from storage.checkpoints import Checkpoints, ShardReceipt
from storage.objects import ObjectStore
from storage.slices import Tensor
from tests.support import toy_axes
from tests.support.ranks import Ranks
from tests.support.toy_axes import LAYOUTS, TENSORS

AT = Version(7, 1)
with toy_axes.registered():
    FOUR = [layout for layout in LAYOUTS if layout.world == 4]
SECRET = b"k" * 32


def whole(tensor: Tensor) -> torch.Tensor:
    """Returns ``tensor`` with the elements 1, 2, 3, …, which are exact in each dtype."""
    return torch.arange(1, int(np.prod(tensor.shape)) + 1).reshape(tensor.shape).to(DTYPES[tensor.dtype])


def right(layout: Layout, rank: int) -> dict[tuple[str, str], torch.Tensor]:
    """Returns what the member must have of each tensor of which it has anything."""
    place = toy_axes.places(layout)[rank]
    found = {}
    for tensor in TENSORS:
        cut = toy_axes.local(whole(tensor).to(torch.float64).numpy(), tensor, layout, place)
        if cut.size:
            found[tensor.kind, tensor.name] = torch.from_numpy(np.array(cut)).to(DTYPES[tensor.dtype])
    return found


def shard_of(layout: Layout, rank: int, version: Version = AT) -> Shard:
    return Shard(version, placement.cell_of(layout, rank), right(layout, rank))


def empty(layout: Layout, rank: int, version: Version = AT) -> Shard:
    values = {key: torch.full_like(value, -1) for key, value in right(layout, rank).items()}
    return Shard(version, placement.cell_of(layout, rank), values)


def check(shard: Shard, layout: Layout, rank: int) -> None:
    for key, expected in right(layout, rank).items():
        assert torch.equal(shard.values[key], expected), (str(layout), rank, key)


@dataclass
class Bare:
    """The part of a ``State`` that healing and saving use; it has no model."""

    tensors: tuple[Tensor, ...]
    shard: Shard
    world: World
    job: Job
    optimizer: Any = field(default_factory=lambda: SimpleNamespace(rule=SimpleNamespace(kept=())))


JOB = Job(name="toys", bucket="/nowhere", steps=1, global_batch=2)


def plan_of(layout: Layout, holders: Sequence[Holding], tier: str) -> Plan:
    members = tuple(WorkerId(f"w{rank}") for rank in range(layout.world))
    return Plan(1, 2, layout, members, AT, tier, tuple(holders), NodeId("n"), (NodeId("n"),) * layout.world)


def live(layout: Layout, without: int | None = None) -> list[Holding]:
    return [
        Holding(WorkerId(f"w{rank}"), AT, placement.cell_of(layout, rank))
        for rank in range(layout.world)
        if rank != without
    ]


# ---- in real processes


def heal_in_turn(world: World, layouts: Sequence[Layout], stale: bool) -> None:
    """Each change of layout fills each member's cell out of the others' memory."""
    with toy_axes.registered():
        shard = shard_of(layouts[0], world.rank)
        if stale and world.rank == 1:
            shard.values["parameter", "cube"] += 1
        for before, after in itertools.pairwise(layouts):
            plan = plan_of(after, live(before), "live")
            state = Bare(TENSORS, empty(after, world.rank), world, JOB)
            todo = moves(TENSORS, plan.holders, after, plan.members, plan.nodes, of=plan.members[world.rank])
            from_members(state, plan, plan.members[world.rank], [shard], todo)
            check(state.shard, after, world.rank)
            shard = state.shard


def test_any_layout_heals_into_any_other(ranks: Ranks) -> None:
    """R17, along axes of dimension 1, of half the tensors, of moments alone and of fused tensors, in random
    orders.
    """
    ranks.run_each(
        Layout(4), heal_in_turn, [(random.Random(seed).sample(FOUR, len(FOUR)), False) for seed in range(3)]
    )


def test_one_stale_slice_is_seen(ranks: Ranks) -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="cube"):
        ranks.run(Layout(4), heal_in_turn, [FOUR[1], FOUR[0]], True)


def save(state: Bare, checkpoints: Checkpoints) -> ShardReceipt:
    """Saves as a keeper does, out of the slot to which the member has copied its shard."""
    world = state.world
    plan = replace(plan_of(world.layout, [], "init"), copy_every=1)
    lies = frame(TENSORS, state.shard.cell)
    region = Region.create(3, lies.bytes, lies.blocks, TENSORS)
    snapshots = Snapshots(region, TENSORS, torch.device("cpu"), CopyRule())
    snapshots.enter(plan, plan.members[world.rank], state.shard)
    snapshots.settle()
    return upload(
        checkpoints, region, SavePart(1, os.getpid(), region.descriptor, AT, world.layout, world.rank)
    )


def save_and_resume(world: World, folder: str, before: Layout, after: Layout, lost: int | None) -> str | None:
    """Saves in one layout, and begins again in another with what the members that are left hold, and the rest
    from the bucket.
    """
    with toy_axes.registered():
        checkpoints = Checkpoints(ObjectStore.open(folder), "toys")
        shard = shard_of(before, world.rank)
        receipts = gather(
            world, save(Bare(TENSORS, shard, replace(world, layout=before), JOB), checkpoints).to_json()
        )
        if world.rank == 0:
            checkpoints.commit(AT, map(ShardReceipt.from_json, receipts), {})
        gather(world, "committed")
        holders = [] if lost is None else live(before, lost)
        plan = plan_of(after, holders, "bucket")
        me = plan.members[world.rank] if world.rank < after.world else WorkerId("out")
        if me == "out":
            return None
        state = Bare(TENSORS, empty(after, world.rank), world, JOB)
        if holders:
            todo = moves(TENSORS, holders, after, plan.members, plan.nodes, partly=True, of=me)
            from_members(state, plan, me, [] if world.rank == lost else [shard], todo)
        from_bucket(state, plan, checkpoints, missing(TENSORS, holders, state.shard.cell))
        check(state.shard, after, world.rank)
        return state.shard.cell


def gather(world: World, text: str) -> list[str]:
    found: list[str] = [""] * world.size
    torch.distributed.all_gather_object(found, text)
    return found


def test_a_checkpoint_of_any_layout_is_resumed_in_another(ranks: Ranks, tmp_path: Path) -> None:
    """Member 1 is lost, or all are.  An export has the whole tensors."""
    cases: list[tuple[str, Layout, Layout, int | None]] = []
    for number, before in enumerate(FOUR):
        at = (number * 5 + 3) % len(FOUR)
        cases += [
            (str(tmp_path / f"{number}-all"), before, LAYOUTS[at], None),
            (str(tmp_path / f"{number}-one"), before, FOUR[at], 1),
        ]
    ranks.run_each(Layout(4), save_and_resume, cases)
    number = FOUR.index(Layout(1, 1, (("pp", 2), ("tp", 2))))
    files = Checkpoints(ObjectStore.open(str(tmp_path / f"{number}-all")), "toys").export(
        AT, tmp_path / "out"
    )
    found = {name: value for file in files for name, value in load_file(file).items()}
    for tensor in TENSORS:
        if tensor.kind in ("parameter", "buffer"):
            assert torch.equal(found[tensor.name], whole(tensor))


# ---- copies in keepers' memory


def test_a_slot_has_room_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage has a large matrix, and most bytes; the other has many small tensors, and most blocks."""
    layout, small_ones = (
        Layout(1, 1, (("pp", 2),)),
        [Tensor(f"b{number:04d}", "parameter", "F32", (8,), depth=(1, 2)) for number in range(100)],
    )
    tensors = (Tensor("e", "parameter", "F32", (512, 1024), depth=(0, 2)), *small_ones)
    monkeypatch.setattr("elastic.job.layouts_by_size", lambda rule, most, least: [(2, layout)])
    with toy_axes.registered():
        cells = [placement.cell_of(layout, rank) for rank in range(layout.world)]
        (large, small), counters = (
            (frame(tensors, cell) for cell in cells),
            Counters(tmp_path / "counters", create=True),
        )
        assert large.bytes > small.bytes and large.blocks < small.blocks == len(small_ones)
        region = make_snapshots(JOB, tensors, torch.device("cpu"), counters, Faults(())).region
    assert (region.slot_bytes, region.slot_blocks) == (large.bytes, small.blocks)


def test_copies_are_sized_by_the_largest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage has most bytes, for the copies of today and for those after a loss."""
    layout, small_ones = (
        Layout(1, 1, (("pp", 2),)),
        [Tensor(f"b{number:04d}", "parameter", "F32", (8,), depth=(0, 2)) for number in range(100)],
    )
    tensors = (Tensor("e", "parameter", "F32", (512, 1024), depth=(1, 2)), *small_ones)
    monkeypatch.setattr("elastic.job.layouts_by_size", lambda rule, most, least: [(2, layout)])
    monkeypatch.setattr("elastic.train.session.after_a_loss", lambda *_: layout)
    with toy_axes.registered():
        small, large = (frame(tensors, placement.cell_of(layout, rank)) for rank in range(2))
        assert large.bytes > 100 * small.bytes
        counters = Counters(tmp_path / "counters", create=True)
        made = make_snapshots(JOB, tensors, torch.device("cpu"), counters, Faults(()))
        assert made.region["wanted"] == made.region.slots * large.bytes
        assert made.foresee(plan_of(layout, [], "init")) == large.bytes


def test_replicas_are_the_members_with_equal_parts() -> None:
    """E6, along axes that cut columns, tensors, or nothing: sound members are alike, and one that holds
    another bit than those with its part is found.
    """
    columns, stages, together = (
        Layout(2, 1, (("tp", 2),)),
        Layout(2, 1, (("pp", 2),)),
        Layout(2, 1, (("together", 2),)),
    )
    members, nodes = tuple(WorkerId(f"w{rank}") for rank in range(4)), (NodeId("n"),) * 4
    found = []
    with toy_axes.registered():
        for layout, culprit in [(each, rank) for each in (columns, stages, together) for rank in (None, 3)]:
            saving, digests = Saving(AT, members, nodes, layout, 0.0), {}
            for rank, member in enumerate(members):
                values = [*right(layout, rank).items()]
                if rank == culprit:
                    values[0][1].view(-1)[0] += 1
                digests[member] = repr([(key, value.tolist()) for key, value in values])
            found.append([vote.worker for vote in in_dispute(votes_of(replace(saving, digests=digests)))])
    assert found == [[], ["w1", "w3"], [], ["w2", "w3"], [], ["w0", "w1", "w2", "w3"]]


GRADIENT = tuple(tensor for tensor in TENSORS if tensor.kind == "parameter")


def used_there(world: World, unused: Sequence[str]) -> list[int]:
    """Returns what a member finds that has a gradient of each parameter of its stage but ``unused``.  Member
    0 had no microbatch.
    """
    with toy_axes.registered():
        cell = placement.cell_of(world.layout, world.rank)
        trained = {each.name: None for each in GRADIENT if placement.held(each, cell).boxes}
        state: Any = SimpleNamespace(world=world, trained=trained, gradient=GRADIENT)
        share = Share([], [], [], unused=None if world.rank == 0 else trained.keys() & set(unused))
        found = used_anywhere(state, share)
    assert found is not None
    return found.tolist()


@pytest.mark.parametrize(
    "layout", [Layout(1, 2, (("pp", 2),)), Layout(2, 1, (("pp", 2),)), Layout(1, 2, (("tp", 2),))], ids=str
)
def test_every_stage_knows_which_parameters_were_used(ranks: Ranks, layout: Layout) -> None:
    """The stages have other numbers of parameters, and ``updates.missed`` of the state has one for each of the
    whole model, on every member.
    """
    unused = ("cube", "embed")
    want = [int(each.name not in unused) for each in GRADIENT]
    assert ranks.run(layout, used_there, unused) == [want] * 4


def test_updates_of_other_stages_are_counted_too() -> None:
    """The counts are those of the whole model, which all members must agree on."""
    job = Job(name="toys", bucket="/nowhere", steps=9, global_batch=2)
    boxes = {each.name: () for each in GRADIENT}
    stage = Optimizer(job, rule_of(job), {"norm": torch.ones(7)}, boxes, frozenset())
    outcome = Outcome(1, 1, 1.0, (1.0,), (1,), ((0,),), finite=True)
    stage.apply({"norm": torch.ones(7)}, outcome, frozenset({"cube", "norm"}))
    assert dict(zip(sorted(boxes), stage.missed.tolist(), strict=True)) == {
        "cube": 1,
        "embed": 0,
        "fused": 0,
        "norm": 1,
    }


@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_copies_of_any_layout_heal_any_other(before: Layout) -> None:
    """Every other layout is on another node than the copies."""
    with toy_axes.registered():
        store = KeeperStore(NodeId("n"), "127.0.0.1", SECRET)
        plan = replace(plan_of(before, [], "init"), copy_every=1)
        regions = []
        for rank, worker in enumerate(plan.members):
            layout = frame(TENSORS, placement.cell_of(before, rank))
            regions.append(Region.create(2, layout.bytes, layout.blocks))
            snapshots = Snapshots(regions[-1], TENSORS, torch.device("cpu"), CopyRule())
            store.adopt(worker, os.getpid(), regions[-1].descriptor)
            snapshots.enter(plan, worker, shard_of(before, rank))
            assert snapshots.settle().copied_through == AT.step
        held = store.held()
        assert {each.cell for each in held} == {
            placement.cell_of(before, rank) for rank in range(before.world)
        }
        for number, after in enumerate(LAYOUTS):
            members = tuple(WorkerId(f"new{rank}") for rank in range(after.world))
            nodes = (NodeId("far" if (number + LAYOUTS.index(before)) % 2 else "n"),) * after.world
            there = replace(
                plan_of(after, held, "host"),
                members=members,
                nodes=nodes,
                hosts=((NodeId("n"), store.address),),
            )
            for rank, me in enumerate(members):
                shard = empty(after, rank)
                todo = moves(TENSORS, held, after, members, nodes, of=me)
                assert all(move.keeper for move in todo)
                read(
                    shard,
                    TENSORS,
                    there,
                    Access(me, SECRET),
                    todo,
                    [StagingStream(torch.device("cpu"))],
                    lambda: None,
                )
                check(shard, after, rank)
        store.close()
