"""The control of "nothing is left": the check of all chaos tests finds whatever a run may leave, and nothing
that belongs to others.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import cluster
from actors.coordinator import GRACE_S
from actors.keeper import Keeper
from actors.perform import ActorGroup
from actors.processes import leave_nothing, log_folder, make_log_folder, remove_logs
from actors.users_code import UsersCode
from actors.view import View
from actors.worker import Worker
from elastic.data.cursor import Cursor
from elastic.ids import WorkerId
from elastic.protocol.events import Event, KeeperLost, KeeperUp
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.train.gauges.counters import Counters, segment, writer_lives
from storage.journal.replicas import folder_of
from tests.support.chaos import Witness, assert_nothing_left, trial
from tests.support.commands import assert_no_actor_left
from tests.support.left import left_of
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import Watched
from tests.support.toys import LIGHT, toy_job

NAME, TOKEN = "nobodys", "nobodys-0001-abcdef"
RUN: Any = SimpleNamespace(job=SimpleNamespace(name=NAME), witness=SimpleNamespace(token=TOKEN, seen={}))
WAITS = "import os; print(os.getpid(), flush=True); input()"
HOLDS = f"import os; os.memfd_create('elastic-copies'); {WAITS}"
ORPHAN = """
import subprocess, sys
with open(sys.argv[1], "w") as log:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    subprocess.Popen(["ray::Worker", "-c", code], executable=sys.executable, stderr=log)
"""


class Desk:
    """Stands in for the coordinator: it hears keepers."""

    def post(self, event: Event, shard: Any = None) -> None: ...

    def post_all(self, said: tuple[Event, ...]) -> None: ...

    def renew_all(self, asked: tuple[tuple[WorkerId, int], ...]) -> None: ...

    def tell(self, sentence: str) -> None: ...


class Idle:
    def there(self) -> bool:
        return True


@contextmanager
def process(title: str, code: str) -> Iterator[str]:
    with subprocess.Popen(
        [title, "-c", code], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert int(started.stdout.readline()) == started.pid
        yield f"process {started.pid} {title}"
        started.kill()


@contextmanager
def orphan(log: Path) -> Iterator[str]:
    """A process whose parent has died and whose log is open, as the logs of all processes of a cluster are."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN, log], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    with Watched(pid) as watched:
        yield f"process {pid} ray::Worker"
        watched.kill()
        watched.wait(PATIENCE_S)


@contextmanager
def actor(name: str) -> Iterator[str]:
    """Starts a named actor whose process does not look like one of a run."""
    idle = (
        ray.remote(Idle)
        .options(name=name, namespace=cluster.NAMESPACE, num_cpus=0, lifetime="detached")
        .remote()
    )
    assert ray.get(idle.there.remote())
    yield f"actor {name}"
    ray.kill(idle)
    # the call only asks for it
    until(lambda: name not in [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)])


@contextmanager
def group() -> Iterator[str]:
    made = ray.util.placement_group([{"CPU": 1}])
    assert made.wait(PATIENCE_S)
    yield f"placement group {made.id.hex()}"
    ray.util.remove_placement_group(made)


@contextmanager
def file(path: Path) -> Iterator[str]:
    path.write_bytes(b"left")
    yield f"segment {path.name}"
    path.unlink()


@contextmanager
def folder(path: Path) -> Iterator[str]:
    path.mkdir(parents=True)
    yield f"folder {path}"
    path.rmdir()


def logs_of_the_cluster() -> Path:
    node, *_ = ray.nodes()  # the head, and perhaps one that a test before has added
    return Path(node["ObjectStoreSocketName"]).parents[1] / "logs"


LEFT: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "an actor's process": lambda: process("ray::Keeper", WAITS),
    "memory of copies": lambda: process("python", HOLDS),
    "an orphan": lambda: orphan(logs_of_the_cluster() / "orphan"),
    "an actor": lambda: actor(f"{NAME}/coordinator"),
    "a placement group": group,
    "a segment": lambda: file(segment(TOKEN, "w1")),
    "logs": lambda: folder(log_folder(TOKEN)),
}


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize("what", LEFT)
def test_whatever_is_left_is_found(what: str) -> None:
    assert_nothing_left(RUN)
    with LEFT[what]() as left, pytest.raises(AssertionError, match=re.escape(f"['{left}']")):
        assert_nothing_left(RUN, deadline_s=0.0)
    assert_nothing_left(RUN)


