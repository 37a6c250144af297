"""L4: two commands for one run at once.  Neither takes from the run what the other one counts on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.begin import begin
from actors.cli import main
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs import branches, resume
from elastic.runs.resume import Start
from elastic.runs.run import Run
from storage.checkpoints import Checkpoints
from tests.runs.test_forks import STATE, job_of
from tests.storage.states import write
from tests.support.job_file import to_toml

pytestmark = pytest.mark.fast
OLDER = Version(2, 1)
Claims = Callable[[Run, int], int]


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Job, str]:
    """A run that finished at step 6, with checkpoints at 2, 4 and 6, and its job file."""
    run = Run.open(job := job_of(tmp_path / "bucket"))
    run.claim("local")
    for step in (2, 4, 6):
        run.commit(Version(step, 1), write(run.checkpoints, Version(step, 1), STATE, 1), ((1, step),), Layout())
    (tmp_path / "job.toml").write_text(to_toml(job))
    return job, str(tmp_path / "job.toml")


def saved(job: Job) -> list[int]:
    return [each.step for each in resume.saved(Run.find(job))]


def resumed(job: Job, file: str, claims: Claims) -> int:
    """Goes on from step 2, as `train --resume 2` on a cluster does, which claims the run late.  Returns its exit code."""
    try:
        begin(Start(job, at=OLDER), lambda line: print(line.text), True, claims)
    except JobError as error:
        print(error)
        return error.exit_code
    return 0


def rolled_back(job: Job, file: str, claims: Claims) -> int:
    """Rolls the run back to step 2.  The command looks at it, claims it, and begins the branch.  Returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "claim_here", lambda run, after: claims(run, after))
        return main(["rollback", file, "--to", "2"])


@pytest.mark.parametrize("goes_back", [resumed, rolled_back])
@pytest.mark.parametrize("deleted", ["marked", "removed", "the control: another step"])
def test_l4_no_branch_goes_on_from_a_checkpoint_that_was_deleted_meanwhile(
    finished: tuple[Job, str], capsys: pytest.CaptureFixture[str], goes_back: Callable[..., int], deleted: str
) -> None:
    """L4: the command has found step 2, and another one deletes it before the claim.  The run stays finished, with its later steps."""
    job, file = finished

    def claims(run: Run, seen: int) -> int:
        if deleted == "marked":
            run.checkpoints.mark(OLDER, "a command that died then")
        else:
            assert main(["checkpoint", "rm", file, "--step", "2" if deleted == "removed" else "4"]) == 0
        return run.claim("here", after=seen)

    there = deleted.startswith("the control")
    assert goes_back(job, file, claims) == (0 if there else 1)
    said = " ".join(capsys.readouterr().out.split())
    assert ("another command has begun to delete step 2 of generation 1 of run meanwhile" in said) != there
    assert saved(job) == ([2] if there else [4, 6])
    assert len(branches.every(Run.find(job).store, "run")) == (1 if there else 0)


def test_l4_a_mark_that_comes_after_the_claim_of_a_branch_is_taken_back(
    finished: tuple[Job, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L4: the claim and the look at step 2 fall between what `rm` reads and what it writes.  The branch keeps its beginning.

    The control: an older claim, which `rm` knows, changes nothing.
    """
    job, file = finished
    mark = Checkpoints.mark

    def late(self: Checkpoints, version: Version, why: str) -> None:
        if version == OLDER:
            resumed(job, file, lambda run, seen: run.claim("here", after=seen))
        mark(self, version, why)

    monkeypatch.setattr(Checkpoints, "mark", late)
    assert main(["checkpoint", "rm", file, "--step", "4"]) == 0 and saved(job) == [2, 6]
    assert main(["checkpoint", "rm", file, "--step", "2"]) == 2
    assert "another command has begun to train run meanwhile" in " ".join(capsys.readouterr().out.split())
    assert saved(job) == [2] and Run.find(job).newest() == OLDER
