"""N1: a coordinator that is slow gives up nobody whose answer has arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.inbox import MANY, Inbox
from elastic.control.machine import advance
from elastic.control.run import Forming, Stopping
from elastic.ids import WorkerId
from elastic.protocol.actions import Kill
from elastic.protocol.events import Event, Fenced, Tick, parts
from elastic.sim.clock import Clock
from storage.slices import Version
from tests.control.play import Play, stepping

pytestmark = pytest.mark.fast
FENCE_S = 10.0
ONE_BY_ONE = 1000
"""No test has as many messages, so none are taken together."""


class Driver:
    """Handles events like a coordinator that needs time for each message, which its clock shows."""

    def __init__(
        self,
        play: Play,
        arrivals: Sequence[tuple[float, Event]],
        cost_s: Callable[[], float],
        *,
        many: int = MANY,
        looks: bool = True,
    ) -> None:
        """``arrivals`` are (seconds from now, event), in order.  From ``many`` messages on they are decided
        together.

        The control does not look how far it is behind (``looks``).
        """
        self.play, self.began, self.cost_s, self.many, self.looks = play, play.now, cost_s, many, looks
        self.arrivals, self.given_up = list(arrivals), list[WorkerId]()

    def run(self) -> list[WorkerId]:
        """Handles all events, and ticks until the fence is over; returns who was given up."""
        inbox = Inbox(lambda: self.play.now, self.many)
        while self.arrivals or not inbox.empty() or self.play.now < self.began + 2 * FENCE_S:
            self._arrive(inbox)
            event = (inbox.take(0.0) or (Tick(), None))[0]
            if isinstance(event, Tick):
                self.play.now += 0.1
            self.play.now += sum(self.cost_s() for _ in parts(event))
            self._arrive(inbox)
            now, heard_until = inbox.heard_until()
            done = advance(self.play.run, event, now, self.play.rules, heard_until if self.looks else now)
            self.play.run = done.run
            self.given_up += [
                worker for action in done.actions if isinstance(action, Kill) for worker in action.workers
            ]
        return self.given_up

    def _arrive(self, inbox: Inbox) -> None:
        """Puts what has arrived by now into the inbox, each at its own time."""
        now = self.play.now
        while self.arrivals and self.began + self.arrivals[0][0] <= now:
            after, event = self.arrivals.pop(0)
            self.play.now = self.began + after
            inbox.put(event)
        self.play.now = now


def fenced(members: int, after_s: Callable[[int], float]) -> tuple[Play, list[tuple[float, Event]]]:
    """Returns a world whose first member has died, and when each of the others answers the fence, in order."""
    play = stepping(members, fence_s=FENCE_S)
    play.steps(1, 2)
    play.lose("w1")
    assert isinstance(play.run.state, Stopping)
    answers: list[tuple[float, Event]] = []
    for number in range(2, members + 1):
        holding = play.shard(f"w{number}", Version(2, 1))
        answers.append((after_s(number), Fenced(holding.worker, 1, (holding,), 3)))
    return play, sorted(answers, key=lambda each: each[0])


@pytest.mark.parametrize("many", [2, ONE_BY_ONE])
@pytest.mark.parametrize("members", [4, 64])
def test_who_has_answered_in_time_is_never_given_up_however_long_the_answers_take(
    members: int, many: int
) -> None:
    """All answer within half a second; to handle them all takes three times ``fence_s``."""
    cost_s = 3 * FENCE_S / members
    driver = Driver(*fenced(members, lambda number: 0.5 * number / members), lambda: cost_s, many=many)
    assert driver.run() == []
    assert isinstance(driver.play.run.state, Forming)


@pytest.mark.parametrize("members", [4, 64])
def test_the_control_gives_up_members_whose_answers_lie_there(members: int) -> None:
    cost_s = 3 * FENCE_S / members
    assert Driver(
        *fenced(members, lambda number: 0.5 * number / members), lambda: cost_s, many=ONE_BY_ONE, looks=False
    ).run()


def test_who_answers_too_late_is_given_up_all_the_same() -> None:
    driver = Driver(*fenced(4, lambda number: FENCE_S + 5 if number == 3 else 0.1), lambda: 0.01)
    assert driver.run() == [WorkerId("w3")]


@given(
    st.lists(st.floats(0.0, 1.5 * FENCE_S), min_size=3, max_size=9), st.floats(0.001, 4.0), st.integers(2, 9)
)
def test_only_who_answers_after_the_deadline_is_given_up(
    after_s: list[float], cost_s: float, many: int
) -> None:
    driver = Driver(*fenced(len(after_s) + 1, lambda number: after_s[number - 2]), lambda: cost_s, many=many)
    assert set(driver.run()) <= {
        WorkerId(f"w{number + 2}") for number, after in enumerate(after_s) if after >= FENCE_S
    }


def test_with_its_own_processor_time_as_its_clock() -> None:
    """The processor time of the rules is the time here, a thousandfold, so that 200 answers take longer than
    ``fence_s``.
    """
    spent = [time.thread_time()]

    def cost_s() -> float:
        before, spent[0] = spent[0], time.thread_time()
        return 1000 * (spent[0] - before)

    driver = Driver(*fenced(200, lambda number: 0.001 * number), cost_s, many=ONE_BY_ONE)
    assert driver.run() == []
    assert driver.play.now - driver.began > FENCE_S


def test_the_inbox_says_how_far_its_reader_is_behind() -> None:
    clock = Clock()
    inbox = Inbox(lambda: clock.now)
    assert inbox.heard_until() == (0.0, 0.0) and inbox.take(0.0) is None
    for at in (1.0, 2.0):
        clock.now = at
        inbox.put(Tick(at))
    clock.now = 5.0
    assert inbox.heard_until() == (5.0, 1.0)
    assert inbox.take(0.0) == (Tick(1.0), None)
    assert inbox.heard_until() == (5.0, 2.0)
    assert inbox.take(0.0) == (Tick(2.0), None)
    assert inbox.heard_until() == (5.0, 5.0) and inbox.empty()
