"""Runs background threads whose failure has an effect: the work begins anew, or the process ends.  Keeps
signals from interrupting a block of the main thread.

An exception in an ordinary thread ends only this thread: some log gets a line, and the process goes on
without the thread's work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

FIRST_S, LONGEST_S = 0.1, 2.0
"""Shortest and longest pause in seconds between a failure and the next attempt.  The pause doubles with each
failure, and is the shortest again after an attempt that lasted longer than the longest pause.
"""
STOPS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
    signal.SIGUSR1: "SIGUSR1",
}
"""The signals that ask a run to save and to stop, each with its name in messages.  A terminal that is closed
sends SIGHUP, and Slurm may send SIGUSR1.
"""
PATIENT = frozenset({signal.SIGHUP, signal.SIGUSR1})
"""The signals of ``STOPS`` that are ignored after an earlier signal: the end of a terminal's session sends
SIGTERM, and SIGHUP twice.
"""


def keep_going(work: Callable[[], object], name: str, say: Callable[[str], None] = print) -> threading.Thread:
    """Runs ``work`` on a daemon thread, and begins it anew whenever it fails.  The thread ends when ``work``
    returns.

    ``say`` receives a sentence with the traceback, once for each place where ``work`` fails.
    """
    thread = threading.Thread(target=_keep_going, args=(work, name, say), name=name, daemon=True)
    thread.start()
    return thread


def go_or_end(work: Callable[[], object], name: str) -> threading.Thread:
    """Runs ``work`` on a daemon thread.  If ``work`` fails, the process ends with code 1, so that other
    processes notice and replace it.
    """
    thread = threading.Thread(target=_go_or_end, args=(work, name), name=name, daemon=True)
    thread.start()
    return thread


def later(seconds: float, work: Callable[[], object]) -> threading.Timer:
    """Calls ``work`` after ``seconds``, on a daemon thread, unless the timer is cancelled before."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def unbroken() -> Iterator[None]:
    """Delays the signals of ``STOPS`` until the block ends, if the main thread runs the block.

    A second signal is handled at once, unless it is one of ``PATIENT``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        if late and number not in PATIENT:
            before[number](number, frame)
        late.append(number)

    found = {int(number): signal.getsignal(number) for number in STOPS}
    before = {number: handler for number, handler in found.items() if callable(handler)}
    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if late:
        signal.raise_signal(late[0])


def _keep_going(work: Callable[[], object], name: str, say: Callable[[str], None]) -> None:
    said, pause_s = set[str](), FIRST_S
    while True:
        began = time.monotonic()
        try:
            work()
            return
        except Exception as error:  # the boundary of a thread
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {os.path.basename(frame.filename)}:{frame.lineno}"
            if place not in said:
                said.add(place)
                sentence = (
                    f"the thread {name!r} failed ({place}) and is started again; this is a bug in "
                    f"Elastic\n{traceback.format_exc()}"
                )
                try:
                    say(sentence)
                except Exception:  # nobody hears it any more, but the work goes on
                    print(sentence, flush=True)
        if time.monotonic() - began > LONGEST_S:
            pause_s = FIRST_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)


def _go_or_end(work: Callable[[], object], name: str) -> None:
    try:
        work()
    except BaseException:  # the boundary of a thread
        print(
            (
                f"the thread {name!r} failed, and this process ends; this is a bug in "
                f"Elastic\n{traceback.format_exc()}"
            ),
            flush=True,
        )
        sys.stderr.flush()
        os._exit(1)
