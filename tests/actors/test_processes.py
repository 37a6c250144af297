"""Processes of a run end when they are told to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors.heads import reachable
from actors.processes import Process, end_on_sigterm, started, sweep
from elastic.train.gauges.counters import Counters, segment
from tests.support.patience import PATIENCE_S
from tests.support.processes import StillRunning, Watched


def test_a_later_process_of_the_same_number_is_not_taken_for_the_one_that_ended() -> None:
    """A keeper kills the processes that it follows.  The control: the process itself is found, by number and
    beginning.
    """
    own, began = os.getpid(), started(os.getpid())
    assert not Process(own, began).ended()
    with pytest.raises(ProcessLookupError, match="another process has this number now"):
        Process(own, began - 1)
    child = subprocess.Popen(["true"])
    began = started(child.pid)
    child.wait()
    with pytest.raises(ProcessLookupError):
        Process(child.pid, began)
    with pytest.raises(ProcessLookupError):
        started(child.pid)


@pytest.mark.parametrize(
    ("command", "ended"), [("exit 7", 7 << 8), ("exit 0", 0), ("kill -9 $$", signal.SIGKILL)]
)
def test_how_a_process_ended_is_known_before_its_parent_has_reaped_it(command: str, ended: int) -> None:
    """The parent is late on a busy machine.  A process that runs has no status, and neither has one that only
    has its number.
    """
    child = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    process = Process(child.pid, started(child.pid))
    assert process.status() is None
    child.stdin.close()  # type: ignore[union-attr]
    while not process.ended():
        pass
    assert process.status() == ended
    process.began += 1
    assert process.status() is None
    child.wait()
    assert process.status() in (ended, None), "Linux 6.15 and later tell it for ever"


THREADS = """
import ctypes, sys, threading, time
memory = bytearray(int(sys.argv[2]))
for _ in range(8):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
if sys.argv[1] == "alone":  # the first thread ends by itself, and the others run on
    ctypes.CDLL(None).syscall(60, 0)
