"""R21: a run is followed without being held, and what a dead one has left is removed."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import cluster
from actors.cli import main, run_commands
from actors.cli.prints import Prints
from actors.launch import start
from actors.living import attach, coordinator_of, reap
from actors.processes import clear, log_file, log_folder, make_log_folder, remove_logs
from actors.screen import Screen
from actors.view import View
from elastic.ids import WorkerId
from elastic.job import Job
from elastic.runs.run import Run
from elastic.train.checks.preflight import preflight
from elastic.train.gauges.counters import Counters, segment
from tests.support.commands import ROOT, Command, assert_no_actor_left, view_of
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import Watched, frozen, kill_all, wait_gone
from tests.support.toys import toy_job
from tests.support.warm import SOCKET, Warm

Shown = pytest.CaptureFixture[str]


@pytest.mark.fast
def test_a13_a_status_names_the_layers_that_were_warned_of() -> None:
    """A13.  Many are counted; none, the control, take no place."""
    view = View("Running", "", "t", 1, 1, 1, 9, 10, {}, 0, [], "", False, "", None, None, (0, 0), "")
    assert run_commands._stands(view).endswith("workers none")
    assert run_commands._stands(replace(view, warned=("dead layers.1", "stationary"))).endswith(
        "; warned of: dead layers.1, stationary"
    )
    many = replace(view, warned=tuple(f"dead layers.{number}" for number in range(80)))
    assert run_commands._stands(many).endswith(", dead layers.5 and 74 more")


def job_file(folder: Path, name: str, steps: int = 10_000, bucket: str = "bucket", **changes: Any) -> Job:
    """Returns a job whose samples are slow, and writes its file."""
    data = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.02}}
    job = toy_job(
        folder / bucket,
        name=name,
        steps=steps,
        data=data,
        deadlines={"lease_s": 60, "grow_debounce_s": 30},
        **changes,
    )
    (folder / "job.toml").write_text(to_toml(job))
    return job


def begun(folder: Path, name: str, steps: int) -> tuple[Job, Any]:
    """Starts a run on the cluster of this process; no driver waits for it."""
    job = job_file(folder, name, steps, on_driver_exit="detach")
    return job, start(Run.open(job), preflight(job).build, uuid.uuid4().hex, 0)


def test_a_run_of_another_cluster_may_live(tmp_path: Path) -> None:
    """This process is part of a cluster that knows no such run; that of the run cannot be reached, so nothing
    is known of it.

    If it was on this machine, it has ended.
    """
    run = Run.open(toy_job(tmp_path, name=uuid.uuid4().hex))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: "another machine")
        run.claim("127.0.0.1:1")
    absent = run_commands.Absent.of(run.job)
    assert (
        coordinator_of(run.job) is None
        and not absent.over
        and "127.0.0.1:1, cannot be reached" in absent.said
    )
    run.claim("127.0.0.1:1")
    absent = run_commands.Absent.of(run.job)
    assert (
        coordinator_of(run.job) is None
        and not absent.over
        and ("its cluster on this machine, 127.0.0.1:1, is gone") in absent.said
    )
    run.claim(ray.get_runtime_context().gcs_address)
    assert coordinator_of(run.job) is None and run_commands.Absent.of(run.job).over, (
        "the control: this cluster has no such run"
    )


def reached(name: str, step: int) -> bool:
    return (view := view_of(name)) is not None and view.step >= step


def interrupted_at(name: str, step: int) -> threading.Thread:
    """Starts a thread that sends Ctrl-C to this process once the run has reached ``step``."""

    def press() -> None:
        until(lambda: reached(name, step))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.full  # in test_stop.py a second command attaches and leaves
def test_attach_tells_the_story_from_the_start_and_leaves_or_ends_with_it(
    tmp_path: Path, capsys: Shown
) -> None:
    """Ctrl-C ends the command and not the run.  A command that follows the run to its end has the run's exit
    code.
    """
    job, _ = begun(tmp_path, "followed", steps=40)
    until(lambda: reached("followed", 5))
    hand = interrupted_at("followed", 9)
    assert main(["attach", str(tmp_path / "job.toml")]) == 3
    hand.join()
    first = capsys.readouterr().out
    assert (
        re.search(r"form generation 1 of w\d and w\d", first)
        and "step     1/40" in first
        and "the run goes on" in first
    )
    view = view_of("followed")
    assert view is not None and not view.stopping and view.generation == 1

    assert main(["attach", str(tmp_path / "job.toml")]) == 0
    second = capsys.readouterr().out
    assert re.search(r"form generation 1 of w\d and w\d", second) and "Finished at step 40 of 40" in second
    assert re.findall(r"step +(\d+)/40 ", second) == [str(step) for step in range(1, 41)]
    until(lambda: attach("followed") is None)
    assert_no_actor_left("followed")
    assert main(["attach", str(tmp_path / "job.toml")]) == 0, "there is nothing to follow"
    assert (
        f"followed is not running; newest good checkpoint: {Run.open(job).newest()}; it ended as Finished"
        in capsys.readouterr().out
    )


def bare_title(pid: int) -> str:
    """Returns the title of a process of Ray, without the method that it runs."""
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").partition(".")[0]


@pytest.mark.must_run_in_ci
def test_clean_spares_a_run_that_lives_and_removes_a_dead_one(tmp_path: Path, capsys: Shown) -> None:
    """The coordinator is gone for good; its workers are stopped, so they cannot hear of it and leave by
    themselves.  The kernel reports the end of their processes."""
    job, coordinator = begun(tmp_path, "left", steps=10_000)
    until(lambda: reached("left", 3))
    token = ray.get(coordinator.view.remote()).token
    workers = [Watched(Counters(segment(token, worker), create=False)["pid"]) for worker in ("w1", "w2")]
    file = str(tmp_path / "job.toml")
    assert main(["logs", file, "w1"]) == 0
    printed = capsys.readouterr().out
    assert "# w1, which lives" in printed and "w1: joined" in printed and "w2: joined" not in printed, (
        "L8: the log of a worker that lives"
    )
    assert main(["logs", file, "w9"]) == 1 and "no logs of w9" in capsys.readouterr().out
    titles = {bare_title(each.pid) for each in workers}
    assert titles == {"ray::Worker left/w1", "ray::Worker left/w2"}, (
        "L8: the processes are called after the run and the worker"
    )
    assert bare_title(ray.get(coordinator.view.remote()).pid) == "ray::Coordinator left"
    follower = threading.Thread(target=main, args=(["logs", "-f", file, "w1"],))
    follower.start()
    until(lambda: "w1: joined" in capsys.readouterr().out)

    command = ["clean", file]
    assert main(command) == 2
    refused = capsys.readouterr().out
    assert re.search(
        (
            rf"left lives \(Running, step \d+ of 10000\); `elastic stop {re.escape(file)}` stops it with a "
            r"save, --force ends"
        ),
        refused,
    )
    assert all(worker.running for worker in workers)

    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    ray.kill(coordinator, no_restart=True)
    until(lambda: attach("left") is None)
    follower.join(PATIENCE_S)
    assert not follower.is_alive(), "who follows leaves with the run"
    assert all(worker.running for worker in workers), "the control: nothing of this goes by itself"
    assert len(cluster.named(f"{token}/")) == 3
    assert main(command) == 0
    said = capsys.readouterr().out
    removed = re.findall(r"removed (.+)", said)
    assert {each for each in removed if each.startswith("actor ")} >= {
        f"actor {token}/w1",
        f"actor {token}/w2",
    }
    assert {str(segment(token, "w1")), str(segment(token, "w2")), str(log_folder(token))} <= set(removed)
    assert all(worker.wait(PATIENCE_S) for worker in workers)
    assert_no_actor_left("left")
    assert not log_folder(token).exists() and Run.open(job).owner() is not None, "what is in the bucket stays"
    assert main(command) == 0
    assert "nothing to remove on the cluster" in capsys.readouterr().out


@pytest.mark.full
def test_the_logs_of_a_cluster_that_was_killed_are_read_where_they_lie(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21: SIGKILL takes the command and its own cluster, so nobody stores the logs.  The control: a run of
    that name elsewhere.

    Nor does `clean` know whose they are if somebody has deleted the run's folder: it said only that there is
    nothing to remove.
    """
    name, file = f"killed-{uuid.uuid4().hex[:6]}", str(tmp_path / "job.toml")
    job_file(tmp_path, name)
    with Warm(tmp_path) as forks:  # it dies with its forks, which are all processes of the cluster
        monkeypatch.setenv(SOCKET, forks.path)
        command = Command(tmp_path, "train", "job.toml", warm=True)
        command.until(lambda: re.search(r"step +[1-9]\d*/", command.text))
        kill_all(every := frozen(forks.process.pid))
        assert command.wait() == -signal.SIGKILL and len(wait_gone(every, PATIENCE_S)) > 5
    assert main(["logs", file]) == 0
    printed = capsys.readouterr().out
    (token,) = {path.parent.name for path in log_folder("").glob(f"{name}-*/w1.log")}
    for worker in ("w1", "w2"):
        assert (
            f"# {worker}: the bucket has no log of this worker; this is the end of its file "
            f"{log_file(token, worker)}\n"
        ) in printed
        assert f"{worker}: joined" in printed
    assert main(["logs", file, "w2"]) == 0 and "w1: joined" not in capsys.readouterr().out
    job_file(tmp_path, name, bucket="another")
    Run.open(Job.load(tmp_path / "job.toml")).claim("127.0.0.1:1", life="abcdef")
    assert main(["logs", file]) == 1
    said = capsys.readouterr().out
    assert (
        f"no logs in {tmp_path}/another/{name}/logs/" in said
        and (f"a killed run leaves its logs on its nodes: look for {log_folder(f'{name}-*')} on") in said
    )
    job = job_file(tmp_path, name)
    (bucket := Path(job.bucket) / name).rename(tmp_path / "deleted")
    assert main(["clean", file]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"{job.bucket} has no claim of {name}" in said
        and "somebody has deleted the run's folder" in said
        and "so nothing is removed" in said
    ), said
    assert (
        f"remove {segment(token, 'w1')}, {segment(token, 'w2')}, {log_folder(token)}" in said
        and log_folder(token).exists()
    )
    (tmp_path / "deleted").rename(bucket)
    assert main(["clean", file]) == 0 and f"removed {log_folder(token)}" in capsys.readouterr().out, (
        "the control: with its claim"
    )
    assert not log_folder(token).exists()


