"""L1: a validation is told with the next commit, so it counts once, and only on the lineage."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from elastic.control import codec
from elastic.ids import Version, WorkerId
from elastic.protocol import events as ev
from elastic.protocol.commit_record import Outcome, Score, Validated
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
    assert history.best == Score(Version(2, 1), Validated(20.0, 10)) and history.validated == Score(Version(3, 1), Validated(25.0, 10))
    step(play, 5, math.nan)
    assert play.run.history.best == history.best, "what is no number is never the best"
    step(play, 5, 1.0)
    assert play.run.history.best == history.best, "a commit that was told before tells nothing"


def test_what_was_abandoned_is_not_the_best() -> None:
    """The state after step 3 was the best, and is lost; it is reached again by another generation, and loses more."""
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
