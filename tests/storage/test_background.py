"""A call that runs on a thread says how it ended, and keeps nothing alive."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest

from storage.background import in_background
from tests.support.patience import PATIENCE_S


class Big:
    """An object that a call refers to."""


def fail(big: Big) -> None:
    raise ValueError("no")


def test_what_is_raised_is_raised_where_it_is_waited_for() -> None:
    assert in_background(lambda: 3, "three").result() == 3
    with pytest.raises(ValueError, match="no"):
        in_background(partial(fail, Big()), "fails").result()


def test_a_call_that_failed_is_forgotten_with_its_future() -> None:
    """A shard of a healing that failed lies on the device, where the next one needs the room."""
    gc.disable()
    try:
        big = Big()
        future = in_background(partial(fail, big), "fails")
        assert isinstance(future.exception(), ValueError)
        gone = weakref.ref(big)
        del big, future
        deadline = time.monotonic() + PATIENCE_S
        while gone() is not None and time.monotonic() < deadline:  # the thread is about to end
            time.sleep(0.001)
        assert gone() is None
    finally:
        gc.enable()


class Panic(BaseException):
    """A panic in Rust code becomes an error like this, which is no :class:`Exception`."""


def test_a_panic_reaches_whoever_waits() -> None:
    future = in_background(panic, "panics")
    with pytest.raises(Panic):
        future.result(PATIENCE_S)


def panic() -> None:
    raise Panic