def test_earlier_lives_are_looked_for_by_the_names_of_their_actors() -> None:
    """Ray remembers the names, so that nobody has to know the token of a life."""
    life = f"{NAME}-0002-abcdef"
    with actor(f"{life}/w1"):
        pass
    with file(segment(life, "w1")), pytest.raises(AssertionError, match=f"segment elastic-{life}-w1"):
        assert_no_actor_left(NAME)
    assert_no_actor_left(NAME)


def test_what_is_of_another_run_or_of_another_cluster_is_not_looked_at(tmp_path: Path) -> None:
    """The check ignores runs of another name, a run of the same name on another cluster of this machine, and
    that cluster's processes.
    """
    (tmp_path / "session_2020-01-01_00-00-00_000000_7").mkdir()
    with (
        actor(f"{NAME}-2/coordinator"),
        actor(f"{NAME}-2-0001-abcdef/w1"),
        file(segment(f"{NAME}-2-0001-abcdef", "w1")),
        file(segment(f"{NAME}-0001-fedcba", "w1")),
        folder(log_folder(f"{NAME}-0001-fedcba")),
        orphan(tmp_path / "session_2020-01-01_00-00-00_000000_7" / "log"),
    ):
        assert left_of(NAME, TOKEN, deadline_s=0.0) == []


@pytest.mark.must_run_in_ci
def test_a_run_that_ends_while_a_worker_starts_leaves_nothing(tmp_path: Path) -> None:
    """The worker has made its counters and has not joined, so no keeper follows it.

    It is stopped (SIGSTOP), so it lives until Ray uses SIGKILL, longer than the keeper.
    """
    hold, gate = tmp_path / "hold", tmp_path / "gate"
    sample = Cursor(64, 16, 0, "permutation").ids(2)[0]

    def act(witness: Witness, view: View) -> bool:
        if view.state == "Running" and len(view.workers) == 2 and not hold.exists():
            hold.touch()
            witness.seen["w2"].process.kill(signal.SIGKILL)
        if not hold.exists() or writer_lives(segment(view.token, "w3")) is not True:
            return False
        os.kill(Counters(segment(view.token, "w3"), create=False)["pid"], signal.SIGSTOP)
        gate.touch()
        return True

    data = {
        "dataset": "tests.support.toys:Held",
        "args": {"hold": str(hold), "samples": 64, "gates": {str(sample): str(gate)}},
    }
    chaos = trial(
        toy_job(tmp_path, name="early", steps=4, data=data, workers={"min": 1, "max": 2}, **LIGHT), act
    )
    assert chaos.result.state == "Finished" and not any(
        "w3 joined" in line.text for line in chaos.lines if isinstance(line, Sentence)
    )
    assert_nothing_left(chaos)


MAKES = """
import sys
from actors.processes import entered
from elastic.train.gauges.counters import Counters, segment

def wait():
    print("waits", flush=True)
    sys.exit()

with entered(sys.argv[1], wait):
    print("entered", flush=True)
    input()
    Counters(segment(sys.argv[1], "w1"), create=True)["pid"] = 1
"""
"""A worker that makes its files when it is told to."""


@contextmanager
def making() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts such a worker, and yields it with its first word."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKES, TOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        try:
            yield worker, worker.stdout.readline().strip()
        finally:
            worker.kill()


@pytest.mark.parametrize("killed", [True, False])
def test_a_worker_that_makes_its_files_while_the_run_ends_is_waited_for(killed: bool) -> None:
    """Ray has said that it is dead, but its process runs on, until it has made them or the kill reaches it.
    The next one makes none.
    """
    make_log_folder(TOKEN)
    with making() as (worker, said):
        assert said == "entered"

        def wait(_: float) -> None:
            """The end of the run has come to the worker, and lets it go on."""
            if worker.poll() is None:
                worker.kill() if killed else worker.communicate("go on\n")
                worker.wait(PATIENCE_S)

        leave_nothing(TOKEN, PATIENCE_S, wait)
        assert worker.poll() is not None, "it was waited for"
    assert_nothing_left(RUN)
    with making() as (_, said):
        assert said == "waits", "who comes later finds no folder"
    assert_nothing_left(RUN)


