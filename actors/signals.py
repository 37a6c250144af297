"""SIGINT and SIGTERM as a request, looked at when it suits: ``ray.get`` is not torn apart half way.

``ray job stop`` sends SIGTERM, and SIGKILL three seconds later; a terminal's Ctrl-C is SIGINT.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
Handler = Callable[[int, FrameType | None], Any] | int | None


class Requests:
    """While it is open, a signal raises KeyboardInterrupt, but for the first one after ``note()``: that one is noted in ``asked``."""

    def __init__(self) -> None:
        self.asked = ""
        self._noting = False
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python calls handlers nowhere else
            self._before = {number: signal.signal(number, self._take) for number in WORDS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self) -> None:
        """From now on there is a run to be told.  Called after ``ray.init``, which puts a handler of its own in our place."""
        for number in self._before:
            found = signal.signal(number, self._take)
            if found != self._take:
                self._before[number] = found  # what is put back in the end is the one of a process that knows Ray
        self._noting = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        word = WORDS[signal.Signals(number)]
        if not self._noting or self.asked:
            raise KeyboardInterrupt(word)
        self.asked = word
