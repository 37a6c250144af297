"""G4: looking at a run that diverged: a step is computed again, and checkpoints are compared and shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actors.cli import main
from elastic.errors import JobError
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from elastic.train.alone.revisit import rerun_here
from tests.runs.test_forks import job_of, trained
from tests.support.chaos import Trial
from tests.support.job_file import to_toml


def test_g4_a_step_of_any_checkpoint_is_computed_again(
    all_died: Trial, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G4: all workers were killed, and one process has the bits that two recorded.  The control: those of
    another step are others.

    The run is not changed.
    """
    job = all_died.job
    before = sorted(Path(job.bucket).rglob("*"))
    seventh, fifth, first = rerun_here(job, 7), rerun_here(job, 5), rerun_here(job, 1)
    assert (
        seventh.same
        and fifth.same
        and first.same
        and {*seventh.now.layer_norms} == {*fifth.now.layer_norms} != set()
    )
    assert seventh.then is not None and seventh.then.generation > 1 and seventh.now.losses != fifth.now.losses
    made, began = rerun_here(job, f"7.{seventh.then.generation}"), rerun_here(job, "7.1")
    assert made == seventh and began.now == seventh.now and began.then is None, (
        "generation 1 saved step 6, and died in step 7"
    )
    for step, why in (
        (4, "no good checkpoint at step 3"),
        (9, "--step 9: .* makes the steps 1 to 8, and its newest checkpoint is of step 8"),
        (0, "--step 0: .*1 to 8"),
    ):
        with pytest.raises(JobError, match=why):
            rerun_here(job, step)
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    assert main(["rerun", str(file), "--step", "7"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(
        "the same bits"
    ) == job.microbatches + 1 and f"step 7: loss {seventh.now.loss:.6g}" in " ".join(shown.split())
    assert main(["checkpoint", "diff", str(file), "--between", "4", "8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "layers.0.even.weight" in shown, "off a terminal no name of a tensor is cut"
    assert re.search(r"\d+ tensors: 0 have the same bits; all together moved by", shown), shown
    assert main(["checkpoint", "diff", str(file), "--between", "8", "8", "--all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        equal := re.search(r"(\d+) tensors: (\d+) have the same bits; all together moved by 0, ", shown)
    ) and equal[1] == equal[2], shown
    assert main(["checkpoint", "show", str(file), "--step", "8"]) == 0
    shown = capsys.readouterr().out
    assert (
        re.search(r"version +step 8 of generation \d", shown)
        and "moment.exp_avg" in shown
        and "generation 1 up to 6" in shown
    )
    assert sorted(Path(job.bucket).rglob("*")) == before


def test_a_step_is_computed_again_with_the_settings_of_its_branch(tmp_path: Path) -> None:
    """The order of the samples and the dropout are those of the branch that made the step.  The control: the
    newest branch has others.
    """
    trained(job_of(tmp_path, steps=4))
    job = job_of(tmp_path, steps=6, seed=5)
    trained(job, branch=True)
    recorded = {int(row["step"]): row["loss"] for row in rows_of(Run.find(job))}
    assert {step: rerun_here(job, step).now.loss for step in (1, 3, 5)} == {
        step: recorded[step] for step in (1, 3, 5)
    }
    other = job_of(tmp_path / "other", steps=4, seed=5)
    trained(other)
    assert recorded[3] != next(row["loss"] for row in rows_of(Run.find(other)) if row["step"] == 3)


def test_a_step_is_computed_again_by_the_loop_of_the_job(tmp_path: Path) -> None:
    """The loss of the loop counts, which is half of the one that the job names."""
    job = job_of(tmp_path, steps=4, loop="tests.support.own_loops:halved")
    trained(job)
    recorded = {int(row["step"]): row["loss"] for row in rows_of(Run.find(job))}
    assert rerun_here(job, 3).now.loss == recorded[3] and rerun_here(job, 1).now.loss == recorded[1] < 2
