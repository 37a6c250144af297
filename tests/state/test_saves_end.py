"""A save ends for the worker that copied it, and a keeper gives up a part whose copy never comes (R1, R11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.ids import Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.actions import Save
from elastic.protocol.commit_record import DUE, LAST, NO_SAVE
from elastic.protocol.copy_schedule import Copy, SaveRule
from elastic.protocol.events import SaveFailed, ShardSaved
from elastic.state.digest import digests
from elastic.state.region import Region
from tests.state.nodes import AT, cluster, enter, outcome, shard_of
from tests.state.saver import PLAN
from tests.state.test_uploads import WHOLE, copied, turned, until, uploading
from tests.support.cells import cell
from tests.support.patience import PATIENCE_S


def lapse() -> Callable[[], bool]:
    """Returns a call that says whether ``PATIENCE_S`` have passed."""
    end = time.monotonic() + PATIENCE_S
    return lambda: time.monotonic() > end


def test_a_save_is_not_overwritten_before_its_keeper_says_that_it_is_over(tmp_path: Path) -> None:
    """Copies go on beside it, and no other save begins; a save of a world that is left is over once the
    keeper is told of a later world.
    """
    with copied() as (node, snapshots):
        region = snapshots.region
        with uploading(node.store, tmp_path) as (uploads, told):
            assert [snapshots.settle().save, snapshots.settle().behind] == [NO_SAVE, 0]
            snapshots.committed(replace(outcome(5, copied=4), saves=False), shard_of(Version(5, 2), 1, 0))
            said = snapshots.settle()
            assert (said.save, said.behind) == (DUE, 0), "after step 6"
            snapshots.committed(replace(outcome(6, copied=5), saves=True), shard_of(Version(6, 2), 1, 0))
            for step in range(7, 20):
                said = snapshots.settle()
                assert (said.save, said.behind) == (DUE if step > 7 else NO_SAVE, 1)
                snapshots.committed(
                    replace(outcome(step, copied=step - 1), behind=True, saves=False),
                    shard_of(Version(step, 2), 1, 0),
                )
            assert region.find(Copy(Version(6, 2), WHOLE)) is not None
            save = Save(Version(6, 2), 2, Layout(1, 1), (WorkerId("w0"),), (node.name,))
            uploads.obey((1, 2), (save,), 2, Version(18, 2))
            assert isinstance(told.next()[0], ShardSaved) and snapshots.settle().behind == 1, (
                "the manifest is not written yet"
            )
            uploads.obey((1, 1), (), 2, Version(19, 2))
            assert snapshots.settle().behind == 1, "this was said before"
            uploads.obey((1, 3), (), 2, Version(5, 2))
            turned(uploads)
            assert snapshots.settle().behind == 1, "whoever says so does not know of the save yet"
            uploads.obey((1, 4), (), 2, Version(19, 2))
            until(lambda: snapshots.settle().behind == 0)
            assert snapshots.settle().save == DUE, "it is owed"


@pytest.mark.parametrize("under_way", [True, False])
def test_a_save_stays_protected_when_only_the_next_one_is_given_up(tmp_path: Path, under_way: bool) -> None:
    """A stop began a save while the one before was under way.  The control: that one is over too."""
    with copied() as (node, snapshots):
        region = snapshots.region
        for step in (6, 7):
            snapshots.committed(
                replace(outcome(step, copied=step - 2), saves=True, behind=step == 7),
                shard_of(Version(step, 2), 1, 0),
            )
            snapshots.settle()
        before = Save(Version(6, 2), 2, Layout(1, 1), (WorkerId("w0"),), (node.name,))
        with uploading(node.store, tmp_path) as (uploads, told):
            uploads.obey((1, 1), (before,) if under_way else (), 2, Version(7, 2))
            if under_way:
                assert isinstance(told.next()[0], ShardSaved)
                turned(uploads)
                assert region.saving
            else:
                until(lambda: not region.saving)
            plan = replace(PLAN, generation=3, version=Version(7, 2), nodes=(node.name,), lineage=((2, 7),))
            snapshots.enter(plan, WorkerId("w0"), shard_of(Version(7, 2), 1, 0))
            assert snapshots.copies is not None
            assert snapshots.copies.saving == (
                (Copy(Version(6, 2), WHOLE), Copy(Version(7, 2), WHOLE)) if under_way else ()
            )
            uploads.obey((1, 2), (), 3, Version(7, 2))
            until(lambda: not region.saving)


@pytest.mark.parametrize("under_way", [True, False])
def test_a_dead_worker_leaves_its_part_of_each_save_under_way(tmp_path: Path, under_way: bool) -> None:
    """Two replicas die that have begun two saves: of equal copies the keeper keeps one, but each uploads its
    own slices of a save.  The control: the older save is over."""
    with cluster(Layout(2, 1), 2, slots=3) as (plan, (node,)):
        enter(plan, [node])
        for step in (6, 7):
            for snapshots in node.workers.values():
                snapshots.committed(
                    replace(outcome(step, copied=step - 2), saves=True), shard_of(Version(step, 2), 1, 0)
                )
                snapshots.settle()
        versions = [Version(6, 2), Version(7, 2)] if under_way else [Version(7, 2)]
        with uploading(node.store, tmp_path) as (uploads, told):
            uploads.obey(
                (1, 1),
                [Save(version, 2, plan.layout, plan.members, plan.nodes) for version in versions],
                2,
                Version(7, 2),
            )
            for worker in plan.members:
                node.store.ended(worker)
            left = [
                {copy.version for copy in node.workers[worker].region.all_held() if copy}
                for worker in plan.members
            ]
            assert left == [{AT, Version(6, 2), Version(7, 2)}, set(versions)]
            assert all(isinstance(told.next()[0], ShardSaved) for _ in versions for _ in plan.members)


def test_a_save_that_was_waited_for_in_vain_is_waited_for_no_more() -> None:
    """R11: a step waits for the bucket only once, and only for a short time."""
    with copied() as (_, snapshots):
        snapshots.patience_s = 0.3
        for step in (5, 6):
            snapshots.committed(
                replace(outcome(step, copied=step - 1), saves=step == 6), shard_of(Version(step, 2), 1, 0)
            )
        snapshots.committed(
            replace(outcome(7, copied=6), behind=True, saves=False), shard_of(Version(7, 2), 1, 0)
        )
        began = time.monotonic()
        assert snapshots.settle().behind == 1 and time.monotonic() - began > 0.3
        snapshots.patience_s = 3600.0
        assert snapshots.settle().behind == 1


def test_saves_that_are_slower_than_they_become_due_hold_up_one_step_only() -> None:
    """H5: after a wait in vain no later save waits, until one finds the save before it over."""
    with copied() as (_, snapshots):
        region, step = snapshots.region, 5
        snapshots.committed(outcome(step, copied=step - 1), shard_of(Version(step, 2), 1, 0))

        def save(patience_s: float, *, over: bool) -> bool:
            """Begins a save, makes the next one due, and returns whether that one found the first over;
            ``over`` says if it is by then.
            """
            nonlocal step
            region["saves_over"] = region["saves"]
            for saves in (True, False):
                step += 1
                behind = not saves and not over
                change = replace(outcome(step, copied=step - 1), saves=saves, behind=behind)
                snapshots.committed(change, shard_of(Version(step, 2), 1, 0))
                snapshots.patience_s = patience_s if not saves else 0.0
                if over:
                    region["saves_over"] = region["saves"]
            return not snapshots.settle().behind

        assert not save(0.01, over=False)
        assert not save(3600.0, over=False), "it did not wait for this one"
        assert save(3600.0, over=True)
        began = time.monotonic()
        assert not save(0.3, over=False)
        assert time.monotonic() - began > 0.3, "saves keep up again, so waiting may help"


def test_where_nothing_else_is_copied_the_last_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """There is one slot; the member has nothing else to do, and is not held up when it is told to leave."""
    with copied(slots=1, copy_every=0) as (node, snapshots):
        region = snapshots.region
        assert snapshots.settle().copied_through == -1 and region.all_held() == [None]
        snapshots.committed(replace(outcome(6), saves=True), shard_of(Version(6, 2), 1, 0))
        snapshots.saves = SaveRule(2, 7)
        snapshots.copies = replace(snapshots.copies, rule=snapshots.saves) if snapshots.copies else None
        assert snapshots.settle().save == LAST and region.all_held() == [Copy(Version(6, 2), WHOLE)]
        snapshots.committed(replace(outcome(7), behind=True, saves=True), shard_of(Version(7, 2), 1, 0))
        snapshots.make_room(lambda: True)
        assert region.all_held() == [Copy(Version(6, 2), WHOLE)]
        with uploading(node.store, tmp_path) as (uploads, told):
            last = Save(Version(7, 2), 2, Layout(1, 1), (WorkerId("w0"),), (node.name,))
            uploads.obey((1, 1), (last,), 2, Version(7, 2))
            lapsed = lapse()
            snapshots.make_room(lapsed)
            snapshots.settle()
            assert not lapsed() and isinstance(told.next()[0], ShardSaved)
        assert region.all_held() == [Copy(Version(7, 2), WHOLE)]


@pytest.mark.parametrize("slots", [1, 3])
def test_what_a_dead_worker_left_is_freed_once_its_save_is_over(tmp_path: Path, slots: int) -> None:
    """The keeper frees it if only saves are copied; otherwise the coordinator releases it when newer copies
    exist.
    """
    with copied(slots, copy_every=int(slots > 1)) as (node, snapshots):
        snapshots.committed(replace(outcome(6, copied=4), saves=True), shard_of(Version(6, 2), 1, 0))
        snapshots.settle()
        with uploading(node.store, tmp_path) as (uploads, told):
            save = Save(Version(6, 2), 2, Layout(1, 1), (WorkerId("w0"),), (node.name,))
            uploads.obey((1, 1), (save,), 2, Version(6, 2))
            node.store.ended(WorkerId("w0"))
            told.next()
            assert node.store.regions()
            uploads.obey((1, 2), (), 2, Version(6, 2))
            until(lambda: not snapshots.region.saving)
            if slots == 1:
                until(lambda: not node.store.regions())
            else:
                turned(uploads)
                assert node.store.regions()


@pytest.mark.parametrize(
    ("version", "knows"),
    [(Version(6, 2), True), (Version(5, 2), True), (Version(6, 2), False)],
    ids=["the same version", "another", "the same version, but its member never heard of the save"],
)
def test_a_copy_that_a_later_world_begins_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: Version, knows: bool
) -> None:
    """Its member heard of the commit when the world was over, and begins no copy then.  The next world begins
    with a copy, which may be the one that the save lacks: then it stays until the save is over.  If it is
    another one, or the member did not hear of the save and would overwrite it, the save fails once that copy
    has ended."""
    goes_on = threading.Event()
    with copied() as (node, snapshots), uploading(node.store, tmp_path) as (uploads, told):
        monkeypatch.setattr(
            "elastic.state.snapshot.digests", lambda data, out: (goes_on.wait(PATIENCE_S), digests(data, out))
        )
        if knows:
            snapshots.committed(replace(outcome(6), saves=True), None)
        uploads.obey(
            (1, 1), (Save(Version(6, 2), 2, Layout(1, 1), (WorkerId("w0"),), (node.name,)),), 2, Version(6, 2)
        )
        turned(uploads)
        assert told.events.empty(), "it may still come"
        plan = replace(PLAN, generation=3, version=version, nodes=(node.name,), lineage=((2, version.step),))
        snapshots.enter(plan, WorkerId("w0"), shard_of(version, 1, 0))
        turned(uploads)
        assert told.events.empty(), "it may be the copy that is being made"
        goes_on.set()
        snapshots.settle()
        event, _ = told.next()
        for step in range(7, 10):
            now = replace(outcome(step, copied=step - 1), generation=3, behind=True, saves=False)
            snapshots.committed(now, shard_of(Version(step, 3), 1, 0))
            snapshots.settle()
        stays = snapshots.region.find(Copy(Version(6, 2), WHOLE)) is not None
    if knows and version == Version(6, 2):
        assert event == ShardSaved(WorkerId("w0"), Version(6, 2), by=2) and stays, "the save is not over yet"
    else:
        assert (
            isinstance(event, SaveFailed)
            and "the worker went on without a copy" in event.reason
            and not stays
        )


def test_the_last_save_gets_the_slot_of_the_one_before_after_a_settled_step(tmp_path: Path) -> None:
    """There is one slot if nothing but saves is copied.  The member applied the last step when its world was
    over, and the save before was on its way: the next world saves the last step once that one is in the
    bucket."""
    rule, last = SaveRule(2, 7), Version(7, 2)
    with (
        copied(slots=1, copy_every=0) as (node, snapshots),
        uploading(node.store, tmp_path) as (uploads, told),
    ):
        assert snapshots.copies is not None
        snapshots.saves, snapshots.copies = rule, replace(snapshots.copies, rule=rule)
        snapshots.committed(replace(outcome(6), saves=True), shard_of(Version(6, 2), 1, 0))
        snapshots.settle()
        snapshots.committed(replace(outcome(7), behind=True, saves=True), None)
        saves = [
            Save(version, by, Layout(1, 1), (WorkerId("w0"),), (node.name,))
            for version, by in ((Version(6, 2), 2), (last, 2), (last, 3))
        ]
        uploads.obey((1, 1), saves[:2], 2, last)
        assert told.next()[0] == ShardSaved(WorkerId("w0"), Version(6, 2), by=2)
        plan = replace(PLAN, generation=3, version=last, copy_every=0, nodes=(node.name,), lineage=((2, 7),))
        snapshots.enter(plan, WorkerId("w0"), shard_of(last, 1, 0))
        uploads.obey((1, 2), saves[2:], 3, last)
        snapshots.make_room(lapse())
        assert told.next()[0] == ShardSaved(WorkerId("w0"), last, by=3)


def test_a_copy_that_becomes_complete_while_the_keeper_looks_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper has just not found it when it becomes complete and the worker goes on."""
    find, goes_on, wanted = Region.find, threading.Event(), Copy(Version(6, 2), WHOLE)

    def find_too_early(region: Region, copy: Copy) -> int | None:
        found = find(region, copy)
        if threading.current_thread().name == "uploads" and copy == wanted and not goes_on.is_set():
            goes_on.set()
            until(lambda: region["generation"] == 3 and find(region, copy) is not None)
        return found

    with copied() as (node, snapshots), uploading(node.store, tmp_path) as (uploads, told):
        monkeypatch.setattr(
            "elastic.state.snapshot.digests", lambda data, out: (goes_on.wait(PATIENCE_S), digests(data, out))
        )
        snapshots.committed(replace(outcome(6), saves=True), None)
        plan = replace(
            PLAN,
            generation=3,
            version=wanted.version,
            nodes=(node.name,),
            lineage=((2, wanted.version.step),),
        )
        snapshots.enter(plan, WorkerId("w0"), shard_of(wanted.version, 1, 0))
        monkeypatch.setattr(Region, "find", find_too_early)
        uploads.obey(
            (1, 1),
            (Save(wanted.version, 2, Layout(1, 1), (WorkerId("w0"),), (node.name,)),),
            3,
            wanted.version,
        )
        snapshots.settle()
        assert isinstance(told.next()[0], ShardSaved) and goes_on.is_set()


