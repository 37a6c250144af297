"""Who may be a member (R22, U8, U11): a second node that differs is real, with mounts of its own, and is refused by name.

The head has room for one worker and the second node for another, so both are asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs import Run
from tests.support.chaos import Trial, assert_nothing_left, trial
from tests.support.commands import user_job, user_package
from tests.support.nodes import node

CPUS = 5
"""Of a worker: the head has 8."""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, as the second node sees it if it is mounted in place of ``tmp_path / "mine"``."""
    for name in ("mine", "theirs"):
        user_package(tmp_path / name, "admitted")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    return tmp_path / "theirs"


def job_of(folder: Path, least: int = 2, **changes: Any) -> Job:
    workers = {"min": least, "max": 2, "cpus": CPUS}
    return user_job(folder, "admitted", bucket=str(folder.parent / "bucket"), workers=workers, steps=6, **changes)


def told(run: Trial) -> str:
    return "\n".join(line.text for line in run.lines if isinstance(line, Sentence))


def formed(job: Job) -> list[dict[str, Any]]:
    """The plans of all worlds that ever formed."""
    actions = [action for record in Run.open(job).records() for action in record["actions"]]
    return [action["plan"] for action in actions if action["$"] == "Form"]


def name_of(node_id: str) -> str:
    (found,) = [each for each in ray.nodes() if each["NodeID"] == node_id]
    return f"node {node_id[:8]} ({found['NodeManagerHostname']}, {found['NodeManagerAddress']})"


def head() -> str:
    return ray.get_runtime_context().get_node_id()


def test_u11_a_bucket_that_is_not_shared_is_refused_with_both_nodes(tmp_path: Path, theirs: Path) -> None:
    """U11: nothing has run yet, so nothing is run; the run can be started again with a bucket that is shared."""
    job = job_of(tmp_path / "mine", least=1)
    Path(job.bucket).mkdir()
    with node(tmp_path / "log", CPUS, empty=(Path(job.bucket),)) as second:
        run = trial(job, hash_it=False)
        assert run.result.state == "Failed" and run.result.step == 0
        sentence = f"{name_of(second)} does not see bucket = {job.bucket!r} as the same place as {name_of(head())}"
        assert sentence in run.result.reason, run.result.reason
    assert formed(job) == []
    assert not list(Path(job.bucket).rglob(".probe-*"))
    assert_nothing_left(run)
