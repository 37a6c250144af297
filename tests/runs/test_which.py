"""A checkpoint that a run has left behind is named by its generation, for whoever looks at it or begins a run
there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from actors.cli import main
from elastic.errors import JobError
from elastic.ids import Version
from elastic.plan.layout import Layout
from elastic.runs.branches import FORMAT
from elastic.runs.metrics import rows_of
from elastic.runs.resume import checkpoint, start_of, version_at
from elastic.runs.run import Run
from elastic.train.alone.revisit import evaluate_here, rerun_here
from storage.documents import seal, unseal
from tests.runs.test_forks import FAST, STATE, job_of, steps_of, told, trained
from tests.storage.states import write
from tests.support.chaos import exported_hash
from tests.support.job_file import to_toml

pytestmark = pytest.mark.fast


def test_a_checkpoint_that_was_left_behind_is_evaluated_when_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It loses what it lost before the rewind, to the bit.  The control: the run's own checkpoint of that
    step loses something else.
    """
    job = job_of(tmp_path)
    trained(job)
    before = {step: evaluate_here(job, step) for step in (4, 6)}
    job = job_of(tmp_path, **FAST)
    trained(job, resume=2)
    for step, (version, lost) in before.items():
        assert version == Version(step, 1) and evaluate_here(job, f"{step}.1") == (version, lost)
        own, other = evaluate_here(job, step)
        assert (
            own == Version(step, 2)
            and other.loss != lost.loss
            and evaluate_here(job, f"{step}.2") == (own, other)
        )
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["evaluate", str(tmp_path / "job.toml"), "--step", "6.1"]) == 0
    assert f"validation after step 6: loss {before[6][1].mean:.6g} over" in capsys.readouterr().out
    refused = {
        "5.1": "--step 5.1: run has no good",
        "6.7": r"abandoned checkpoints of this step: 6\.1",
        "x": "--step = 'x' must be a step",
    }
    for word, why in refused.items():
        assert main(["evaluate", str(tmp_path / "job.toml"), "--step", word]) == 1
        with pytest.raises(JobError, match=why):
            evaluate_here(job, word)


