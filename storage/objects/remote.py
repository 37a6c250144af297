"""Calls that cross a network: how long each may take, what is tried again, and when to give up.

Socket timeouts alone are no deadline: a store that sends a byte a second keeps every socket alive.  So each attempt is cut off after
``attempt_s``, and all attempts of a call with the pauses between them after ``call_s``; both grow with the bytes that are moved.
Pauses double, and each is drawn between nothing and its length ("full jitter": Brooker, AWS Architecture Blog, 2015), for a
thousand workers that met the same failure must not come back together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import Unavailable

T = TypeVar("T")


class Transient(Exception):
    """Whoever makes an attempt raises this when another one may help; the text says what happened."""


@dataclass(frozen=True)
class RemotePolicy:
    """Generous: what waits for a bucket is a background save, a journal's copy, or a worker that has nothing else to do."""

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
        """What an attempt gets on top for moving ``size`` bytes."""
        return size / self.slowest_bytes_s

    def call(self, object: str, attempt: Callable[[float], T], extra_s: float = 0.0) -> T:
        """``attempt(seconds)`` until it returns; ``extra_s``: what each gets on top.  Raises :class:`Unavailable`, naming ``object``."""
        began, number = self.clock(), 0
        end = began + self.call_s + 2 * extra_s
        while True:
            number += 1
            try:
                return attempt(min(self.attempt_s + extra_s, end - self.clock()))
            except Transient as error:
                last = error
            pause_s = self.draw() * min(self.longest_pause_s, self.first_pause_s * 2 ** (number - 1))
            if number >= self.attempts or self.clock() + pause_s >= end:
                tries = f"{number} attempt{'s' if number > 1 else ''} in {self.clock() - began:.1f} s"
                raise Unavailable(object, f"gave up after {tries}; the last error: {last}") from last
            self.sleep(pause_s)
