"""L6: the commands of a run that lives need its name and its bucket, whatever else the job file says by now."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import uuid
from pathlib import Path

import pytest

from actors.cli import main
from actors.launch import start
from elastic.control.run import Stopped
from elastic.job import Job
from elastic.runs.run import Run
from elastic.train.checks.preflight import preflight
from tests.support.commands import Command, assert_no_actor_left, view_of
from tests.support.job_file import to_toml
from tests.support.patience import until
from tests.support.toys import LIGHT, toy_job

Shown = pytest.CaptureFixture[str]
SAVES = 10
DATA = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.05}}
ENDLESS = LIGHT | {"steps": 10_000, "data": DATA, "checkpoint": {"save_every": SAVES}, "workers": {"max": 1}}
OTHER = {
    "model": "nowhere:at_all",
    "model_args": {"vocab": "many"},
    "loss": "nowhere:loss",
    "steps": 7,
    "seed": 5,
    "global_batch": 6,
    "microbatch": 3,
    "optim": {"lr": 0.5},
    "data": {"dataset": "nowhere:Data"},
    "workers": {"min": 9, "max": 9},
}


def other_file(folder: Path, job: Job) -> str:
    """Writes a job file with the name and the bucket of ``job``, in which all else is other and fits no run;
    returns its path.
    """
    (folder / "other.toml").write_text(to_toml(Job(name=job.name, bucket=job.bucket, **OTHER)))  # type: ignore[arg-type]
    return str(folder / "other.toml")


def check_what_only_reads(other: str, name: str, folder: Path, capsys: Shown) -> None:
    """Checks that each command that reads the bucket tells of the run ``name``, which trains meanwhile."""

    def told(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words]) == code, capsys.readouterr().out
        return capsys.readouterr().out

    rows = [json.loads(line) for line in told("metrics", other).splitlines()]
    assert [row["step"] for row in rows[:SAVES]] == [*range(1, SAVES + 1)] and all(
        row["lr"] <= 0.01 for row in rows
    )
    assert f"│ {SAVES} " in told("checkpoint", "ls", other)
    assert f"version     step {SAVES} of generation 1" in told(
        "checkpoint", "show", other, "--step", str(SAVES)
    )
    assert "every digest as written" in told("checkpoint", "verify", other, "--step", str(SAVES))
    assert "every digest as written" in told("checkpoint", "verify", other)
    assert re.match(rf"{name}: step \d+ of 10000, ", told("runs", other))
    assert "page.html: " in told("report", other, "--to", str(folder / "page.html"))
    page = (folder / "page.html").read_text()
    assert f"<title>{name}" in page and re.search("10,?000", page)


def attached_until_ctrl_c(name: str, other: str, capsys: Shown) -> str:
    """Attaches to the run, and sends Ctrl-C to this process once the command says that it is attached;
    returns what it shows.
    """
    shown: list[str] = []

    def attached() -> bool:
        shown.append(capsys.readouterr().out)
        return f"attached to {name}" in "".join(shown)

    def press() -> None:
        until(attached)
        os.kill(os.getpid(), signal.SIGINT)

    hand = threading.Thread(target=press)
    hand.start()
    assert main(["attach", other]) == 3
    hand.join()
    return "".join((*shown, capsys.readouterr().out))


@pytest.mark.full
def test_l6_a_changed_job_file_locks_nobody_out_of_a_run_that_lives(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: status, attach, logs, replay, stop and what only reads.  The controls: it cannot be trained by such
    a file, and a name of nobody is missed.
    """
    monkeypatch.chdir(tmp_path)
    job = toy_job(
        tmp_path / "bucket",
        name="mine",
        on_driver_exit="detach",
        deadlines={"lease_s": 60, "grow_debounce_s": 30},
        **ENDLESS,
    )
    other = other_file(tmp_path, job)
    start(Run.open(job), preflight(job).build, uuid.uuid4().hex, 0)
    until(lambda: Run.find(job).newest() is not None)
    check_what_only_reads(other, "mine", tmp_path, capsys)
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["train", "job.toml", "--seed", "5"]) == 1, "the control"
    assert "the run 'mine' in bucket = " in capsys.readouterr().out

    assert main(["status", other, "--once"]) == 0
    assert re.match(r"mine-\d+-\w+: Running, step \d+ of 10000, generation 1, ", capsys.readouterr().out)
    assert main(["logs", other, "w1"]) == 0
    assert "w1: joined" in capsys.readouterr().out
    assert (
        main(["logs", other, "w1", "--name", "nobodys"]) == 1
        and "no run 'nobodys'" in capsys.readouterr().out
    ), "the control"
    for words in ([], ["--check"]):
        assert main(["replay", other, *words]) == 0
        assert ("form generation 1 of " if not words else "decides 0 otherwise") in capsys.readouterr().out
    shown = attached_until_ctrl_c("mine", other, capsys)
    assert re.search(r"at step \d+ of 10000: .*the run goes on", shown), "the steps are those of the run"
    (tmp_path / "other.toml").write_text(f'name = "mine"\nbucket = "{job.bucket}"\n')
    assert main(["stop", other]) == 0
    assert isinstance(Run.find(job).end(), Stopped)
    until(lambda: view_of("mine") is None)
    assert_no_actor_left("mine")
    assert main(["attach", other]) == 3
    assert "mine is not running; newest good checkpoint: step" in capsys.readouterr().out


@pytest.mark.full
def test_l6_also_of_a_run_that_another_process_trains_alone(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: with ``--local`` there is nobody to ask, so status, attach and stop name the process; Ctrl-C there
    stops it.
    """
    monkeypatch.chdir(tmp_path)
    job = toy_job(tmp_path / "bucket", name="alone", **ENDLESS)
    (tmp_path / "job.toml").write_text(to_toml(job))
    other = other_file(tmp_path, job)
    trains = Command(tmp_path, "train", "job.toml", "--local")
    try:
        _check_of_a_process(trains, job, other, tmp_path, capsys)
    finally:
        if trains.process.poll() is None:
            trains.kill_everything()


def _check_of_a_process(trains: Command, job: Job, other: str, folder: Path, capsys: Shown) -> None:
    trains.until(lambda: Run.find(job).newest() is not None)
    check_what_only_reads(other, "alone", folder, capsys)
    for words, code in ((["status", "--once"], 0), (["attach"], 2), (["stop"], 2)):
        assert main([*words, other]) == code
        assert (
            f"alone is trained by process {trains.process.pid} of this machine (--local); stop it "
            "with Ctrl-C in its terminal"
        ) in capsys.readouterr().out
    for command, said in (
        ("replay", "alone has no journal"),
        ("logs", "alone runs with --local, which stores no logs"),
    ):
        assert main([command, other]) == 1
        assert said in capsys.readouterr().out
    assert main(["train", "job.toml", "--local", "--seed", "5"]) == 1, "the control"
    assert "the run 'alone' in bucket = " in capsys.readouterr().out
    trains.interrupt()
    assert trains.wait() == 3
    assert main(["status", other, "--once"]) == 0
    assert "alone is not running; newest good checkpoint: step" in capsys.readouterr().out
