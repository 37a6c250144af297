"""L4: a branch is the last thing that a command writes, after its claim, so that no other life of the run adds to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.begin import begin
from actors.cli import main
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs import branches
from elastic.runs.resume import Start
from elastic.runs.run import Run
from tests.control.play import stepping
from tests.runs.test_metrics import Written
from tests.storage.states import TENSORS, state_of, write
from tests.support.job_file import to_toml
from tests.support.toys import toy_job

pytestmark = pytest.mark.fast
STATE = state_of(TENSORS[:1], seed=1)


def saved(run: Run, version: Version, lineage: tuple[tuple[int, int], ...]) -> None:
    run.commit(version, write(run.checkpoints, version, STATE, 1), lineage, Layout())


def living(folder: Path) -> tuple[Run, Job]:
    """Returns a run with a checkpoint at step 5 whose coordinator still lives somewhere, and its job with another rate."""
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
    """L4: it forms one more world before it sees the claim, and saves.  What it saves is abandoned; the branch goes on from step 5."""
    run, changed = living(tmp_path)
    branched = Run.look(changed, branch=True)
    incarnation = branched.claim("here") if claims else 0
    assert branched.branch(0.0, incarnation=incarnation).startswith("branch 2 of toy goes on from step 5: optim.lr")
    saved(run, Version(10, 2), ((1, 5), (2, 10)))
    its = branches.at(run.store, "toy", Version(10, 2)).job["optim"]["lr"]
    assert (Run.find(changed).newest(), its) == ((Version(5, 1), run.job.optim.lr) if claims else (Version(10, 2), 1e-4))
    state = Run.find(changed).standing(branched.claim("here"), 0.0)
    first = Version(6, state.next_generation)
    assert not claims or branches.at(run.store, "toy", first).job["optim"]["lr"] == 1e-4
    assert branched.branched is False, "it goes on"


def test_l4_the_run_is_claimed_before_the_branch_and_only_for_one(tmp_path: Path) -> None:
    """L4: a command that says --branch, as a supervisor does, and changes nothing claims nothing here: its coordinator does."""
    run, changed = living(tmp_path)
    seen = list[tuple[int, int]]()

    def claim(run: Run) -> int:
        seen.append((run.latest_claim(), branches.number_of(run.store, "toy")))
        return run.claim("here")

    assert begin(Start(run.job), lambda line: None, True, claim) == 0 and seen == []
    assert begin(Start(changed), lambda line: None, True, claim) == 2 and seen == [(1, 1)]
    assert branches.number_of(run.store, "toy") == 2 and begin(Start(changed), lambda line: None, True, claim) == 0


def test_l4_a_rollback_claims_the_run_too(tmp_path: Path) -> None:
    """L4: with --force it is for a run that may live.  The control is the first test."""
    run, _ = living(tmp_path)
    (tmp_path / "job.toml").write_text(to_toml(run.job))
    assert main(["rollback", str(tmp_path / "job.toml"), "--to", "5", "--lr-scale", "0.5", "--force"]) == 0
    saved(run, Version(10, 2), ((1, 5), (2, 10)))
    assert (Run.find(run.job).newest(), run.latest_claim(), run.local_process()) == (Version(5, 1), 2, 0)
    assert main(["rollback", str(tmp_path / "job.toml"), "--to", "5", "--force", "--optim.lr", str(run.job.optim.lr / 2)]) == 0
    assert run.latest_claim() == 2, "nothing was to change"
