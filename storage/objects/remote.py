"""Calls that cross a network: how long each may take, which failures are tried again, and when a call gives
up.

A socket timeout is no deadline: a store that sends one byte a second keeps every socket alive.  So each
attempt ends after ``attempt_s``, and a call with all its attempts and pauses ends after ``call_s``.  Both
grow with the number of bytes moved.  Pauses double, and each is drawn at random between zero and its length
("full jitter": Brooker, AWS Architecture Blog, 2015), because a thousand workers that met the same failure
must not come back at the same moment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import Unavailable

T = TypeVar("T")


class Retryable(Exception):
    """An attempt raises this if another one may help.  The text says what happened."""


@dataclass(frozen=True)
class RemotePolicy:
    """The limits of a call.  They are generous, since only background saves, the journal's thread and idle
    workers wait for a bucket.
    """

    attempts: int = 10
    attempt_s: float = 20.0
    call_s: float = 180.0
    slowest_bytes_s: float = 2**20
    first_pause_s: float = 0.2
    longest_pause_s: float = 20.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random

    def transfer_s(self, size: int) -> float:
        """Returns the seconds that an attempt gets in addition for moving ``size`` bytes."""
        return size / self.slowest_bytes_s

    def call(self, object: str, attempt: Callable[[float], T], extra_s: float = 0.0) -> T:
        """Calls ``attempt(seconds)`` until it returns.  Each attempt gets ``extra_s`` in addition.

        Raises :class:`Unavailable`, naming ``object``, when attempts or time are spent.
        """
        began, number = self.clock(), 0
        end = began + self.call_s + 2 * extra_s
        while True:
            number += 1
            try:
                return attempt(min(self.attempt_s + extra_s, end - self.clock()))
            except Retryable as error:
                last = error
            pause_s = self.draw() * min(self.longest_pause_s, self.first_pause_s * 2 ** (number - 1))
            if number >= self.attempts or self.clock() + pause_s >= end:
                tries = f"{number} attempt{'s' if number > 1 else ''} in {self.clock() - began:.1f} s"
                raise Unavailable(object, f"gave up after {tries}; the last error: {last}") from last
            self.sleep(pause_s)
