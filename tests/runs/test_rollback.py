"""G2, L5: rolling back a run that diverged, and the tree of the runs of a bucket."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from actors.cli import branch_commands, main
from actors.launch import launch
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.lineage import Lineage
from elastic.runs import branches, forks, resume
from elastic.runs.branches import Origin
from elastic.runs.metrics import rows_of, store_rows
from elastic.runs.run import Run
from elastic.train.checks import preflight
from storage.objects import ObjectStore
from tests import test_objects
from tests.runs.test_forks import STATE, job_of, trained
from tests.storage.states import write
from tests.support.job_file import to_toml


def test_g2_a_run_that_diverged_is_rolled_back_and_recovers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G2: from step 12 on the rate is absurd; `--to auto` finds the last good checkpoint before it by itself,
    and the loss comes back.

    The controls: before the divergence there is nothing to find, and without the roll-back the loss does not
    come back.
    """
    settings = {"steps": 12, "optim": {"lr": 3e-3}}
    trained(job_of(tmp_path, **settings))
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job_of(tmp_path, **settings)))
    assert main(["rollback", str(path), "--to", "auto"]) == 1
    assert "the losses of run do not diverge" in " ".join(capsys.readouterr().out.split())
    absurd = {"steps": 20, "optim": {"lr": 30.0}}
    trained(job_of(tmp_path, **absurd), branch=True)
    run = Run.find(job_of(tmp_path))
    losses = {int(row["step"]): row["loss"] for row in rows_of(run)}
    assert min(losses[step] for step in range(15, 21)) > 2 * losses[12], "it diverged, and did not come back"
    path.write_text(to_toml(job_of(tmp_path, **absurd)))
    assert (
        main(
            ["rollback", str(path), "--steps", "20", "--optim.lr", "30", "--to", "auto", "--lr-scale", "1e-4"]
        )
        == 0
    )
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert (
        "branch 3 of run goes on from step 12: optim.lr = 30.0 before and 0.003 now; it abandons 8 steps, "
        "13 to 20"
    ) in said
    assert f"to go on, run `elastic train {path} --steps 20 --optim.lr 0.003 --local`" in said
    assert main(["train", str(path), "--local", "--optim.lr", "0.003"]) == 0
    rows = {int(row["step"]): row for row in rows_of(run)}
    assert sorted(rows) == [*range(1, 21)] and rows[20]["loss"] < rows[12]["loss"]
    assert [(each.number, each.step) for each in run.branches.every()] == [(2, 12), (3, 12)]
    assert {rows[step]["lr"] for step in rows} == {0.003}
    capsys.readouterr()
    assert main(["runs", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "run: step 20 of 20, Finished" in shown
        and ("branch 3 from step 12: optim.lr = 30.0 → 0.003, abandons 8 steps, 13 to 20") in shown
    )
    assert re.search(r"branch 2 from step 12: .*? → 20 ", shown), (
        "the control: it went on from the newest step, and abandoned none"
    )


@pytest.mark.parametrize(
    ("first", "code", "says"),
    [
        (0, 1, "--to auto: the losses of fork do not diverge"),
        (23, 0, "branch 2 of fork goes on from step 21"),
        (22, 0, "branch 2 of fork goes on from step 20"),
        (
            21,
            0,
            (
                "was forked from step 20 of generation 1 of run, and goes back to that checkpoint, "
                "since it has no earlier one; if it diverges again, "
            ),
        ),
        (
            15,
            1,
            (
                "the losses had diverged by then; fork again from step 13 or an earlier step: "
                "`elastic train JOB --name OTHER --resume run@STEP`"
            ),
        ),
    ],
    ids=("never", "later", "second", "first", "in the origin"),
)
def test_g2_what_diverges_soon_after_a_fork_is_seen_by_the_losses_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int, code: int, says: str
) -> None:
    """G2: the steps of a fork alone are too few to say what is usual.  ``first`` is the first step with a
    strange loss.

    The judge is one run of these losses: where it is rolled back to, so is the fork, if it has a checkpoint
    there.
    """

    def made(name: str, last: int, generation: int, since: int, lineage: Lineage) -> Run:
        run = Run.find(job_of(tmp_path, name, 30))
        losses = {
            step: 40.0 + step if 0 < first <= step else 2.0 + step % 3 / 100
            for step in range(since, last + 1)
        }
        row = {"generation": generation, "time": 0.0, "norm": 1.0}
        store_rows(run.store, name, [{"step": step, "loss": loss, **row} for step, loss in losses.items()])
        for version in (Version(step, generation) for step in losses if step >= 20):
            run.commit(
                version,
                write(run.checkpoints, version, STATE, 1),
                (*lineage, (generation, version.step)),
                Layout(),
            )
        run.claim("local")
        return run

    Run.open(job_of(tmp_path, steps=30))
    run = made("run", 20, 1, 1, ())
    forks.begin(run.store, job_of(tmp_path, "fork", 30), Origin("run", Version(20, 1)), {})
    made("fork", 26, 2, 21, ((1, 20),))
    (path := tmp_path / "fork.toml").write_text(to_toml(job_of(tmp_path, "fork", 30)))
    assert main(["rollback", str(path), "--to", "auto", "--lr-scale", "0.5"]) == code
    assert says.replace("JOB", str(path)) in " ".join(capsys.readouterr().out.split())
    fork = Run.find(job_of(tmp_path, "fork"))
    assert [each.step for each in fork.branches.every()] == ([] if code else [max(first - 2, 20)])
    if not code and first > 21:
        made("run", 26, 1, 21, ())
        assert branch_commands.before_divergence(Run.find(job_of(tmp_path))).step == first - 2


