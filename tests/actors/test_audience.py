"""R21: who may stop a run by going, and what a signal to a driver does."""

from __future__ import annotations

import os
import signal

import pytest

from actors.audience import Audience
from actors.signals import Requests


def test_the_run_stops_with_the_driver_that_started_it() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    audience.hear("second", 1)
    assert audience.stops_with("first", 2), "whoever watches"
    assert not audience.stops_with("second", 2), "it only attached"
    audience.leave("second")
    assert audience.present(3) == ["first"]


def test_the_last_driver_takes_its_place() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    audience.hear("second", 15)
    assert not audience.stops_with("second", 20)
    assert audience.stops_with("second", 21), "the first has vanished"
    audience.hear("third", 21)
    assert not audience.stops_with("second", 21), "two that attached: one may go"


def test_a_run_that_nobody_watches() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    assert not audience.left_alone(20)
    assert audience.left_alone(20.1)
    audience.hear("second", 21)
    assert not audience.left_alone(22)
    audience.leave("second")
    assert audience.left_alone(22)


def test_detached_it_needs_nobody() -> None:
    audience = Audience("first", "detach", driver_s=20, now=0)
    assert not audience.stops_with("first", 1)
    assert not audience.left_alone(1000)
    assert audience.present(1000) == []


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_signal_is_a_request_and_the_second_is_not(number: signal.Signals, word: str) -> None:
    before = signal.getsignal(number)
    try:
        with Requests() as requests:
            with pytest.raises(KeyboardInterrupt, match=word):
                os.kill(os.getpid(), number)  # nothing runs yet: nothing is asked
            signal.signal(number, signal.SIG_IGN)  # as ray.init puts its own
            requests.note()
            assert requests.asked == ""
            os.kill(os.getpid(), number)
            assert requests.asked == word
            with pytest.raises(KeyboardInterrupt, match=word):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    with Requests():
        pass
    assert signal.getsignal(number) is before


def test_who_only_watches_keeps_nothing_alive_and_stops_nothing() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    audience.hear("watcher", 15, only=True)
    assert audience.stops_with("first", 16)
    assert audience.left_alone(21), "the first has vanished"
    assert audience.present(21) == ["watcher"], "but it is to see the end"
    audience.hear("second", 21)
    assert audience.stops_with("second", 22), "a watcher is no other driver"
