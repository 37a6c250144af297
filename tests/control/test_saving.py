"""These stories show when a save is made, by which members, and when a checkpoint counts (R11, H1, H2), with
the bookkeeping.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.run import Running, Saves, Saving
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout, LayoutRule
from elastic.plan.retention import Keep
from elastic.protocol import events as ev
from elastic.protocol.actions import CommitManifest, Retain, Save, Upload
from elastic.protocol.commit_record import DUE, GO_ON, LAST, NO_SAVE, PAUSE, SAVE_AND_PAUSE, is_saved
from elastic.protocol.copy_schedule import due
from tests.control.play import Play, stepping

pytestmark = pytest.mark.fast
W1, W2 = WorkerId("w1"), WorkerId("w2")


def test_when_to_save() -> None:
    assert [step for step in range(0, 12) if due(step, 5, 11)] == [5, 10, 11]


def test_no_save_begins_while_the_one_before_is_on_its_way() -> None:
    """R11: steps go on; the last state, and what a stop asks for, is saved all the same."""
    asks = {step: LAST if step == 11 else DUE if due(step, 5, 11) else NO_SAVE for step in range(1, 12)}
    assert [step for step in asks if is_saved(GO_ON, asks[step], behind=step > 5)] == [5, 11]
    assert is_saved(SAVE_AND_PAUSE, NO_SAVE, behind=True) and not is_saved(PAUSE, NO_SAVE, behind=False)
    play = stepping(2, save_every=5)
    play.steps(1, 9)
    said = play.step(10, behind=True)
    assert said.startswith("a save is due, but the save before it is not in the bucket yet, or ")
    assert [each.version.step for each in play.run.saves.pending] == [5]
    play.steps(11, 15)
    assert [each.version.step for each in play.run.saves.pending] == [5, 15]


def test_keepers_are_told_which_saves_are_on_their_way() -> None:
    """Each change is told, with the version up to which the run is known: a save that began by then and is
    not named is over.
    """
    play = stepping(2, save_every=5)
    play.steps(1, 4)
    assert not play.did(Upload)
    play.step(5)
    plan, keepers = play.plan, play.run.cluster.keepers
    save = Save(Version(5, 1), 1, plan.layout, plan.members, plan.nodes)
    assert play.did(Upload) == [Upload(keepers, (save,), 1, Version(5, 1))]
    play.step(6)
    assert not play.did(Upload)
    play.save(Version(5, 1), "w1", "w2")
    assert play.did(Upload) == [Upload(keepers, (), 1, Version(6, 1))]
    play.steps(7, 10)
    play.tell(ev.SaveFailed(Version(10, 1), "disk full"))
    assert play.did(Upload) == [Upload(keepers, (), 1, Version(10, 1))]
    assert play.last.durable, (
        "its copies may be overwritten from now on: the next coordinator must not wait for them"
    )


def test_without_all_keepers_nothing_is_saved_and_that_is_said() -> None:
    play = stepping(2, save_every=5)
    play.tell(ev.KeeperLost(NodeId("n2"), "its process died"))
    play.steps(1, 4)
    assert "step 5 of generation 1 is not saved: there is no keeper on node n2" in play.step(5)
    assert play.run.saves.pending == () and play.did(Upload)[0].saves == (), (
        "whoever copied it may overwrite it"
    )
    assert play.last.durable, (
        "so the next coordinator must not begin it, even if a keeper is there again by then"
    )


def test_a_checkpoint_counts_when_its_manifest_is_durable() -> None:
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.tell(ev.ShardSaved(W1, Version(5, 1)))
    assert play.last.actions == ()
    play.tell(ev.ShardSaved(W2, Version(5, 1)))
    assert play.last.actions == (CommitManifest(Version(5, 1), ((1, 5),)),)
    assert play.run.history.saved == ()
    assert play.tell(ev.Saved(Version(5, 1), "digest")) == (
        "the checkpoint of step 5 of generation 1 is in the bucket"
    )
    assert play.run.history.saved == (Version(5, 1),)


def test_a_zombies_manifest_counts_for_nothing() -> None:
    """Version (7, 1) was abandoned; whatever is written of it later is refused."""
    play = stepping(3, layout=LayoutRule(1, None, 1, "all"), save_every=7)
    play.steps(1, 7)
    for worker in ("w1", "w2", "w3"):
        play.tell(ev.ShardSaved(WorkerId(worker), Version(7, 1)))
    assert play.deeds == ["CommitManifest"]
    play.lose("w2")
    play.answer("w1", Version(7, 1))
    play.answer("w3", Version(7, 1))
    assert play.plan.version == Version(0, 0) and play.run.history.lineage == ()
    before = play.run
    assert play.tell(ev.Saved(Version(7, 1), "digest")) == (
        "refused: the checkpoint of step 7 of generation 1 was given up"
    )
    assert play.tell(ev.ShardSaved(W1, Version(7, 1))).startswith("refused: a part of ")
    assert play.run is before and play.run.history.saved == ()


def test_a_manifest_nobody_asked_for_counts_for_nothing() -> None:
    play = stepping(2, save_every=5)
    play.steps(1, 6)
    assert play.tell(ev.Saved(Version(6, 1), "digest")) == (
        "refused: the manifest of step 6 of generation 1 is not expected"
    )
    assert play.tell(ev.Saved(Version(5, 1), "digest")) == (
        "refused: the manifest of step 5 of generation 1 is not expected"
    )


def test_a_worker_that_dies_does_not_end_a_save() -> None:
    """Its keeper has the copy, or says that it lacks it."""
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.tell(ev.ShardSaved(W1, Version(5, 1)))
    play.lose("w2")
    play.answer("w1", Version(5, 1))
    assert [each.version for each in play.run.saves.pending] == [Version(5, 1)]
    assert play.did(Upload)[0].saves[0].members == (W1, W2), "and it is told so while the next world forms"
    assert play.save(Version(5, 1), "w2").endswith(
        "the checkpoint of step 5 of generation 1 is in the bucket"
    )


def test_a_worker_that_dies_before_its_copy_is_complete_ends_the_save() -> None:
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.lose("w2")
    said = play.tell(
        ev.SaveFailed(Version(5, 1), "no part of w2: the worker ended before its copy was complete", 1)
    )
    assert said == (
        "the checkpoint of step 5 of generation 1 failed (no part of w2: the worker ended before its "
        "copy was complete)"
    )
    assert play.run.saves.pending == ()


@pytest.mark.parametrize("written", [False, True])
def test_a_keeper_that_dies_ends_the_saves_that_it_had_to_upload(written: bool) -> None:
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.tell(ev.ShardSaved(W2 if written else W1, Version(5, 1)))
    said = play.tell(ev.KeeperLost(NodeId("n2"), "its process died"))
    assert ("the keeper of node n2 is gone and had not saved its part" in said) != written
    assert [each.version.step for each in play.run.saves.pending] == ([5] if written else [])


def test_a_save_that_the_run_went_back_behind_is_given_up() -> None:
    """Nobody waits for it: otherwise every later save would have to wait."""
    play = stepping(2, layout=LayoutRule(1, None, 1, "all"), save_every=5)
    play.steps(1, 5)
    play.lose("w2")
    play.answer("w1", Version(5, 1))
    assert play.plan.version == Version(0, 0) and play.run.saves.pending == ()
    assert play.did(Upload) == [Upload(play.run.cluster.keepers, (), 2, Version(0, 0))]


def test_a_save_outlives_its_world_when_its_writers_do() -> None:
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.broken("w1")
    play.answer("w1", Version(5, 1))
    play.answer("w2", Version(5, 1))
    assert play.generation == 2
    assert play.save(Version(5, 1), "w1", "w2").endswith("is in the bucket")


def test_a_manifest_that_fails_is_asked_for_again_and_a_part_is_not() -> None:
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    for worker in (W1, W2):
        play.tell(ev.ShardSaved(worker, Version(5, 1)))
    reason = play.tell(ev.SaveFailed(Version(5, 1), "store unavailable", 1, again=True, manifest=True))
    assert reason == (
        "the manifest of step 5 of generation 1 was not written (store unavailable); the run "
        "tries again in 5 s"
    )
    assert play.last.actions == ()
    play.step(6)
    play.later(5.0)
    assert play.deeds == ["CommitManifest"]
    play.steps(7, 10)
    assert play.tell(ev.SaveFailed(Version(10, 1), "disk full")) == (
        "the checkpoint of step 10 of generation 1 failed (disk full)"
    )
    assert isinstance(play.run.state, Running) and [each.version for each in play.run.saves.pending] == [
        Version(5, 1)
    ]


@pytest.mark.parametrize("last", [2, 0])
def test_a_save_without_room_has_what_no_rule_keeps_deleted_at_once(last: int) -> None:
    """It is asked for at each refusal, since what may be deleted changes.  The control: of a bucket that is
    down nothing is deleted.
    """
    play = stepping(2, save_every=5, keep=Keep(last=last))
    for step in (5, 10):
        play.steps(step - 4, step)
        play.save(Version(step, 1), "w1", "w2")
    play.steps(11, 15)
    down = ev.SaveFailed(Version(15, 1), "no", 1, again=True, worker=W1)
    for event, asked in ((down, 0), (replace(down, worker=W2, full=True), 1), (replace(down, full=True), 1)):
        play.tell(event)
        assert len(play.did(Retain)) == asked
    play.save(Version(15, 1), "w1", "w2")
    play.steps(16, 20)
    full = ev.SaveFailed(Version(20, 1), "no", 1, again=True, worker=W1, full=True)
    play.tell(full)
    kept = (Version(10, 1), Version(15, 1)) if last else (Version(5, 1), Version(10, 1), Version(15, 1))
    assert (
        play.did(Retain) == [Retain(kept, ((1, 20),), None, (Version(20, 1), Version(0, 0)), at_once=True)]
        and play.last.durable
    )
    play.tell(replace(full, worker=W2))
    assert len(play.did(Retain)) == 1


def test_a_manifest_that_can_never_be_written_ends_its_save() -> None:
    """Only a bucket that refuses it is asked again; otherwise no save would ever be begun any more."""
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.tell(ev.ShardSaved(W1, Version(5, 1)))
    play.tell(ev.ShardSaved(W2, Version(5, 1)))
    said = play.tell(
        ev.SaveFailed(Version(5, 1), "Incomplete: 6 of 12 elements", 1, again=False, manifest=True)
    )
    assert said == "the checkpoint of step 5 of generation 1 failed (Incomplete: 6 of 12 elements)"
    assert play.run.saves.pending == () and play.did(Upload)[0].saves == ()


def test_a_save_of_which_nothing_is_heard_is_given_up() -> None:
    """A member that stands still, and whose kill was lost, copies nothing and does not end: no other save
    would begin any more.
    """
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.tell(ev.ShardSaved(W1, Version(5, 1)))
    for step in (6, 7, 8):
        play.now += 10.0
        play.step(step)
        play.tell(ev.Beat(NodeId("n2"), (), uploading=(Version(5, 1),)))
    assert play.run.saves.find(Version(5, 1)) is not None, "the control: a keeper is writing it"
    play.now += 14.0
    play.step(9)
    play.now += 1.0
    assert play.step(10, behind=True).startswith(
        "a save is due, but the save before it is not in the bucket yet, or "
    )
    assert play.run.saves.pending == ()


def taken_over(*, asked: bool) -> Play:
    """Returns a run whose coordinator died while a save was on its way, and with it the node n2, which had
    uploaded its part.

    ``asked``: all parts were there, and the manifest was asked for.
    """
    play = stepping(2, save_every=5, min_workers=1)
    play.steps(1, 5)
    play.tell(ev.ShardSaved(W2, Version(5, 1)))
    if asked:
        play.tell(ev.ShardSaved(W1, Version(5, 1)))
        assert play.did(CommitManifest)
    play.now += 1.0
    play.tell(ev.Recovered(2, (W1,), (NodeId("n1"),)))
    return play


def test_a_save_whose_receipts_died_with_a_coordinator_and_a_keeper_is_given_up() -> None:
    """Nobody can say again what the lost keeper had uploaded: if the save stayed, no other one would be begun
    any more.
    """
    play = taken_over(asked=False)
    assert "the keeper of node n2 is gone and had not saved its part" in play.last.reason
    assert play.run.saves.pending == () and play.last.durable


@pytest.mark.parametrize("exists", [False, True])
def test_a_manifest_that_may_exist_is_looked_for_once_more(exists: bool) -> None:
    play = taken_over(asked=True)
    assert [each.version for each in play.did(CommitManifest)] == [Version(5, 1)], (
        "the answer says whether it is there"
    )
    assert not (play.later(0.1) or play.did(CommitManifest)), "once"
    if exists:
        assert "the checkpoint of step 5 of generation 1 is in the bucket" in play.tell(
            ev.Saved(Version(5, 1), "digest")
        )
        assert play.run.history.saved == (Version(5, 1),)
    else:
        said = play.tell(
            ev.SaveFailed(Version(5, 1), "KeyError: no part of it", 1, again=False, manifest=True)
        )
        assert "the checkpoint of step 5 of generation 1 failed (KeyError: no part of it)" in said
    assert play.run.saves.pending == ()


@pytest.mark.parametrize("exists", [False, True])
def test_a_part_that_is_gone_does_not_end_a_save_whose_manifest_may_exist(exists: bool) -> None:
    """The manifest was written, and the coordinator died before anybody knew; the next keepers do not find
    the copies any more.
    """
    play = stepping(2, save_every=5)
    play.steps(1, 5)
    play.tell(ev.ShardSaved(W1, Version(5, 1)))
    play.tell(ev.ShardSaved(W2, Version(5, 1)))
    play.now += 1.0
    play.tell(ev.Recovered(2, (W1, W2), (NodeId("n1"), NodeId("n2"))))
    play.tell(
        ev.SaveFailed(
            Version(5, 1), "no part of w1: the worker ended before its copy was complete", 1, again=False
        )
    )
    assert [each.version for each in play.did(CommitManifest)] == [Version(5, 1)]
    assert play.did(Upload)[0].saves == () and play.last.durable, "nobody looks for the copies any more"
    play.tell(
        ev.SaveFailed(
            Version(5, 1), "no part of w2: the worker ended before its copy was complete", 1, again=False
        )
    )
    assert not play.did(CommitManifest) and play.run.saves.find(Version(5, 1)) is not None
    if exists:
        play.tell(ev.Saved(Version(5, 1), "digest"))
    else:
        play.tell(ev.SaveFailed(Version(5, 1), "KeyError: no part of it", 1, again=False, manifest=True))
    assert play.run.history.saved == ((Version(5, 1),) if exists else ()) and play.run.saves.pending == ()


WORKERS = [WorkerId(f"w{number}") for number in range(1, 5)]
STEPS = st.integers(1, 3)
WORK = st.one_of(
    st.tuples(st.just("begin"), STEPS, st.sets(st.sampled_from(WORKERS), min_size=1)),
    st.tuples(st.just("report"), STEPS, st.sampled_from(WORKERS)),
)


@given(st.lists(WORK, max_size=25))
def test_a_save_is_complete_when_all_its_writers_reported(work: list[tuple[str, int, object]]) -> None:
    saves = Saves()
    missing: dict[int, set[object]] = {}
    for kind, step, what in work:
        version = Version(step, 1)
        if kind == "begin":
            assert isinstance(what, set)
            writers = tuple(sorted(what))
            saves, missing[step] = (
                saves.put(Saving(version, writers, (), Layout(1, len(writers)), 0.0)),
                set(writers),
            )
        elif kind == "report" and (known := saves.find(version)):
            saves = saves.put(known.report(what, 0.0))
            missing[step].discard(what)
        assert [each.version.step for each in saves.pending] == sorted(missing)
        assert {each.version.step for each in saves.pending if each.complete} == {
            each for each, writers in missing.items() if not writers
        }
