"""Makes work that leaves others little room: on the cores, and under a keeper's own lock."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COPY_BYTES = 64 * 2**20


@contextlib.contextmanager
def busy_cores(processes: int) -> Iterator[None]:
    """Runs so many processes that only compute, at niceness 15, which Ray gives its workers too.

    At niceness 0 three of them leave the workers so little that a step takes 20 s.  That too was survived.
    """
    started = [subprocess.Popen(["nice", "-n", "15", sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def burn(_keeper: Any, until: str) -> int:
    """Repeats what a keeper does with copies and logs (digests, copies, lines), under the interpreter's lock, until ``until`` exists.

    Returns how often it did so.
    """
    memory, rounds = bytearray(COPY_BYTES), 0
    text = b"a line of a log\n" * 200_000
    while not Path(until).exists():
        for number in range(20_000):
            hashlib.sha256(number.to_bytes(8, "big")).digest()
        memory[: COPY_BYTES // 2] = memory[COPY_BYTES // 2 :]
        text.decode().splitlines()
        rounds += 1
    return rounds


def hold_the_gil(_keeper: Any, seconds: float) -> None:
    """Holds the interpreter's lock, as no code of a keeper does: nothing else of its process runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def worst_beat_s(keeper: Any) -> float:
    return float(keeper.late_s)
