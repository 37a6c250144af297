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
