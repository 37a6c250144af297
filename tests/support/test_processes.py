"""The helpers tell how a process really ended, and find what was left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.processes import (
    KEEPS_STATUS,
    SHM,
    Machine,
    StillRunning,
    Watched,
    actors_of_ours,
    children,
    frozen,
    kill_all,
    processes,
    segments,
    start_time,
    state,
    wait_gone,
)


@contextmanager
def child(*command: str, **options: object) -> Iterator[tuple[subprocess.Popen[bytes], Watched]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, **options)  # type: ignore[call-overload]
    try:
        with Watched(process.pid) as watched:
            yield process, watched
    finally:
        process.kill()
        process.communicate()


def wait_seen(mark: str, watched: Watched) -> None:
    """Waits until command line and environment can be read, which is a moment after exec has closed
    ``Popen``'s pipe.
    """
    while not processes(mark):
        assert watched.running


def test_a_signal_is_told_from_an_exit() -> None:
    with child("sleep", "60") as (_, killed), child("sh", "-c", "read line; exit 7") as (exits, exited):
        assert killed.running
        killed.kill(signal.SIGSEGV)
        assert exits.stdin is not None
        exits.stdin.close()
        first, second = wait_gone([killed, exited], PATIENCE_S)
        assert (first.signal, first.exit_code) == (signal.SIGSEGV, None)
        assert (second.signal, second.exit_code) == (None, 7)
        assert not killed.running
        assert {first.source, second.source} == {"zombie"}


def test_the_status_outlives_the_zombie() -> None:
    """Before Linux 6.15 the status of a reaped process cannot be read, and ``wait`` says so."""
    with child("sleep", "60") as (process, watched):
        watched.kill()
        process.wait()
        ended = watched.wait(PATIENCE_S)
        assert (ended.source, ended.signal) in (("pidfd", signal.SIGKILL), ("gone", None))


@pytest.mark.skipif(
    not KEEPS_STATUS, reason="this Linux forgets how a process ended that somebody else reaped"
)
def test_the_status_is_known_however_fast_somebody_else_reaps() -> None:
    """The system reaps each child of a parent that ignores SIGCHLD at once, so there may be no zombie at all."""
    parent = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(20):
    end, held = os.pipe()
    if not (pid := os.fork()):
        os.close(held)
        os.read(end, 1)
        os._exit(7)
    os.close(end)
    print(pid, flush=True)
    sys.stdin.readline()
    os.close(held)
"""
    with child(sys.executable, "-c", parent, stdout=subprocess.PIPE) as (process, _):
        assert process.stdin is not None and process.stdout is not None
        for _ in range(20):
            with Watched(int(process.stdout.readline())) as watched:
                assert watched.ended() is None
                process.stdin.write(b"\n")
                process.stdin.flush()
                assert watched.wait(PATIENCE_S).exit_code == 7


def test_a_process_that_does_not_end_is_an_error() -> None:
    with child("sleep", "60") as (_, watched), pytest.raises(StillRunning, match=r"still runs after 0\.01 s"):
        watched.wait(0.01)