@pytest.mark.parametrize("wanted", [6, 4])
def test_the_failure_of_one_save_is_not_taken_for_that_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    """The worker begins the save of step 6 while the keeper looks for the failure of a save.  If 6 is wanted,
    it is the save before that has failed; if 4 is wanted, it is the one after.  The control: a failure of the
    wanted save is told."""
    find, named, looks = Region.find, Region.copy, list[int]()

    def find_and_arm(region: Region, copy: Copy) -> int | None:
        found = find(region, copy)
        if threading.current_thread().name == "uploads" and not looks:
            looks.append(1)
        return found

    def begin_between(region: Region, field: str) -> Copy | None:
        found = named(region, field)
        if threading.current_thread().name == "uploads" and field == "save" and looks == [1]:
            looks.append(2)
            region.begin_save(Copy(Version(6, 2), WHOLE))
            region["save_failed"] = int(wanted == 4)
            return found if wanted == 4 else named(region, field)
        return found

    with copied() as (node, snapshots), uploading(node.store, tmp_path) as (uploads, told):
        region, copy = snapshots.region, Copy(Version(wanted, 2), cell(1, 0))
        region.begin(region.all_held().index(Copy(AT, WHOLE)))
        region.begin_save(Copy(Version(4, 2), WHOLE))
        region["save_failed"] = int(wanted == 6)
        monkeypatch.setattr(Region, "find", find_and_arm)
        monkeypatch.setattr(Region, "copy", begin_between)
        uploads.obey(
            (1, 1), (Save(copy.version, 2, Layout(1, 1), (WorkerId("w0"),), (node.name,)),), 2, copy.version
        )
        until(lambda: looks == [1, 2])
        turned(uploads)
        assert told.events.empty()
        region.begin_save(copy)
        region["save_failed"] = 1
        event, _ = told.next()
        assert isinstance(event, SaveFailed) and "the copy failed" in event.reason


@pytest.mark.parametrize("by", [2, 3])
def test_a_failure_in_the_world_before_does_not_end_the_save_of_this_world(tmp_path: Path, by: int) -> None:
    """The last save failed, and a world is formed to begin it again; its keeper hears of that before its
    worker.  The control: of the world in which it failed."""
    with copied() as (node, snapshots), uploading(node.store, tmp_path) as (uploads, told):
        snapshots.saves = SaveRule(2, 6)
        snapshots.region.begin_save(Copy(Version(6, 2), WHOLE))
        snapshots.region["save_failed"] = 1
        uploads.obey(
            (1, 1),
            (Save(Version(6, 2), by, Layout(1, 1), (WorkerId("w0"),), (node.name,)),),
            by,
            Version(6, 2),
        )
        if by == 2:
            event, _ = told.next()
            assert isinstance(event, SaveFailed) and "the copy failed" in event.reason
            return
        turned(uploads)
        assert told.events.empty()
        snapshots.enter(
            replace(PLAN, generation=3, version=Version(6, 2), nodes=(node.name,)),
            WorkerId("w0"),
            shard_of(Version(6, 2), 1, 0),
        )
        assert isinstance(told.next()[0], ShardSaved)
