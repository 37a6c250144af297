"""The table of states: every edge that is allowed is taken by a short story, and no other is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic.control.decision import Decision
from elastic.control.edges import ALLOWED, enter
from elastic.control.run import (
    TERMINAL,
    Failed,
    Finished,
    Finishing,
    Forming,
    Running,
    RunState,
    State,
    Stopped,
    Stopping,
    Waiting,
)
from elastic.ids import Version, WorkerId
from elastic.protocol import events as ev
from tests.control.play import RULES, Play, reformed, rules, started, stepping

pytestmark = pytest.mark.fast


def lost_alone() -> Play:
    play = stepping(1)
    play.broken("w1")
    play.lose("w1")
    return play


def broken_once() -> Play:
    play = stepping(1)
    play.broken("w1")
    play.answer("w1", Version(0, 0))
    return play


def out_of_patience() -> Play:
    play = lost_alone()
    play.later(RULES.wait_s)
    return play


def fruitless() -> Play:
    play = stepping(1, max_fruitless=0)
    play.broken("w1")
    play.answer("w1", Version(0, 0))
    return play


def stopped_while_waiting() -> Play:
    play = Play()
    play.tell(ev.StopRequested("Ctrl-C"))
    return play


def stopped_while_forming() -> Play:
    play = started(1)
    play.tell(ev.StopRequested("Ctrl-C"))
    play.answer("w1", None)
    return play


def finished_already() -> Play:
    play = Play(rules(), RunState.begin(2, 0.0, (Version(100, 1),), ((1, 100),)))
    play.later(0.1)
    return play


def finishing() -> Play:
    play = stepping(1, target_step=2)
    play.steps(1, 2)
    return play


def finished() -> Play:
    play = finishing()
    play.save(Version(2, 1), "w1")
    return play


def saved_again() -> Play:
    play = finishing()
    play.broken("w1")
    play.answer("w1", Version(2, 1))
    return reformed(play)


def finished_while_stopping() -> Play:
    """The manifest was on its way when the member broke."""
    play = finishing()
    play.tell(ev.ShardSaved(WorkerId("w1"), Version(2, 1)))
    play.broken("w1")
    play.tell(ev.Saved(Version(2, 1), "digest"))
    play.answer("w1", Version(2, 1))
    return play


def target_before_the_boundary() -> Play:
    play = stepping(1, target_step=2)
    play.tell(ev.StopRequested("Ctrl-C"))
    play.steps(1, 2)
    return play


def journal_too_short() -> Play:
    """The run is read from a journal that ends before the generation that its workers are in."""
    play = started(1)
    plan, play.run = play.plan, replace(play.run, state=Waiting(0.0), generation=0)
    play.tell(ev.Attached(plan.members[0], plan, stepping=True))
    return play


STORIES: dict[tuple[type[State], type[State]], Callable[[], Play]] = {
    (Waiting, Forming): lambda: started(1),
    (Waiting, Stopped): stopped_while_waiting,
    (Waiting, Failed): out_of_patience,
    (Waiting, Finished): finished_already,
    (Waiting, Stopping): journal_too_short,
    (Forming, Running): lambda: stepping(1),
    (Forming, Stopping): stopped_while_forming,
    (Forming, Finishing): saved_again,
    (Running, Stopping): lost_alone,
    (Running, Finishing): finishing,
    (Stopping, Forming): broken_once,
    (Stopping, Waiting): lost_alone,
    (Stopping, Stopped): stopped_while_forming,
    (Stopping, Failed): fruitless,
    (Stopping, Finishing): target_before_the_boundary,
    (Stopping, Finished): finished_while_stopping,
    (Finishing, Stopping): saved_again,
    (Finishing, Finished): finished,
}


def test_every_allowed_edge_has_a_story() -> None:
    assert STORIES.keys() == {(before, after) for before, afters in ALLOWED.items() for after in afters}


@pytest.mark.parametrize("edge", STORIES, ids=lambda edge: f"{edge[0].__name__}-{edge[1].__name__}")
def test_the_story_takes_the_edge(edge: tuple[type[State], type[State]]) -> None:
    play = STORIES[edge]()
    assert edge in play.edges


def test_what_ends_stays_ended() -> None:
    assert all(not ALLOWED[state] for state in TERMINAL)


def test_no_other_edge_can_be_taken() -> None:
    decision = Decision(RunState.begin(1, 0.0), 0.0, RULES, 0.0)
    with pytest.raises(AssertionError, match="no edge from Waiting to Running"):
        enter(decision, Running(started(1).plan, 0.0))
