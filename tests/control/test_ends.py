"""Runs end finished, stopped or at fault; these tests cover each end and what is saved on the way (R14, R20,
H1, H2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.control.run import Failed, Finished, Finishing, Forming, Running, RunState, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.protocol import events as ev
from elastic.protocol.actions import CommitManifest, Exit, Fence, Pause, Quarantine, Settle
from elastic.protocol.commit_record import PAUSE, SAVE_AND_PAUSE
from tests.control.play import CLASSES, Play, reformed, rules, started, stepping

pytestmark = pytest.mark.fast
W1, W2 = WorkerId("w1"), WorkerId("w2")


def finishing(workers: int = 2, **changes: Any) -> Play:
    play = stepping(workers, target_step=6, save_every=50, **changes)
    play.steps(1, 6)
    assert play.last.reason == "step 6 is the last: its checkpoint is on the way"
    return play


def test_the_last_save_that_fails_is_not_waited_for() -> None:
    play = finishing()
    assert "the last checkpoint cannot become complete" in play.tell(
        ev.SaveFailed(Version(6, 1), "disk full")
    ), "not after stop_s"


def test_a_run_finishes_when_the_last_checkpoint_is_durable() -> None:
    play = finishing()
    assert isinstance(play.run.state, Finishing)
    reason = play.save(Version(6, 1), "w1", "w2")
    assert reason == "the checkpoint of step 6 of generation 1 is in the bucket; finished at step 6"
    assert isinstance(play.run.state, Finished)
    assert play.deeds == ["Exit"] and play.did(Exit) == [Exit((W1, W2))]


def test_losing_a_member_while_finishing_saves_again_from_whoever_holds_it() -> None:
    play = finishing()
    play.tell(ev.ShardSaved(W1, Version(6, 1)))
    assert play.lose("w2") == "w2 is lost (its process died)"
    reason = play.tell(ev.SaveFailed(Version(6, 1), "no part of w2", 1))
    assert reason.endswith(
        "failed (no part of w2); the last checkpoint cannot become complete: stop generation 1 of 2 workers"
    )
    reason = play.answer("w1", Version(6, 1))
    assert reason == "form generation 2 of w1 (1×1) at step 6 (live)"
    reformed(play)
    assert isinstance(play.run.state, Finishing)
    assert play.tell(ev.ShardSaved(W1, Version(6, 1), by=1)).startswith("refused"), (
        "it was on its way: a part in another layout"
    )
    assert play.tell(ev.SaveFailed(Version(6, 1), "disk full", by=1)).startswith("refused"), (
        "nor does a failure of the one before"
    )
    assert play.save(Version(6, 1), "w1", by=2).endswith("finished at step 6")
    assert play.run.history.lineage == ((1, 6),), (
        "the version is still generation 1's: nothing was computed again"
    )


def test_losing_all_members_after_they_have_copied_changes_nothing() -> None:
    """The keepers write the last checkpoint without them."""
    play = finishing()
    play.tell(ev.ShardSaved(W1, Version(6, 1)))
    assert play.lose("w1") == "w1 is lost (its process died)"
    assert play.lose("w2") == "w2 is lost (its process died)"
    play.tell(ev.ShardSaved(W2, Version(6, 1)))
    assert play.did(CommitManifest)
    assert play.tell(ev.Saved(Version(6, 1), "digest")).endswith("finished at step 6")


def test_finishing_without_a_word_has_a_deadline() -> None:
    play = finishing()
    assert play.later(14.0) == ""
    play.tell(ev.ShardSaved(W1, Version(6, 1)))
    assert play.later(14.0) == ""
    assert play.later(1.0).startswith("nothing of the last checkpoint arrived for 15 s: stop generation 1")


def test_a_last_checkpoint_that_is_being_written_is_waited_for() -> None:
    """Parts of a large model take longer than ``stop_s``; the keepers' beats say that they go on."""
    play = finishing()
    for _ in range(100):
        assert play.later(10.0) == ""
        assert play.tell(ev.Beat(NodeId("n2"), (), uploading=(Version(6, 1),))) == ""
    assert play.later(14.0) == ""
    assert play.later(1.0).startswith("nothing of the last checkpoint arrived for 15 s: stop generation 1"), (
        "the control: no beat says so"
    )


