"""R21: the first signal to a driver asks for something, the second one interrupts it."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from actors.launch import launch
from actors.signals import Requests, kept_from_children
from elastic.report.story import Line, StepLine
from elastic.runs.run import Run
from tests.support.commands import ROOT
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S
from tests.support.toys import SMALL, toy_job


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_signal_is_a_request_and_the_second_is_not(number: signal.Signals, word: str) -> None:
    before = signal.getsignal(number)
    try:
        with Requests() as requests:
            with pytest.raises(KeyboardInterrupt, match=word):
                os.kill(os.getpid(), number)  # nothing runs yet, so the first signal interrupts too
            signal.signal(number, signal.SIG_IGN)  # as ray.init installs a handler of its own
            requests.note()
            assert requests.asked == ""
            os.kill(os.getpid(), number)
            assert requests.asked == word
            with pytest.raises(KeyboardInterrupt, match=word):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    with Requests():
        pass
    assert signal.getsignal(number) is before


def test_what_must_not_be_interrupted_ends_before_the_signal_counts() -> None:
    """The user is told at once.  A second signal does not wait.  The control: without a signal nothing is
    raised.
    """
    done = list[str]()
    with Requests() as requests:
        with requests.finishing(lambda: done.append("told")):
            done.append("control")
        with (
            pytest.raises(KeyboardInterrupt, match="Ctrl-C"),
            requests.finishing(lambda: done.append("told")),
        ):
            os.kill(os.getpid(), signal.SIGINT)
            done.append("ended")
    with (
        Requests() as requests,
        pytest.raises(KeyboardInterrupt, match="SIGTERM"),
        requests.finishing(lambda: None),
    ):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("not reached")
    assert done == ["control", "told", "ended"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
def test_a_closed_terminal_and_slurm_ask_for_a_save(
    tmp_path: Path, number: signal.Signals, ignored: bool
) -> None:
    """R21: a terminal sends SIGHUP twice, and the second one does not break the save off.  ``nohup`` has it
    ignored, and so do we.
    """
    job = toy_job(tmp_path, steps=5, **SMALL)

    def show(line: Line) -> None:
        if (isinstance(line, StepLine) and line.step == 2) or "stops after a save" in getattr(
            line, "text", ""
        ):
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        result = launch(job, local=True, show=show)
        assert signal.getsignal(number) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(number, before)
    assert (result.state, result.step) == (("Finished", 5) if ignored else ("Stopped", 2)), result.reason
    if not ignored:
        assert result.reason == f"{number.name}; saved at step 2"


def test_the_processes_of_a_cluster_that_starts_here_outlive_the_terminal() -> None:
    """R21: a terminal that closes signals all that it has begun.  The control: a process that starts
    otherwise ends.
    """
    reads = [sys.executable, "-c", "input()"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever has started the tests may ignore it
    with kept_from_children():
        kept = subprocess.Popen(reads, stdin=subprocess.PIPE)
    ends = subprocess.Popen(reads, stdin=subprocess.PIPE)
    signal.signal(signal.SIGHUP, before)
    with kept, ends:
        for process in (kept, ends):
            process.send_signal(signal.SIGHUP)
        assert ends.wait(PATIENCE_S) == -signal.SIGHUP
        kept.communicate(b"\n", timeout=PATIENCE_S)
    assert kept.returncode == 0


def test_many_ctrl_c_end_in_no_traceback(tmp_path: Path) -> None:
    """The command ends with its own exit code, whatever Python does when the last Ctrl-C comes."""
    code = """
import atexit, os, signal, sys, threading
from actors import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupted():
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
cli.main = interrupted
sys.argv = ["elastic", "data"]
from elastic.__main__ import main
sys.exit(main())
"""
    ours = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ours, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "elastic: interrupted; give the same command again to go on\n"


@pytest.mark.full
def test_a_run_whose_terminal_is_closed_saves(tmp_path: Path) -> None:
    """R21: the terminal is a real one, and the cluster is the command's own, so its processes are told, too."""
    job = toy_job(
        tmp_path / "bucket",
        name="closed",
        steps=10_000,
        data={"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.05}},
    )
    (tmp_path / "job.toml").write_text(to_toml(job.replace(workers={"max": 1})))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic", "train", "job.toml", "--address", "local"],
        **{
            "stdin": theirs,
            "stdout": theirs,
            "stderr": theirs,
            "cwd": tmp_path,
            "env": os.environ | {"PYTHONPATH": str(ROOT)},
        },
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    shown = b""
    while b"step 3/" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(PATIENCE_S) == 3
    newest = Run.open(job).newest()
    assert newest is not None and newest.step >= 3
    assert f"stopped (SIGHUP), resumes from step {newest.step}" in Run.open(job).records()[-1]["reason"]
