"""``ray job submit``: a user's project outside of our tree, on nodes that have never heard of Elastic.

The commands are those of the guide (clusters.md), word for word.  The nodes' Python has no Elastic.  Each
node keeps what Ray brings it in a folder of its own.  The user's loss writes down in which process, on which
node and with which code it ran.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import ray
from ray.job_submission import JobSubmissionClient

from actors import cluster
from actors.result import Result
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.report.ledger import ledger
from elastic.runs.run import Run
from tests.support.chaos import (
    Story,
    Trial,
    Witness,
    act_by,
    alone,
    assert_survived,
    comes,
    exported_hash,
    formed,
)
from tests.support.clusters import Nodes, assert_all_given_back, python_without_elastic
from tests.support.commands import ROOT, user_job, user_package, view_of
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import processes

STEPS, JOINS, WHOLE, DIES, SAVES = 16, 4, 8, 12, 2
"""Steps of the run; those whose data cannot be read before the worker of a node that joins, and before the
one in place of a killed worker, is about to be in the world, and before the cluster was killed; and from save
to save."""
When = Callable[[Witness, View], bool]
KNOWN = {"PIP_NO_DEPS": "1"}
"""Environment of the nodes that come after the first one.  There pip has found out that a node has all that
the wheel needs, which is two thirds of its work, and all nodes have the same Python.
"""
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    # pip makes an environment on each node; beside four busy processes that takes minutes
    pytest.mark.timeout(1800),
]
WATCHED = """
import hashlib, json, os, sys, time
from pathlib import Path
import elastic, actors, storage
from PACKAGE import code

class Paced(code.Walks):  # the walks again and again, slowly until there is a file "hurry"; some not before the file of their gate is there
    def __init__(self, read_s=0.0, gates=()):
        super().__init__()
        self.pause_s, self.gates = read_s, dict(gates)

    def __len__(self):
        return 10 * super().__len__()

    def read(self, ids):
        if not Path(SEEN, "hurry").exists():
            time.sleep(self.pause_s)
        while any(str(i) in self.gates and not Path(SEEN, self.gates[str(i)]).exists() for i in ids):
            time.sleep(0.01)
        return super().read(tuple(i % super(Paced, self).__len__() for i in ids))

def digest():
    names = [Path(module.__file__).parent for module in (elastic, actors, storage, code)]
    files = [file for folder in names for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

def loss(model, batch):
    where = Path(SEEN, f"where-{os.getpid()}")
    if not where.exists():
        import ray
        context = ray.get_runtime_context() if ray.is_initialized() else None
        node = context.get_node_id() if context and context.get_actor_id() else "local"
        files = [module.__file__ for module in (elastic, actors, storage, code)]
        where.write_text(json.dumps({"node": node, "files": files, "digest": digest(), "path": sys.path}))
    return code.loss(model, batch)
"""


def documented() -> list[str]:
    """The lines of the guide that begin with ``ray job submit``: train, then stop, from a project; then from
    our own checkout.
    """
    return re.findall(
        r"^ray job submit .*",
        (ROOT / "examples" / "guide" / "clusters.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds our wheel as ``pip wheel . --no-deps`` does, in a copy of the repository, since a build leaves
    files where it runs.
    """
    copy = tmp_path_factory.mktemp("checkout") / "elastic"
    left_out = shutil.ignore_patterns(
        ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "quickstart-out"
    )
    shutil.copytree(ROOT, copy, ignore=left_out)
    build = "from setuptools.build_meta import build_wheel; build_wheel('built')"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build],
        cwd=copy,
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    (built,) = copy.glob("built/*.whl")
    return built


@pytest.fixture(scope="module", autouse=True)
def local_cluster(no_cluster_is_left: None) -> Iterator[None]:
    """Takes this process out of the cluster of the other modules."""
    ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_without_elastic(tmp_path_factory.mktemp("python") / "venv")


@pytest.fixture(scope="module")
def nodes(local_cluster: None, python: Path) -> Iterator[Nodes]:
    """A head and a node with one CPU each, so that two workers have no choice but to be on two nodes.  This
    process is part of it.
    """
    with Nodes(python, head_cpus=1) as started:
        started.add().says("Ray runtime started")
        join(started)
        yield started


