"""Signals: SIGINT and SIGTERM become a request that the driver looks at between two calls, so that no ``ray.get`` is interrupted.

``ray job stop`` sends SIGTERM, and SIGKILL three seconds later.  Ctrl-C in a terminal sends SIGINT.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
Handler = Callable[[int, FrameType | None], Any] | int | None


class Requests:
    """Handles signals while it is open.

    A signal raises KeyboardInterrupt, except for the first one after ``note()``, which is only noted in ``asked``, and the first one
    within ``finishing()``, which waits for the end of that.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._late = ""
        self._tell: Callable[[], None] | None = None
        self._noting = False
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python calls signal handlers in no other thread
            self._before = {number: signal.signal(number, self._take) for number in WORDS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def finishing(self, tell: Callable[[], None]) -> Iterator[None]:
        """Lets what runs within end before a signal raises KeyboardInterrupt: ``ray.init`` may crash its process if it is interrupted.

        ``tell`` is called at the signal.
        """
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None
        if self._late:
            raise KeyboardInterrupt(self._late)

    def note(self) -> None:
        """Notes that a run exists from now on, to which a signal can be passed on.

        It is called after ``ray.init``, which replaces the handlers of this class.
        """
        for number in self._before:
            found = signal.signal(number, self._take)
            if found != self._take:
                self._before[number] = found  # at the end, Ray's own handler is put back
        self._noting = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        word = WORDS[signal.Signals(number)]
        if self._tell is not None and not self._late:
            self._late = word
            return self._tell()
        if not self._noting or self.asked:
            raise KeyboardInterrupt(word)
        self.asked = word