def test_a_worker_that_stays_in_the_folder_is_not_waited_for_without_end() -> None:
    """The control: the folder was not free."""
    make_log_folder(TOKEN)
    waits = list[float]()
    with making():
        leave_nothing(TOKEN, 0.05, lambda pause_s: (waits.append(pause_s), time.sleep(pause_s))[0])
    assert waits and not log_folder(TOKEN).exists()


def test_a_worker_that_is_made_when_the_run_is_over_leaves_nothing(tmp_path: Path) -> None:
    """Its process had begun when Ray was told to kill it, and no keeper is there any more.  The control: with
    one, it begins.
    """
    job = toy_job(tmp_path, name=NAME, deadlines={"lease_s": 1, "fence_s": 1})
    kind = ray.remote(num_cpus=0, concurrency_groups={"control": 1, "life": 1})(Worker)
    for over in (False, True):
        if not over:
            make_log_folder(TOKEN)
        late = kind.remote(job, TOKEN, WorkerId("w1"), None, UsersCode([]), b"secret")
        with pytest.raises(ray.exceptions.RayActorError):  # nobody calls it, so it leaves by itself
            ray.get(late.lives.remote(), timeout=PATIENCE_S)
        assert segment(TOKEN, "w1").exists() == log_folder(TOKEN).exists() == (not over)
        leave_nothing(TOKEN)


@pytest.mark.parametrize("lost", [True, False])
def test_a_run_whose_keeper_is_lost_at_its_end_leaves_nothing(tmp_path: Path, lost: bool) -> None:
    """R9: no other keeper is started when the run is over, or the next one did not come up in time.  The
    control: a keeper that lives removes all.  What another run has there stays.
    """
    job = toy_job(tmp_path, name=NAME)
    desk: Any = ray.remote(num_cpus=0, max_concurrency=4)(Desk).remote()
    said = list[Any]()
    run = Run.open(job)
    one = ActorGroup(job, run, TOKEN, 1, desk, UsersCode([]), b"secret", said.append)
    one.tell = said.append
    with file(segment(f"{NAME}-2-0001-abcdef", "w1")):
        one.keep(cluster.here())
        until(lambda: any(isinstance(event, KeeperUp) for event in said), what="the keeper is up")
        Counters(segment(TOKEN, "w1"), create=True)["pid"] = os.getpid()
        assert log_folder(TOKEN).exists()
        if lost:
            ray.kill(one.keepers[cluster.here()])
            until(lambda: any(isinstance(event, KeeperLost) for event in said), what="the keeper is lost")
        one.reap(GRACE_S)
        assert segment(f"{NAME}-2-0001-abcdef", "w1").exists()
    ray.kill(desk)
    assert_nothing_left(RUN)
    assert not any(isinstance(event, str) for event in said), said


def test_a_keeper_makes_the_folder_again_that_a_cleaner_has_removed() -> None:
    """Otherwise no worker could begin there.  The control: at the first look it waits, since who ends the run
    removes it, too.
    """
    one = Keeper.__new__(Keeper)
    one.run = TOKEN
    assert one._make_again(False) and not log_folder(TOKEN).exists(), "the control"
    assert one._make_again(True) and log_folder(TOKEN).exists()
    assert not one._make_again(True)
    leave_nothing(TOKEN)


@pytest.mark.parametrize("coordinator", [True, False])
def test_a_keeper_that_leaves_by_itself_keeps_the_journal_of_a_coordinator(coordinator: bool) -> None:
    """R6: the coordinator on its node may only have stood still, and goes on.  The control: without it the
    folder goes.
    """
    token = f"{NAME}-0001-{'abcdef' if coordinator else 'fedcba'}"
    folder, journal = log_folder(token), folder_of(log_folder(token), 1)
    try:
        (journal if coordinator else folder).mkdir(parents=True)
        (folder / "w1.log").touch()
        if coordinator:
            (journal / "000000000000000.jsonl").touch()
        remove_logs(token)
        assert not (folder / "w1.log").exists() and folder.exists() == coordinator
        assert [path.name for path in journal.glob("*")] == ["000000000000000.jsonl"] * coordinator
    finally:
        shutil.rmtree(folder, ignore_errors=True)
