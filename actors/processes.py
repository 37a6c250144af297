"""Processes as the operating system sees them: log files, ends, and the signals that ended them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from elastic.errors import JobError
from elastic.train.gauges.counters import segment, writer_lives

_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_PF_EXITING = 0x4
"""Flag of a thread, in the ninth field of its ``stat``, that runs no more of its program: the kernel takes it
apart.
"""
POLL_S = 0.02
"""Seconds between two looks at whether another process is done."""
STAT_BYTES = 512
"""Bytes of ``/proc/<pid>/stat`` that are read for the first fields: the name of the process has at most 64.
"""
ENTERED_S = 5.0
"""Seconds to wait, at the end of a run, for a worker that is making its files.  That takes a millisecond,
unless the worker is stopped.
"""


def log_folder(run: str) -> Path:
    """Returns the folder of this node for what the run's processes print, and for the local journal of a
    coordinator.

    Its parent, in the temporary folder, belongs to the user alone.  Its name has a dash, because a folder
    called ``elastic`` there would be a package of that name for every process that works in the temporary
    folder.
    """
    return Path(tempfile.gettempdir()) / f"elastic-{os.getuid()}" / run


def compiled_folder() -> Path:
    """Returns this user's folder of this node for compiled code.  It outlives runs.

    Workers remove the files that no worker has used for 14 days.  If the folder is removed, the next worker
    compiles again.
    """
    return log_folder("compiled")


def make_log_folder(run: str) -> Path:
    """Makes :func:`log_folder`, which only this user can read and write.

    Raises :class:`JobError` if another user has put something else there: the other user could then read or
    replace what is written there.
    """
    folder = log_folder(run)
    with contextlib.suppress(FileExistsError):
        folder.parent.mkdir(mode=0o700)
    if not _is_ours(folder.parent):
        raise JobError(
            f"{folder.parent} is a link, or belongs to another user: remove it, or set TMPDIR to a folder "
            "of your own"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _is_ours(folder: Path) -> bool:
    """Returns whether ``folder`` is a folder of this user and no link; if so, bars all other users."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        ours = os.fstat(descriptor).st_uid == os.getuid()
        if ours:
            os.fchmod(descriptor, 0o700)
        return ours
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def entered(run: str, wait: Callable[[], object]) -> Iterator[None]:
    """Enters the run's folder on this node: :func:`leave_nothing` removes what a worker makes within the
    block.  Calls ``wait`` until the folder exists.

    A killed process may run on for a while after Ray has said that its actor is dead.  So a worker enters the
    folder that its keeper has made, and never makes it: once the run is over there is no folder, so a late
    worker leaves no files behind.
    """
    while (descriptor := _locked(log_folder(run), fcntl.LOCK_SH)) is None:
        wait()
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path, how: int) -> int | None:
    """Returns a descriptor of ``folder`` that holds the lock ``how`` until it is closed, or its process ends;
    None without such a folder.

    Raises ``BlockingIOError`` if ``how`` says not to wait, and another process holds the lock.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how)
        there = os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except FileNotFoundError:
        there = False
    except BlockingIOError:
        os.close(descriptor)
        raise
    if not there:  # it was removed while this process waited for the lock
        os.close(descriptor)
    return descriptor if there else None


def log_file(run: str, worker: str) -> Path:
    """Returns the file on its node that holds what the worker printed."""
    return log_folder(run) / f"{worker}.log"


def life_of(name: str, token: str) -> str:
    """Returns the life in ``token``, which is ``<name>-<first incarnation>-<life>``.  A life is a random
    text, which no run of another bucket has.

    Returns "" for the token of another run, such as one called ``<name>-2``.
    """
    found = re.fullmatch(rf"{re.escape(name)}-\d{{4,}}-([0-9a-f]{{6}})", token)
    return found[1] if found else ""


def _folders(name: str, lives: Collection[str]) -> list[Path]:
    """Returns the folders of ``lives`` of the run on this node, oldest life first."""
    found = log_folder("").glob(f"{name}-*") if _is_ours(log_folder("")) else ()
    return sorted(
        (each for each in found if life_of(name, each.name) in lives),
        key=lambda each: (len(each.name), each.name),
    )


def _counters(name: str) -> dict[Path, str]:
    """Returns the life of each file of counters that is on this node of any run called ``name``."""
    run = segment(name, "").name[:-1]
    lives = {each: life_of(run, each.name.rpartition("-")[0]) for each in segments(f"{name}-*")}
    return {each: life for each, life in lives.items() if life}


def left_here(name: str, lives: Collection[str]) -> list[Path]:
    """Returns the logs of workers that ``lives`` of the run have left on this node, oldest life first.

    The lives are known by the random text at the end of their names: another bucket may have a run of that
    name, too.
    """
    return [path for folder in _folders(name, lives) for path in sorted(folder.glob("*.log"))]


def nobodys(name: str) -> list[Path]:
    """Returns the files of runs called ``name`` on this node, of each life that has no living worker here.
    Such a life may have living workers on other nodes.
    """
    counters = _counters(name)
    lives = {*counters.values()} | {life_of(name, each.name) for each in log_folder("").glob(f"{name}-*")}
    dead = lives - {life for path, life in counters.items() if writer_lives(path) is not False} - {""}
    return [*(path for path, life in counters.items() if life in dead), *_folders(name, dead)]


def remove_logs(run: str) -> None:
    """Removes the logs of the run's workers on this node, but not what a coordinator has written of the
    journal.
    """
    for path in log_folder(run).glob("*.log"):
        path.unlink(missing_ok=True)
    # a coordinator's part of the journal is there, or a worker has just made a log
    with contextlib.suppress(OSError):
        log_folder(run).rmdir()


def leave_nothing(
    run: str, deadline_s: float = ENTERED_S, wait: Callable[[float], object] = time.sleep
) -> None:
    """Removes all that the run has on this node, since the run is over.  Waits at most ``deadline_s`` for
    workers that are :func:`entered`, since only such workers can make more files here.
    """
    end, locked = time.monotonic() + deadline_s, None
    while True:
        try:
            locked = _locked(log_folder(run), fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= end:
                break
        wait(POLL_S)
    shutil.rmtree(log_folder(run), ignore_errors=True)
    for path in segments(run):  # after the folder: from now on nobody makes any
        path.unlink(missing_ok=True)
    if locked is not None:
        os.close(locked)


def sweep(name: str) -> None:
    """Removes the counters of dead processes that earlier lives of the run left on this node."""
    for path in _counters(name):
        if writer_lives(path) is False:
            path.unlink(missing_ok=True)


def segments(run: str) -> list[Path]:
    """Returns the files of counters here of the life ``run``, or of several lives if it is a pattern."""
    every = segment(run, "w*")
    return sorted(every.parent.glob(every.name))


def end_on_sigterm() -> None:
    """Lets SIGTERM end this process at once, as it ends ordinary processes.

    Ray's own handler begins an exit that waits for calls under way.  The call of a worker never ends, so it
    would train on and ignore every order.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def clear(name: str, lives: Collection[str], deadline_s: float) -> list[str]:
    """Removes all that ``lives`` of the run have left on this node, once their processes have ended, and
    returns what was removed.

    Files of a process that still lives at the deadline stay.
    """
    removed, end = [], time.monotonic() + deadline_s
    for path in [each for each, life in _counters(name).items() if life in lives]:
        while (alive := writer_lives(path)) and time.monotonic() < end:
            time.sleep(POLL_S)
        if not alive:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                path.unlink()
                removed.append(f"{path}")
    for folder in _folders(name, lives):
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(f"{folder}")
    return removed


