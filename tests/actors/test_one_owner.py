"""R19: a run has one owner, also where several commands are given on one machine."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
import ray

from actors import cluster, launch
from actors.cli import main
from actors.coordinator import Coordinator
from actors.launch import start
from actors.living import ask, attach, coordinator_of, reap
from actors.processes import log_file, log_folder, make_log_folder
from elastic.control.run import RunState
from elastic.errors import JobError, PlatformGaveUp, Refused
from elastic.job import Job
from elastic.protocol.builds import Build
from elastic.runs.run import Run
from elastic.train.checks.preflight import preflight
from tests.support.commands import FORK, assert_no_actor_left
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S, until
from tests.support.toys import LIGHT, toy_job
from tests.support.warm import Warm

ROOT = Path(__file__).resolve().parents[2]


def command(job: Path, *line: str) -> subprocess.Popen[str]:
    """Starts the command ``line``: a fork that gets the signals of the process."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    return subprocess.Popen(
        [sys.executable, FORK, "-m", "elastic", *line[:1], str(job), *line[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fork_of_command(forks: Warm) -> int:
    """Returns the pid of the only command that is a fork now: it leads a group of processes."""
    (pid,) = (
        each.pid for each in psutil.Process(forks.process.pid).children() if os.getpgid(each.pid) == each.pid
    )
    return pid


def until_it_says(process: subprocess.Popen[str], words: str, never: str = "\n\n") -> None:
    """Reads what ``process`` prints up to a line with ``words``.  If there is none, or before it one with
    ``never``, the test fails.
    """
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        assert never not in line, "".join(said)
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}:\n{''.join(said)}")


def stopped(job: Path, *commands: subprocess.Popen[str]) -> None:
    """Stops the run, which ``commands`` have begun or follow, and checks that each of them ends as one whose
    run was stopped.
    """
    command(job, "stop").communicate(timeout=PATIENCE_S)
    for each in commands:
        said, _ = each.communicate(timeout=PATIENCE_S)
        assert each.returncode == 3, said


SLOW = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.1}}


def slow_job(folder: Path, name: str) -> Path:
    """Writes the file of a job that lasts until it is stopped, and returns its path."""
    job = toy_job(
        folder,
        name=name,
        steps=100_000,
        data=SLOW,
        schedule={"kind": "constant"},
        workers={"min": 1, "max": 1},
        log_every=1,
        **LIGHT,
    )
    folder.mkdir(exist_ok=True)
    (path := folder / "job.toml").write_text(to_toml(job))
    return path


def test_a_second_local_command_does_not_write_into_a_run_that_another_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forks: Warm
) -> None:
    """It is refused by name, as are commands for a cluster; `stop` says who trains.  When the first has
    ended, the run is free.

    The second command is this process, which need not start.
    """
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = slow_job(tmp_path, "alone")
    first = command(job, "train", "--local")
    try:
        until_it_says(first, "step     3")
        pid = fork_of_command(forks)
        trains = f"process {pid} of this machine trains this run (--local)"
        for code, words, line in (
            (1, trains, ["train", str(job), "--local"]),
            (1, trains, ["train", str(job)]),
            (2, f"is trained by process {pid} of this machine", ["stop", str(job)]),
        ):
            found = main(line)
            said = " ".join("".join(capsys.readouterr()).split())
            assert found == code and words in said, said
    finally:
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 3 and "saved at step" in said, said
    third = command(job, "train", "--local")
    until_it_says(third, "loss")  # Ctrl-C before the first step would save nothing
    third.send_signal(signal.SIGINT)
    third.communicate(timeout=PATIENCE_S)
    assert third.returncode == 3