def join(nodes: Nodes) -> None:
    """Makes this process part of a cluster, instead of another one."""
    ray.shutdown()
    ray.init(nodes.address, namespace=cluster.NAMESPACE, log_to_driver=False, logging_level="warning")


def project(folder: Path, name: str, wheel: Path | None, **changes: Any) -> Job:
    """Makes a user's folder, with their package, job.toml, and the wheel, and returns the job."""
    here = folder / "project"
    # outside of what is submitted: Ray looks at the files twice, and a run writes here meanwhile
    seen = folder / "seen"
    user_package(here, name, seen)
    (here / name / "watched.py").write_text(WATCHED.replace("SEEN", repr(str(seen))).replace("PACKAGE", name))
    if wheel is not None:
        shutil.copy(wheel, here)
    values = {
        "bucket": str(folder / "bucket"),
        "loss": f"{name}.watched:loss",
        "steps": STEPS,
        "data": {"dataset": f"{name}.watched:Paced", "args": {"read_s": 0.5}},
        "workers": {"min": 1, "max": 2},
    }
    return user_job(here, name, **(values | changes))


def reference(job: Job, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the result of the job in one process without Ray."""
    monkeypatch.syspath_prepend(folder / "project")
    return alone(job.replace(name="local", data={"dataset": job.data.dataset}, trial=False))


def where(folder: Path) -> list[dict[str, Any]]:
    """Returns what the user's loss recorded about each process in which it ran."""
    return [json.loads(file.read_text()) for file in sorted((folder / "seen").glob("where-*"))]


def microbatches(folder: Path, *, ours: bool = False) -> list[str]:
    """Returns what the user's loss recorded of each microbatch: in this process if ``ours``, else in all
    other processes.
    """
    files = [file for file in (folder / "seen").iterdir() if file.name.isdigit()]
    return [
        line
        for file in files
        if (file.name == str(os.getpid())) == ours
        for line in file.read_text().splitlines()
    ]


def at_step(name: str, step: int) -> Any:
    return lambda: (view := view_of(name)) is not None and view.step >= step


def test_the_wheel_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    code = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in code} == {"elastic", "actors", "storage"}
    ours = {
        str(file.relative_to(ROOT))
        for package in ("elastic", "actors", "storage")
        for file in (ROOT / package).rglob("*")
        if file.suffix in (".py", ".html", ".css", ".js")
    }
    assert code == ours


def about_to_form(generation: int) -> When:
    """Returns whether all that this world waits for is the step in which its members are; there it can be
    held by a gate.
    """
    return lambda _, view: (
        (view.generation, view.state) in ((generation - 1, "Stopping"), (generation, "Running"))
    )


class StopThenGrowThenKill:
    """Stops the Ray job, and adds a node; once the worker of that node is about to join, the first gate
    opens.  Then it kills that worker; once the next one is about to join, the second gate opens.  It is done
    once this world has saved, and waits at the third gate."""

    def __init__(self, nodes: Nodes, job: Job, seen: Path) -> None:
        self.nodes, self.job, self.seen, self.submitted = nodes, job, seen, None  # type: ignore[var-annotated]
        self.homes, self.stopped_at, self.killed_at = dict[str, str](), 0, 0
        self.done = Event()

    def saved(self, _: Witness, view: View) -> bool:
        at_gate = view.generation == 4 and view.step == DIES - 1
        return at_gate and (newest := Run.open(self.job).newest()) is not None and newest.step >= DIES - SAVES

    def story(self) -> Story:
        _, view = yield from comes(lambda _, view: view.step >= 1 and self.submitted is not None)
        self.stopped_at = view.step
        self.submitted.stop()
        self.nodes.add(**KNOWN)
        yield from comes(about_to_form(2))
        (self.seen / "joins").touch()
        witness, view = yield from comes(
            lambda witness, view: view.generation == 2 and view.step > JOINS and "w2" in witness.seen
        )
        self.homes |= view.workers
        self.killed_at = view.step
        witness.seen["w2"].process.kill()
        yield from comes(about_to_form(4))
        (self.seen / "whole").touch()
        _, view = yield from comes(self.saved)
        self.homes |= view.workers
        self.done.set()