def test_g2_the_line_that_a_roll_back_prints_goes_on_with_the_branch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G2: it has options for all in which the file and the line differ from the branch.  The control: without
    them `train` refuses.

    What no option can say is named.
    """
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job_of(tmp_path / "bucket", steps=4)))
    assert main(["train", str(path), "--local"]) == 0
    other = ["--optim.lr", "0.02", "--optim.betas", "0.8", "0.9", "--reproducible", "--steps", "6"]
    assert main(["train", str(path), "--local", "--branch", *other]) == 0
    capsys.readouterr()
    assert main(["rollback", str(path), "--steps", "5", "--to", "4"]) == 0
    line = re.search("to go on, run `elastic (train .*)`", capsys.readouterr().out)
    begun = Run.find(job_of(tmp_path / "bucket")).branches.job()
    assert begun["checkpoint"]["save_every"] == 2, "the free settings are those of the file"
    assert (
        line is not None
        and "--optim.lr 0.02" in line[1]
        and "--steps 6" in line[1]
        and "--steps 5" not in line[1]
    )
    assert (
        main(["train", str(path), "--local"]) == 1
        and "optim.lr = 0.02 in the run and 0.01 now" in capsys.readouterr().out
    )
    assert main([*shlex.split(line[1]), "--local"]) == 0 and Run.find(
        job_of(tmp_path / "bucket")
    ).job.optim.betas == (0.8, 0.9)
    path.write_text(
        to_toml(
            job_of(
                tmp_path / "bucket", steps=6, optim={"lr": 0.02, "betas": [0.8, 0.9]}, data={"weights": [1.0]}
            )
        )
    )
    capsys.readouterr()
    assert main(["rollback", str(path), "--to", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "to go on, change job.toml (data.dataset = " in said and said.endswith(
        f"data.weights = []), and run `elastic train {path} --local`"
    )


def guarded(step: int, steps: int, token: str) -> float:
    """A schedule that is looked up with a token."""
    return 1.0


def test_g2_a_roll_back_and_a_branch_show_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G2: the line to paste has the option without its value.  The control: the learning rate is shown.

    The run is one of an older release, which did not refuse a secret that stands in the job.
    """
    monkeypatch.setattr(preflight, "_check_secrets", lambda job: [])
    path = tmp_path / "job.toml"
    schedule = {"kind": "tests.runs.test_rollback:guarded", "args": {"token": "hush"}}
    path.write_text(to_toml(job_of(tmp_path / "bucket", steps=4, schedule=schedule)))
    assert main(["train", str(path), "--local"]) == 0
    other = ["--schedule.args.token", "hushed", "--optim.lr", "0.02", "--steps", "6"]
    said = ""
    for code, line in (
        (1, ["train", str(path), "--local", *other]),
        (0, ["train", str(path), "--local", "--branch", *other]),
        (0, ["rollback", str(path), "--to", "4"]),
        (0, ["runs", str(path)]),
    ):
        assert main(line) == code
        said += " ".join(capsys.readouterr().out.split())
    name, hidden = "schedule.args.token", "(not shown)"
    assert (
        f"{name} = {hidden} in the run and {hidden} now" in said
        and (f"{name} = {hidden} before and {hidden} now") in said
    )
    assert (
        f"{name} = {hidden} → {hidden}" in said and "optim.lr = 0.01 → 0.02" in said and "hush" not in said
    ), said
    hint = re.search(
        (rf"to go on, run `elastic train {path}( [^`]*)` [(]write ([^`]*) into job[.]toml, too[)]"),
        said,
    )
    assert (
        hint is not None
        and f" --{name}" in hint[1]
        and " --optim.lr 0.02" in hint[1]
        and f"{name} = {hidden}" in hint[2]
    ), said