@pytest.mark.must_run_in_ci
def test_two_commands_that_begin_a_run_on_two_clusters_at_once(tmp_path: Path) -> None:
    """Neither has seen the other's claim.  The later one is refused, and the run goes on elsewhere.

    The control: a command that has seen the claim takes the run over, since it has found nobody there.
    """
    job = toy_job(tmp_path, name="raced", steps=100, data=SLOW, **LIGHT)
    seen = Run.look(job).latest_claim()
    elsewhere = Run.open(job).claim("192.0.2.7:6379", "abcdef")
    coordinator = start(Run.open(job), preflight(job).build, "driver", seen)
    with pytest.raises(
        Refused,
        match=(
            r"^raced was started on the cluster at 192[.]0[.]2[.]7:6379 .* while this command was "
            r"starting; `el"
        ),
    ):
        ask(coordinator, "view", deadline_s=PATIENCE_S)
    until(lambda: attach("raced") is None)
    coordinator = start(Run.open(job), preflight(job).build, "driver", elsewhere)
    assert ask(coordinator, "view", deadline_s=PATIENCE_S).incarnation == elsewhere + 1
    Run.open(job).claim("192.0.2.8:6379", "fedcba")
    ray.kill(coordinator, no_restart=False)
    with pytest.raises(
        Refused,
        match=(
            r"^raced was taken over by a command on the cluster at "
            r"192[.]0[.]2[.]8:6379"
        ),
    ):
        while True:
            ask(coordinator, "view", deadline_s=PATIENCE_S)
    reap("raced")


class DiesAtOnce(Coordinator):
    """A coordinator whose process is killed once it has claimed the run, before it records anything.  Ray
    starts the next one.
    """

    def _begun(self, reference: Build) -> RunState:
        if not self.again:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._begun(reference)


@pytest.mark.parametrize("host", ["host-a", "the control: this one"])
def test_who_follows_a_coordinator_that_recorded_nothing_skips_what_it_would_have_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """A process of another machine has begun the run with --local, and may live: its generation is not used a
    second time.

    The control: a process of this machine, which can be seen.
    """
    job, name = (
        toy_job(tmp_path, name="unseen", steps=100_000, on_driver_exit="detach", data=SLOW, **LIGHT),
        platform.node(),
    )
    run = Run.open(job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: host if host == "host-a" else name)
        claimed = run.claim_here()
        its = run.state(claimed, 0.0).next_generation
    monkeypatch.setattr(launch, "Coordinator", DiesAtOnce)
    coordinator = start(Run.open(job), preflight(job).build, "driver", claimed)
    view = until(
        lambda: found if (found := ask(coordinator, "view", deadline_s=PATIENCE_S)).generation else None
    )
    reap("unseen")
    until(lambda: attach("unseen") is None)  # or the next one to start it may get this one
    assert view.incarnation == claimed + 2 and run.latest_claim() == claimed + 2, (
        "the first coordinator is dead"
    )
    assert (view.generation == its) == host.startswith("the control")


