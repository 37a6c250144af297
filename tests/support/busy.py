"""Takes time away from others: on the cores of the machine, and under the interpreter's lock of a keeper."""

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
    """Runs this number of processes that only compute, at the niceness of the workers: 0, by ``TUNED`` in
    ``tests/support/clusters.py``.

    At Ray's 15 for workers, three such processes slow a step down to 20 s; runs survived that too.
    """
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def burn(_keeper: Any, until: str) -> int:
    """Repeats what a keeper does with copies and logs (digests, copies, lines), under the interpreter's lock,
    until the file ``until`` exists.

    Returns the number of rounds.
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
    """Holds the interpreter's lock, so that nothing else in the process runs meanwhile.  No code of a keeper
    does this.
    """
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def worst_beat_s(keeper: Any) -> float:
    return float(keeper.late_s)