def test_at_the_end_a_bucket_that_is_down_is_waited_for() -> None:
    """The keeper tries again by itself, so the world stays, for ``wait_s`` from the first refusal on."""
    play = finishing(wait_s=600.0)
    refused = ev.SaveFailed(Version(6, 1), "no part of w1 yet: s3://b cannot be reached", 1, again=True)
    assert play.tell(refused).startswith(
        "a part of step 6 of generation 1 was not written (no part of w1 yet: "
    )
    assert play.later(300.0) == ""
    play.tell(refused)
    assert isinstance(play.run.state, Finishing) and play.later(299.0) == ""
    assert play.later(1.0).startswith("the bucket refused the last checkpoint for 600 s: stop generation 1")


def test_a_bucket_that_is_back_is_given_the_last_checkpoint() -> None:
    play = finishing(wait_s=600.0)
    play.tell(ev.SaveFailed(Version(6, 1), "s3://b cannot be reached", 1, again=True))
    assert play.later(500.0) == ""
    play.tell(ev.ShardSaved(W1, Version(6, 1)))
    play.tell(ev.ShardSaved(W2, Version(6, 1)))
    assert play.did(CommitManifest)
    play.tell(ev.SaveFailed(Version(6, 1), "s3://b cannot be reached", 1, again=True))
    assert play.later(10.0) == "" and play.did(CommitManifest), "the manifest is tried again too"
    assert play.tell(ev.Saved(Version(6, 1), "digest")).endswith("finished at step 6")


def test_a_part_that_is_still_refused_is_waited_for_after_another_part_has_arrived() -> None:
    """Its keeper says only once that the bucket refuses it, and a part that was refused often does not count
    as being written.
    """
    play, refused = (
        finishing(wait_s=600.0),
        ev.SaveFailed(Version(6, 1), "s3://b cannot be reached", 1, again=True),
    )
    play.tell(replace(refused, worker=W1))
    play.tell(replace(refused, worker=W2))
    play.tell(ev.ShardSaved(W1, Version(6, 1)))
    assert play.later(599.0) == ""
    assert play.later(1.0).startswith("the bucket refused the last checkpoint for 600 s: stop generation 1")
    control = finishing(wait_s=600.0)
    control.tell(replace(refused, worker=W1))
    control.tell(ev.ShardSaved(W1, Version(6, 1)))
    assert control.later(15.0).startswith("nothing of the last checkpoint arrived for 15 s"), (
        "nothing is refused any more"
    )


def test_a_bucket_that_refuses_the_last_checkpoint_is_waited_for_once() -> None:
    """Each world that was formed again waited as long once more.  The control: where nothing is refused,
    another world saves it.
    """
    play, control = finishing(wait_s=600.0), finishing(wait_s=600.0)
    play.tell(ev.SaveFailed(Version(6, 1), "s3://b cannot be reached", 1, again=True))
    play.later(600.0)
    control.later(15.0)
    for each in (play, control):
        each.answer("w1", Version(6, 1))
        each.answer("w2", Version(6, 1))
    why = "the bucket refused the last checkpoint for 600 s"
    assert (
        play.last.reason == f"gave up ({why}), resumes from step 0; steps 1–6 are not saved"
        and play.run.state == Failed(why)
    )
    assert isinstance(control.run.state, Forming)


@pytest.mark.parametrize("before", [1.0, 599.0])
def test_a_bucket_that_was_full_before_the_end_is_waited_for_once_from_there_on(before: float) -> None:
    """Both saves are refused, the last one when there is a slot for its copy."""
    play = stepping(2, target_step=6, save_every=5, wait_s=600.0, stall_s=1e9, silence_s=1e9)
    play.steps(1, 5)
    play.tell(ev.SaveFailed(Version(5, 1), "disk full", 1, again=True, worker=W1))
    play.later(before)
    play.step(6)
    began = play.now
    assert play.later(599.0) == ""
    play.tell(ev.SaveFailed(Version(6, 1), "disk full", 1, again=True, worker=W1))
    while isinstance(play.run.state, Finishing):
        play.later(1.0)
    assert play.now - began == 600.0


def complete(play: Play) -> ev.SaveFailed:
    """Brings all parts of the last checkpoint, and returns what says that the bucket refuses the manifest."""
    play.tell(ev.ShardSaved(W1, Version(6, 1)))
    play.tell(ev.ShardSaved(W2, Version(6, 1)))
    return ev.SaveFailed(Version(6, 1), "s3://b cannot be reached", 1, again=True, manifest=True)


def wait_while_finishing(play: Play, answer: ev.Event | None) -> float:
    """Answers each question for the manifest, and returns how long the run went on finishing."""
    began = play.now
    while isinstance(play.run.state, Finishing) and play.now < began + 3000.0:
        play.later(1.0)
        if play.did(CommitManifest) and answer is not None:
            play.tell(answer)
    return play.now - began