@pytest.mark.full
def test_ray_job_stop_and_a_save_that_comes_later(
    tmp_path: Path, nodes: Nodes, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21, R7: SIGTERM, and SIGKILL 3 s later in the middle of a long step; the run saves by itself, and the
    same line goes on.
    """
    slow = {"dataset": "slow.watched:Paced", "args": {"read_s": 1.2}}
    job = project(tmp_path, "slow", wheel, steps=5, data=slow, deadlines={"driver_s": 4})
    expected = reference(job, tmp_path, "slow", monkeypatch)
    submitted = nodes.submit(tmp_path / "project", shlex.split(documented()[0]))
    submitted.until(at_step("slow", 2))
    submitted.stop()
    view = view_of("slow")
    assert view is not None and not view.over and view.stopping == "SIGTERM", (
        "its driver is gone, the run is not done"
    )
    assert submitted.wait() == 0 and "Stopped at step" not in submitted.text, (
        "its driver did not live to see it"
    )
    assert "stopped" in submitted.ray("status", submitted.id).lower()
    assert_all_given_back(nodes, "slow")
    newest = Run.open(job).newest()
    assert newest is not None and newest.step >= 2
    assert f"stopped (SIGTERM), resumes from step {newest.step}" in Run.open(job).records()[-1]["reason"]

    again = nodes.submit(tmp_path / "project", shlex.split(documented()[0]))
    assert again.wait() == 0, again.text
    assert exported_hash(job) == expected.hash
    assert_all_given_back(nodes, "slow")
    log = again.ray("logs", again.id)
    assert f"at step {newest.step} (bucket)" in log and "Finished at step 5 of 5" in log
    assert re.search(r"^\d\d:\d\d:\d\d step +5/5  loss \d\.\d{4} ", log, re.MULTILINE), "a line a step"
    assert "\r" not in log and "Actor" not in log
    assert "succeeded" in again.ray("status", again.id).lower()


@pytest.mark.full
def test_what_cannot_work_is_said_in_the_jobs_log(tmp_path: Path, nodes: Nodes, wheel: Path) -> None:
    """U8: a folder of the user's that takes the place of ours, a bucket inside the working directory, a job
    file that is not in it, and a cluster that is too small; Ray shows the job as failed, with the exit
    code."""
    line = shlex.split(documented()[0])
    shadowed, inside, absent, large = (tmp_path / name for name in ("shadowed", "inside", "absent", "large"))
    for folder in (shadowed, inside, absent, large):
        project(folder, "wrong", wheel, workers={"min": 9 if folder == large else 1, "max": 9})
    (shadowed / "project" / "storage").mkdir()
    (shadowed / "project" / "storage" / "__init__.py").write_text("raise RuntimeError('imported')")
    text = (inside / "project" / "job.toml").read_text()
    (inside / "project" / "job.toml").write_text(text.replace(str(inside / "bucket"), "runs"))
    (absent / "project" / "job.toml").unlink()
    jobs = [nodes.submit(folder / "project", line) for folder in (shadowed, inside, absent, large)]
    said = [
        (1, "/storage hides Elastic's own package 'storage'"),
        (1, "/runs' lies in the submitted working directory"),
        (1, "there is no job file 'job.toml' in the submitted working directory"),
        (2, "workers.min = 9, but the cluster has room for"),
    ]
    for job, (code, sentence) in zip(jobs, said, strict=True):
        assert job.wait() == 1, job.text
        assert sentence in job.text
        status = job.ray("status", job.id)
        assert "failed" in status.lower() and f"exit code {code}" in status
        assert "Traceback" not in job.text
    assert re.search(r"; node \w{8} \(\S+, \S+\): \d of 1 CPUs free", jobs[3].text), "each node is named"
    assert view_of("wrong") is None


@pytest.mark.full
def test_from_our_own_checkout_and_a_driver_that_vanishes(
    tmp_path: Path, nodes: Nodes, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21, R19, R7: ``python -m elastic`` from a copy of this repository; submitted twice it attaches; its
    drivers are SIGKILLed; then it is stopped by the guide's line."""
    checkout = tmp_path / "project"
    left_out = shutil.ignore_patterns(".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, checkout, ignore=left_out)
    job = project(tmp_path, "ours", None, steps=100, deadlines={"driver_s": 4})
    expected = reference(job, tmp_path, "ours", monkeypatch)
    line = shlex.split(documented()[2])
    first = nodes.submit(checkout, line)
    first.until(at_step("ours", 2))
    second = nodes.submit(checkout, line)
    second.until(lambda: "which runs on this cluster already" in second.text)
    drivers = [
        each
        for each in processes("RAY_JOB_CONFIG_JSON_ENV_VAR")
        if each.command.endswith("-m elastic train job.toml")
    ]
    for driver in drivers:
        os.kill(driver.pid, signal.SIGKILL)
    assert first.wait() == 1 and second.wait() == 1
    assert_all_given_back(nodes, "ours")
    newest = Run.open(job).newest()
    assert newest is not None
    assert (
        "the command that started the run has not been heard for deadlines.driver_s = 4 s"
        in Run.open(job).records()[-1]["reason"]
    )

    third = nodes.submit(checkout, line)
    third.until(lambda: f"at step {newest.step} (bucket)" in third.text)
    stop = nodes.submit(checkout, shlex.split(documented()[2].replace("train", "stop")))
    assert stop.wait() == 0 and "stopped (elastic stop), resumes from step" in stop.text
    assert third.wait() == 1, "Ray's word for every exit code but 0"
    assert "exit code 3" in third.ray("status", third.id)
    assert_all_given_back(nodes, "ours")
    (tmp_path / "seen" / "hurry").touch()
    fourth = nodes.submit(checkout, line)
    assert fourth.wait() == 0, fourth.text
    assert exported_hash(job) == expected.hash


def begun_and_killed(
    python: Path, job: Job, folder: Path, line: list[str]
) -> tuple[StopThenGrowThenKill, Witness]:
    """Submits the job on a head with one CPU, so that a second worker has no choice but to be on another
    node.

    Kills every process of the cluster once all that happens to the run before has happened.
    """
    with Nodes(python, head_cpus=1) as nodes:
        join(nodes)
        act = StopThenGrowThenKill(nodes, job, folder / "seen")
        witness = Witness(job.name, act_by(act.story()))
        witness.look_s = 0.2  # all that it waits for lasts
        witness.start()
        try:
            act.submitted = nodes.submit(folder / "project", line)
            assert act.submitted.wait() == 0, act.submitted.text
            assert "the run continues after this command has ended" in act.submitted.text
            log = act.submitted.log
            assert "SIGTERM: this command ends, the run goes on" in log
            assert "blocks: layers.0 … layers.2" in log and "so data parallel only" in log
            assert JobSubmissionClient(nodes.jobs).get_job_status(act.submitted.id) == "STOPPED"
            until(lambda: act.done.is_set() or not witness.is_alive())
        finally:
            witness.done.set()
            witness.join()
            ray.shutdown()
            ends = nodes.kill_everything()
            witness.close()
    assert len(ends) > 10 and {end.signal for end in ends} == {signal.SIGKILL}, "1: it happened, to everybody"
    return act, witness


@contextmanager
def resumed(python: Path, job: Job, folder: Path, line: list[str], before: Witness) -> Iterator[Trial]:
    """Submits the job on a new cluster of one node, follows it to its end, and gives all that is known of the
    run.
    """
    witness = Witness(job.name)
    with Nodes(python, head_cpus=1, **KNOWN) as nodes:
        join(nodes)
        witness.start()
        try:
            again = nodes.submit(folder / "project", line)
            assert again.wait() == 0, again.text
            assert_all_given_back(nodes, job.name)
        finally:
            witness.close()
        steps, worlds = ledger(Run.open(job).segments()), formed(Run.open(job).records())
        assert worlds[-1].generation == witness.generation
        witness.seen, witness.generation = before.seen | witness.seen, len(worlds)
        result = Result(
            "Finished" if max(steps) == STEPS else "cut off", "", max(steps), 0, job.bucket, job.name
        )
        yield Trial(
            job, result, witness, [], steps, exported_hash(job), [steps[step].loss for step in sorted(steps)]
        )
        ray.shutdown()


def assert_brought_by_ray(folder: Path, homes: dict[str, str]) -> None:
    """Checks that the run had the same code on each of three nodes, on each a copy that Ray made, and nothing
    of this machine besides.
    """
    assert homes["w1"] != homes["w2"] == homes["w3"], "two nodes, and a replacement where there was room"
    ran = [each for each in where(folder) if each["node"] != "local"]
    assert {each["node"] for each in ran} > {*homes.values()} and len({each["node"] for each in ran}) == 3, (
        "and that of the new cluster"
    )
    assert len({each["digest"] for each in where(folder)}) == 1, (
        "the same code on every node, and in this process"
    )
    copies = {each["files"][0].split("/runtime_resources/")[0] for each in ran}
    assert len(copies) == 3, copies
    for each in ran:
        assert all("/runtime_resources/" in file for file in each["files"])
        assert not any(str(ROOT) in entry or str(folder) in entry for entry in each["path"]), (
            "nothing of the machine it came from"
        )


@pytest.mark.must_run_in_ci
def test_a_users_project_trains_on_nodes_that_never_heard_of_elastic(
    tmp_path: Path, python: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1, R4, R7, R21, U1, U3, U8, U10, H1: detached, it trains on; its Ray job is stopped, and what Ray
    brought it is not taken away: a node that joins later trains with the same code, and a killed worker is
    replaced.  Then every process of the cluster is SIGKILLed at once, head and all; on a new one, of one node
    with room for one worker, the same line goes on from the newest good manifest.  The six assertions."""
    cursor, gates = Cursor(960, 16, 0, "permutation"), ((JOINS, "joins"), (WHOLE, "whole"), (DIES, "hurry"))
    args = {
        "read_s": 0.05,
        "gates": {str(cursor.microbatch_ids(step, 0, 2)[0]): name for step, name in gates},
    }
    job = project(
        tmp_path,
        "mine",
        wheel,
        data={"dataset": "mine.watched:Paced", "args": args},
        optim={"lr": 3e-2},
        schedule={"warmup_steps": 2},
        on_driver_exit="detach",
        checkpoint={"save_every": SAVES},
        deadlines={"grow_debounce_s": 30, "stall_s": 300},  # nobody moves at a gate
    )
    expected = reference(job, tmp_path, "mine", monkeypatch)
    line = shlex.split(documented()[0])
    act, first = begun_and_killed(python, job, tmp_path, line)
    newest = Run.open(job).newest()
    assert newest is not None
    assert 1 <= act.stopped_at < JOINS < act.killed_at < WHOLE < newest.step < DIES, "inside the run"
    (tmp_path / "seen" / "hurry").touch()
    with resumed(python, job, tmp_path, line, first) as chaos:
        worlds = formed(Run.open(job).records())
        assert worlds[-1].step == newest.step
        killed = [(2, worlds[1].members.index("w2")), (4, 0), (4, 1)]
        how = {"point": "forward", "kind": "SIGKILL"}  # from outside
        struck = [how | {"generation": world, "world_rank": rank} for world, rank in killed]
        tiers = ("init", "live", "live", "live", "bucket")
        assert_survived(
            replace(chaos, job=job.replace(faults=struck)), expected, worlds=(1, 2, 1, 2, 1), tiers=tiers
        )

    (log_of_killed,) = Path(job.bucket).glob("mine/logs/*/w2.log")
    said = log_of_killed.read_text().splitlines()[0]
    # Ray may reap a process before its keeper asks, and some kernels have forgotten its status then
    assert "killed by signal 9 (SIGKILL)" in said or "this kernel does not say how" in said, said
    assert_brought_by_ray(tmp_path, act.homes)
    # the user's own loss ran every microbatch of every step
    work, due = microbatches(tmp_path), microbatches(tmp_path, ours=True)
    assert set(due) <= set(work) and len(set(due)) == job.steps * job.microbatches
    assert len(set(work) - set(due)) <= 8, "a trial has a few more, with values of its own"
