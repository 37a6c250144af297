"""Skipped steps are said, counted and, if too many come in a row, end the run: the same after a takeover, a
fall-back and a replay.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.rules import WatchRule
from elastic.control.run import Failed, Finished, Finishing, Running, RunState, Stopping
from elastic.control.skips import KEPT, Skips, Steps, note
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.protocol.actions import Pause
from elastic.protocol.commit_record import SAVE_AND_PAUSE, Outcome, Spike
from elastic.protocol.events import StepDone, StopRequested
from elastic.report.replay import differences
from tests.control.play import Play, outcome, reformed, stepping
from tests.control.test_takeover import take_over

pytestmark = pytest.mark.fast

RULE = WatchRule(max_skipped=3)
NAN, FINE = (math.nan, 2.0), (1.0, 2.0)


def commit(
    step: int,
    *losses: float,
    finite: bool = False,
    generation: int = 1,
    rescales: bool = False,
    boundary: int = 0,
) -> Outcome:
    """Returns a commit of two microbatches of two samples each."""
    return replace(
        outcome(step, generation, boundary),
        finite=finite,
        losses=losses or FINE,
        counts=(4, 4),
        samples=((10 * step, 10 * step + 1), (10 * step + 2, 10 * step + 3)),
        squared_norm=1.0 if finite else math.nan,
        rescales=rescales,
        saves=boundary == SAVE_AND_PAUSE,
    )


def said(each: Outcome, skips: Skips = Skips(), rule: WatchRule = RULE) -> str:  # noqa: B008 (frozen)
    return note(skips, each, rule, ends=False)[1]


def test_l3_the_sentence_names_the_step_the_microbatches_and_their_samples() -> None:
    """L3: one microbatch, all, and the gradient alone; the control is a finite step."""
    assert said(commit(7, *NAN)) == (
        "step 7 is skipped and changes no weights: the loss of microbatch 0 is nan (samples 70, 71)"
    )
    assert said(commit(7, 1.0, -math.inf)).endswith("the loss of microbatch 1 is -inf (samples 72, 73)")
    all_of_them = said(commit(7, math.nan, math.inf))
    assert all_of_them.endswith(
        "no loss of its 2 microbatches is finite; the loss of microbatch 0 is nan (samples 70, 71)"
    )
    assert said(commit(7)).endswith("every loss is finite, but the gradient is not (its norm is nan)")
    assert note(Skips(), commit(7, finite=True), RULE, ends=False) == (Skips(), "")


def test_g1_what_is_left_out_of_a_step_is_told_and_is_no_skip() -> None:
    """G1: the sentence has the microbatch, its loss and the limit; with a spike besides, both.  What is
    learnt late counts the same.  The control: without the word of the members the step counts as skipped.
    """
    noisy = replace(commit(7, 8.0, 36.0, finite=True), most_loss=5.0, quarantined=(72, 73))
    skips, sentence = note(Skips(), noisy, RULE, ends=False)
    told = (
        "leaves out microbatch 1 (loss 9, samples 72, 73) of 2: above 5 no loss counts (spikes.microbatch_z)"
    )
    apart = "samples 72, 73 are in quarantine from now on"
    assert sentence == f"step 7 {told}; {apart}" and skips == Skips(quarantined=((72, 7), (73, 7)))
    spike = Spike("loss", 9.0, 1.0, False)
    height = "is a spike: its loss, 2, is 9.0 robust standard deviations above the usual 1"
    assert said(replace(noisy, spike=spike)) == f"step 7 {height} and {told}; {apart}"
    most = replace(noisy, most_loss=None, quarantined=(), spike=Spike("microbatches", 2, 5.0, True))
    height = (
        "the losses of 2 of its 2 microbatches are above 5, the largest that counts (spikes.microbatch_z)"
    )
    assert said(most) == f"step 7 is skipped and changes no weights: {height}"
    assert (
        Skips().completed(((72, 7), (73, 7)), (7,)) == skips
        and Skips().completed(((72, 7), (73, 7))).total == 1
    )
    assert codec.decode(Outcome, json.loads(json.dumps(codec.encode(noisy)))) == noisy


def test_what_would_be_left_out_is_told_and_nothing_counts_as_skipped() -> None:
    """A step of which more than half is above the limit would be skipped.  The control: a limit that no loss
    exceeds.
    """
    noisy = replace(commit(7, 8.0, 36.0, finite=True), warned_loss=5.0)
    skips, sentence = note(Skips(), noisy, RULE, ends=False)
    limit = "above 5 no loss would count (spikes.microbatch_z), but spikes.action = 'warn' changes nothing"
    assert sentence == f"step 7 would leave out microbatch 1 (loss 9, samples 72, 73) of 2: {limit}"
    assert skips == Skips(would_leave_out=Steps(((7, 7),))) and not skips.total
    assert skips.summary == "1 step had microbatches that would be left out (warned): 7"
    assert said(replace(noisy, warned_loss=1.0)).startswith(
        "step 7 would be skipped, since it would leave out microbatch 0 (loss 2, "
    )
    assert said(replace(noisy, warned_loss=9.0)) == "" and not said(replace(noisy, warned_loss=None))
    assert codec.decode(Outcome, json.loads(json.dumps(codec.encode(noisy)))) == noisy


def test_a_step_of_many_microbatches_and_samples_is_told_in_brief() -> None:
    many = replace(commit(1), losses=(math.nan,) * 20 + (1.0,), samples=tuple((range(64)) for _ in range(21)))  # type: ignore[misc]
    assert (
        "microbatch 7 is nan" in said(many)
        and said(many).endswith(", and 12 more are not finite")
        and "and 56 more)" in said(many)
    )


def test_l3_the_scale_of_fp16_does_not_count_while_it_falls() -> None:
    """L3.  The controls: a loss that is not finite by itself, and a scale that cannot fall any more."""
    assert note(Skips(), commit(1, rescales=True), RULE, ends=False) == (Skips(), "")
    assert note(Skips(), commit(1, *NAN, rescales=True), RULE, ends=False)[0].total == 1
    assert note(Skips(), commit(1, rescales=False), RULE, ends=False)[0].total == 1


@given(st.sets(st.integers(1, 60)), st.randoms(), st.integers(0, 60))
def test_the_stretches_are_those_of_a_plain_set(skipped: set[int], draw: random.Random, cut: int) -> None:
    """Commits are told in any order; the judge counts the steps of the set."""
    skips, order = Skips(), sorted(skipped)
    draw.shuffle(order)
    for step in order:
        skips, _ = note(skips, commit(step), WatchRule(max_skipped=0), ends=False)
    assert {
        step for first, last in skips.stretches for step in range(first, last + 1)
    } == skipped and skips.total == len(skipped)
    assert {step for first, last in skips.cut(cut).stretches for step in range(first, last + 1)} == {
        each for each in skipped if each <= cut
    }


def test_of_many_stretches_the_oldest_are_only_counted() -> None:
    skips = Skips()
    for step in range(1, 201, 2):
        skips, _ = note(skips, commit(step), RULE, ends=False)
    assert (skips.total, len(skips.stretches)) == (100, KEPT)
    assert skips.summary.startswith("100 steps were skipped") and "the last of them 185, " in skips.summary


# ---- the run


def reported(play: Play, each: Outcome) -> str:
    return play.tell(
        StepDone(play.plan.members[0], play.generation, replace(each, generation=play.generation))
    )


def test_l3_after_max_skipped_in_a_row_the_run_fails_with_the_last_good_step() -> None:
    """L3: the state is saved at the next boundary, and then the run ends as the job's fault.  A step that is
    good begins a new row.
    """
    play = stepping(2, watch=RULE)
    for each in (
        commit(1, finite=True),
        commit(2),
        commit(3),
        commit(4, finite=True),
        commit(5, *NAN),
        commit(6),
    ):
        reported(play, each)
        assert isinstance(play.run.state, Running) and not play.run.stop
    text = reported(play, commit(7))
    assert "these are 3 in a row, of at most 3 (watch.max_skipped)" in text and text.endswith(
        "generation 1 pauses at the next boundary"
    )
    assert play.did(Pause) == [Pause(1, play.plan.members, save=True)]
    reported(play, commit(8, boundary=SAVE_AND_PAUSE))
    play.answer("w1", Version(8, 1))
    play.answer("w2", Version(8, 1))
    reason = play.save(Version(8, 1), "w1", "w2")
    end = play.run.state
    assert isinstance(end, Failed) and end.job_error == end.reason
    assert end.reason.startswith(
        "3 steps were skipped in a row, 5–7, and watch.max_skipped is 3: the last good step is 4, and no "
        "weight"
    )
    assert "lower optim.lr and go on with --branch; resumes from step 8" in end.reason
    assert reason.endswith("6 steps were skipped, because no finite gradient came: 2–3, 5–8")


def test_without_a_limit_and_at_the_last_step_the_run_goes_on() -> None:
    play = stepping(1, watch=WatchRule(max_skipped=0))
    for step in range(1, 60):
        reported(play, commit(step))
    assert isinstance(play.run.state, Running) and play.run.skips.total == 59
    play = stepping(1, watch=RULE, target_step=3)
    for step in (1, 2, 3):
        reported(play, replace(commit(step), saves=step == 3))
    assert isinstance(play.run.state, Finishing)
    assert play.save(Version(3, 1), "w1").endswith(
        "finished at step 3; 3 steps were skipped, because no finite gradient came: 1–3"
    )
    assert isinstance(play.run.state, Finished)


def test_l3_a_takeover_goes_on_counting() -> None:
    """L3: the next coordinator reads the journal.  The control forgets what was known."""
    for forgets in (False, True):
        play = stepping(2, watch=RULE)
        reported(play, commit(1))
        reported(play, commit(2))
        play = take_over(play)
        play.run = replace(play.run, skips=Skips()) if forgets else play.run
        reported(play, commit(3))
        assert bool(play.run.skips.failed) is not forgets


def test_l3_steps_that_were_given_up_count_anew() -> None:
    """L3: the members fall back to step 1, and the steps after it are skipped again; that is no longer row.
    The control: a third does.
    """
    play = stepping(2, watch=RULE)
    for step in (1, 2, 3):
        reported(play, commit(step, finite=step == 1))
    play.lose("w1")
    play.answer("w2", Version(1, 1))
    reformed(play)
    assert play.run.history.version == Version(1, 1) and play.run.skips.total == 0
    for step in (2, 3):
        assert not play.run.skips.failed
        reported(play, commit(step))
    assert play.run.skips == Skips(((2, 3),))
    reported(play, commit(4))
    assert play.run.skips.failed


def test_a_stop_that_was_asked_for_first_does_not_hide_the_failure() -> None:
    play = stepping(1, watch=RULE)
    reported(play, commit(1))
    reported(play, commit(2))
    play.tell(StopRequested("Ctrl-C"))
    assert isinstance(play.run.state, Stopping)
    reported(play, commit(3, boundary=SAVE_AND_PAUSE))
    play.answer("w1", Version(3, 1))
    play.save(Version(3, 1), "w1")
    assert isinstance(play.run.state, Failed) and "no step was good" in play.run.state.reason


def test_a_run_that_is_resumed_may_skip_as_many_again() -> None:
    skips = Skips(((5, 8),), failed="3 steps in a row").resume(7)
    assert (skips.stretches, skips.failed) == (((5, 7),), "")
    for step in (8, 9):
        skips, _ = note(skips, commit(step), RULE, ends=False)
        assert not skips.failed
    skips, _ = note(skips, commit(10), RULE, ends=False)
    assert skips.failed.startswith("3 steps were skipped in a row, 8–10") and skips.total == 6


def test_l3_a_replay_decides_the_same() -> None:
    """L3.  The control: with another limit it decides otherwise."""
    play = stepping(2, watch=RULE)
    begun, records = codec.snapshot(play.run, "this", play.rules), []
    for each in (
        commit(1, finite=True),
        commit(2, *NAN),
        commit(3, rescales=True),
        commit(4),
        commit(5),
        commit(6),
    ):
        before, event = play.run, StepDone(WorkerId("w1"), 1, each)
        play.tell(event)
        records.append(
            json.loads(json.dumps(codec.record(each.step, float(each.step), event, before, play.last)))
        )
    assert play.run.skips == Skips(((2, 2), (4, 6)), failed=play.run.skips.failed) and play.run.skips.failed
    assert (
        list(differences([(begun, records)], "this")) == []
        and codec.fold(begun, records).skips == play.run.skips
    )
    patient = codec.encode(replace(play.rules, watch=WatchRule(max_skipped=4)))
    assert list(differences([({**begun, "rules": patient}, records)], "this"))


def test_a_commit_without_skips_is_written_as_before() -> None:
    plain, scaled = codec.encode(commit(1, finite=True)), codec.encode(commit(1, rescales=True))
    assert "rescales" not in plain and codec.decode(Outcome, plain) == commit(1, finite=True)
    assert codec.decode(Outcome, json.loads(json.dumps(scaled))).rescales
    old = codec.encode(RunState.begin(1, 0.0))
    del old["skips"]
    assert codec.decode_run(old).skips == Skips()


SPIKE = Spike("loss", 9.26, 2.0, skipped=True)


def test_g1_the_sentences_about_a_spike() -> None:
    """G1: a spike that is skipped, with and without a quarantine, and one that is only told, which is no
    skip.
    """
    high = replace(commit(7, 100.0, 2.0, finite=True), spike=SPIKE)
    what = "its loss, 12.75, is 9.3 robust standard deviations above the usual 2"
    skips, sentence = note(Skips(), high, RULE, ends=False)
    assert sentence == f"step 7 is skipped and changes no weights: {what}"
    assert skips == Skips(((7, 7),), spikes=(7,)) and skips.summary.endswith(
        "because no finite gradient came or it was a spike: 7"
    )
    skips, sentence = note(Skips(), replace(high, quarantined=(70, 71)), RULE, ends=False)
    assert sentence == (
        f"step 7 is skipped and changes no weights: {what}; samples 70, 71 are in quarantine from now on"
    )
    assert skips.quarantined == ((70, 7), (71, 7)) and skips.summary.endswith(
        ": 7; 2 samples are in quarantine"
    )
    told = replace(high, spike=replace(SPIKE, skipped=False))
    assert note(Skips(), told, RULE, ends=False) == (
        Skips(warned=Steps(((7, 7),))),
        f"step 7 is a spike: {what}",
    )
    norm = replace(high, spike=replace(SPIKE, what="norm"), squared_norm=64.0)
    assert "its norm of the gradient, 1, is 9.3" in said(norm)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.booleans()), unique_by=lambda each: each[0], max_size=150),
    st.integers(0, 300),
)
def test_g1_spikes_that_are_only_warned_of_are_counted_apart_from_what_is_skipped(
    seen: list[tuple[int, bool]], end: int
) -> None:
    """G1: the judge is a count of the steps.  Steps that are given up count no more.  The control: a run that
    skips them.
    """
    skips = Skips()
    for step, skipped in sorted(seen):
        high = replace(commit(step, 100.0, 2.0, finite=True), spike=replace(SPIKE, skipped=skipped))
        skips, _ = note(skips, high, WatchRule(max_skipped=0), ends=False)
    warned, out = ([step for step, skipped in sorted(seen) if skipped is which] for which in (False, True))
    assert (skips.warned.total, skips.total) == (len(warned), len(out))
    number = f"{len(warned)} {'step was a spike' if len(warned) == 1 else 'steps were spikes'} (warned): "
    assert (number in skips.summary) == bool(warned) and ("skipped" in skips.summary) == bool(out)
    if skips.warned.earlier == skips.earlier == 0:
        cut = skips.cut(end)
        assert (cut.warned.total, cut.total) == tuple(
            len([step for step in each if step <= end]) for each in (warned, out)
        )
    assert codec.decode(Skips, json.loads(json.dumps(codec.encode(skips)))) == skips


def test_g1_a_run_that_warned_says_how_often_also_after_a_takeover() -> None:
    """G1: the sentence is that of `elastic status` and of the end.  The control: a run without a spike."""
    for spikes in ((), (2, 3, 5)):
        play = stepping(2, save_every=100, target_step=6)
        for step in range(1, 6):
            spike = replace(SPIKE, skipped=False) if step in spikes else None
            play.tell(StepDone(play.plan.members[0], 1, replace(play.commit(step), spike=spike)))
        before = play.run.skips
        assert before.summary == ("3 steps were spikes (warned): 2–3, 5" if spikes else "")
        assert take_over(play).run.skips.summary == before.summary
        old = codec.encode(replace(RunState.begin(1, 0.0), skips=before))
        del old["skips"]["warned"], old["skips"]["would_leave_out"]
        assert codec.decode_run(old).skips == Skips(), "an older release wrote none"


def test_g1_what_was_given_up_is_not_in_quarantine() -> None:
    skips = Skips()
    for step in (2, 5, 6):
        skips, _ = note(skips, replace(commit(step, *NAN), quarantined=(10 * step,)), RULE, ends=False)
    skips, _ = note(skips, replace(commit(8, *NAN), quarantined=(20,)), RULE, ends=False)
    assert skips.quarantined == ((20, 2), (50, 5), (60, 6)), "a sample is listed once"
    assert (
        skips.cut(8) is skips and skips.cut(5).quarantined == ((20, 2), (50, 5)) and skips.cut(1) == Skips()
    )
    assert replace(skips, stretches=()).cut(5).quarantined == ((20, 2), (50, 5))
    assert (
        skips.resume(5).quarantined == ((20, 2), (50, 5)) and skips.resume(5, forgets=True).quarantined == ()
    )


def test_g1_a_coordinator_learns_what_is_in_quarantine_from_the_state() -> None:
    """G1: a report with the list of the state completes what is known, each step counted once, and the next
    report adds nothing.  A list of a step that is not on the lineage says nothing.  The control: the same
    report without the list.
    """
    told = ((10, 1), (11, 1), (20, 2), (40, 4))
    for listed, known, total in ((told, told, 4), ((), ((20, 2),), 2)):
        play = stepping(2, save_every=100)
        play.step(1)
        for step in (2, 3):
            play.tell(
                StepDone(
                    play.plan.members[0],
                    1,
                    replace(commit(step, *NAN), quarantined=(20,) if step == 2 else (), generation=1),
                )
            )
        play.tell(
            StepDone(play.plan.members[0], 7, replace(play.commit(4), generation=7), quarantined=((30, 3),))
        )
        play.step(4)
        said = play.tell(StepDone(play.plan.members[0], 1, play.commit(5), quarantined=listed))
        assert (play.run.skips.quarantined, play.run.skips.total) == (known, total)
        assert said == (
            "the state has 3 samples in quarantine that the journal had not recorded" if listed else ""
        )
        before, event = play.run, StepDone(play.plan.members[0], 1, play.commit(6), quarantined=listed)
        assert play.tell(event) == "" and play.run.skips is before.skips
        assert ("quarantined" in codec.encode(event)) == bool(listed) and codec.decode(
            StepDone, codec.encode(event)
        ) == event


def test_g1_what_the_state_lists_counts_once_beside_stretches_that_are_not_kept() -> None:
    skips = Skips(stretches=((100, 101),), earlier=7, quarantined=((5, 101),))
    found = skips.completed(((1, 3), (2, 3), (5, 101), (9, 102)))
    assert (found.total, found.stretches, found.quarantined) == (
        11,
        ((3, 3), (100, 102)),
        ((1, 3), (2, 3), (5, 101), (9, 102)),
    )
    assert found.completed(found.quarantined) is found


def test_g1_many_spikes_in_a_row_end_the_run() -> None:
    skips = Skips()
    for step in (4, 5, 6):
        assert not skips.failed
        skips, _ = note(skips, replace(commit(step, 100.0, 2.0, finite=True), spike=SPIKE), RULE, ends=False)
    assert skips.failed.startswith(
        "3 steps were skipped in a row, 4–6, and watch.max_skipped is 3: the last good step is 3"
    )


def test_g1_spikes_are_journaled_and_older_journals_have_none() -> None:
    """G1: the control is a commit without a spike, which is written as before."""
    high = replace(commit(7, 100.0, 2.0, finite=True), spike=SPIKE, quarantined=(70, 71))
    assert codec.decode(Outcome, json.loads(json.dumps(codec.encode(high)))) == high
    assert not {"spike", "quarantined"} & codec.encode(commit(7, finite=True)).keys()
    run = replace(RunState.begin(1, 0.0), skips=note(Skips(), high, RULE, ends=False)[0])
    assert codec.decode_run(json.loads(json.dumps(codec.encode(run)))).skips == run.skips
    old = codec.encode(RunState.begin(1, 0.0))
    del old["skips"]["spikes"], old["skips"]["quarantined"]
    assert codec.decode_run(old).skips == Skips()
