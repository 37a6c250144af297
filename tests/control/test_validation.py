"""L1: a validation is told with the next commit, so it counts once, and only on the lineage."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from elastic.control.run import Finished, Finishing, Running
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.protocol import events as ev
from elastic.protocol.commit_record import Outcome, Score, Validated
from elastic.report.best import Loss, enough
from tests.control.play import Play, outcome, reformed, stepping

pytestmark = pytest.mark.fast
W1 = WorkerId("w1")


def step(play: Play, number: int, loss: float | None = None) -> str:
    """The world commits a step, before which it has validated the state with this mean loss."""
    done = replace(play.commit(number), validated=None if loss is None else Validated(10 * loss, 10))
    return play.tell(ev.StepDone(play.plan.members[0], play.generation, done))


def test_the_best_is_kept() -> None:
    play = stepping(2)
    step(play, 1)
    assert step(play, 2, 3.0) == "validation after step 1: loss 3 over 10 terms"
    step(play, 3, 2.0)
    assert step(play, 4, 2.5) == "validation after step 3: loss 2.5 over 10 terms; the best is 2 after step 2"
    history = play.run.history
    assert history.best == Score(Version(2, 1), Validated(20.0, 10)) and history.validated == Score(
        Version(3, 1), Validated(25.0, 10)
    )
    step(play, 5, math.nan)
    assert play.run.history.best == history.best, "what is no number is never the best"
    step(play, 5, 1.0)
    assert play.run.history.best == history.best, "a commit that was told before tells nothing"


def test_what_was_abandoned_is_not_the_best() -> None:
    """The state after step 3 was the best, and is lost; it is reached again by another generation, and loses
    more.
    """
    play = stepping(2)
    for number in (1, 2, 3):
        step(play, number)
    step(play, 4, 1.0)
    play.lose("w1")
    play.answer("w2", Version(2, 1))
    reformed(play)
    assert play.run.history.version == Version(2, 1)
    step(play, 3)
    step(play, 4, 5.0)
    assert play.run.history.best == Score(Version(3, 2), Validated(50.0, 10))


def test_the_last_step_is_told_with_itself() -> None:
    play = stepping(1, target_step=2)
    step(play, 1)
    done = replace(play.commit(2), validated=Validated(9.0, 3))
    play.tell(ev.StepDone(W1, 1, done, None, Validated(6.0, 3)))
    assert play.run.history.validated == Score(Version(2, 1), Validated(6.0, 3)) == play.run.history.best


def test_it_comes_back_from_the_journal_and_costs_nothing_where_there_is_none() -> None:
    told = replace(outcome(3, 1), validated=Validated(0.1, 3))
    written = json.loads(json.dumps(codec.encode(told)))
    assert codec.decode(Outcome, written) == told != replace(told, validated=None)
    assert "validated" not in codec.encode(outcome(3, 1))
    play = stepping(2)
    step(play, 1)
    step(play, 2, 3.0)
    assert codec.fold(codec.snapshot(play.run), []) == play.run


def test_a_spare_tells_it_later() -> None:
    """It counts like that of the members, and does not take the place of a later one; what was abandoned is
    refused.
    """
    play = stepping(2)
    for number in (1, 2, 3):
        step(play, number)
    assert play.tell(ev.Evaluated(Version(2, 1), Validated(20.0, 10))) == (
        "validation after step 2: loss 2 over 10 terms"
    )
    assert play.run.history.best == play.run.history.validated == Score(Version(2, 1), Validated(20.0, 10))
    step(play, 4, 3.0)
    assert play.tell(ev.Evaluated(Version(1, 1), Validated(10.0, 10))) == (
        "validation after step 1: loss 1 over 10 terms"
    )
    assert play.run.history.best == Score(Version(1, 1), Validated(10.0, 10))
    assert play.run.history.validated == Score(Version(3, 1), Validated(30.0, 10))
    before = play.run
    assert play.tell(ev.Evaluated(Version(3, 9), Validated(1.0, 10))).startswith(
        "refused: step 3 of generation 9"
    )
    assert play.run.history == before.history
    assert codec.decode(
        ev.Event, json.loads(json.dumps(codec.encode(ev.Evaluated(Version(2, 1), Validated(0.1, 3)))))
    ) == ev.Evaluated(Version(2, 1), Validated(0.1, 3))


def last_of(play: Play, validated: Validated | None) -> None:
    play.tell(ev.StepDone(W1, play.generation, play.commit(2), None, validated))


@pytest.mark.parametrize("first", ["saved", "validated"])
def test_the_end_waits_for_the_last_validation(first: str) -> None:
    """The world that has committed the last step measures it while its checkpoint is on the way.

    The control: without a validation the checkpoint alone ends the run.
    """
    for owes in (True, False):
        play = stepping(1, target_step=2, validates_last=owes)
        step(play, 1)
        last_of(play, None)
        if first == "validated":
            last_of(play, Validated(6.0, 3))
        play.save(Version(2, 1), "w1")
        if first == "saved":
            assert isinstance(play.run.state, Finishing) is owes
            last_of(play, Validated(6.0, 3)) if owes else None
        assert isinstance(play.run.state, Finished)
        assert (play.run.history.validated == Score(Version(2, 1), Validated(6.0, 3))) is (
            owes or first == "validated"
        )


def test_the_end_does_not_wait_for_a_world_that_cannot_tell() -> None:
    """A member is gone, so the others cannot end what they measure; it is said what is missing."""
    play = stepping(2, target_step=2, validates_last=True)
    step(play, 1)
    last_of(play, None)
    play.save(Version(2, 1), "w1", "w2")
    assert isinstance(play.run.state, Finishing)
    reason = play.lose("w2")
    assert isinstance(play.run.state, Finished)
    assert reason.endswith(
        "finished at step 2; the last validation was cut off; `elastic evaluate` measures it"
    )


def test_other_samples_are_not_compared() -> None:
    """The best over one set says nothing about another."""
    play = stepping(2)
    step(play, 1)
    step(play, 2, 1.0)
    members = replace(
        play.run.members, reference=replace(play.run.members.reference, held_out="others, 9 samples")
    )
    play.run = replace(play.run, members=members)
    assert step(play, 3, 5.0) == "validation after step 2: loss 5 over 10 terms"
    assert play.run.history.best == Score(Version(2, 1), Validated(50.0, 10), "others, 9 samples")


def test_what_is_better_by_less_than_min_delta_does_not_count_for_patience() -> None:
    """L1: the best is still the smallest loss.  The control: without ``min_delta`` each of them counts."""
    for min_delta in (0.1, 0.0):
        play = stepping(2, save_every=2, patience=2, min_delta=min_delta)
        losses = {2: 2.0, 4: 1.95, 6: 1.92}
        for number in range(1, 8):
            said = step(play, number, losses.get(number - 1))
        assert play.run.enough == (6 if min_delta else 0) and play.run.history.best is not None
        assert play.run.history.best.version.step == 6
        why = (
            "no validation is better by more than validation.min_delta = 0.1 than the one after step "
            "2, so step 6 is the last"
        )
        assert said.endswith(why) is bool(min_delta)
        found = {Version(at, 1): Loss(loss) for at, loss in losses.items()}
        assert enough(found, 2, min_delta) == play.run.enough, "a start finds the same in the metrics"


def test_patience_counts_the_validations_that_there_are() -> None:
    """L1: ``validation.every`` may change on the way, so steps say nothing.  The next world knows how many
    there were.
    """
    play, losses = stepping(2, save_every=2, patience=3), {2: 2.0, 6: 2.5, 7: 2.5, 8: 2.5}
    for number in range(1, 9):
        step(play, number, losses.get(number - 1))
    play.lose("w1")
    play.answer("w2", Version(8, 1))
    assert not play.run.enough and play.plan.worse == 2
    assert [
        codec.decode(type(each), json.loads(json.dumps(codec.encode(each)))) == each
        for each in (play.plan, play.run)
    ] == [True, True]
    reformed(play)
    assert (
        step(play, 9, losses[8]).endswith("than the one after step 2, so step 8 is the last")
        and play.run.enough == 8
    )
    assert enough({Version(at, 1): Loss(loss) for at, loss in losses.items()}, 3, 0.0) == 8, (
        "a start finds the same in the metrics"
    )


def test_a_run_without_patience_ends_with_the_checkpoint_of_the_validation() -> None:
    """L1: two validations in a row are no better.  The world trains on until that checkpoint is there.

    A worker is lost meanwhile, so a validation is told again: it is not counted twice.  The control has more
    patience.
    """
    for patience in (2, 3):
        play = stepping(2, save_every=2, patience=patience)
        for number, loss in ((1, None), (2, None), (3, 2.0), (4, None), (5, 2.5)):
            step(play, number, loss)
        play.save(Version(4, 1), "w1", "w2")
        step(play, 6)
        play.lose("w1")
        play.answer("w2", Version(4, 1))
        reformed(play)
        assert play.run.history.version == Version(4, 1) and not play.run.enough
        assert "the last" not in step(play, 5, 2.5)
        step(play, 6)
        said = step(play, 7, 2.0)
        assert (play.run.enough, isinstance(play.run.state, Running)) == (6 if patience == 2 else 0, True)
        why = (
            "; validation.patience = 2: no validation is better than the one after step 2, so "
            "step 6 is the last"
        )
        assert said.endswith(why if patience == 2 else "the best is 2 after step 2")
        run = codec.decode(type(play.run), json.loads(json.dumps(codec.encode(play.run))))
        assert run.enough == play.run.enough and ("enough" in codec.encode(run)) == (patience == 2), (
            "an older version reads the control"
        )
        play.save(Version(6, 2), "w2")
        if patience == 3:
            assert isinstance(play.run.state, Running)
            continue
        assert play.last.reason.endswith(
            "the last checkpoint, of step 6, is in the bucket: stop generation 2 of 1 worker"
        )
        assert play.answer("w2", Version(7, 2)).endswith("finished at step 6") and isinstance(
            play.run.state, Finished
        )
