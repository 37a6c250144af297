"""Processes as the operating system sees them: their log files, their deaths, the signal they died of."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import weakref
from pathlib import Path

from elastic.train.counters import segment

_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


def log_folder(run: str) -> Path:
    return Path(tempfile.gettempdir()) / "elastic" / run


def log_file(run: str, worker: str) -> Path:
    """What the worker printed, on its node."""
    return log_folder(run) / f"{worker}.log"


def sweep(name: str) -> None:
    """Remove what earlier lives of the run left on this node when everything was killed at once: segments of dead processes.

    Also those of another version, which had other counters: the first of all is the pid.
    """
    for path in segment(f"{name}-????-??????", "w*").parent.glob(segment(f"{name}-????-??????", "w*").name):
        pid = int.from_bytes(path.read_bytes()[:8], sys.byteorder)
        if pid and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def end_on_sigterm() -> None:
    """SIGTERM ends this process at once, as it ends others.

    Ray's own handler begins an exit that waits for the calls under way.  A worker's never ends: it would train on, deaf to every order.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def clear(name: str, deadline_s: float) -> list[str]:
    """Remove all that lives of the run have left on this node, once their processes have ended; what was removed.

    What a process still holds at the deadline stays.
    """
    removed, end = [], time.monotonic() + deadline_s
    for path in sorted(segment(f"{name}-????-??????", "w*").parent.glob(segment(f"{name}-????-??????", "w*").name)):
        pid = int.from_bytes(path.read_bytes()[:8], sys.byteorder)
        while (alive := bool(pid) and Path(f"/proc/{pid}").exists()) and time.monotonic() < end:
            time.sleep(0.02)
        if not alive:
            path.unlink(missing_ok=True)
            removed.append(f"{path}")
    for folder in sorted(log_folder("").glob(f"{name}-????-??????")):
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(f"{folder}")
    return removed


class Process:
    """A handle on one process, by pidfd: never confused with a later process of the same number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    def ended(self) -> bool:
        poll = select.poll()  # ``select`` knows no descriptor beyond 1023; and each thread needs its own
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def stopped(self) -> bool:
        """By a signal, until another one sets it going."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt" and not self.ended()
        except OSError:
            return False

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return

    def dump_stack(self) -> None:
        """Ask it to write where its threads stand: see ``actors/worker.py``."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGUSR1)

    def status(self) -> int | None:
        """The wait status of the ended process, from the kernel (Linux 6.15 and later tell it to others than the parent); else None."""
        buffer = bytearray(64)
        struct.pack_into("Q", buffer, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, buffer, True)
        except OSError:
            return None
        mask, status = struct.unpack_from("Q", buffer, 0)[0], struct.unpack_from("i", buffer, 60)[0]
        return status if mask & _PIDFD_INFO_EXIT else None


def describe(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "ended; this kernel does not tell how (nothing in its log: SIGKILL, often from the kernel when memory runs out)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by signal {number} ({signal.Signals(number).name})"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"
