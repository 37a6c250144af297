"""A coordinator acts on a decision once its record is safe; while it waits for that it asks nobody and hears
nobody.
"""

from __future__ import annotations

import pytest

from elastic.control.run import Finishing, Running, Stopping, Waiting
from elastic.protocol import events as ev
from elastic.protocol.actions import Kill
from tests.control.play import stepping
from tests.control.test_ahead import W2, asked, connects, growing, joins
from tests.control.test_ends import complete, finishing
from tests.control.test_takeover import waiting

pytestmark = pytest.mark.fast


def test_while_a_coordinator_stood_still_nobody_was_silent() -> None:
    """The fence goes out when its record is safe; the control is a tick that comes late for no such reason."""
    for stood_s in (0.0, 6.0):
        play = stepping(2)
        play.lose("w2")
        assert isinstance(play.run.state, Stopping) and play.run.state.pending == ("w1",)
        play.now += 6.0
        reason = play.tell(ev.Tick(stood_s))
        assert ("the coordinator waited 6.0 s" in reason) is (stood_s > 0)
        assert isinstance(play.run.state, Stopping) is (stood_s > 0), "who was not asked yet is not expelled"
    play.later(play.rules.fence_s)
    assert not isinstance(play.run.state, Stopping)


def test_one_that_stands_still_again_and_again_expels_the_silent_all_the_same() -> None:
    """Only the time that it stood does not count."""
    play = stepping(2)
    play.lose("w2")
    for _ in range(10):
        play.now += 2.5
        play.tell(ev.Tick(1.5))
    assert not isinstance(play.run.state, Stopping)


def test_who_could_not_be_asked_meanwhile_has_the_time_to_say_what_it_holds() -> None:
    play = stepping(2, copy_every=1)
    play.lose("w1")
    asked = play.run.copies.answers_until
    play.now += 2.0
    play.tell(ev.Tick(2.0))
    assert play.run.copies.answers_until == asked + 2.0


def test_newcomers_wait_as_much_longer_for_the_world_that_is_connected_ahead() -> None:
    """The answers of its members wait meanwhile.  The control: a tick that is late for no such reason."""
    for stood_s in (0.0, 6.0):
        play = growing()
        joins(play, 2)
        connects(play, asked(play), W2)
        play.later(play.rules.form_s - 3.0)
        play.now += 6.0
        play.tell(ev.Tick(stood_s))
        assert isinstance(play.run.state, Running) is (stood_s > 0)
    play.later(3.0)
    assert isinstance(play.run.state, Stopping), "and then no longer"


def test_a_lease_that_was_granted_while_it_stood_still_is_waited_for() -> None:
    """The message about the renewal waits behind those about losses that came meanwhile."""
    play = stepping(2)
    granted_until = play.run.watch.lease_until
    play.now = granted_until + 1.0
    play.tell(ev.Tick(play.now))
    assert play.run.watch.lease_until == play.now + play.rules.lease_over_s


def test_processes_that_were_asked_for_meanwhile_have_the_time_to_come() -> None:
    play = waiting()
    play.tell(ev.Capacity(2))
    started = play.run.members.starting
    play.now += play.rules.form_s + 1.0
    play.tell(ev.Tick(play.rules.form_s + 1.0))
    assert started and play.run.members.starting.keys() >= started.keys() and not play.did(Kill)
    assert isinstance(play.run.state, Waiting) and play.run.state.since > 0


def test_a_save_is_refused_no_longer_because_a_coordinator_stood_still() -> None:
    """Nobody asked the bucket meanwhile; it has the whole of ``wait_s`` left."""
    for stood_s in (0.0, 400.0):
        play = finishing(wait_s=600.0)
        refused = complete(play)
        play.tell(refused)
        assert play.later(250.0) == ""
        play.now += 400.0
        play.tell(ev.Tick(stood_s))
        assert isinstance(play.run.state, Finishing) is (stood_s > 0)