@pytest.mark.full
def test_a_command_that_cannot_join_the_cluster_of_a_run_that_lives_does_not_begin_it_again(
    tmp_path: Path,
) -> None:
    """The command is in a container with the network of this machine, but without its processes, so Ray finds
    no node there.

    For a run that does not live, it says so of the cluster that it was told of: it waited for a minute, and
    did not say why.

    The control: the run lives on.
    """
    path, other = slow_job(tmp_path, "hidden"), slow_job(tmp_path / "other", "outside")
    job = Job.load(path).replace(on_driver_exit="detach")
    coordinator = start(Run.open(job), preflight(job).build, "driver", 0)
    until(lambda: ask(coordinator, "view", deadline_s=PATIENCE_S).generation)
    here = ray.get_runtime_context().gcs_address
    lines = [["train", str(path)], ["train", str(other), "--address", here]]
    both = f"from actors.cli import main; assert [main(line) for line in {lines}] == [1, 1]"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    hidden = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", both]
    found = subprocess.run(
        hidden, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    said = " ".join((found.stdout + found.stderr).split())
    assert f"the cluster at {here} answers, but this machine is not one of its nodes" in said, said
    assert (
        found.returncode == 0
        and "hidden lives on the cluster at" in said
        and ("does not start the run a second time") in said
    ), said
    assert (
        Run.find(job).latest_claim() == 1 and ask(coordinator, "view", deadline_s=PATIENCE_S).incarnation == 1
    )
    reap("hidden")


@pytest.mark.must_run_in_ci
def test_a_driver_that_slept_ends_what_is_left_of_its_run_and_not_who_has_begun_it_since(
    tmp_path: Path, forks: Warm
) -> None:
    """Its coordinator died while it was stopped, as by Ctrl-Z, and another command began the run: it ended
    that one, by its name.

    The control: the workers of its own coordinator, which would step on for two leases, are ended.
    """
    path, name = slow_job(tmp_path, "slept"), "slept"
    driver = command(path, "train", "--address", ray.get_runtime_context().gcs_address)
    try:
        until_it_says(driver, "step     3")
        os.kill(pid := fork_of_command(forks), signal.SIGSTOP)
        old = ask(attach(name), "view", deadline_s=PATIENCE_S)
        ray.kill(attach(name), no_restart=True)
        until(lambda: attach(name) is None)
        assert cluster.named(f"{old.token}/"), "its worker has outlived it"
        job = Job.load(path).replace(on_driver_exit="detach")
        start(Run.open(job), preflight(job).build, uuid.uuid4().hex, old.incarnation)
        new = until(
            lambda: found if (found := ask(attach(name), "view", deadline_s=PATIENCE_S)).workers else None
        )
        os.kill(pid, signal.SIGCONT)
        said, _ = driver.communicate(timeout=PATIENCE_S)
    finally:
        driver.kill()
    assert driver.returncode == 2 and "the coordinator of the run is gone" in said, said
    until(lambda: not cluster.named(f"{old.token}/"))
    now = ask(attach(name), "view", deadline_s=PATIENCE_S)
    assert (now.token, now.incarnation, now.pid) == (
        new.token,
        new.incarnation,
        new.pid,
    ) and old.token != new.token
    assert {*new.workers} <= {*cluster.named(f"{new.token}/")}
    assert main(["clean", str(path), "--force"]) == 0


@pytest.mark.full
def test_the_same_command_again_attaches_to_a_run_on_the_cluster_of_the_first(tmp_path: Path) -> None:
    """The first command has started a cluster on this machine.  The second one finds the run there, and does
    not take it over.
    """
    job = slow_job(tmp_path, "twice")
    first = command(job, "train")
    second = None
    try:
        until_it_says(first, "step     3")
        local = command(job, "train", "--local")
        said, _ = local.communicate(timeout=PATIENCE_S)
        assert local.returncode == 1 and "this run lives on the cluster at" in said, said
        second = command(job, "train")
        until_it_says(second, "attached to twice, which runs on this cluster already")
        until_it_says(second, "step")
        time.sleep(0.5)
        stopped(job, first, second)
    finally:
        for each in filter(None, (first, second)):
            if each.poll() is None:
                each.kill()
    assert len(list((tmp_path / "twice" / "owner").glob("*.json"))) == 1, "one coordinator, ever"


def test_a_run_of_that_name_in_another_bucket_is_neither_attached_to_nor_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two users of one cluster gave their runs one name, and the second one's run was on this cluster before.

    The controls: the first one's command stops that run, and so does one for which the bucket has another
    path here.
    """
    job = Job.load(slow_job(tmp_path / "first", "one-name")).replace(on_driver_exit="detach")
    start(Run.open(job), preflight(job).build, uuid.uuid4().hex, 0)
    until(
        lambda: (
            (found := attach("one-name")) is not None and ask(found, "view", deadline_s=PATIENCE_S).step >= 2
        )
    )
    token = ask(attach("one-name"), "view", deadline_s=PATIENCE_S).token
    other = Job.load(slow_job(tmp_path / "second", "one-name"))
    mounted = other.replace(bucket=str(tmp_path / "mounted"))
    here = ray.get_runtime_context().gcs_address
    Run.open(other).claim(here, life="abcdef")
    Run.open(mounted).claim(here, life=token.rpartition("-")[2])
    with pytest.raises(
        JobError,
        match=(
            f"another run of this name, with bucket = {job.bucket}, lives on this cluster; choose "
            "another name"
        ),
    ):
        launch.launch(other)
    assert main(["stop", str(tmp_path / "second" / "job.toml")]) == 0
    assert "is not running" in capsys.readouterr().out
    assert coordinator_of(other) is None and coordinator_of(mounted) is not None
    assert not ask(attach("one-name"), "view", deadline_s=PATIENCE_S).stopping
    assert main(["stop", str(tmp_path / "first" / "job.toml")]) == 0
    assert "stopped (elastic stop)" in capsys.readouterr().out


class Left:
    """Stands for a worker that has outlived its coordinator."""


@pytest.mark.must_run_in_ci
def test_clean_neither_ends_nor_removes_a_run_of_that_name_in_another_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R19: also by force, and also if the bucket of the command has no claim; what its own run has left goes
    all the same.

    The controls: the other run steps on with its coordinator, its workers and its folder, and its own command
    ends it by force.
    """
    name, theirs, ours, empty = "cleaned", *(tmp_path / folder for folder in ("theirs", "ours", "empty"))
    job = Job.load(slow_job(theirs, name)).replace(on_driver_exit="detach")
    start(Run.open(job), preflight(job).build, uuid.uuid4().hex, 0)
    until(lambda: (found := attach(name)) is not None and ask(found, "view", deadline_s=PATIENCE_S).step >= 2)
    before = ask(attach(name), "view", deadline_s=PATIENCE_S)
    folder, left = log_folder(before.token), f"{name}-0001-abcdef"
    (journal,) = (path for path in folder.iterdir() if path.is_dir())
    Run.open(Job.load(slow_job(ours, name))).claim(ray.get_runtime_context().gcs_address, life="abcdef")
    slow_job(empty, name)

    def cleaned(command: Path, *options: str) -> str:
        assert main(["clean", str(command / "job.toml"), *options]) == 0
        said = capsys.readouterr().out
        now = ask(attach(name), "view", deadline_s=PATIENCE_S)
        assert (now.token, now.incarnation, now.generation) == (
            before.token,
            before.incarnation,
            before.generation,
        ), said
        assert (
            now.pid == before.pid
            and not now.over
            and journal.exists()
            and log_file(before.token, "w1").exists()
        ), said
        until(lambda: ask(attach(name), "view", deadline_s=PATIENCE_S).step > now.step)
        return said

    for options in ((), ("--force",)):
        make_log_folder(left)
        log_file(left, "w1").touch()
        worker = (
            ray.remote(num_cpus=0)(Left)
            .options(name=f"{left}/w1", namespace=cluster.NAMESPACE, lifetime="detached")
            .remote()
        )
        ray.get(worker.__ray_ready__.remote(), timeout=PATIENCE_S)
        said = cleaned(ours, *options)
        assert (
            f"another run named {name}, with bucket = {job.bucket}, lives on this cluster; it is left alone"
            in said
        )
        assert (
            f"removed actor {left}/w1\n" in said
            and f"removed {log_folder(left)}\n" in said
            and before.token not in said
        )
        assert not log_folder(left).exists() and attach(name) is not None
        assert f"{empty} has no claim of {name}" in cleaned(empty, *options)
    assert main(["clean", str(theirs / "job.toml"), "--force"]) == 0
    said = capsys.readouterr().out
    assert (
        f"removed actor {name}/coordinator" in said
        and f"removed actor {before.token}/w1" in said
        and f"removed {folder}" in said
    )
    assert_no_actor_left(name)


class Silent:
    """Stands for a coordinator that does not answer."""

    def view(self) -> None:
        threading.Event().wait()

    def stop(self) -> str:
        return "heard"


def test_who_asks_in_vain_says_how_long_it_has_waited() -> None:
    """The control: what is answered."""
    silent = ray.remote(num_cpus=0, max_concurrency=3)(Silent).remote()
    assert ask(silent, "stop", deadline_s=PATIENCE_S) == "heard"
    for waited_s in (0.5, 0.8):
        said = (
            f"^the coordinator of the run has not answered for {waited_s} s; give the same command "
            "again to resume the run$"
        )
        with pytest.raises(PlatformGaveUp, match=said):
            ask(silent, "view", deadline_s=waited_s)
    ray.kill(silent)
