"""Calls on daemon threads: a call that hangs holds up whoever waits for its result, but not the exit of the
process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Runs ``call()`` on a daemon thread of this name and returns a future, whose ``result()`` raises what
    the call raised.
    """
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(call, future), name=name, daemon=True).start()
    return future


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # a panic in Rust code is no Exception; result() raises whatever it was
        future.set_exception(error)
    finally:
        # the error refers to this frame, which would keep these alive until the garbage collector runs
        del call, future