def started(pid: int) -> int:
    """Returns when the process began, in clock ticks since the machine did.  Raises ``ProcessLookupError`` if
    there is no such process.
    """
    try:
        return int(_stat(pid)[19])
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None


def _stat(pid: int) -> list[str]:
    """Returns the fields of ``/proc/<pid>/stat`` from the third one on; the second, a name, may contain
    anything.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _exits(stat: bytes) -> bool:
    """Returns whether the thread with this ``stat`` has ended, or is exiting."""
    fields = stat.rpartition(b")")[2].split(None, 7)
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)


def _thread_exits(pid: int, thread: str) -> bool:
    try:
        return _exits(Path(f"/proc/{pid}/task/{thread}/stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return True


class Process:
    """A handle on one process by pidfd.  It is never confused with a later process of the same number."""

    def __init__(self, pid: int, began: int) -> None:
        """``began`` is what :func:`started` has returned for the process.  Raises ``ProcessLookupError`` if
        the process has ended.
        """
        self.pid, self.began = pid, began
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)
        try:
            # of this process for ever, whoever gets the number later
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except FileNotFoundError:
            raise ProcessLookupError(f"there is no process {pid}") from None
        weakref.finalize(self, os.close, self._stat)
        if started(pid) != began:
            raise ProcessLookupError(f"process {pid} has ended, and another process has this number now")

    def ended(self) -> bool:
        # ``select`` fails for descriptors above 1023; each thread needs a poll of its own
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def dying(self) -> bool:
        """Returns whether nothing of the process's program runs any more: each of its threads is exiting or a
        zombie.

        This is true at once after SIGKILL.  Sockets and the pidfd report the end only when the kernel has
        freed what the process had, which takes seconds for 36 GiB of pinned memory.  All threads are checked,
        because the first thread alone may have ended by itself.
        """
        try:
            if not _exits(os.pread(self._stat, STAT_BYTES, 0)):
                return False
            threads = os.listdir(f"/proc/{self.pid}/task")
            if not all(_thread_exits(self.pid, each) for each in threads):
                return False
            # a thread that has ended since may have started another one
            born = not set(os.listdir(f"/proc/{self.pid}/task")) <= set(threads)
            # if the process was reaped, another one may have its number
            return not born and _exits(os.pread(self._stat, STAT_BYTES, 0))
        except (FileNotFoundError, ProcessLookupError):
            return self.ended()

    def stopped(self) -> bool:
        """Returns whether a signal has stopped the process and none has continued it."""
        try:
            return _stat(self.pid)[0] in "Tt" and not self.ended()
        except OSError:
            return False

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return

    def dump_stack(self) -> None:
        """Asks the process to write the stacks of its threads (see ``actors/worker.py``)."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGUSR1)

    def status(self) -> int | None:
        """Returns the wait status of the ended process, or None if the kernel does not tell it.

        Every Linux tells the status until the parent has reaped the process; afterwards only Linux 6.15 and
        later do, by the pidfd.  The process may be reaped between the two questions, so the pidfd is asked
        again.
        """
        for ask in (self._told, self._as_zombie, self._told):
            if (status := ask()) is not None:
                return status
        return None

    def _told(self) -> int | None:
        buffer = bytearray(64)
        struct.pack_into("Q", buffer, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, buffer, True)
        except OSError:
            return None
        mask, status = struct.unpack_from("Q", buffer, 0)[0], struct.unpack_from("i", buffer, 60)[0]
        return status if mask & _PIDFD_INFO_EXIT else None

    def _as_zombie(self) -> int | None:
        try:
            fields = _stat(self.pid)
        except OSError:
            return None
        return int(fields[49]) if fields[0] == "Z" and int(fields[19]) == self.began else None


def describe(status: int | None) -> str:
    """Returns a sentence that says how a process ended."""
    if status is None:
        return (
            "ended; this kernel does not say how (an empty log suggests SIGKILL, which the kernel "
            "often sends when memory runs out)"
        )
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by signal {number} ({signal.Signals(number).name})"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"
