"""Finds out what happened to a process, from the operating system and not from us, for tests that kill.

A pidfd names one process for ever, whoever reuses its number.  Since Linux 6.15 it also tells how the process
ended, to anybody and after it was reaped (``PIDFD_GET_INFO``); before that only a zombie's status can be
read, in ``/proc/<pid>/stat``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.warm import STANDS_FOR

PIDFD_INFO_EXIT = 1 << 3
INFO = struct.Struct("<QQ11Ii")
"""The first published form of ``struct pidfd_info``: mask, cgroup id, eleven ids, exit code."""
PIDFD_GET_INFO = (3 << 30) | (INFO.size << 16) | (0xFF << 8) | 11
SHM = Path("/dev/shm")
ACTORS = ("ray::Coordinator", "ray::Keeper", "ray::Worker", "ray::Hand")
COPIES = "/memfd:elastic-copies"
POLL_S = 0.01
KEEPS_STATUS = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (6, 15)
"""True if the pidfd of a process that was reaped tells how it ended."""
STOP_S = 2.0
"""Time in seconds that a process has to stop.  SIGSTOP acts at once, except on a process that waits for a
disk.
"""
ENDED = ("Z", "X", "gone")
"""Values of :func:`state` for a process that has ended."""


class StillRunning(AssertionError):
    """A process did not end before the deadline."""


@dataclass(frozen=True)
class Ended:
    """The end of a process.  ``source`` is "pidfd", "zombie", or "gone" if nobody could say (then ``status``
    is None).
    """

    status: int | None
    source: str

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it, or None."""
        return (
            signal.Signals(os.WTERMSIG(self.status))
            if self.status is not None and os.WIFSIGNALED(self.status)
            else None
        )

    @property
    def exit_code(self) -> int | None:
        """The code with which it exited, or None."""
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None


class Watched:
    """A running process, held by its pidfd from before the fault until after its end.  A context manager."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        self.started = start_time(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    @property
    def running(self) -> bool:
        """False once it is a zombie or gone."""
        return not select.select([self.fd], [], [], 0)[0]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signals this very process, never another one with its number."""
        signal.pidfd_send_signal(self.fd, number)

    def wait(self, deadline_s: float) -> Ended:
        """Returns how it ended.  Raises :class:`StillRunning` after ``deadline_s``."""
        until = time.monotonic() + deadline_s
        select.select([self.fd], [], [], deadline_s)
        while (ended := self.ended()) is None:
            if not self._reaped(max(until - time.monotonic(), 0)):
                raise StillRunning(
                    f"process {self.pid} still runs after {deadline_s} s, in state {state(self.pid)}"
                )
        return ended

    def ended(self) -> Ended | None:
        """Returns how it ended.  Returns None while it runs, and in the moment in which it is a zombie no
        more, and not reaped yet.
        """
        if self.running:
            return None
        # it is asked before the status: whoever is reaped then has left its status with the pidfd
        reaped = self._reaped()
        ended = self._ended()
        return ended if ended.status is not None or reaped or not KEEPS_STATUS else None

    def _reaped(self, timeout_s: float = 0.0) -> bool:
        """Returns whether it has been reaped, or is in time: its pidfd hangs up then."""
        waits = select.poll()
        waits.register(self.fd, 0)
        return bool(waits.poll(1000 * timeout_s))

    def _ended(self) -> Ended:
        buffer = bytearray(INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.fd, PIDFD_GET_INFO, buffer)
        except OSError:  # an older kernel, or a zombie that nobody has reaped yet
            return self._zombie()
        mask, *_, status = INFO.unpack(buffer)
        return Ended(status, "pidfd") if mask & PIDFD_INFO_EXIT else self._zombie()

    def _zombie(self) -> Ended:
        fields = _stat(self.pid)
        if fields is None or fields[0] != "Z" or int(fields[19]) != self.started:
            return Ended(None, "gone")
        return Ended(int(fields[49]), "zombie")


@dataclass(frozen=True, order=True)
class Process:
    """One process of this machine; (pid, started) never occurs twice between two boots."""

    pid: int
    started: int
    """Start time in clock ticks after boot."""
    command: str


def start_time(pid: int) -> int:
    """Returns the clock ticks between boot and the start of ``pid``."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"no process {pid}")
    return int(fields[19])


def state(pid: int) -> str:
    """Returns R, S, D, T (stopped), Z … as in proc(5), or "gone" if there is no such process."""
    fields = _stat(pid)
    return "gone" if fields is None else fields[0]


def processes(mark: str = "") -> list[Process]:
    """Returns all live processes, without zombies, whose command line or first environment contains ``mark``,
    such as the folder of a run.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat(int(entry.name))
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or not ours to read
            continue
        if fields is not None and fields[0] != "Z" and mark.encode() in command + b"\0" + environment:
            found.append(
                Process(
                    int(entry.name),
                    int(fields[19]),
                    command.replace(b"\0", b" ").decode(errors="replace").strip(),
                )
            )
    return sorted(found)


