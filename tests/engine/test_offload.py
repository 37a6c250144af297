"""State in host memory or in files that streams through the device: the same bits, none of it on the device,
no version torn by an update.

What concerns files alone is in ``test_offload_files.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from elastic.engine.optim.base import rule_of
from elastic.engine.parameters.whole import Whole
from elastic.engine.world import World
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.copy_schedule import Copy
from elastic.state import streaming
from elastic.state.digest import digests
from elastic.state.snapshot import Snapshots
from elastic.state.streaming import SHARES
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from elastic.train.machine.device import need_of
from elastic.train.model import build_model, builder_of, tensors_of
from elastic.train.own_faults import InjectedError
from tests.support.chaos import alone, exported_hash
from tests.support.ranks import Ranks
from tests.support.segments import (
    Member,
    Part,
    Trained,
    compute,
    member,
    segment,
    shard_hash,
    train,
    train_each,
)
from tests.support.toys import small_job
from tests.support.worlds import STEPS

SMALL = 1 << 14
"""Bytes of a group, so that the toy model's state comes in many."""
LARGE = {"vocab": 29, "dim": 64, "layers": 4, "heads": 4}


def offloaded(folder: Path, zero: int | str = 2, **changes: Any) -> Job:
    return small_job(folder, offload="optimizer", parallel={"zero": zero}, **changes)


def in_files(folder: Path, zero: int | str = 2, **changes: Any) -> Job:
    return offloaded(
        folder, zero, **{"offload_folder": str(folder), "offload_buffer_gb": SHARES * SMALL / 1e9} | changes
    )


MEDIA: dict[str, Callable[..., Job]] = {"memory": offloaded, "files": in_files}


