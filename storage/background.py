"""Work on a thread that nobody's exit waits for: what hangs holds up whoever wants its result, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(call: Callable[[], T], name: str) -> Future[T]:
    """``call()``, on a thread of this name.  What it raises is raised by ``result()``."""
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(call, future), name=name, daemon=True).start()
    return future


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # the end of a thread: raised where it is waited for
        future.set_exception(error)
    finally:
        del call, future  # the error knows this frame: what hung on these would live until the garbage collector comes