def test_g2_the_run_of_a_notebook_goes_on_there_after_a_roll_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G2: the sentence has what must be the same, also from earlier branches.  The control: with other
    settings `launch` refuses.
    """
    objects = test_objects.cell()

    def notebook(**settings: Any) -> Job:
        return test_objects.job_of(tmp_path, objects, checkpoint={"save_every": 2}, **settings)

    path = tmp_path / "job.toml"
    path.write_text(f"name = {notebook().name!r}\nbucket = {notebook().bucket!r}\n")
    assert launch(notebook(steps=4), local=True).state == "Finished"
    assert launch(notebook(steps=6), local=True, branch=True).state == "Finished"
    rate = notebook().optim.lr
    capsys.readouterr()
    assert main(["rollback", str(path), "--to", "4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "call launch(Job(...)) with steps = 6, in the script or notebook that defines the job's "
        "objects (object:build, "
    ) in said
    assert "elastic train" not in said
    begun = Run.find(notebook()).branches.job()
    assert begun["checkpoint"]["save_every"] == 2, (
        "the file names no free settings, so they are those of before"
    )
    assert main(["rollback", str(path), "--to", "2", "--lr-scale", "0.5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"to go on, call launch(Job(...)) with steps = 6, optim.lr = {rate / 2!r}, in the script" in said
    with pytest.raises(JobError, match=r"optim\.lr = "):
        launch(notebook(steps=6), local=True)
    assert launch(notebook(steps=6, optim={"lr": rate / 2}), local=True).state == "Finished"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "soon"], "--to = 'soon' must be a step, or 'auto'"),
        (["--to", "3"], "no good checkpoint at step 3"),
        (["--to", "2", "--lr-scale", "0"], "--lr-scale = 0 must be more than 0"),
    ],
    ids=str,
)
def test_a_roll_back_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    run = Run.open(job_of(tmp_path))
    run.commit(Version(2, 1), write(run.checkpoints, Version(2, 1), STATE, 1), ((1, 2),), Layout())
    run.claim("local")
    path = tmp_path / "job.toml"
    path.write_text(to_toml(run.job))
    assert main(["rollback", str(path), *words]) == 1
    assert says.replace("JOB", str(path)) in " ".join(capsys.readouterr().out.split())
    assert run.branches.every() == []


def test_what_was_abandoned_is_told_by_each_command_that_meets_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of gc add up to what ls lists, and what it advises deletes the abandoned ones and no
    others.

    The controls: before the roll-back nothing is abandoned, and `--resume STEP` says what it abandons, too.
    """
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job := job_of(tmp_path / "bucket", steps=8)))

    def said(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(path) if word == "JOB" else word for word in words]) == code
        return " ".join(capsys.readouterr().out.split())

    said("train", "JOB", "--local")
    dry = ("checkpoint", "gc", "JOB", "--dry-run")
    assert said(*dry) == "0 would be deleted, 4 kept; checkpoint.keep_last = 0 keeps all complete checkpoints"
    assert "goes on from step 0: its settings stay; it abandons 8 steps, 1 to 8" in said(
        "rollback", "JOB", "--to", "0"
    )
    assert "except abandoned ones: step 6 of generation 1 (--step 6.1)" in said(
        "checkpoint", "rm", "JOB", "--step", "6", code=1
    )
    assert "makes the steps 1 to 8, and its newest checkpoint is of step 0" in said(
        "rerun", "JOB", "--step", "1000", code=1
    )
    assert "no good checkpoint at step 6" in (refused := said("rollback", "JOB", "--to", "6", code=1))
    assert refused.endswith("steps with a good checkpoint: none; abandoned checkpoints of this step: 6.1"), (
        refused
    )
    said("train", "JOB", "--local")
    assert "goes on from step 6: its settings stay; it abandons 2 steps, 7 to 8" in said(
        "train", "JOB", "--local", "--resume", "6"
    )
    told = said(*dry)
    run = Run.find(job)
    good, there = [each.step for each in resume.saved(run)], len(run.checkpoints.versions())
    numbers = [
        int(number)
        for number in re.findall(
            r"(\d+) (?:would be deleted|kept|checkpoints of abandoned branches, steps)", told
        )
    ]
    assert good == [2, 4, 6, 8] and numbers == [0, 4, 5] and sum(numbers) == there, told
    fix = f"`elastic checkpoint gc {path} --checkpoint.keep-last 4` deletes"
    assert f"checkpoints of abandoned branches, steps 2 to 8: nothing goes on from them; {fix}" in told
    said("checkpoint", "gc", "JOB", "--checkpoint.keep-last", "4")
    assert (
        [each.version.step for each in run.checkpoints.versions()]
        == good
        == [each.step for each in resume.saved(run)]
    )
    assert said(*dry) == "0 would be deleted, 4 kept; checkpoint.keep_last = 0 keeps all complete checkpoints"
    said("rollback", "JOB", "--to", "2")
    told = said(*dry)
    assert (
        "0 would be deleted, 1 kept" in told
        and "also there: 2 checkpoints of abandoned branches, steps 4 to 8" in told
    )
    assert (
        "also there: 1 checkpoints of abandoned branches, which stay because a later branch or a fork "
        "goes on from them"
    ) in told, "step 6, of branch 3"


