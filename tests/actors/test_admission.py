"""Admission of workers (R22, U8, U11): the nodes are real, differ in mounts of their own, and are refused by
name.

The head has room for one worker and every other node for one, so all are asked.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import elastic
from actors.living import attach
from actors.view import View
from elastic.job import Job
from elastic.report.ledger import ledger
from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.support.chaos import Trial, Witness, assert_nothing_left, trial
from tests.support.commands import ROOT, user_job, user_package
from tests.support.nodes import Node, joined
from tests.support.room import Room

CPUS = 5
"""CPUs of one worker.  The head has a CPU for each core, and at least 8; with 8 it has room for one worker.
"""
CODE = "admitted"
BROKEN = """
import threading

class Unpicklable(Exception):
    def __init__(self, what, lock):
        super().__init__(f"it needs {what}")
        self.lock = lock

raise Unpicklable("what only the head has", threading.Lock())
"""
OLDER, NEWER = "2.11.0+cpu", "9.9.9"
DIFFERENT = ["code", "import", "storage", "disk", "torch", "older", "newer"]
TORCH = Path(torch.__file__).with_name("version.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the code of a job; beside it two others, one of which cannot be imported, and
    other things that differ.
    """
    for name in ("mine", "other", "broken"):
        user_package(tmp_path / name, CODE)
    with open(tmp_path / "other" / CODE / "code.py", "a") as code:
        code.write("# mended since\n")
    (tmp_path / "broken" / CODE / "code.py").write_text(BROKEN)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "version.py").write_text(
        TORCH.read_text().replace(torch.__version__, f"{torch.__version__}.other")
    )
    (tmp_path / "older.py").write_text(TORCH.read_text().replace(torch.__version__, OLDER))
    ours = ROOT / "elastic" / "__init__.py"
    (tmp_path / "newer.py").write_text(
        ours.read_text().replace(f'__version__ = "{elastic.__version__}"', f'__version__ = "{NEWER}"')
    )
    (tmp_path / "shadow" / "storage").mkdir(parents=True)
    (tmp_path / "shadow" / "storage" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "mine")
    return tmp_path


def job_of(folder: Path, least: int, most: int = 2, **changes: Any) -> Job:
    workers = {"min": least, "max": most, "cpus": CPUS}
    return user_job(
        folder / "mine",
        CODE,
        bucket=str(folder / "bucket"),
        workers=workers,
        deadlines={"grow_debounce_s": 0.2},
        **changes,
    )


def torch_of_another_build(folder: Path) -> Node:
    return Node("torch", CPUS, instead={TORCH: folder / "version.py"})


def formed(job: Job) -> list[dict[str, Any]]:
    """Returns the plans of all worlds that were to be formed."""
    actions = [action for record in Run.open(job).records() for action in record["actions"]]
    return [action["plan"] for action in actions if action["$"] == "Form"]


def name_of(node_id: str) -> str:
    (found,) = [each for each in ray.nodes() if each["NodeID"] == node_id]
    return f"node {node_id[:8]} ({found['NodeManagerHostname']}, {found['NodeManagerAddress']})"


def head() -> str:
    return ray.get_runtime_context().get_node_id()


def assert_another_disk_ends_a_run_that_begins(folder: Path, disk: str) -> None:
    """Checks that a run fails by both nodes while the node ``disk`` sees another bucket: one worker would be
    enough, but no step has run yet, so the run ends now."""
    job = job_of(folder, least=1, name="begins")
    run = trial(job, hash_it=False)
    assert (run.result.state, run.result.step) == ("Failed", 0)
    assert f"does not see bucket = {job.bucket!r} as the same place as node" in run.result.reason, (
        run.result.reason
    )
    assert name_of(disk) in run.result.reason and name_of(head()) in run.result.reason, run.result.reason
    assert formed(job) == []
    assert not list(Path(job.bucket).rglob(".probe-*"))
    assert_nothing_left(run)


class Latecomers:
    """Joins nodes to a run that already steps.  Once the run has refused all of them and taken two more
    steps, it is asked to stop.

    The first node stays until the end of ``stays``, the others until that of ``stack``.
    """

    def __init__(self, folder: Path, *nodes: Node) -> None:
        self.folder, self.nodes, self.stays, self.stack = folder, nodes, ExitStack(), ExitStack()
        self.ids: dict[str, str] = {}
        self.refused_at = 0

    def __call__(self, witness: Witness, view: View) -> bool:
        if view.step < 2:
            return False
        if not self.ids:
            first = self.stays.enter_context(joined(self.folder, self.nodes[0]))
            self.ids = {**first, **self.stack.enter_context(joined(self.folder, *self.nodes[1:]))}
        coordinator = attach(witness.job_name)
        assert coordinator is not None
        lines = ray.get(coordinator.view.remote(0)).lines
        told = " ".join(line.text for line in lines if isinstance(line, Sentence))
        if not all(f"node {node[:8]} is refused" in told for node in self.ids.values()):
            return False
        self.refused_at = self.refused_at or view.step
        if view.step < self.refused_at + 2:
            return False
        coordinator.stop.remote("seen enough")
        return True