@pytest.mark.parametrize("answered", [True, False], ids=["refused", "not answered"])
def test_a_manifest_that_is_never_written_is_waited_for_no_longer_than_a_part(answered: bool) -> None:
    """R11: each question began the wait anew, so a bucket that went down after the last part kept the run for
    ever.
    """
    play = finishing(wait_s=600.0)
    refused = complete(play)
    if answered:
        play.tell(refused)
    assert 599.0 <= wait_while_finishing(play, refused if answered else None) <= 606.0


def test_a_save_whose_manifest_is_never_answered_does_not_keep_the_next_ones_away() -> None:
    """R11: no other save begins while one is on its way."""
    play = stepping(2, wait_s=600.0, save_every=1, stall_s=1e9, silence_s=1e9)
    play.step(1)
    play.tell(ev.ShardSaved(W1, Version(1, 1)))
    play.tell(ev.ShardSaved(W2, Version(1, 1)))
    assert play.did(CommitManifest)
    said = [play.later(1.0) for _ in range(599)]
    assert not any("failed" in each for each in said) and play.run.saves.pending
    assert "its save made no progress for 600 s" in play.later(1.0) and not play.run.saves.pending


def test_a_refusal_that_comes_after_its_part_counts_no_more() -> None:
    """Reports of different processes may overtake each other; the part is in the bucket."""
    play = finishing(wait_s=600.0)
    play.tell(ev.ShardSaved(W1, Version(6, 1)))
    play.tell(ev.SaveFailed(Version(6, 1), "s3://b cannot be reached", 1, again=True, worker=W1))
    play.tell(ev.ShardSaved(W2, Version(6, 1)))
    assert play.run.saves.pending[0].refused_at is None


def test_a_stop_waits_for_its_checkpoint_too() -> None:
    play = stepping(2)
    play.tell(ev.StopRequested("Ctrl-C"))
    play.step(1, boundary=SAVE_AND_PAUSE)
    play.answer("w1", Version(1, 1), saw=1)
    play.answer("w2", Version(1, 1), saw=1)
    for _ in range(10):
        assert play.later(10.0) == ""
        play.tell(ev.Beat(NodeId("n1"), (), uploading=(Version(1, 1),)))
    assert play.save(Version(1, 1), "w1", "w2").endswith("stopped (Ctrl-C), resumes from step 1")


def test_a_finished_run_has_nothing_to_do() -> None:
    run = RunState.begin(2, 0.0, saved=(Version(100, 3),), lineage=((3, 100),))
    play = Play(rules(), run)
    assert play.later(0.1) == "finished: step 100 is in the bucket"
    assert isinstance(play.run.state, Finished)


def test_a_stop_is_clean_saves_and_can_be_resumed() -> None:
    play = stepping(2)
    play.steps(1, 3)
    reason = play.tell(ev.StopRequested("Ctrl-C"))
    assert reason == "stop asked for (Ctrl-C): generation 1 pauses at the next boundary"
    assert play.last.actions == (Pause(1, (W1, W2), True),)
    play.step(4, boundary=SAVE_AND_PAUSE)
    play.answer("w1", Version(4, 1), saw=4)
    play.answer("w2", Version(4, 1), saw=4)
    assert isinstance(play.run.state, Stopping), "its checkpoint is not durable yet"
    reason = play.save(Version(4, 1), "w1", "w2")
    assert reason == (
        "the checkpoint of step 4 of generation 1 is in the bucket; stopped (Ctrl-C), resumes from step 4"
    )
    assert (play.deeds, play.did(Settle)) == (["Settle", "Exit"], [Settle(1, (W1, W2), None)])
    resumed = Play(
        rules(max_workers=2),
        RunState.begin(2, 0.0, play.run.history.saved, play.run.history.lineage, play.run.generation),
    )
    resumed.tell(ev.Capacity(2))
    assert "at step 4 (bucket)" in resumed.join("w1", "w2")


def test_a_stop_whose_save_does_not_come_says_what_is_lost() -> None:
    play = stepping(2)
    play.steps(1, 3)
    play.tell(ev.StopRequested("Ctrl-C"))
    play.step(4, boundary=SAVE_AND_PAUSE)
    play.answer("w1", Version(4, 1))
    play.answer("w2", Version(4, 1))
    assert play.later(15.0) == "stopped (Ctrl-C), resumes from step 0; steps 1–4 are not saved"