def children(pid: int) -> list[int]:
    """Returns all descendants of ``pid``, zombies included, as of now: parents before their children,
    whatever their numbers.

    The fork that runs in place of a process (``tests/support/warm.py``) counts as its child.
    """
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is not None:
            below.setdefault(int(fields[1]), []).append(int(entry.name))
            with contextlib.suppress(OSError):
                if (name := (entry / "comm").read_text()).startswith(STANDS_FOR):
                    below.setdefault(int(entry.name), []).append(int(name.removeprefix(STANDS_FOR)))
    found, rest = [], [pid]
    while rest:
        rest += (next_ := [each for each in below.get(rest.pop(), ()) if each not in found])
        found += next_
    return found


def frozen(pid: int) -> list[Watched]:
    """Stops the whole tree of processes below ``pid``, that one included, and returns it: parents before
    their children.

    A process that was already on its way out when its SIGSTOP came ends by itself; it is not among them.
    """
    tree: list[int] = []
    while new := [each for each in (pid, *children(pid)) if each not in tree]:
        for each in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)
        until = time.monotonic() + STOP_S
        while any(state(each) not in ("T", "t", *ENDED) for each in new) and time.monotonic() < until:
            time.sleep(POLL_S)
        tree += new
    return [Watched(each) for each in tree if state(each) not in ENDED]


def kill_all(frozen: Sequence[Watched]) -> None:
    """Kills a frozen tree by SIGKILL.  Children come first, because the kernel sends SIGHUP to a stopped
    process whose parent is gone.
    """
    for each in reversed(frozen):
        each.kill()


def actors_of_ours(root: int, session: str = "") -> list[str]:
    """Returns processes that are an actor of a run, by the title that Ray gives them, or that have memory of
    copies open.

    It looks at all descendants of ``root`` and, if ``session`` is given, at every other process that has
    files of that Ray session open; never at ``root`` itself.  Ports, and memory of a device, go with the
    processes that hold them.
    """
    found, below = [], set(children(root))
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):  # gone meanwhile
            opened = _opened(pid)
            if pid not in below and (
                pid == root or not session or not any(f"/{session}/" in name for name in opened)
            ):
                continue
            title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
            if title.startswith(ACTORS) or any(name.startswith(COPIES) for name in opened):
                found.append(f"{pid} {title}")
    return found


def _opened(pid: int) -> list[str]:
    """Returns the names of the files that the process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile; the process may still be there
            found.append(os.readlink(entry))
    return found


def free_ports(count: int) -> list[int]:
    """Returns loopback ports on which nobody listens now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def segments(prefix: str = "elastic-") -> list[str]:
    """Returns shared-memory segments whose names begin with ``prefix``."""
    return sorted(path.name for path in SHM.glob(f"{prefix}*"))


@dataclass(frozen=True)
class Machine:
    """A record of what runs and lies on this machine at one moment, to be compared with later."""

    processes: frozenset[Process]
    segments: frozenset[str]
    prefix: str

    @classmethod
    def now(cls, mark: str, run: str) -> Machine:
        """Returns the record of now.  ``run`` is the run whose segments count; other runs of this machine
        come and go meanwhile.
        """
        return cls(frozenset(processes(mark)), frozenset(segments(f"elastic-{run}-")), f"elastic-{run}-")

    def assert_nothing_left(self, mark: str, deadline_s: float) -> None:
        """Checks that no process with ``mark`` and no segment of the run is left since this moment.

        Processes have ``deadline_s`` to end in good order.
        """
        until = time.monotonic() + deadline_s
        while True:
            seen = {(process.pid, process.started) for process in self.processes}
            left = [
                process
                for process in processes(mark)
                if (process.pid, process.started) not in seen and process.pid != os.getpid()
            ]
            shared = sorted(set(segments(self.prefix)) - self.segments)
            if not left and not shared:
                return
            if time.monotonic() > until:
                raise AssertionError(
                    f"left after {deadline_s} s: processes {left}, shared-memory segments {shared}"
                )
            time.sleep(POLL_S)


def wait_gone(watched: Iterable[Watched], deadline_s: float) -> list[Ended]:
    """Returns how each ended.  Raises :class:`StillRunning` if one of them still runs after ``deadline_s``."""
    until = time.monotonic() + deadline_s
    return [process.wait(max(until - time.monotonic(), 0)) for process in watched]


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of ``/proc/<pid>/stat`` from the third on (the second may contain anything), or None
    if it is gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
