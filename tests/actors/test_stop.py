"""A run stops by Ctrl-C, or because nobody waits for it any more.  It goes on from its save later; nothing is
left running.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.cli import main
from actors.living import attach
from elastic.job import Job
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from tests.support.chaos import alone, exported_hash
from tests.support.commands import Command, assert_no_actor_left, view_of
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S, until
from tests.support.toys import LIGHT, toy_job

STEPS, FEW = 40, 16
"""Steps, and samples divided by 16, of a run; and the steps of one that is soon stopped."""


def job_of(folder: Path, name: str, read_s: float = 0.04, steps: int = STEPS, **changes: object) -> Job:
    """Returns a job that is slow enough to be stopped on its way, and writes its file."""
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * STEPS, "read_s": read_s}}
    job = toy_job(folder / "bucket", name=name, steps=steps, data=data, **changes)
    (folder / "job.toml").write_text(to_toml(job))
    return job


@pytest.fixture
def undisturbed_hash(forty: Any) -> str:
    """The hash of the same job on a disk that is not slow."""
    return str(forty.hash)


def reached(name: str, step: int) -> Callable[[], bool]:
    def look() -> bool:
        view = view_of(name)
        return view is not None and view.step >= step

    return look


def train(folder: Path) -> Command:
    return Command(folder, "train", "job.toml", "--address", ray.get_runtime_context().gcs_address, warm=True)


@pytest.mark.must_run_in_ci
def test_ctrl_c_saves_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, a save at the step where it stopped, and the bits of the run that was never stopped."""
    job = job_of(tmp_path, "ctrl-c", read_s=0.25, steps=FEW, **LIGHT)
    command = train(tmp_path)
    command.until(reached("ctrl-c", 4))
    # from another process than the one that waits
    assert main(["status", str(tmp_path / "job.toml"), "--once"]) == 0
    status = capsys.readouterr().out
    assert re.search(
        (
            rf"ctrl-c-0001-\w+: Running, step \d+ of {FEW}, generation 1, incarnation 1; workers "
            r"w1@\w+, w2@\w+; "
        ),
        status,
    )

    command.interrupt()
    assert command.wait() == 3, command.text
    (stopped_at,) = map(int, re.findall(r"stopped \(Ctrl-C\), resumes from step (\d+)", command.text)[-1:])
    assert f"Stopped at step {stopped_at} of {FEW}" in command.text
    assert "`elastic train job.toml` goes on" in command.text
    assert 4 <= stopped_at < FEW
    newest = Run.open(job).newest()
    assert newest is not None and newest.step == stopped_at, "nothing is lost"
    assert_no_actor_left("ctrl-c")
    assert main(["status", str(tmp_path / "job.toml"), "--once"]) == 0
    assert f"is not running; newest good checkpoint: step {stopped_at}" in capsys.readouterr().out

    fast = job_of(tmp_path, "ctrl-c", read_s=0.0, steps=FEW, **LIGHT)
    # in this process, which is on the cluster already
    assert main(["train", str(tmp_path / "job.toml")]) == 0
    again = capsys.readouterr().out
    assert f"at step {stopped_at} (bucket)" in again
    assert f"step {stopped_at:>5}/" not in again and f"step {stopped_at + 1:>5}/" in again
    assert exported_hash(job) == alone(fast.replace(name="local")).hash
    assert_no_actor_left("ctrl-c")


@pytest.mark.full  # tests/control/test_ends.py has the rule
def test_a_stop_whose_bucket_refuses_it_says_so_and_a_second_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    """Nobody can write a checkpoint.  The run goes on trying without the command; once the bucket takes it,
    nothing is lost.
    """
    job = job_of(tmp_path, "refused", steps=10_000, checkpoint={"save_every": 10_000})
    command = train(tmp_path)
    command.until(reached("refused", 4))
    steps = tmp_path / "bucket" / "refused" / "steps"
    assert not steps.exists()
    steps.touch()  # no folder can be made there
    command.interrupt()
    command.until(
        lambda: (
            "for 600 s in all (deadlines.wait_s); then the run stops without it, and resumes from step 0"
            in command.text
        )
    )
    assert (
        "Ctrl-C: the run stops after a save; press Ctrl-C again to end this command at once" in command.text
    )
    assert "was not written (no part of w" in command.text and "Not a directory" in command.text
    command.interrupt()
    assert command.wait() == 3, command.text
    assert "interrupted; give the same command again to go on" in command.text
    view = view_of("refused")
    assert view is not None and view.state == "Stopping", "the run is still there, with its state"
    steps.unlink()
    until(lambda: attach("refused") is None)
    newest = Run.open(job).newest()
    assert newest is not None and newest.step == view.step >= 4
    assert_no_actor_left("refused")


