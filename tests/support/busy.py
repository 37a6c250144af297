"""Work that leaves others little room: on the cores, and under a keeper's own lock."""

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
    """So many processes that only compute, as often as those of Ray's workers are let to: it runs them at niceness 15.  (At 0 three of
    these leave them so little that a step takes 20 s; that too was survived.)"""
    started = [subprocess.Popen(["nice", "-n", "15", sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def burn(_keeper: Any, until: str) -> int:
    """What a keeper does with copies and logs, again and again, until there is a file ``until``: digests, copies, lines; all under the
    interpreter's lock.  Returns how often."""
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
    """As no code of a keeper does: nothing else of its process runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def worst_beat_s(keeper: Any) -> float:
    return float(keeper.late_s)
