"""L4: a branch is the last thing that a command writes, after its claim, so that no other life of the run
adds to it.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.launch import launch
from elastic.errors import JobError, PlatformGaveUp, Refused
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs.begin import begin
from elastic.runs.resume import StartPoint
from elastic.runs.run import Run
from storage.errors import Exists
from tests.control.play import stepping
from tests.runs.test_metrics import Written
from tests.storage.states import TENSORS, state_of, write
from tests.support.job_file import to_toml
from tests.support.toys import TINY, toy_job

pytestmark = pytest.mark.fast
STATE = state_of(TENSORS[:1], seed=1)


def saved(run: Run, version: Version, lineage: tuple[tuple[int, int], ...]) -> None:
    run.commit(version, write(run.checkpoints, version, STATE, 1), lineage, Layout())


def living(folder: Path) -> tuple[Run, Job]:
    """Returns a run with a checkpoint at step 5 whose coordinator still lives somewhere, and its job with
    another rate.
    """
    run = Run.open(toy_job(folder / "bucket", steps=100))
    run.claim("a cluster that cannot be reached", "its life")
    play = Written(stepping(2, save_every=5), run, folder / "local")
    play.steps(1, 5)
    play.save(Version(5, 1), "w1", "w2")
    play.ship()
    saved(run, Version(5, 1), ((1, 5),))
    return run, run.job.replace(optim={"lr": 1e-4})


@pytest.mark.parametrize("claims", [True, False], ids=("claimed", "the control: not claimed"))
def test_l4_a_world_of_a_life_that_has_not_noticed_is_of_the_old_job(tmp_path: Path, claims: bool) -> None:
    """L4: it forms one more world before it sees the claim, and saves.  What it saves is abandoned; the
    branch goes on from step 5.
    """
    run, changed = living(tmp_path)
    branched = Run.look(changed, branch=True)
    incarnation = branched.claim("here") if claims else 0
    assert branched.branch(0.0, incarnation=incarnation).startswith(
        "branch 2 of toy goes on from step 5: optim.lr"
    )
    saved(run, Version(10, 2), ((1, 5), (2, 10)))
    its = run.branches.at(Version(10, 2)).job["optim"]["lr"]
    assert (Run.find(changed).newest(), its) == (
        (Version(5, 1), run.job.optim.lr) if claims else (Version(10, 2), 1e-4)
    )
    state = Run.find(changed).state(branched.claim("here"), 0.0)
    first = Version(6, state.next_generation)
    assert not claims or run.branches.at(first).job["optim"]["lr"] == 1e-4
    assert branched.branched is False, "it goes on"


def test_l4_the_run_is_claimed_before_the_branch_and_only_for_one(tmp_path: Path) -> None:
    """L4: a command that says --branch, as a supervisor does, and changes nothing claims nothing here: its
    coordinator does.
    """
    run, changed = living(tmp_path)
    seen = list[tuple[int, int]]()

    def claim(run: Run, _: int) -> int:
        seen.append((run.latest_claim(), run.branches.newest()))
        return run.claim("here")

    assert begin(StartPoint(run.job), lambda line: None, True, claim) == 0 and seen == []
    assert begin(StartPoint(changed), lambda line: None, True, claim) == 2 and seen == [(1, 0)]
    assert run.branches.newest() == 2 and begin(StartPoint(changed), lambda line: None, True, claim) == 0


@pytest.mark.parametrize("life", ["", "its life"], ids=("no life", "the control: a life of its own"))
def test_l4_two_branches_after_a_claim_whose_coordinator_never_came(tmp_path: Path, life: str) -> None:
    """L4: both commands have seen that claim, and only one of them goes past it: a claim without a life is
    not that of the other one.

    The one that does says which claim it goes past.  Its coordinator is refused once a third command has
    claimed the run.
    """
    run, changed = living(tmp_path)
    assert run.claim("gone", life) == 2
    said, other = list[Any](), run.job.replace(optim={"lr": 1e-5})
    assert (
        begin(StartPoint(changed), said.append, True, lambda run, _: run.claim("here", after=run.follows(2)))
        == 3
    )
    assert (
        f"it goes past claim 2, made at gone ({platform.node()}), which has recorded nothing" in said[-1].text
    )
    with pytest.raises(PlatformGaveUp):
        begin(StartPoint(other), said.append, True, lambda run, _: run.claim("there", after=run.follows(2)))
    assert run.branches.newest() == 2 and run.latest_claim() == 3
    assert run.follows(3) == 3, "its own coordinator comes"
    run.claim("elsewhere")
    with pytest.raises(Exists):
        run.follows(3)


def test_l4_a_branch_of_another_command_meanwhile_is_said(tmp_path: Path) -> None:
    """L4: the other one has claimed the run later, and begun its branch first."""
    _, changed = living(tmp_path)

    def claim(run: Run, _: int) -> int:
        ours = run.claim("here")
        theirs = Run.look(changed.replace(optim={"lr": 1e-5}), branch=True)
        theirs.branch(0.0, incarnation=theirs.claim("there"))
        return ours

    with pytest.raises(
        Refused,
        match="another command has just started toy, or a branch of toy; see `elastic runs`",
    ):
        begin(StartPoint(changed), lambda line: None, True, claim)
    assert Run.find(changed).job.optim.lr == 1e-5


def test_l4_a_process_that_looked_before_another_claim_begins_no_branch(tmp_path: Path) -> None:
    """L4: the other one, whose claim is the newest, goes on.  The control: who claims whatever is newest ends
    it.
    """
    run, changed = living(tmp_path)

    def later(run: Run, seen: int) -> int:
        assert run.claim("there", "a life") == seen + 1
        return run.claim_here(after=seen)

    with pytest.raises(Refused, match="another command has just started toy, or a branch of toy"):
        begin(StartPoint(changed), lambda line: None, True, later)
    assert (run.latest_claim(), run.branches.newest()) == (2, 0)
    assert begin(StartPoint(changed), lambda line: None, True, lambda run, _: run.claim_here()) == 3


def test_l4_a_rollback_claims_the_run_too(tmp_path: Path) -> None:
    """L4: with --force it is for a run that may live.  The control is the first test."""
    run, _ = living(tmp_path)
    (tmp_path / "job.toml").write_text(to_toml(run.job))
    assert main(["rollback", str(tmp_path / "job.toml"), "--to", "5", "--lr-scale", "0.5", "--force"]) == 0
    saved(run, Version(10, 2), ((1, 5), (2, 10)))
    assert (Run.find(run.job).newest(), run.latest_claim(), run.local_process()) == (Version(5, 1), 2, None)
    assert (
        main(
            [
                "rollback",
                str(tmp_path / "job.toml"),
                "--to",
                "5",
                "--force",
                "--optim.lr",
                str(run.job.optim.lr / 2),
            ]
        )
        == 0
    )
    assert run.latest_claim() == 2, "no setting would change"


@pytest.mark.parametrize("branched", [False, True])
def test_a_run_whose_job_is_gone_is_refused_before_anything_is_written(
    tmp_path: Path, branched: bool
) -> None:
    """The judge is the list of all files.  The controls: with the file it goes on; a new name takes its
    weights.
    """
    job, other = toy_job(tmp_path, steps=2, **TINY), toy_job(tmp_path, steps=4, optim={"lr": 0.5}, **TINY)
    assert launch(job, local=True, show=lambda _: None).state == "Finished"
    if branched:
        job = job.replace(steps=3)
        assert launch(job, local=True, branch=True, show=lambda _: None).step == 3
    document = tmp_path / "toy" / "job.json"
    kept = document.read_bytes()
    document.unlink()
    there = sorted(tmp_path.rglob("*"))
    for asked in (job, other):
        for words in ({}, {"branch": True}, {"resume": "2"}):
            with pytest.raises(
                JobError,
                match=(
                    r"toy/job\.json is missing, so the settings .* put the file back .* init = 'toy@latest'"
                ),
            ):
                launch(asked, local=True, show=lambda _: None, **words)
    with pytest.raises(JobError, match=r"job\.json is missing"):
        Run.look(other)
    assert sorted(tmp_path.rglob("*")) == there
    assert (
        launch(other.replace(name="warm", init="toy@latest"), local=True, show=lambda _: None).state
        == "Finished"
    )
    document.write_bytes(kept)
    assert launch(job, local=True, show=lambda _: None).step == job.steps


@pytest.mark.parametrize("deleted", [True, False])
def test_a_local_run_whose_folder_is_deleted_says_so(tmp_path: Path, deleted: bool) -> None:
    """The control: another command has claimed the run."""
    job = toy_job(tmp_path, steps=2, **TINY)

    def show(line: object) -> None:
        if getattr(line, "step", 0) == 1:
            shutil.rmtree(tmp_path / "toy") if deleted else Run.find(job).claim("elsewhere")

    why = (
        r"this command's claim, .*toy/owner/000001\.json, is missing"
        if deleted
        else "another command has taken this run over"
    )
    with pytest.raises(PlatformGaveUp, match=why):
        launch(job, local=True, show=show)