@pytest.mark.parametrize("stops", [True, False], ids=["stop", "control"])
def test_a_stop_whose_save_the_bucket_refuses_says_how_long_it_is_tried(stops: bool) -> None:
    """It says so at the first refusal, and keeps to that.  The control: a save on the way that nobody waits
    for.
    """
    play, waits = (
        stepping(2, wait_s=600.0),
        "for 600 s in all (deadlines.wait_s); then the run stops without it, and resumes from step 0",
    )
    play.steps(1, 3)
    if stops:
        play.tell(ev.StopRequested("Ctrl-C"))
    play.step(4, boundary=SAVE_AND_PAUSE)
    for manifest in (False, True):
        said = play.tell(
            ev.SaveFailed(
                Version(4, 1), "no part of w1 yet: disk full", 1, again=True, worker=W1, manifest=manifest
            )
        )
        assert "disk full" in said and said.endswith(f", {waits}") is stops, said
    if stops:
        play.answer("w1", Version(4, 1), saw=4)
        play.answer("w2", Version(4, 1), saw=4)
        assert play.later(599.0) == ""
        assert play.later(1.0) == "stopped (Ctrl-C), resumes from step 0; steps 1–4 are not saved"


def test_a_stop_survives_a_loss_on_the_way() -> None:
    """The members that are left form a world more, which saves.  The control: nobody is left."""
    play = stepping(2)
    play.steps(1, 3)
    play.tell(ev.StopRequested("Ctrl-C"))
    reason = play.lose("w2")
    assert reason == "w2 is lost (its process died); generation 1 stops at once"
    assert play.did(Fence) == [Fence(1, (W1,))]
    assert play.answer("w1", Version(3, 1)) == "form generation 2 of w1 (1×1) at step 3 (live)"
    reformed(play)
    assert play.later(0.1) == "stop asked for (Ctrl-C): generation 2 pauses at the next boundary"
    play.step(4, boundary=SAVE_AND_PAUSE)
    play.answer("w1", Version(4, 2))
    assert play.save(Version(4, 2), "w1").endswith("stopped (Ctrl-C), resumes from step 4")
    alone = stepping(1)
    alone.steps(1, 3)
    alone.tell(ev.StopRequested("Ctrl-C"))
    alone.lose("w1")
    assert alone.later(0.1).endswith("stopped (Ctrl-C), resumes from step 0; steps 1–3 are not saved")


def test_a_stop_while_waiting_or_forming_with_nothing_to_save_is_immediate() -> None:
    waiting = Play()
    assert waiting.tell(ev.StopRequested("Ctrl-C")).endswith("stopped (Ctrl-C), resumes from step 0")
    forming = started(1)
    assert "and there is nothing to save: stop generation 1" in forming.tell(ev.StopRequested("Ctrl-C"))
    assert forming.answer("w1", None).endswith("stopped (Ctrl-C), resumes from step 0")


def test_a_stop_while_forming_with_something_to_save_saves_it() -> None:
    play = stepping(2)
    play.steps(1, 3)
    play.lose("w2")
    play.answer("w1", Version(3, 1))
    assert play.tell(ev.StopRequested("Ctrl-C")) == "stop asked for (Ctrl-C)"
    assert isinstance(play.run.state, Forming)
    reformed(play)
    assert play.later(0.1) == "stop asked for (Ctrl-C): generation 2 pauses at the next boundary"
    assert play.did(Pause) == [Pause(2, (W1,), True)]


def test_a_stop_during_growth_saves_too() -> None:
    play = stepping(1)
    play.rules = rules(max_workers=2)
    play.tell(ev.Capacity(1))
    play.join("w2")
    play.tell(ev.StopRequested("Ctrl-C"))
    assert play.did(Pause) == [Pause(1, (W1,), True)]


def test_the_target_reached_before_the_boundary_finishes() -> None:
    """The pause came too late for the last commit: nobody will ever stand at the boundary it asks for."""
    play = stepping(1, target_step=6)
    play.rules = rules(max_workers=2, target_step=6)
    play.steps(1, 5)
    play.tell(ev.Capacity(1))
    play.join("w2")
    assert play.step(6) == "step 6 is the last: its checkpoint is on the way"
    assert play.save(Version(6, 1), "w1").endswith("finished at step 6")


def test_the_target_at_the_boundary_finishes() -> None:
    play = stepping(1, target_step=6)
    play.rules = rules(max_workers=2, target_step=6)
    play.steps(1, 5)
    play.tell(ev.Capacity(1))
    play.join("w2")
    play.answer("w1", Version(6, 1), saw=6)
    assert isinstance(play.run.state, Finishing), "the report of world rank 0 is late: its answer says it all"
    assert play.step(6, boundary=PAUSE) == ""
    assert play.save(Version(6, 1), "w1").endswith("finished at step 6")