@pytest.mark.full
def test_a_run_whose_driver_vanished_saves_and_leaves(tmp_path: Path, undisturbed_hash: str) -> None:
    """The driver is SIGKILLed, the cluster lives: nobody waits, so the run stops after a save, and its actors
    end themselves.
    """
    job = job_of(tmp_path, "vanished", deadlines={"driver_s": 2})
    command = train(tmp_path)
    command.until(reached("vanished", 4))
    command.process.send_signal(signal.SIGKILL)
    assert command.process.wait(PATIENCE_S) == -signal.SIGKILL

    deadline = time.monotonic() + PATIENCE_S
    while attach("vanished") is not None:
        assert time.monotonic() < deadline, view_of("vanished")
        time.sleep(0.1)
    assert_no_actor_left("vanished")
    newest = Run.open(job).newest()
    assert newest is not None and 4 <= newest.step < STEPS
    reasons = [record["reason"] for record in Run.open(job).records()]
    assert any(
        "the command that started the run has not been heard for deadlines.driver_s = 2 s" in reason
        for reason in reasons
    )
    assert f"resumes from step {newest.step}" in reasons[-1]

    job = job_of(tmp_path, "vanished", read_s=0.0)
    assert run_local(job, lambda line: None)[0] == "Finished"
    assert exported_hash(job) == undisturbed_hash


def test_a_stop_while_nothing_runs_yet(tmp_path: Path) -> None:
    """A stop that is asked for before the first world is formed ends the run at once, with nothing saved and
    nothing left.
    """
    job = job_of(tmp_path, "early", workers={"min": 2, "max": 2}, **LIGHT)
    command = train(tmp_path)
    command.until(lambda: attach("early") is not None)
    ray.get(attach("early").stop.remote("a test asks for it"))
    assert command.wait() == 3, command.text
    assert "stopped (a test asks for it), resumes from step 0" in command.text
    assert Run.open(job).newest() is None
    assert_no_actor_left("early")


def attached(command: Command) -> Callable[[], bool]:
    return lambda: "which runs on this cluster already" in command.text