def test_the_best_checkpoint_is_evaluated_when_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The judge is the list of validations: the rate is absurd after step 4.  The control: the newest
    checkpoint is another.
    """
    held_out = {"validation": {"every": 2, "args": {"samples": 20, "seq_len": 16}}}
    trained(job_of(tmp_path, steps=4, **held_out))
    job = job_of(tmp_path, steps=6, optim={"lr": 30.0}, **held_out)
    trained(job, branch=True)
    told = {
        int(row["step"]): row["validation_loss"] for row in rows_of(Run.find(job)) if "validation_loss" in row
    }
    least = min(told, key=lambda step: told[step])
    (version, lost), (newest, _) = evaluate_here(job, "best"), evaluate_here(job)
    assert (
        version.step == least == 4
        and lost.mean == told[4]
        and newest.step == 6
        and version == checkpoint(Run.find(job), "best")
    )
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["evaluate", str(tmp_path / "job.toml"), "--step", "best"]) == 0
    assert f"validation after step 4: loss {told[4]:.6g} over" in capsys.readouterr().out
    Run.find(job).checkpoints.mark(version, "a test")
    said = list[str]()
    assert evaluate_here(job, "best", tell=said.append)[0].step == 6
    assert said == ["the best validation was after step 4, which has no checkpoint, so the next one is used"]
    trained(bare := job_of(tmp_path, name="bare", steps=2))
    with pytest.raises(
        JobError, match=r"^bare has no validation with a finite loss, so there is no best checkpoint"
    ):
        evaluate_here(bare, "best")


def test_g4_a_step_that_was_left_behind_is_computed_again_when_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G4: it has the loss that was recorded before the rewind, to the bit.  The control: the run's own step
    has another.

    A run with --local has no journal: its metrics are compared, and without them it is said that nothing is.
    """
    job = job_of(tmp_path)
    trained(job)
    told = {int(row["step"]): row["loss"] for row in rows_of(Run.find(job))}
    job = job_of(tmp_path, **FAST)
    trained(job, resume=2)
    own = {int(row["step"]): row["loss"] for row in rows_of(Run.find(job))}
    for step in (3, 5):
        assert (
            rerun_here(job, f"{step}.1").now.loss == told[step]
            and rerun_here(job, f"{step}.2").now.loss == own[step]
        )
        assert rerun_here(job, step).now.loss == own[step]
    assert own[5] != told[5] and rerun_here(job, "1.1").now.loss == told[1]
    assert Run.find(job).branches.at(Version(5, 1)).number == 1, (
        "the job of its branch, which has another rate"
    )
    assert rerun_here(job, 5).same and rerun_here(job, "5.1").same

    def said(step: str) -> str:
        (tmp_path / "job.toml").write_text(to_toml(job))
        assert main(["rerun", str(tmp_path / "job.toml"), "--step", step]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert f"step 5: loss {told[5]:.6g}" in (shown := said("5.1"))
    assert f"; the run recorded {told[5]:.6g} and " in shown and shown.endswith(", the same bits"), shown
    for file in (Path(job.bucket) / "run" / "metrics").iterdir():
        file.write_text(file.read_text().replace(json.dumps(told[5]), json.dumps(told[5] * (1 + 2**-50))))
    assert said("5.1").endswith(", other bits"), "a loss that differs in its last bits"
    shutil.rmtree(Path(job.bucket) / "run" / "metrics")
    assert "; nothing is compared, since the bucket has no record of this step" in said("5.1")
    for word, why in {
        "5.7": "--step 5.7: run has had 2 generations so far",
        "4.1": (
            r"checkpoint 3\.1: run has no good checkpoint of this name; `elastic checkpoint ls --name "
            r"run` lists"
        ),
        "4": "no good checkpoint at step 3",
        "x": "--step = 'x' must be a step",
    }.items():
        with pytest.raises(JobError, match=why):
            rerun_here(job, word)


def test_of_many_checkpoints_an_error_names_the_first_the_last_and_their_number(tmp_path: Path) -> None:
    """The control: a few are named one by one."""
    run = Run.open(job_of(tmp_path, steps=20))
    for step in range(2, 21, 2):
        version = Version(step, 1)
        run.commit(version, write(run.checkpoints, version, STATE, 1), ((1, step),), Layout())
        if step == 16:
            with pytest.raises(JobError, match=r"checkpoint: 2, 4, 6, 8, 10, 12, 14, 16$"):
                version_at(run, "3")
    with pytest.raises(
        JobError, match=r"checkpoint: 2 to 20, 10 in all [(]`elastic checkpoint ls` lists them[)]$"
    ):
        version_at(run, "3")


def test_a_run_goes_on_from_what_another_has_left_behind_and_not_from_its_own(tmp_path: Path) -> None:
    """The oracle is a fork that was begun before the rewind.  The control: a fork of the run's own checkpoint
    of that step.
    """
    job = job_of(tmp_path)
    with pytest.raises(JobError, match=r"^--resume 6: there is no run 'run' in bucket"):
        start_of(job, 6)
    trained(job)
    trained(job_of(tmp_path, name="early", steps=8), resume="run@6")
    other = job_of(tmp_path, name="other")
    for at, word, why in (
        (job, "3", "no good checkpoint at step 3 in"),
        (other, "run@3", "no good checkpoint at step 3 in"),
        (other, "run@best", "run has no validation with a finite loss"),
        (other, "nobody@3", "there is no run 'nobody' in bucket"),
    ):
        with pytest.raises(JobError, match=f"^--resume {word}: {why}"):
            start_of(at, word)
    with pytest.raises(JobError, match=r"^init = 'run@3': no good checkpoint at step 3 in"):
        start_of(other.replace(init="run@3"))
    trained(job_of(tmp_path, **FAST), resume=2)
    lines = trained(job_of(tmp_path, name="late", steps=8), resume="run@6.1")
    assert steps_of(lines) == [7, 8] and "late goes on from step 6 of generation 1 of run" in told(lines)
    trained(job_of(tmp_path, name="other", steps=8), resume="run@6")
    early, late, other = (
        exported_hash(job_of(tmp_path, name=name, steps=8)) for name in ("early", "late", "other")
    )
    assert early == late != other
    job = job_of(tmp_path, steps=8, **FAST)
    for word in ("6.1", "run@6.1"):
        with pytest.raises(
            JobError,
            match=(r"run has abandoned step 6 of generation 1, .* --name OTHER --resume run@6.1"),
        ):
            start_of(job, word)
    assert start_of(job, "6.2").at == start_of(job, "run@6").at == Version(6, 2)
    for name, word in (("run", "run@6.7"), ("new", "run@6.7"), ("run", "6.7")):
        with pytest.raises(
            JobError,
            match=(
                r"checkpoint 6\.7: run has no good checkpoint of this name; .* abandoned "
                r"checkpoints of this step: 6\.1"
            ),
        ):
            start_of(job_of(tmp_path, name=name, steps=8), word)


def test_l4_a_line_that_says_best_goes_back_once(tmp_path: Path) -> None:
    """L4: a supervisor starts the same line again and again, while the best validation moves on: with such a
    rate, to step 3 of 4.

    The controls: with another number of steps, or if a step is named, the line goes back; so it does after a
    branch of an older release, which noted no word.
    """
    small = {"model_args": {"vocab": 29, "dim": 8, "layers": 1, "heads": 1}, "checkpoint": {"save_every": 1}}
    job = job_of(tmp_path, steps=2, optim={"lr": 1e-3}, validation={"every": 1, "samples": 4}, **small)
    trained(job)
    job = job.replace(steps=4, optim={"lr": 0.3})
    assert steps_of(trained(job, resume="run@best")) == [3, 4], "the best was at step 2"
    best = checkpoint(run := Run.find(job), "best")
    assert best == Version(3, 2)
    lines = trained(job, resume="run@best")
    assert steps_of(lines) == [] and (
        "branch 2 of run has gone on from run@best, step 2, already, so it goes on from its "
        "newest checkpoint, step 4"
    ) in told(lines)
    assert [(each.number, each.step, each.word) for each in run.branches.every()] == [(2, 2, "best")]
    for other, word in ((job.replace(steps=5), "run@best"), (job, "run@3"), (job, "3")):
        assert start_of(other, word).at == best
    document = Path(tmp_path, "run", "branches", "000002.json")
    about = unseal(document.read_bytes(), "", FORMAT)
    document.write_bytes(seal({name: value for name, value in about.items() if name != "word"}))
    assert start_of(job, "run@best").at == best
