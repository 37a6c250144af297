"""Progress counters of one worker in shared memory: read by its keeper while the worker is busy, stuck or
dead.

They are a file of 64-bit integers in ``/dev/shm`` with one writer.  A reader needs no help from the worker,
so a held GIL hides nothing, and the work of a killed worker can still be counted.  The writer, with what it
has forked, holds a lock on the file as long as it lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from elastic.protocol.events import HEALS, INITIALISES

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
    "started",
)
"""``step``, ``microbatch`` and ``collective`` are the last completed ones.  ``operation`` is the worker's
present operation, an index into :data:`OPERATIONS`.  While the worker initialises or heals, ``collective`` is
instead the time of its latest progress.  ``microbatches_run`` counts since the process began, without idle
rounds.  ``healed_live_bytes``, ``healed_host_bytes`` and ``healed_bucket_bytes`` are the bytes of state that
came from members, keepers' copies and the bucket.  ``stepping_since_ns`` is the wall clock at which computing
of the generation's first microbatch began, 0 before.  ``copies`` is the descriptor of the worker's region of
host copies, 0 for none.  ``started`` is when the process began, as the kernel counts it; a later process with
the same ``pid`` began later.
"""
PLACES = {name: place for place, name in enumerate(FIELDS)}
IDS = 64
"""Largest number of samples that the message names if a worker dies while it reads."""
LOADERS = ("data", "validation")
"""The sections of the datasets that a worker reads.  After the fields, the counters have for each section the
number of samples that are read now, and their ids.
"""
BYTES = 8 * (len(FIELDS) + len(LOADERS) * (1 + IDS))
OPERATIONS = ("", "forms", "reads data", "computes", "commits", "updates", INITIALISES, "validates", HEALS)
FOLDER = Path("/dev/shm")


def segment(run: str, worker: str) -> Path:
    """Returns the path of the counters of ``worker`` on its node."""
    return FOLDER / f"elastic-{run}-{worker}"


class Counters:
    """Reads and writes counters: ``counters["step"] += 1``.  The worker creates them; any process on its node
    may open them.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDWR
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                # without room this call fails, instead of the first write by SIGBUS
                os.posix_fallocate(descriptor, 0, BYTES)
                # the mapping keeps the lock, because it has the same open file
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._memory = mmap.mmap(descriptor, BYTES)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._memory).cast("q")

    def __getitem__(self, field: str) -> int:
        return self._view[PLACES[field]]

    def __setitem__(self, field: str, value: int) -> None:
        self._view[PLACES[field]] = value

    def reads(self, section: str, ids: Sequence[int]) -> None:
        """Notes the ids of the samples that the dataset of ``section`` reads now; the caller passes no ids
        once they are read.
        """
        place, some = len(FIELDS) + LOADERS.index(section) * (1 + IDS), ids[:IDS]
        for number, sample in enumerate(some, 1):
            self._view[place + number] = sample
        self._view[place] = len(some)

    @property
    def reading(self) -> str:
        """The samples that are read now, in words; "" if none are."""
        told = []
        for number, section in enumerate(LOADERS):
            place = len(FIELDS) + number * (1 + IDS)
            if count := self._view[place]:
                told.append(
                    f"samples {self._view[place + 1 : place + 1 + count].tolist()} of {section}.dataset"
                )
        return " and ".join(told)

    def at(self, operation: str) -> None:
        """Sets the worker's present operation."""
        self["operation"] = OPERATIONS.index(operation)

    def got_further(self) -> None:
        """Writes the time, which is larger than any earlier value, into ``collective``: a sign that the
        worker does not stand still.
        """
        self["collective"] = time.monotonic_ns() // 1_000_000

    def close(self) -> None:
        self._view.release()
        self._memory.close()


def writer_lives(path: Path) -> bool | None:
    """Returns whether the process that made the counters at ``path`` lives.

    It is None if that process has not written its pid yet, or if the counters are gone or belong to another
    user.  The lock on the file shows it.  The pid cannot: containers that share ``/dev/shm`` have different
    pids and clocks for the same process.
    """
    try:
        with open(path, "rb") as file:
            if not int.from_bytes(file.read(8), sys.byteorder):
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, PermissionError):
        return None
    except BlockingIOError:
        return True
    return False