def test_l5_the_runs_of_a_bucket_are_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: branches below their run, forks and warm starts below the branch that they come from, and what
    cannot be read says so.
    """
    store, run = ObjectStore.open(str(tmp_path)), Run.open(job_of(tmp_path))
    for step in (2, 4):
        run.commit(
            Version(step, 1), write(run.checkpoints, Version(step, 1), STATE, 1), ((1, step),), Layout()
        )
    branches.begin(run.branches, job_of(tmp_path, steps=9), run.job, Version(4, 1), time.time() - 7200)
    forks.begin(store, job_of(tmp_path, "fork"), Origin("run", Version(2, 1)), {})
    forks.begin(store, job_of(tmp_path, "child"), Origin("fork", Version(2, 1)), {})
    Run.open(job_of(tmp_path, "warm", init="run@4.1"))
    run.commit(Version(8, 2), write(run.checkpoints, Version(8, 2), STATE, 1), ((1, 4), (2, 8)), Layout())
    forks.begin(store, job_of(tmp_path, "later", steps=9), Origin("run", Version(8, 2)), {})
    Run.open(job_of(tmp_path, "after", init="run@8.2"))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "job.json").write_text('{"job": {"steps": "many"}}')
    said: list[str] = []
    monkeypatch.setattr(branch_commands, "say", said.append)
    assert main(["runs", str(tmp_path)]) == 0
    assert [line for line in said if not line.startswith("odd")] == [
        "run: step 8 of 9, not finished, 2 hours ago",
        "    child: step 2 of 6, not finished, from step 2 of generation 1 of run",
        "    fork: step 2 of 6, not finished, from step 2 of generation 1 of run",
        "    warm: step 0 of 6, not finished, with the weights of run@4.1",
        "  branch 2 from step 4: steps = 6 → 9",
        "    after: step 0 of 6, not finished, with the weights of run@8.2",
        "    later: step 8 of 9, not finished, from step 8 of generation 2 of run",
    ]
    assert any(line.startswith("odd: cannot be read: ") for line in said)
    (tmp_path / "job.toml").write_text(to_toml(job_of(tmp_path)))
    all_, one = list(said), [line for line in said if not line.startswith("odd")]
    for name in ("run", "child", "later"):
        said.clear()
        assert main(["runs", str(tmp_path / "job.toml"), "--name", name]) == 0 and said == one != all_
    said.clear()
    assert (
        main(["runs", str(tmp_path), "--name", "nobody"])
        == 1
        == main(["runs", str(tmp_path), "--nane", "run"])
        and not said
    )
    assert main(["runs", str(tmp_path / "empty")]) == 1