def in_groups(world: World, job: Job, version: Version, last: int, *, stale: bool = False) -> Part:
    """Trains a segment with small groups.  With ``stale`` the model does not get the weights that an update
    has made.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "GROUP", SMALL)
        if stale:
            patch.setattr(Whole, "take", _take_once)
        return segment(world, job, version, last)


def _take_once(self: Whole, name: str, values: Tensor) -> None:
    if not self._fresh:
        self._mine(self._used[name]).copy_(values)


def test_the_hash_sees_weights_that_are_not_brought(ranks: Ranks, reference: Trained, tmp_path: Path) -> None:
    """Negative control of ``test_covering.py``: the model goes on with the weights with which it began."""
    jobs = [make(tmp_path / medium) for medium, make in MEDIA.items()]
    (tmp_path / "files").mkdir()
    for found in train_each(ranks, jobs, Layout(1, 2), STEPS, partial(in_groups, stale=True)):
        assert found.hash != reference.hash


@pytest.mark.full
@pytest.mark.parametrize("medium", MEDIA)
def test_sums_without_a_fixed_order_are_the_same_too(ranks: Ranks, tmp_path: Path, medium: str) -> None:
    """There is one layout here; ``test_covering.py`` has all else that the engine does."""
    layout, free = Layout(1, 2), {"reproducible": False}
    resident = train(ranks, small_job(tmp_path / "resident", parallel={"zero": 2}, **free), layout, 4)
    (tmp_path / medium).mkdir()
    assert (
        train(ranks, MEDIA[medium](tmp_path / medium, **free), layout, 4, how=in_groups).hash == resident.hash
    )


def test_a_run_in_one_process_resumes_where_it_saved(reference: Trained, tmp_path: Path) -> None:
    """``--local`` has slots of its own, in its own memory.  The first attempt ends in step 3, after the save
    of step 2.
    """
    job = offloaded(
        tmp_path,
        steps=6,
        checkpoint={"save_every": 2},
        faults=[{"point": "in_update", "step": 3, "kind": "exception", "generation": 1}],
    )
    with pytest.raises(InjectedError):
        run_local(job, lambda line: None)
    assert run_local(job, lambda line: None) == ("Finished", "all 6 steps are done", 6)
    assert exported_hash(job) == alone(small_job(tmp_path / "resident", steps=6)).hash != reference.hash


def taken(world: World, job: Job) -> tuple[int, int, float]:
    """Returns the bytes of tensors beyond those before the run, before a commit and after an update, and a
    loss; slots do not count.
    """
    before = living(None)
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        loss = me.step().loss
        after = living(me.session.snapshots) - before
        compute(me.session, me.state, 3)
        return living(me.session.snapshots) - before, after, loss


def living(snapshots: Snapshots | None) -> int:
    """Returns the bytes of all tensors of this process outside of the slots; each memory counts once."""
    gc.collect()
    slots = range(0)
    if snapshots is not None:
        slots = range(snapshots.memory.data_ptr(), snapshots.memory.data_ptr() + len(snapshots.memory))
    tensors = (
        each
        for each in gc.get_objects()
        if issubclass(type(each), Tensor) and not issubclass(type(each), FakeTensor)
    )
    found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(
        storage.nbytes()
        for place, storage in found.items()
        if storage.device.type == "cpu" and place not in slots
    )


@pytest.mark.parametrize("members", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_device_has_only_weights_to_compute_with_and_gradients(
    ranks: Ranks, tmp_path: Path, members: int
) -> None:
    """F3: a member has 2 bytes a parameter in bf16, and 4 for each sum of gradients that is its own; after an
    update just the former.

    The control, state on the device, has 12 bytes more for each parameter that it updates.  Losses are equal.
    """
    free = {"precision": "bf16", "model_args": LARGE}
    job = offloaded(tmp_path / "offloaded", **free)
    count = sum(parameter.numel() for parameter in build_model(job, builder_of(job)).parameters())
    cases = [(job,), (small_job(tmp_path / "resident", parallel={"zero": 2}, **free),)]
    (computing, updated, loss), resident = (
        found[0] for found in ranks.run_each(Layout(1, members), taken, cases)
    )
    assert (computing / count, updated / count) == pytest.approx((2 + 4 / members, 2), rel=0.05)
    assert (resident[0] / count, resident[1] / count) == pytest.approx(
        (2 + 16 / members, 2 + 12 / members), rel=0.05
    )
    assert loss == resident[2]


def torn(world: World, job: Job, *, in_place: bool = False) -> tuple[bool, bool, list[int]]:
    """Fails in the update of step 3: in the middle of the groups, or after the last one where a fault of the
    job says so.

    Returns whether the slot of version 2 holds its bits, whether its digests are right, and the steps that
    are complete.
    """
    with pytest.MonkeyPatch.context() as patch, member(world, job, Version(0, 0), prefetch=0) as me:
        patch.setattr(streaming, "GROUP", SMALL)
        if in_place:
            patch.setattr(
                streaming._OnHost,
                "load",
                lambda self, home, keys: lambda: {key: home.values[key] for key in keys},
            )
            patch.setattr(
                streaming._Threads, "_read", lambda self, home, keys: {key: home.values[key] for key in keys}
            )
        me.step()
        me.step()
        right, shard = shard_hash(me.state.shard), me.state.shard
        if not job.faults:
            _fail_in_group(me, 2)
        with pytest.raises((InjectedError, ArithmeticError)):
            me.step()
        with me.fence as rules:
            assert not rules.held, "the member answers as for any update that failed"
        snapshots = me.session.snapshots
        assert snapshots is not None
        version = Version(2, world.generation)
        home = snapshots.home(Copy(version, shard.cell), [], adopt=True)
        me.state.shard.home = home
        me.state.shard.values |= home.values
        sums = [
            torch.equal(home.sums[home.blocks[key]], digests(value)) for key, value in home.values.items()
        ]
        there = [copy.version.step for copy in snapshots.region.all_held() if copy]
        return home.whole and shard_hash(me.state.shard) == right, all(sums), there


def _fail_in_group(me: Member, number: int) -> None:
    rule, left = me.state.optimizer.rule, [number]

    def update(*arguments: Any) -> None:
        rule.update(*arguments)
        left[0] -= 1
        if not left[0]:
            raise ArithmeticError("in the middle of an update")

    me.state.optimizer.rule = replace(rule, update=update)


AFTER = {"faults": [{"point": "in_update", "step": 3, "kind": "exception", "generation": 1}]}


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("where", ["in a group", "after the last group"])
def test_an_update_that_fails_leaves_the_version_before(tmp_path: Path, where: str, medium: str) -> None:
    """The generation of this world of one is 1.  The control: an update in place tears the version that it
    reads.
    """
    job = MEDIA[medium](tmp_path, **({} if where == "in a group" else AFTER))

    def fails(**how: bool) -> tuple[bool, bool, list[int]]:
        world = World.alone(torch.device("cpu"), generation=1)
        try:
            return torn(world, job, **how)
        finally:
            world.close()

    whole, right, there = fails()
    assert whole and right and 2 in there and 3 not in there
    assert not fails(in_place=True)[0]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"parallel": {"zero": 3}},
            (
                r"parallel\.zero = 3 with offload = 'optimizer': stage 3 gathers weights .* set "
                r"parallel\.zero to 2, or to 0"
            ),
        ),
        (
            {"copies": {"copy_every": 2}},
            (
                r"copies\.copy_every = 2 with offload = 'optimizer': .* set "
                r"copies\.copy_every to 1"
            ),
        ),
        ({"copies": {"copy_every": 0}}, r"copies\.copy_every = 0 with offload = 'optimizer'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], why: str) -> None:
    settings = {"parallel": {"zero": 2}, "offload": "optimizer", **changes}
    with pytest.raises(JobError, match=why):
        small_job("/nowhere", **settings)
    small_job("/nowhere", **settings | {"offload": "none"})


@pytest.mark.fast
@pytest.mark.parametrize("offload", ["optimizer", "weights"])
def test_the_stage_auto_is_2_with_state_that_is_offloaded(offload: str, tmp_path: Path) -> None:
    """The layouts and the memory are those of 2, and the user is told.  The controls: a stage that is named,
    and no offloading.
    """

    def told(job: Job) -> list[str]:
        return [note for note in preflight(job).notes if "parallel.zero" in note]

    auto, named = (
        small_job(tmp_path, offload=offload, workers={"max": 4}, parallel=each) for each in ({}, {"zero": 2})
    )
    assert auto.layouts() == named.layouts() == [Layout(1, n) for n in range(1, 5)]
    tensors = tensors_of(build_model(auto, builder_of(auto)), rule_of(auto))
    assert need_of(auto, tensors) == need_of(named, tensors) != need_of(auto.in_stage(0), tensors)
    (sentence,) = told(auto)
    assert sentence.startswith(
        f"parallel.zero = 'auto' is 2 with offload = '{offload}': all workers share the state"
    )
    assert told(named) == told(small_job(tmp_path, workers={"max": 4})) == []
    assert auto.parallel.zero == "auto" and Job.from_json(auto.to_json()).zero == 2, (
        "what is stored is what was written"
    )
    assert (
        auto.replace(offload="none").zero == "auto"
        and small_job(tmp_path, offload=offload, parallel={"dp_shard": 1}).zero == "auto"
    )


@pytest.mark.fast
@pytest.mark.parametrize(("make", "bytes_a_parameter"), [(offloaded, 2 + 4), (small_job, 12 + 4 + 2)])
def test_state_in_host_memory_needs_no_room_on_the_device(
    make: Callable[..., Job], bytes_a_parameter: int
) -> None:
    """A world of one shard is counted, before an update; the buffers of an update are no larger than the
    state.
    """
    job = make("/nowhere", precision="bf16", model_args=LARGE)
    model = build_model(job, builder_of(job))
    need, count = (
        need_of(job, tensors_of(model, rule_of(job))),
        sum(parameter.numel() for parameter in model.parameters()),
    )
    assert need.held(1) / count == pytest.approx(bytes_a_parameter, rel=0.01)
    assert need.of_a_member(1) / count == pytest.approx(18, rel=0.01)
    assert need.state / count == pytest.approx(12, rel=0.01)