@pytest.mark.full
def test_clean_by_force_ends_a_run_that_lives(tmp_path: Path, capsys: Shown) -> None:
    begun(tmp_path, "forced", steps=10_000)
    until(lambda: reached("forced", 3))
    assert main(["clean", str(tmp_path / "job.toml"), "--force"]) == 0
    assert "removed actor forced/coordinator" in capsys.readouterr().out
    assert_no_actor_left("forced")


@pytest.mark.full
def test_from_a_machine_that_is_no_node_it_is_said_what_to_do(tmp_path: Path) -> None:
    """The machine reaches the cluster's head, but no process of the cluster runs on it (it is a pid namespace
    of its own).
    """
    begun(tmp_path, "elsewhere", steps=10_000)
    until(lambda: reached("elsewhere", 1))
    alone = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "elastic"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "PYTHONPATH": str(ROOT)
    }
    for command in ("stop", "status", "attach", "clean"):
        done = subprocess.run(
            [*alone, command, str(tmp_path / "job.toml")],
            env=ours,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 1 and "answers, but this machine is not one of its nodes" in done.stdout, (
            done
        )
    view = view_of("elsewhere")
    assert view is not None and not view.stopping
    assert main(["clean", str(tmp_path / "job.toml"), "--force"]) == 0


def test_l8_what_workers_print_is_shown_with_their_names_and_bounded(tmp_path: Path, capsys: Shown) -> None:
    """L8: by one task for each node, whoever many workers it has.  Controls: w2 was not asked for, and "all"
    shows it, too.
    """
    run, node = f"printed-{uuid.uuid4().hex}", ray.get_runtime_context().get_node_id()
    make_log_folder(run)
    for worker in ("w1", "w2"):
        log_file(run, worker).write_text("".join(f"{worker} says {n}\n" for n in range(70)))
    view = View(
        "Running",
        "",
        run,
        1,
        1,
        1,
        9,
        10,
        {WorkerId("w2"): node, WorkerId("w1"): node},
        0,
        [],
        "",
        False,
        "",
        None,
        None,
        (0, 0),
        "",
    )
    for asked, said in (("first", {"w1": 50}), ("all", {"w1": 25, "w2": 25}), ("w2,w9", {"w2": 50})):
        prints = Prints(Screen(quiet=True), asked)
        shown = list[str]()

        def looked(prints: Prints = prints, shown: list[str] = shown, said: dict[str, int] = said) -> bool:
            prints.look(view)
            shown += capsys.readouterr().out.splitlines()
            return len(shown) >= sum(said.values()) + len(said)

        until(looked)
        assert prints._reading is not None and len(prints._reading.tasks) <= 1
        for worker, number in said.items():
            lines = [line for line in shown if line.startswith(f"{worker} {worker} says")]
            assert lines == [f"{worker} {worker} says {n}" for n in range(70 - number, 70)]
            assert f"{worker} {70 - number} lines are left out here; `elastic logs` has the newest" in shown
        assert {line.split()[0] for line in shown} == set(said)
        with log_file(run, "w2").open("a") as log:
            print("one more", file=log)
        if "w2" in said:
            until(
                lambda prints=prints, shown=shown: (
                    prints.look(view),
                    capsys.readouterr().out == "w2 one more\n",
                )[1]
            )  # type: ignore[misc]
        log_file(run, "w2").write_text("".join(f"w2 says {n}\n" for n in range(70)))
    prints = Prints(Screen(quiet=True), None)
    prints.look(view)
    assert prints._reading is None, "by default nobody reads logs"
    remove_logs(run)


def test_nothing_of_another_run_is_removed() -> None:
    """Nothing is removed of a run whose name begins the same, of another bucket's run, whose life is another,
    or of one that lives.
    """
    other, ours = segment("nobodys-2-0001-abcdef", "w1"), segment("nobodys-0001-abcdef", "w1")
    counters = [Counters(path, create=True) for path in (other, ours)]
    try:
        counters[1]["pid"] = os.getpid()
        assert clear("nobodys", {"abcdef"}, 0.0) == [] and other.exists() and ours.exists()
        counters[1]["pid"] = 0
        assert clear("nobodys", {"fedcba", ""}, 0.0) == [] and ours.exists()
        assert clear("nobodys", {"abcdef"}, 0.0) == [str(ours)] and other.exists()
        assert reap("nobodys") == []
    finally:
        for path in (other, ours):
            path.unlink(missing_ok=True)
