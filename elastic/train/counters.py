"""Progress counters of one worker in shared memory: read by its keeper while the worker is busy, stuck or dead.

A file of 64-bit integers in ``/dev/shm``; one writer.  Reading needs nothing of the worker, so a held GIL hides nothing, and what a
killed worker had done can still be counted.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

FIELDS = (
    "pid",
    "generation",
    "step",
    "microbatch",
    "collective",
    "operation",
    "microbatches_run",
    "updates_applied",
    "healed_live_bytes",
    "healed_host_bytes",
    "healed_bucket_bytes",
    "stepping_since_ns",
    "copies",
)
"""``step``, ``microbatch``, ``collective``: last completed; ``operation``: what the worker is at, a number in :data:`OPERATIONS`;
``microbatches_run``: since the process began, idle rounds not counted; ``stepping_since_ns``: wall clock when the generation's
first microbatch began to be computed, 0 before; ``copies``: the descriptor of its region of host copies, 0 for none."""
BYTES = 8 * len(FIELDS)
OPERATIONS = ("", "forms", "reads data", "computes", "commits", "updates")
FOLDER = Path("/dev/shm")


def segment(run: str, worker: str) -> Path:
    """Where the counters of ``worker`` are, on its node."""
    return FOLDER / f"elastic-{run}-{worker}"


class Counters:
    """``counters["step"] += 1``.  ``create`` in the worker, ``open`` anywhere on its node."""

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDWR
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, BYTES)  # where there is no room this fails, and not the first write, by SIGBUS
            self._memory = mmap.mmap(descriptor, BYTES)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._memory).cast("q")

    def __getitem__(self, field: str) -> int:
        return self._view[FIELDS.index(field)]

    def __setitem__(self, field: str, value: int) -> None:
        self._view[FIELDS.index(field)] = value

    def at(self, operation: str) -> None:
        """From now on."""
        self["operation"] = OPERATIONS.index(operation)

    def close(self) -> None:
        self._view.release()
        self._memory.close()
