"""R3: before a hanging worker is ended, its keeper finds out where it stands, whatever it hangs in, and
nobody waits long for that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.logs import LINES, Logs, last_lines, stack_of
from actors.processes import Process, log_file, started
from elastic.ids import NodeId, WorkerId
from storage.objects import Data, ObjectStore
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import state
from tests.support.stores import Forwarding

STUCK = """
import ctypes, faulthandler, signal, sys, threading
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "a"))

def holds_the_gil():
    open(sys.argv[1] + ".ready", "w").close()
    while True:  # a signal ends one sleep
        ctypes.PyDLL(None).usleep(600_000_000)

def waits():
    open(sys.argv[1] + ".ready", "w").close()
    threading.Event().wait()

globals()[sys.argv[2]]()
"""


class Stuck:
    def __init__(self, folder: Path, function: str) -> None:
        self.function, self.log = function, folder / "log"
        self.log.touch()
        self.popen = subprocess.Popen([sys.executable, "-c", STUCK, str(self.log), function])
        until(lambda: Path(f"{self.log}.ready").exists())
        self.process = Process(self.popen.pid, started(self.popen.pid))

    def stop(self) -> None:
        os.kill(self.popen.pid, signal.SIGSTOP)
        until(lambda: state(self.popen.pid) == "T")


@pytest.fixture
def stuck(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stuck]:
    one = Stuck(tmp_path, request.param)
    yield one
    one.popen.kill()
    one.popen.wait()


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize("stuck", ["holds_the_gil", "waits"], indirect=True)
def test_py_spy_sees_where_it_stands_also_when_it_is_stopped(stuck: Stuck) -> None:
    for stopped in (False, True):
        if stopped:
            stuck.stop()
        text = stack_of(stuck.process, stuck.log, 20.0)
        assert (
            text.startswith("# where its process stood, by py-spy:")
            and f"{stuck.function} (<string>:" in text
        )
        assert state(stuck.popen.pid) == ("T" if stopped else "S"), "it is left as it was"


@pytest.mark.parametrize("stuck", ["holds_the_gil", "waits"], indirect=True)
def test_without_py_spy_its_own_fault_handler_says_so(stuck: Stuck) -> None:
    assert stack_of(stuck.process, stuck.log, 20.0, spy="") == ""
    assert f"in {stuck.function}" in stuck.log.read_text()
    size = stuck.log.stat().st_size
    stuck.stop()
    assert "a signal had stopped its process; install py-spy" in stack_of(
        stuck.process, stuck.log, 20.0, spy=""
    )
    assert stuck.log.stat().st_size == size and state(stuck.popen.pid) == "T", (
        "it is not set going to be asked"
    )


@pytest.mark.parametrize("stuck", ["waits"], indirect=True)
def test_one_that_fails_or_does_not_come_back_is_not_waited_for(stuck: Stuck, tmp_path: Path) -> None:
    for script, why in (
        ("echo Permission Denied >&2; exit 1", "Permission Denied"),
        ("exec sleep 600", "TimeoutExpired"),
    ):
        spy = tmp_path / "spy"
        spy.write_text(f"#!/bin/sh\n{script}\n")
        spy.chmod(0o755)
        began = time.monotonic()
        assert stack_of(stuck.process, stuck.log, 1.0, spy=str(spy)).startswith(
            f"# py-spy could not tell where its process stood: {why}"
        )
        assert time.monotonic() - began < 30.0
    assert "in waits" in stuck.log.read_text()


def test_the_end_of_a_log_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "wb+") as file:
        assert last_lines(file) == []
        file.truncate(20 * 2**30)  # sparse: who reads it whole runs out of memory
        file.seek(0, 2)
        file.write(b"\n" + b"".join(b"line %d\n" % n for n in range(1000)))
        assert last_lines(file) == [f"line {n}" for n in range(1000 - LINES, 1000)]


def test_what_was_printed_is_kept_whoever_has_removed_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of one machine share the folder, and the first one to leave removes it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "here"))
    store = ObjectStore.open(str(tmp_path / "bucket"))
    logs, log = Logs(store, "run/logs/1", "run-0001-abcdef", NodeId("n1")), log_file("run-0001-abcdef", "w1")
    log.parent.mkdir(parents=True)
    log.write_text("warmed up\n")
    for worker in ("w1", "w2"):  # the second has not printed anything yet
        logs.follow(WorkerId(worker))
    with log.open("a") as file:
        file.write("stepped\n")
        shutil.rmtree(log.parent)
        file.write("left\n")
    for worker in ("w1", "w2"):
        logs.keep(WorkerId(worker), "exited with code 0")
    logs.close()
    assert store.get("run/logs/1/w1.log").decode().splitlines() == [
        "# w1 on node n1: exited with code 0",
        "warmed up",
        "stepped",
        "left",
    ]
    assert store.get("run/logs/1/w2.log").decode().splitlines() == ["# w2 on node n1: exited with code 0"]


def test_nobody_waits_for_a_slow_bucket(tmp_path: Path) -> None:
    """The thread that watches processes continues at once; all logs are in the bucket when the keeper has
    closed.
    """
    asked, slow = threading.Event(), threading.Event()

    class Slow(Forwarding):
        def put(self, key: str, data: Data) -> None:
            asked.set()
            assert slow.wait(PATIENCE_S)
            super().put(key, data)

    store = Slow(ObjectStore.open(str(tmp_path)))
    logs = Logs(store, "run/logs/1", "run-0001-abcdef", NodeId("n1"))
    for worker in ("w1", "w2"):
        logs.keep(WorkerId(worker), "killed by signal 9 (SIGKILL)")
    assert asked.wait(PATIENCE_S) and not store.list("run/")
    slow.set()
    logs.close()
    assert store.get("run/logs/1/w2.log").decode() == "# w2 on node n1: killed by signal 9 (SIGKILL)\n"
