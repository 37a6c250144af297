"""Slots in which shards live: an update never writes to one that somebody still needs, and there always is
another one.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.copy_budget import CopyRule, slots_for
from elastic.plan.layout import Layout
from elastic.protocol.copy_schedule import Copy, CopySchedule, SaveRule
from elastic.protocol.plan import Plan
from elastic.state.region import Region, frame
from elastic.state.shard import Shard, ShardHome
from elastic.state.snapshot import NoMemory, Snapshots
from storage.slices import Tensor
from tests.state.nodes import outcome
from tests.support.cells import cell

WORKER = WorkerId("w0")
TENSORS = (
    Tensor("w", "parameter", "F32", (7, 3)),
    Tensor("w", "moment.exp_avg", "F32", (7, 3)),
    Tensor("updates", "scalar", "F32", ()),
)
LAYOUTS = (Layout(1, 1), Layout(1, 2), Layout(1, 3))
SEEDS = range(40)
LARGEST = frame(TENSORS, cell(1, 0))


def snapshots_of(slots: int) -> Snapshots:
    region = Region.create(slots, LARGEST.bytes, LARGEST.blocks, TENSORS)
    return Snapshots(region, TENSORS, torch.device("cpu"), CopyRule(), SaveRule(5, 10**6))


def plan_of(generation: int, layout: Layout, version: Version, buddy_every: int) -> Plan:
    members = tuple(WorkerId(f"w{rank}") for rank in range(layout.world))
    line = ((version.generation, version.step),)
    return Plan(
        1,
        generation,
        layout,
        members,
        version,
        "host",
        (),
        NodeId("n"),
        copy_every=1,
        buddy_every=buddy_every,
        lineage=line,
    )


def fill(home: ShardHome, version: Version, count: int) -> Shard:
    """Writes the state at ``version`` into the slot, and returns it as a shard that lives there."""
    for value in home.values.values():
        value.fill_(_number(version))
    return Shard(version, cell(count, 0), dict(home.values), home)


def _number(version: Version) -> int:
    return version.step * 1000 + version.generation


def live(seed: int, slots: int, buddy_every: int) -> str:
    """Lives through a few worlds in which members and keepers are late at random.  Returns what was lost, or
    "".
    """
    rng, snapshots = random.Random(seed), snapshots_of(slots)
    version, held, generation = Version(0, 0), list[Shard](), 0
    try:
        for _ in range(6):
            generation += 1
            layout = rng.choice(LAYOUTS)
            plan, own = (
                plan_of(generation, layout, version, buddy_every),
                Copy(version, cell(layout.dp_shard, 0)),
            )
            try:
                home = snapshots.home(own, held, adopt=True)
            # several worlds in a row broke before they stepped; the worker then gives up what it holds
            except NoMemory:
                home = snapshots.home(own, [], adopt=True)
            shard = (
                Shard(version, own.cell, dict(home.values), home)
                if home.whole
                else fill(home, version, layout.dp_shard)
            )
            if not home.whole:
                snapshots.moved_in(shard, version)
            if any((value != _number(version)).any() for value in shard.values.values()):
                return f"the state at {version}"
            held.append(shard)
            if rng.random() < 0.3:
                continue  # the world broke before it stepped
            held = [shard]
            snapshots.enter(plan, WORKER, shard)
            for step in range(version.step + 1, version.step + rng.randint(2, 12)):
                assert snapshots.copies is not None and shard.home is not None
                following = snapshots.next_home(shard)
                copies = snapshots.copies
                copied = rng.choice([-1, step - 1, step - 1])
                buddied = rng.choice([-1, copies.sent.version.step]) if copies.sent and buddy_every else -1
                saves = copies.asks > 0 and not snapshots.region.saving
                seen = replace(
                    outcome(step, copied, buddied),
                    generation=generation,
                    saves=saves,
                    behind=snapshots.region.saving,
                )
                version = Version(step, generation)
                home, shard = shard.home, fill(following, version, layout.dp_shard)
                if (
                    snapshots.region.held(home.slot) != Copy(Version(step - 1, generation), own.cell)
                    and step > plan.version.step + 1
                ):
                    return f"step {step - 1} while step {step} was written"
                snapshots.moved_in(shard, version)
                held = [shard]
                snapshots.committed(seen, shard)
                if rng.random() < 0.3:
                    snapshots.region["saves_over"] = snapshots.region["saves"]
                if snapshots.copies.begun != Copy(version, own.cell) or snapshots.made != version:
                    return f"step {step} is not taken for a copy"
                for kept in (snapshots.copies.copied, snapshots.copies.buddied, *snapshots.copies.saving):
                    if (
                        kept is not None
                        and kept.version.generation == generation
                        and snapshots.region.find(kept) is None
                    ):
                        return f"the copy of {kept.version} at step {step}"
            if rng.random() < 0.5 and snapshots.copies is not None and snapshots.copies.copied is not None:
                version = snapshots.copies.copied.version  # a member died before it had a later one
    except NoMemory as error:
        return str(error)
    return ""


@pytest.mark.parametrize("buddy_every", [0, 1])
def test_there_is_always_a_slot_that_nobody_needs(buddy_every: int) -> None:
    """There are saves on their way, keepers that are away, other layouts, and versions given up; with and
    without buddies.
    """
    assert [live(seed, slots_for(1, buddy_every, offload=True), buddy_every) for seed in SEEDS] == [""] * len(
        SEEDS
    )


@pytest.mark.parametrize("buddy_every", [0, 1])
def test_with_one_slot_less_there_is_not(buddy_every: int) -> None:
    """Control: so many slots are enough for copies of a state that lives elsewhere."""
    assert any(
        "slots holds state that is still needed" in live(seed, slots_for(1, buddy_every), buddy_every)
        for seed in SEEDS
    )


def test_who_waits_for_the_copy_before_skips_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: that is the rule for copies of a state that lives elsewhere."""
    begin = CopySchedule.begin
    monkeypatch.setattr(CopySchedule, "begin", lambda *arguments, lives: begin(*arguments))
    assert any("is not taken for a copy" in live(seed, slots_for(1, 0, offload=True), 0) for seed in SEEDS)


def test_a_shard_that_its_region_holds_stays_where_it_is() -> None:
    """A member that keeps its cell takes its slot again.  The controls: another version, another cell, and a
    slot that is torn.
    """
    snapshots, version = snapshots_of(4), Version(3, 1)
    shard = fill(snapshots.home(Copy(version, cell(2, 0)), [], adopt=True), version, 2)
    assert shard.home is not None and not shard.home.whole
    snapshots.moved_in(shard, version)
    again = snapshots.home(Copy(version, cell(2, 0)), [shard], adopt=True)
    assert again.whole and again.slot == shard.home.slot
    for copy in (Copy(Version(3, 2), cell(2, 0)), Copy(version, cell(3, 0))):
        other = snapshots.home(copy, [shard], adopt=True)
        assert not other.whole and other.slot != shard.home.slot
    snapshots.region.begin(shard.home.slot)
    torn = snapshots.home(Copy(version, cell(2, 0)), [shard], adopt=True)
    assert not torn.whole and torn.slot != shard.home.slot, "the shard still lives there"
    assert not snapshots.home(Copy(version, cell(2, 0)), [], adopt=True).whole
