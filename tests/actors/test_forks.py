"""L4, L5: forks, warm starts and older steps on a cluster, where workers die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors import cluster
from actors.launch import launch
from elastic.errors import JobError, PlatformGaveUp
from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.lineage import contains
from elastic.report.ledger import ledger
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from tests.support.chaos import alone, exported_hash
from tests.support.toys import LIGHT, toy_job

SETTINGS: dict[str, Any] = {
    "schedule": {"kind": "constant"},
    "parallel": {"dp_replicate": 1},
    "checkpoint": {"save_every": 3},
    **LIGHT,
}
FAST = {"optim": {"lr": 2e-2}}


def job_of(bucket: Path, name: str, steps: int, **changes: Any) -> Job:
    return toy_job(bucket, **{"name": name, "steps": steps} | SETTINGS | changes)


@pytest.mark.full
def test_l5_a_fork_lives_through_a_kill_and_goes_back_to_an_older_step(tmp_path: Path) -> None:
    """L4, L5: with one process or two workers, and through a death, it has the bits of one run that was so
    long from the beginning.

    Then it goes on from an older step of its own, with another rate: as a run that had it there, each step
    once in journal and metrics. The control: with the rate from step 6 on, it has other bits.
    """
    longer = alone(job_of(tmp_path / "longer", "longer", 12))
    launch(job_of(tmp_path, "run", 6), local=True)
    dies = {"point": "backward", "step": 11, "world_rank": 1, "generation": 2}
    fork = job_of(tmp_path, "fork", 12, faults=[dies])
    result = launch(fork, resume="run@6")
    assert (result.state, result.step, exported_hash(fork)) == ("Finished", 12, longer.hash)
    run = Run.open(fork)
    assert sorted(ledger(run.segments())) == [*range(7, 13)] and {
        each.generation for each in ledger(run.segments()).values()
    } == {2, 3}
    changed = job_of(tmp_path, "fork", 12, **FAST)
    with pytest.raises(JobError, match="with --branch"):
        launch(changed)
    assert launch(changed, resume=9).state == "Finished"
    steps = ledger(run.segments())
    assert sorted(steps) == [*range(7, 13)] and min(steps[step].generation for step in (10, 11, 12)) > 3
    assert [int(row["step"]) for row in rows_of(run)] == [*range(7, 13)]
    assert [row["lr"] for row in rows_of(run)] == [1e-2] * 3 + [2e-2] * 3
    newest = run.newest()
    assert newest is not None and contains(run.state().history.lineage, Version(6, 1))
    for at, same in ((9, True), (6, False)):
        judge = job_of(tmp_path, f"judge-{at}", 12, **FAST)
        launch(judge, local=True, resume=f"fork@{at}")
        assert (exported_hash(judge) == exported_hash(changed)) is same


@pytest.mark.full
def test_l5_a_warm_start_has_the_same_bits_in_every_layout(tmp_path: Path) -> None:
    """L5: a world that is formed anew before the first save begins with the same weights again.  The control:
    without them, other bits.
    """
    launch(job_of(tmp_path, "run", 3), local=True)
    launch(job_of(tmp_path, "one", 4, init="run@3"), local=True)
    dies = {"point": "backward", "step": 2, "world_rank": 1, "generation": 1}
    many = job_of(tmp_path, "many", 4, init="run@latest", faults=[dies], copies={"copy_every": 0})
    assert launch(many).state == "Finished"
    assert exported_hash(many) == exported_hash(job_of(tmp_path, "one", 4, init="run@3"))
    launch(job_of(tmp_path, "cold", 4), local=True)
    assert exported_hash(job_of(tmp_path, "cold", 4)) not in ("", exported_hash(many))


@pytest.mark.full
def test_l4_a_command_that_is_refused_for_want_of_room_begins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L4, L5: neither a branch, nor a fork, nor a run with given weights.  The control: with room the branch
    is begun.
    """
    job = job_of(tmp_path, "run", 2, checkpoint={"save_every": 2})
    launch(job, local=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(cluster, "ROOM_S", 0.0)
    longer = {"steps": 4, "checkpoint": {"save_every": 2}}
    changed = job_of(tmp_path, "run", **longer, workers={"cpus": 999})
    fork, warm = changed.replace(name="fork"), changed.replace(name="warm", init="run@2")
    for asked, words in ((changed, {"branch": True}), (fork, {"resume": "run@2"}), (warm, {})):
        with pytest.raises(PlatformGaveUp, match="but the cluster has room for 0"):
            launch(asked, **words)
        assert sorted(tmp_path.rglob("*")) == before, asked.name
    monkeypatch.undo()
    run, roomy = Run.find(job), job_of(tmp_path, "run", **longer)
    assert launch(roomy, branch=True).state == "Finished"
    (branch,) = run.branches.every()
    assert branch.claim == 1 and run.latest_claim() == 3 and run.newest() == Version(4, branch.until + 1)
