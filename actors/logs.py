"""Stores what the workers of a node printed, and the stacks of those that hung, in the bucket once the
workers have ended.

A separate thread writes to the bucket: the bucket may be slow, and neither the heartbeat nor the watch may
wait for it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import BinaryIO

from actors.processes import Process, log_file
from elastic.ids import NodeId, WorkerId
from storage.errors import StorageError
from storage.objects import ObjectStore

LINES = 200
"""Number of lines that are kept of a log, counted from its end."""
MOST_BYTES = 2**18
"""Bytes that are kept of a log, counted from its end."""
EXAMINE_S = 6.0
"""Seconds for finding out where a process stands.  Then it is ended in any case."""
QUIET_S = 0.1
"""Seconds without new output after which a fault handler is taken to have finished."""


class Logs:
    """Keeps the logs of one node's workers.  ``folder`` is their prefix in ``store``; ``run`` names the life
    of the run.
    """

    def __init__(self, store: ObjectStore, folder: str, run: str, node: NodeId) -> None:
        self.store, self.folder, self.run, self.node = store, folder, run, node
        self._stood: dict[WorkerId, str] = {}
        self._files: dict[WorkerId, BinaryIO] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="logs")

    def key(self, worker: WorkerId) -> str:
        return f"{self.folder}/{worker}.log"

    def follow(self, worker: WorkerId) -> None:
        """Opens the log of a living worker, so that it can be read at the end even if another keeper of this
        machine has cleaned up.
        """
        with contextlib.suppress(FileNotFoundError):
            self._files[worker] = open(log_file(self.run, worker), "rb")  # noqa: SIM115 # until it is kept

    def examine(self, worker: WorkerId, process: Process) -> str:
        """Finds out where ``process`` stands, to add that to its log, and returns the key of the log.  This
        takes ``EXAMINE_S`` seconds at most.
        """
        self._stood[worker] = stack_of(process, log_file(self.run, worker), EXAMINE_S)
        return self.key(worker)

    def keep(self, worker: WorkerId, how: str) -> None:
        """Stores the log of a worker that has ended; ``how`` says how it ended."""
        self._thread.submit(self._keep, worker, how)

    def _keep(self, worker: WorkerId, how: str) -> None:
        stood = self._stood.pop(worker, "")
        with self._files.pop(worker, BytesIO()) as file:
            text = "\n".join(
                [f"# {worker} on node {self.node[:8]}: {how}", *stood.splitlines(), *last_lines(file), ""]
            )
        try:
            self.store.put(self.key(worker), text.encode())
        except (StorageError, OSError) as error:
            print(f"the log of {worker} could not be kept: {error}", flush=True)

    def close(self) -> None:
        """Returns once all logs are stored."""
        self._thread.shutdown(wait=True)


def last_lines(file: BinaryIO) -> list[str]:
    """Returns the last lines of a file of any size."""
    file.seek(max(file.seek(0, SEEK_END) - MOST_BYTES, 0))
    return file.read().decode(errors="replace").splitlines()[-LINES:]


def read_from(run: str, worker: str, offset: int) -> tuple[int, str] | None:
    """Returns what a worker of this node has printed from ``offset`` on, and where that ends; None if it has
    no log here.

    With a negative ``offset`` it begins with the last lines.
    """
    try:
        with open(log_file(run, worker), "rb") as file:
            if offset < 0:
                text = "\n".join(last_lines(file))
                return file.tell(), f"{text}\n" if text else ""
            file.seek(offset)
            new = file.read(MOST_BYTES)
            return offset + len(new), new.decode(errors="replace")
    except FileNotFoundError:
        return None


def read_each(run: str, offsets: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    """Returns what :func:`read_from` returns for each worker that has a log on this node, by worker."""
    found = {worker: read_from(run, worker, offset) for worker, offset in offsets.items()}
    return {worker: told for worker, told in found.items() if told is not None}


def stack_of(process: Process, log: Path, deadline_s: float, spy: str | None = None) -> str:
    """Returns the stacks of all threads of ``process``, a comment that says why there are none, or "" if they
    are in ``log``.

    py-spy reads the memory of a process that does not answer, is stopped, or holds its GIL.  If it is not
    installed (``spy`` is "") or not allowed, the fault handler of the process is asked instead.
    """
    until = time.monotonic() + deadline_s
    spy = _spy() if spy is None else spy
    if spy:
        try:
            seen = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=deadline_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = type(error).__name__
        else:
            if seen.returncode == 0 and not process.ended():
                return f"# where its process stood, by py-spy:\n{seen.stdout.strip()}"
            why = seen.stderr.strip().partition("\n")[0]
        missing = f"# py-spy could not tell where its process stood: {why}"
    else:
        missing = ""
    if process.stopped():
        return missing or (
            "# a signal had stopped its process; install py-spy on this node to see where it stood"
        )
    _ask_fault_handler(process, log, until)
    return missing


def _spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy") or ""


def _ask_fault_handler(process: Process, log: Path, until: float) -> None:
    """Sends SIGUSR1 and waits while the fault handler writes."""
    size, since = _size(log), float("inf")
    process.dump_stack()
    while time.monotonic() < min(until, since + QUIET_S) and not process.ended():
        time.sleep(0.01)
        if (now := _size(log)) != size:
            size, since = now, time.monotonic()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