time.sleep(600)
"""
PTRACE_ATTACH, LAST_PID = 16, Path("/proc/sys/kernel/ns_last_pid")


@contextlib.contextmanager
def threads(how: str = "whole", memory: int = 0) -> Iterator[Process]:
    """A process of nine threads; in the end it is killed and reaped."""
    with subprocess.Popen([sys.executable, "-c", THREADS, how, f"{memory}"], stdout=subprocess.PIPE) as child:
        process = Process(child.pid, started(child.pid))
        try:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            yield process
        finally:
            child.kill()


def until_dying(process: Process) -> None:
    end = time.monotonic() + PATIENCE_S
    while not process.dying() and time.monotonic() < end:
        pass
    assert process.dying()


def test_a_process_is_seen_to_die_before_the_kernel_has_let_go_of_it() -> None:
    """R1: giving back a gigabyte takes the kernel many milliseconds.  The control: until it is killed,
    nothing says that it dies.
    """
    with threads(memory=2**30) as process:
        assert not process.dying() and not process.ended()
        process.kill()
        until_dying(process)
        assert not process.ended(), "it was seen to die only once it had ended"
        while not process.ended():
            assert process.dying()
    assert process.dying() and process.ended()


@pytest.mark.parametrize("how", ["stopped", "traced", "alone"])
def test_a_process_that_only_stands_still_or_has_lost_its_first_thread_does_not_die(how: str) -> None:
    """Each is killed afterwards, and is seen to die then."""
    with threads(how) as process:
        if how == "stopped":
            os.kill(process.pid, signal.SIGSTOP)
        elif how == "traced":
            assert ctypes.CDLL(None).ptrace(PTRACE_ATTACH, process.pid, None, None) == 0
        state = {"stopped": "T", "traced": "t", "alone": "Z"}[how]
        while state not in (
            stat := Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        ):
            assert stat in "RSD"
        for _ in range(50):
            assert not process.dying() and not process.ended()
        process.kill()
        until_dying(process)


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="chooses the number of a process")
def test_a_handle_of_a_dead_process_does_not_speak_of_the_next_one_with_its_number() -> None:
    """The kernel is made to give the same number again.  The control: the new process's own handle says that
    it lives.
    """
    with threads() as first:
        pass
    for _ in range(100):
        LAST_PID.write_text(f"{first.pid - 1}")
        with threads() as second:
            if second.pid == first.pid:
                assert not second.dying() and first.dying() and first.ended() and not first.stopped()
                return
    raise AssertionError("the kernel never gave the number again")


WRITES = """
import os, sys, time
from elastic.train.gauges.counters import Counters, segment
counters = Counters(segment("swept-0001-abcdef", sys.argv[1]), create=True)
counters["pid"] = os.getpid()
print("written", flush=True)
time.sleep(float(sys.argv[2]))
"""


APART = ["unshare", "--pid", "--fork", "--kill-child", "--time", "--boottime", "1000"]
"""Runs a command as in a container that has its own numbers of processes and its own clock."""


@pytest.mark.parametrize(
    "where",
    [[], pytest.param(APART, marks=pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces"))],
    ids=["here", "apart"],
)
def test_counters_are_removed_once_their_process_is_dead(where: list[str]) -> None:
    """Seen from outside, the process in a container has another number and another beginning.  Of the four,
    only the last has ended, and its number belongs to a living process."""
    own = Counters(segment("swept-0001-abcdef", "w0"), create=True)
    unborn = Counters(segment("swept-0001-abcdef", "w1"), create=True)
    own["pid"] = os.getpid()
    living = subprocess.Popen([*where, sys.executable, "-c", WRITES, "w2", "100"], stdout=subprocess.PIPE)
    try:
        assert living.stdout is not None and living.stdout.readline() == b"written\n"
        subprocess.run([sys.executable, "-c", WRITES, "w3", "0"], stdout=subprocess.PIPE, check=True)
        Counters(segment("swept-0001-abcdef", "w3"), create=False)["pid"] = os.getpid()
        sweep("swept")
        assert left() == ["w0", "w1", "w2"]
    finally:
        living.kill()
        living.communicate()
    own.close()
    sweep("swept")
    assert left() == ["w1"]
    unborn["pid"] = os.getpid()
    unborn.close()
    sweep("swept")
    assert left() == []


def left() -> list[str]:
    """Returns the workers whose counters are there."""
    return [f"w{number}" for number in range(4) if segment("swept-0001-abcdef", f"w{number}").exists()]


class Busy:
    """An actor with a call that never ends, like that of a worker."""

    def __init__(self, ends: bool) -> None:
        self.begun = threading.Event()
        if ends:
            end_on_sigterm()

    def pid(self) -> int:
        return os.getpid()

    def trains(self) -> bool:
        return self.begun.wait(PATIENCE_S)

    @ray.method(concurrency_group="life")
    def train(self) -> None:
        self.begun.set()
        threading.Event().wait()


@pytest.mark.parametrize("ends", [True, False], ids=["ours", "Ray's handler"])
def test_sigterm_ends_an_actor_that_is_busy(ends: bool) -> None:
    """The control is Ray's own handler: the process stays, and hears nothing any more."""
    actor = ray.remote(concurrency_groups={"life": 1})(Busy).options(num_cpus=0).remote(ends)
    with Watched(ray.get(actor.pid.remote())) as process:
        actor.train.remote()
        assert ray.get(actor.trains.remote())
        process.kill(signal.SIGTERM)
        if ends:
            assert process.wait(PATIENCE_S).signal is signal.SIGTERM
            return
        with pytest.raises(StillRunning):
            process.wait(1)
        with pytest.raises(ray.exceptions.GetTimeoutError):
            ray.get(actor.pid.remote(), timeout=1)
    ray.kill(actor)


def test_a_cluster_at_an_address_of_ipv6_can_be_reached() -> None:
    """The control: nobody listens at the port any more."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert reachable(f"[::1]:{port}")
    assert not reachable(f"[::1]:{port}"), "the control"