def refusals(run: Trial) -> list[str]:
    """Returns a sentence for each node that was refused, which begins with the node; a fault of the job was
    told before its node.
    """
    said = list[str]()
    for text in (line.text for line in run.lines if isinstance(line, Sentence)):
        why, _, node = text.rpartition("; node ")
        if re.fullmatch(r"\w+ is refused", node):
            said.append(f"node {node}: {why}")
        else:
            said += [
                f"node {each.removeprefix('node ')}"
                for each in text.split("; node ")
                if " is refused: " in each
            ]
    return said


@pytest.mark.full
@pytest.mark.parametrize(
    "names", [["code", "disk"], pytest.param(DIFFERENT, marks=pytest.mark.full)], ids=len
)
def test_nodes_that_join_later_and_differ_are_refused_and_the_run_goes_on(
    folder: Path, names: list[str]
) -> None:
    """R22, U8, U11: other code, code that fails only there (with an exception that does not pickle), a folder
    that shadows ours, torch of another build or version, another Elastic, another disk.  A run that begins
    beside another disk fails."""
    code = folder / "mine" / CODE
    nodes = [
        Node("disk", CPUS, empty=(folder / "bucket",)),
        Node("code", CPUS, instead={code: folder / "other" / CODE}),
        Node("import", CPUS, instead={code: folder / "broken" / CODE}),
        Node("storage", CPUS, instead={ROOT / "storage": folder / "shadow" / "storage"}),
        torch_of_another_build(folder),
        Node("older", CPUS, instead={TORCH: folder / "older.py"}),
        Node("newer", CPUS, instead={ROOT / "elastic" / "__init__.py": folder / "newer.py"}),
    ]
    late = Latecomers(folder, *(node for node in nodes if node.name in names))
    job = job_of(
        folder, least=1, most=8, steps=4000, data={"dataset": f"{CODE}.code:Walks", "args": {"read_s": 0.05}}
    )
    with late.stays:
        with late.stack:
            run = trial(job, late, hash_it=False)
        assert_another_disk_ends_a_run_that_begins(folder, late.ids["disk"])
    assert run.result.state == "Stopped", run.result
    said = {
        name: [each for each in refusals(run) if each.startswith(f"node {node[:8]}")]
        for name, node in late.ids.items()
    }
    assert all(len(sentences) == 1 for sentences in said.values()), said
    expected = {
        "code": f"the code that the job names is {CODE} ",
        "import": "importing admitted.code failed with Unpicklable: it needs what only the head has",
        "storage": (
            "; on this node another folder of this name comes first on Python's path, or Elastic is "
            "not installed"
        ),
        "disk": f"does not see bucket = {job.bucket!r} as the same place as node {head()[:8]}",
        "torch": f"torch {torch.__version__}.other, 1 threads, but the run began on ",
        "older": f"torch is {OLDER.partition('+')[0]} on this node and {torch.__version__.partition('+')[0]} on ",
        "newer": f"Elastic is {NEWER} (sources ",
    }
    assert sorted(said) == sorted(names)
    for name in names:
        assert expected[name] in said[name][0], said[name]
    assert [plan["members"] for plan in formed(job)] == [["w1"]], "nobody was stopped for them"
    records = Run.open(job).records()
    last = max(number for number, record in enumerate(records) if " is refused: " in record["reason"])
    assert not [
        record
        for record in records[last:]
        if any(action["$"] == "StartWorkers" for action in record["actions"])
    ]
    assert_nothing_left(run)


def mixed(job: Job) -> tuple[int, ...]:
    """Returns the generations that the journal has marked, since they had workers of several kinds."""
    recorded = Run.open(job).last_recorded()
    assert recorded is not None
    return recorded.members.mixed


@pytest.mark.full  # tests/control has the rule; above, nodes of other kinds are refused
def test_without_reproducible_another_kind_trains_and_its_steps_are_marked(folder: Path) -> None:
    """R22; the negative control: a run of one kind has no mark."""
    job = job_of(folder, least=2, steps=4, reproducible=False)
    with joined(folder, torch_of_another_build(folder)):
        run = trial(job, hash_it=False)
    assert run.result.state == "Finished", run.result
    assert (
        {outcome.generation for outcome in ledger(Run.open(job).segments()).values()}
        == set(mixed(job))
        == {1}
    )
    assert any(
        "its steps are marked as mixed" in line.text for line in run.lines if isinstance(line, Sentence)
    )
    alone = job_of(folder, least=1, steps=2, reproducible=False, name="alone")
    assert trial(alone, hash_it=False).result.state == "Finished"
    assert mixed(alone) == ()


@pytest.mark.full
def test_u8_too_few_nodes_with_the_jobs_code_fail_by_name(folder: Path) -> None:
    """U8: before any world forms."""
    job = job_of(folder, least=2)
    other = Node("code", CPUS, instead={folder / "mine" / CODE: folder / "other" / CODE})
    with closing(Room()) as room:
        room.take(max(ray.cluster_resources()["CPU"] - 2 * CPUS + 1, 0))
        with joined(folder, other) as nodes:
            run = trial(job, hash_it=False)
            assert run.result.state == "Failed" and formed(job) == []
            assert f"on {name_of(head())}, where the job was checked" in run.result.reason
            assert f"on node {nodes['code'][:8]} (" in run.result.reason
    assert_nothing_left(run)