def test_a_stopped_process_is_seen() -> None:
    with child("sleep", "60") as (process, watched):
        watched.kill(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state(process.pid) == "T"
        assert watched.running
        assert start_time(process.pid) == watched.started


def test_a_process_is_found_by_its_mark_and_its_parent(tmp_path: Path) -> None:
    mark = str(tmp_path)
    assert processes(mark) == []
    with child("sleep", "60", env={"RUN": mark}) as (process, watched):
        wait_seen(mark, watched)
        assert [found.pid for found in processes(mark)] == [process.pid]
        assert process.pid in children(os.getpid())
        process.kill()
        watched.wait(PATIENCE_S)
        assert processes(mark) == []


def test_what_is_left_is_found(tmp_path: Path) -> None:
    before = Machine.now(str(tmp_path), f"test-{os.getpid()}")
    with child(sys.executable, "-c", "input()", str(tmp_path)) as (process, watched):
        wait_seen(str(tmp_path), watched)
        with pytest.raises(AssertionError, match=str(process.pid)):
            before.assert_nothing_left(str(tmp_path), 0.05)
        assert process.stdin is not None
        process.stdin.close()
        watched.wait(PATIENCE_S)
        before.assert_nothing_left(str(tmp_path), PATIENCE_S)
    segment = SHM / f"elastic-test-{os.getpid()}-w1"
    segment.write_bytes(b"left")
    try:
        assert segment.name in segments()
        with pytest.raises(AssertionError, match=segment.name):
            before.assert_nothing_left(str(tmp_path), 0.05)
    finally:
        segment.unlink()


def test_a_process_that_is_ending_is_not_taken_for_a_killed_one() -> None:
    """A process that gives back its memory while the freeze comes can no longer be stopped, and exits with 0."""
    ending = "import os; held = bytearray(b'1') * 2**29; print(flush=True); os._exit(0)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ending!r}]); input()"
    with child(sys.executable, "-c", parent, stdout=subprocess.PIPE) as (process, _):
        assert process.stdout is not None
        process.stdout.readline()
        watched = frozen(process.pid)
        for each in watched:
            each.kill()
        process.wait(PATIENCE_S)
        assert watched and all(end.signal is signal.SIGKILL for end in wait_gone(watched, PATIENCE_S))


def test_a_frozen_tree_is_killed_and_nobody_in_it_hangs_up() -> None:
    """A stopped process whose parent dies gets SIGHUP.  A parent's pid may be higher than its child's,
    because pids begin again.
    """
    heeds = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # nohup would make them ignore it
    below = f"{heeds}; print(flush=True); input()"
    parent = (
        f"{heeds}; import subprocess, sys; subprocess.run([sys.executable, '-c', {below!r}], process_group=0)"
    )
    with child(sys.executable, "-c", parent, stdout=subprocess.PIPE, start_new_session=True) as (process, _):
        assert process.stdout is not None
        process.stdout.readline()
        watched = frozen(process.pid)
        assert [each.pid for each in watched] == [process.pid, *children(process.pid)]
        kill_all(watched)
        process.wait(PATIENCE_S)
        assert {end.signal for end in wait_gone(watched, PATIENCE_S)} == {signal.SIGKILL}
    with child(sys.executable, "-c", parent, stdout=subprocess.PIPE, start_new_session=True) as (process, _):
        assert process.stdout is not None
        process.stdout.readline()
        first, second = frozen(process.pid)
        first.kill()  # the control: the wrong order
        process.wait(PATIENCE_S)
        assert second.wait(PATIENCE_S).signal is signal.SIGHUP


def test_an_actor_that_is_left_and_memory_of_copies_are_found() -> None:
    """The control for ``assert_nothing_left``: if the search never found anything, that assertion could not
    fail.
    """
    before, holds = actors_of_ours(os.getpid()), "import os; os.memfd_create('elastic-copies'); input()"
    with (
        child("ray::Keeper", "-c", "input()", executable=sys.executable) as (keeper, _),
        child(sys.executable, "-c", holds, stdout=subprocess.PIPE) as (memory, _),
        child("sleep", "60"),
    ):
        until = time.monotonic() + PATIENCE_S
        while len(found := [each for each in actors_of_ours(os.getpid()) if each not in before]) < 2:
            assert time.monotonic() < until, found
        assert sorted(int(each.split()[0]) for each in found) == sorted((keeper.pid, memory.pid))
    assert actors_of_ours(os.getpid()) == before


def test_an_actor_that_opens_and_closes_files_is_found_at_every_look() -> None:
    churn = (
        "import os\nprint(flush=True)\nwhile True:\n    for each in [os.open('/dev/null', 0) for _ in "
        "range(50)]: os.close(each)"
    )
    with child("ray::Worker", "-c", churn, executable=sys.executable, stdout=subprocess.PIPE) as (busy, _):
        assert busy.stdout is not None
        busy.stdout.readline()
        assert all(f"{busy.pid} ray::Worker" in actors_of_ours(os.getpid()) for _ in range(20))