def test_nothing_is_heard_after_the_end() -> None:
    play = finishing()
    play.save(Version(6, 1), "w1", "w2")
    before = play.run
    assert play.lose("w1") == "refused: the run is over (Finished)"
    reason = play.tell(ev.Joined(WorkerId("w7"), NodeId("n1"), "cpu", CLASSES))
    assert reason == "refused: the run is over (Finished)" and play.last.actions == (Exit((WorkerId("w7"),)),)
    assert play.run is before


# ---- errors that are the job's own (R20)

ERROR = "Traceback ...\nValueError: bad sample"


def test_r20_the_same_error_on_a_second_worker_is_the_jobs_own() -> None:
    play = stepping(2)
    play.steps(1, 3)
    play.broken("w2", "job", ERROR, "ValueError at user.py:7")
    play.answer("w1", Version(3, 1))
    play.answer("w2", Version(3, 1))
    assert play.plan.members == ("w2", "w1"), "moved by one seat: the microbatch is w1's now"
    reformed(play)
    play.broken("w1", "job", ERROR, "ValueError at user.py:7")
    play.answer("w1", Version(3, 1))
    reason = play.answer("w2", Version(3, 1))
    assert reason == "job error: ValueError at user.py:7 at step 4, again on w2 and w1"
    assert play.run.state == Failed(reason, ERROR)
    assert play.did(Exit)


def test_r20_a_one_off_recovers() -> None:
    play = stepping(2)
    play.steps(1, 3)
    for step, signature in (
        (4, "OSError at data.py:3"),
        (5, "OSError at data.py:3"),
        (6, "ValueError at user.py:9"),
    ):
        play.broken("w2", "job", ERROR, signature)
        play.answer("w1", play.run.version)
        play.answer("w2", play.run.version)
        reformed(play)
        assert isinstance(play.run.state, Running), "another step, or another error"
        play.step(step)
    assert play.run.history.failures == ()


def test_r20_a_single_worker_tries_twice() -> None:
    play = stepping(1)
    play.broken("w1", "job", ERROR, "ValueError at user.py:7")
    play.answer("w1", Version(0, 0))
    reformed(play)
    play.broken("w1", "job", ERROR, "ValueError at user.py:7")
    play.answer("w1", Version(0, 0))
    assert isinstance(play.run.state, Failed) and play.run.state.job_error == ERROR


def test_r20_the_same_worker_again_is_not_the_jobs_own_while_there_are_others() -> None:
    """The worker itself may be bad: only the same error on another worker convicts the job."""
    play = stepping(2)
    for _ in range(2):
        play.broken("w2", "job", ERROR, "ValueError at user.py:7")
        play.answer("w1", Version(0, 0))
        play.answer("w2", Version(0, 0))
        assert isinstance(play.run.state, Forming)
        reformed(play)
    play.broken("w1", "job", ERROR, "ValueError at user.py:7")
    play.answer("w1", Version(0, 0))
    play.answer("w2", Version(0, 0))
    assert isinstance(play.run.state, Failed) and play.run.state.job_error == ERROR


def test_r20_two_workers_at_once_are_still_one_attempt() -> None:
    play = stepping(2)
    play.broken("w1", "job", ERROR, "ValueError at user.py:7")
    play.broken("w2", "job", ERROR, "ValueError at user.py:7")
    play.answer("w1", Version(0, 0))
    play.answer("w2", Version(0, 0))
    assert isinstance(play.run.state, Forming)
    assert play.plan.members == ("w2", "w1"), "one seat, not two"


# ---- a damaged checkpoint


def test_a_damaged_checkpoint_is_put_aside_for_the_one_before() -> None:
    saved = (Version(10, 1), Version(20, 1))
    play = Play(rules(max_workers=2), RunState.begin(2, 0.0, saved, ((1, 24),), 1))
    play.tell(ev.Capacity(2))
    play.join("w1", "w2")
    play.here("w1", "w2")
    reason = play.tell(ev.Broken(W1, 2, 20, "damaged", "digest of shard-0 differs", version=Version(20, 1)))
    assert reason.startswith(
        "the checkpoint of step 20 of generation 1 is damaged (w1: digest of shard-0 differs): the "
        "checkpoint of step 10"
    )
    assert play.did(Quarantine) == [Quarantine(Version(20, 1), "w1: digest of shard-0 differs")]
    play.tell(ev.Broken(W2, 2, 20, "damaged", "digest of shard-0 differs", version=Version(20, 1)))
    assert not play.did(Quarantine), "once is enough"
    play.answer("w1", None)
    reason = play.answer("w2", None)
    assert reason == (
        "form generation 3 of w1 and w2 (2×1) at step 10 (bucket), abandons steps 11–20 of generation 1"
    )
