"""Signals become a request that the driver looks at between two calls, so that no ``ray.get`` is interrupted.

``ray job stop`` sends SIGTERM, and SIGKILL three seconds later.  Ctrl-C in a terminal sends SIGINT; a
terminal that is closed sends SIGHUP.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from elastic.threads import PATIENT, STOPS

Handler = Callable[[int, FrameType | None], Any] | int | None


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Blocks SIGHUP and SIGUSR1 in all processes that start within the block, and in their children: a
    terminal or Slurm sends these signals to every process that it has begun.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PATIENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Requests:
    """Handles the signals of ``STOPS`` while it is open; SIGHUP and SIGUSR1 only if they would end this
    process otherwise.

    A signal raises KeyboardInterrupt, except for the first one after ``note()``, which is only noted in
    ``asked``, and the first one within ``finishing()``, which waits for the end of that block.  SIGHUP and
    SIGUSR1 do nothing after another signal.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._late = ""
        self._tell: Callable[[], None] | None = None
        self._noting, self._heard = False, False
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        # Python calls signal handlers in no other thread
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._take)
                for number in STOPS
                # `nohup` ignores SIGHUP
                if number not in PATIENT or signal.getsignal(number) is signal.SIG_DFL
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def finishing(self, tell: Callable[[], None]) -> Iterator[None]:
        """Delays the KeyboardInterrupt of a signal until the block ends: ``ray.init`` may crash its process
        if it is interrupted.

        ``tell`` is called when the signal comes.
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
        again, self._heard = self._heard, True
        if again and number in PATIENT:
            return None
        word = STOPS[signal.Signals(number)]
        if self._tell is not None and not self._late:
            self._late = word
            return self._tell()
        if not self._noting or self.asked:
            raise KeyboardInterrupt(word)
        self.asked = word
        return None