@pytest.mark.must_run_in_ci
def test_detached_it_trains_on_until_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R21, R19: submitted twice it attaches; Ctrl-C to the second driver and SIGTERM to the first only make
    them leave.
    """
    job = job_of(
        tmp_path, "detached", read_s=0.1, steps=10_000, on_driver_exit="detach", workers={"max": 1}, **LIGHT
    )
    first = train(tmp_path)
    first.until(reached("detached", 1))
    assert "the run continues after this command has ended; `elastic stop job.toml` stops it" in first.text
    second = train(tmp_path)
    second.until(attached(second))
    second.interrupt()
    assert second.wait() == 3, second.text
    assert "Ctrl-C: this command ends, the run goes on" in second.text
    first.process.terminate()
    assert first.wait() == 3, first.text
    assert "SIGTERM: this command ends, the run goes on" in first.text
    assert "`elastic stop job.toml` stops it" in first.text

    view = view_of("detached")
    assert view is not None and view.generation == 1 and not view.stopping
    address = ray.get_runtime_context().gcs_address
    alone = Command(tmp_path, "train", "job.toml", "--local", warm=True, RAY_ADDRESS=address)
    assert alone.wait() == 1 and f"this run lives on the cluster at {address}; `elastic stop" in alone.text, (
        alone.text
    )
    assert (
        main(["train", str(tmp_path / "job.toml"), "--local"]) == 1
        and "this run lives on the cluster at" in capsys.readouterr().out
    )
    assert reached("detached", view.step)() and ray.is_initialized(), (
        "this process is still part of that cluster"
    )
    deadline = time.monotonic() + PATIENCE_S
    while not reached("detached", view.step + 5)():
        assert time.monotonic() < deadline, view_of("detached")
        time.sleep(0.1)
    assert main(["stop", str(tmp_path / "job.toml")]) == 0
    (stopped_at,) = map(
        int, re.findall(r"stopped \(elastic stop\), resumes from step (\d+)", capsys.readouterr().out)[-1:]
    )
    newest = Run.open(job).newest()
    assert newest is not None and newest.step == stopped_at and view.step + 5 <= stopped_at < job.steps
    deadline = time.monotonic() + PATIENCE_S
    while attach("detached") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert_no_actor_left("detached")
    assert main(["stop", str(tmp_path / "job.toml")]) == 0
    assert f"is not running; newest good checkpoint: step {stopped_at}" in capsys.readouterr().out


@pytest.mark.full
def test_two_drivers(tmp_path: Path) -> None:
    """R21, R19: a driver that attached merely leaves; the driver that started the run stops it, and another
    one that watches sees this.
    """
    calm = tmp_path / "calm"
    data = {
        "dataset": "tests.support.toys:Paced",
        "args": {"samples": 16 * STEPS, "pace_s": 0.3, "calm": str(calm)},
    }
    job = toy_job(tmp_path / "bucket", name="two", steps=STEPS, data=data, deadlines={"driver_s": 4})
    (tmp_path / "job.toml").write_text(to_toml(job))
    first = train(tmp_path)
    first.until(reached("two", 1))
    leaves, stays = train(tmp_path), train(tmp_path)
    for each in (leaves, stays):
        each.until(attached(each))
    assert "with other settings (" not in stays.text
    (tmp_path / "job.toml").write_text(to_toml(job.replace(workers={"min": 1, "max": 4})))
    other = train(tmp_path)
    other.until(attached(other))
    assert (
        "(workers.max = 2 in the run and 4 now): those of this command take effect when the run is "
        "started again"
    ) in other.text, other.text
    other.interrupt()
    assert other.wait() == 3
    (tmp_path / "job.toml").write_text(to_toml(job))
    leaves.interrupt()
    assert leaves.wait() == 3 and "the run goes on" in leaves.text
    first.process.terminate()
    assert first.wait() == 3 and "stopped (SIGTERM), resumes from step" in first.text, first.text
    assert stays.wait() == 3 and "stopped (SIGTERM), resumes from step" in stays.text, stays.text
    assert_no_actor_left("two")

    again = train(tmp_path)
    again.until(lambda: (view := view_of("two")) is not None and view.state == "Running")
    again.process.send_signal(signal.SIGKILL)
    assert again.process.wait(PATIENCE_S) == -signal.SIGKILL
    ray.get(attach("two").stop.remote("a test asks for it"))
    calm.touch()
    third = train(tmp_path)  # while the run is stopping, or just has: it goes on from there
    assert third.wait() == 0, third.text
    assert Run.open(job).newest() is not None
    assert_no_actor_left("two")


@pytest.mark.full
def test_who_loses_the_head_of_the_cluster_hears_so_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed_hash: str
) -> None:
    """Ray would end the command without a word that helps.  The command has a cluster of its own, whose head
    dies.
    """
    job = job_of(tmp_path, "headless")
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "20"}
    command = Command(tmp_path, "train", "job.toml", **patience)
    command.until(lambda: re.search(r"step +15/", command.text))
    (head,) = (
        each
        for each in psutil.Process(command.process.pid).children(recursive=True)
        if "gcs_server" in each.name()
    )
    head.kill()
    assert command.wait() == 2, command.text
    assert "does not answer; if it stays silent, the cluster ends in 20 s" in command.text
    assert re.search(
        (
            r"elastic: the head of the cluster at \S+ is gone; give the same command on another "
            r"cluster to resume the run"
        ),
        command.text,
    )
    again = Command(tmp_path, "train", "job.toml")
    assert again.wait() == 0, again.text
    # workers step on without the head, perhaps to the end
    goes_on = "headless ran before, and goes on from step (10|20|30)|finished: step 40 is in the bucket"
    assert re.search(goes_on, again.text), again.text
    assert exported_hash(job) == undisturbed_hash
    assert_no_actor_left("headless")
