"""R21: the first signal to a driver asks for something, the second one interrupts it."""

from __future__ import annotations

import os
import signal

import pytest

from actors.signals import Requests


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_signal_is_a_request_and_the_second_is_not(number: signal.Signals, word: str) -> None:
    before = signal.getsignal(number)
    try:
        with Requests() as requests:
            with pytest.raises(KeyboardInterrupt, match=word):
                os.kill(os.getpid(), number)  # nothing runs yet, so the first signal interrupts too
            signal.signal(number, signal.SIG_IGN)  # as ray.init installs a handler of its own
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


def test_what_must_not_be_interrupted_ends_before_the_signal_counts() -> None:
    """The user is told at once.  A second signal does not wait.  The control: without a signal nothing is raised."""
    done = list[str]()
    with Requests() as requests:
        with requests.finishing(lambda: done.append("told")):
            done.append("control")
        with pytest.raises(KeyboardInterrupt, match="Ctrl-C"), requests.finishing(lambda: done.append("told")):
            os.kill(os.getpid(), signal.SIGINT)
            done.append("ended")
    with Requests() as requests, pytest.raises(KeyboardInterrupt, match="SIGTERM"), requests.finishing(lambda: None):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("not reached")
    assert done == ["control", "told", "ended"]
