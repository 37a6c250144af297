"""L4: two commands for one run at once.  Neither takes from the run what the other one counts on."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.launch import launch
from elastic.control.run import Stopped
from elastic.errors import JobError, Refused
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.report.story import Line, StepLine
from elastic.runs import alone, resume
from elastic.runs.begin import begin
from elastic.runs.resume import StartPoint
from elastic.runs.run import LOCAL, Run
from elastic.train.alone import local
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from tests.control.play import stepping
from tests.runs.test_forks import STATE, job_of, told, trained
from tests.runs.test_runs import Life, end_as
from tests.storage.states import write
from tests.support.job_file import to_toml
from tests.support.stores import Forwarding

pytestmark = pytest.mark.fast
OLDER = Version(2, 1)
Claims = Callable[[Run, int], int]


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Job, str]:
    """A run that finished at step 6, with checkpoints at 2, 4 and 6, and its job file."""
    run = Run.open(job := job_of(tmp_path / "bucket"))
    run.claim("local")
    for step in (2, 4, 6):
        run.commit(
            Version(step, 1), write(run.checkpoints, Version(step, 1), STATE, 1), ((1, step),), Layout()
        )
    (tmp_path / "job.toml").write_text(to_toml(job))
    return job, str(tmp_path / "job.toml")


def saved(job: Job) -> list[int]:
    return [each.step for each in resume.saved(Run.find(job))]


def resumed(job: Job, file: str, claims: Claims) -> int:
    """Goes on from step 2, as `train --resume 2` on a cluster does, which claims the run late.  Returns its
    exit code.
    """
    try:
        begin(StartPoint(job, at=OLDER), lambda line: print(line.text), True, claims)
    except JobError as error:
        print(error)
        return error.exit_code
    return 0


def rolled_back(job: Job, file: str, claims: Claims) -> int:
    """Rolls the run back to step 2.  The command looks at it, claims it, and begins the branch.  Returns its
    exit code.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "claim_here", lambda run, after, **more: claims(run, after))
        return main(["rollback", file, "--to", "2"])


@pytest.mark.parametrize("goes_back", [resumed, rolled_back])
@pytest.mark.parametrize("deleted", ["marked", "removed", "the control: another step"])
def test_l4_no_branch_goes_on_from_a_checkpoint_that_was_deleted_meanwhile(
    finished: tuple[Job, str], capsys: pytest.CaptureFixture[str], goes_back: Callable[..., int], deleted: str
) -> None:
    """L4: the command has found step 2, and another one deletes it before the claim.  The run stays finished,
    with its later steps.
    """
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
    assert ("another command has just begun to delete step 2 of generation 1 of run" in said) != there
    assert saved(job) == ([2] if there else [4, 6])
    assert len(Run.find(job).branches.every()) == (1 if there else 0)


def test_l4_a_mark_that_comes_after_the_claim_of_a_branch_is_taken_back(
    finished: tuple[Job, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L4: the claim and the look at step 2 fall between what `rm` reads and what it writes.  The branch keeps
    its beginning.

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
    assert "another command has just started run" in " ".join(capsys.readouterr().out.split())
    assert saved(job) == [2] and Run.find(job).newest() == OLDER


# ---- a process of another machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Moves this process to a machine of another name."""
    return lambda name: monkeypatch.setattr(platform, "node", lambda: name)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Returns the exit code of a command, and what it said."""
    capsys.readouterr()
    code = main([*words])
    return code, " ".join(capsys.readouterr().out.split())


COMMANDS = (
    ("checkpoint", "rm", "JOB", "--step", "2"),
    ("checkpoint", "gc", "JOB"),
    ("rollback", "JOB", "--to", "2"),
)


def test_l4_a_run_that_lives_on_another_machine_is_left_alone(
    tmp_path: Path, machine: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """L4: commands of host B, while host A is after step 5 of 8: none does anything without --force, and the
    run is trained to its end.

    The control: once it has told its end, each of them does what it is asked.
    """
    job, file, found = (
        job_of(tmp_path / "bucket", steps=8),
        str(tmp_path / "job.toml"),
        list[tuple[int, str]](),
    )
    Path(file).write_text(to_toml(job))
    machine("host-a")

    def show(line: object) -> None:
        if isinstance(line, StepLine) and line.step == 5:
            machine("host-b")
            for words in (*COMMANDS, ("status", "JOB", "--once"), ("stop", "JOB")):
                found.append(said(capsys, *(file if word == "JOB" else word for word in words)))
            machine("host-a")

    assert launch(job, local=True, show=show).state == "Finished"
    assert [code for code, _ in found] == [2, 2, 2, 0, 2]
    for _, text in found:
        assert re.search(
            (
                r"run was started with --local on host host-a at \d{4}-\S+ \S+, and the bucket does "
                r"not say that it has ended; if it still runs, end it there"
            ),
            text,
        )
    assert all("if you know that it does not run, use --force" in text for _, text in found[:3]) and saved(
        job
    ) == [2, 4, 6, 8]
    machine("host-b")
    assert [said(capsys, *(file if word == "JOB" else word for word in words))[0] for words in COMMANDS] == [
        0,
        0,
        1,
    ]
    assert saved(job) == [4, 6, 8], "and there is no step 2 any more"


@pytest.mark.parametrize(
    "how", ["Ctrl-C", "a fault of the job", "killed", "killed, and --force", "killed, on the same machine"]
)
def test_l4_a_run_that_ended_on_another_machine(
    tmp_path: Path, machine: Callable[[str], None], capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """L4: a process that could say so has left its end.  The controls: one that was killed has not, but its
    own machine knows it.
    """
    job, file = job_of(tmp_path / "bucket", steps=8), str(tmp_path / "job.toml")
    Path(file).write_text(to_toml(job))
    machine("host-a")
    kill = how.startswith("killed")

    def show(line: object) -> None:
        if isinstance(line, StepLine) and line.step == 5:
            raise JobError("the loss is a word") if how.startswith("a fault") else KeyboardInterrupt

    if how == "Ctrl-C":
        assert launch(job, local=True, show=show).state == "Stopped"
    elif not kill:
        with pytest.raises(JobError):
            launch(job, local=True, show=show)
    else:
        assert launch(job, local=True, show=show).state == "Stopped"
        shutil.rmtree(tmp_path / "bucket" / "run" / "ends")
    machine("host-a" if how.endswith("machine") else "host-b")
    _, text = said(capsys, "status", file, "--once")
    ends = {
        "Ctrl-C": "it ended as Stopped (Ctrl-C; saved at step 5)",
        "a fault of the job": "it ended as Failed (the loss is a word)",
    }
    lost = how in ("killed", "killed, and --force")
    assert (
        ends.get(
            how,
            "the bucket does not say that it has ended"
            if lost
            else (
                "run is not running; newest good checkpoint: step 5 of generation 1, of 8 steps; no end was "
                "recorded (it was killed, or its last save failed): the same command line goes on from there"
            ),
        )
        in text
    )
    force = ["--force"] if how.endswith("--force") else []
    code, _ = said(capsys, "checkpoint", "rm", file, "--step", "2", *force)
    assert code == (2 if lost and not force else 0) and (2 in saved(job)) == (code == 2)


def test_l4_a_roll_back_is_no_training(
    finished: tuple[Job, str], machine: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """L4: nothing lives after it, so commands of another machine need no --force.  The control: a claim of a
    process that trains.
    """
    job, file = finished
    assert said(capsys, "rollback", file, "--to", "4")[0] == 0
    machine("host-b")
    assert said(capsys, "rollback", file, "--to", "2")[0] == 0 and saved(job) == [2]
    Run.find(job).claim_here()
    machine("host-c")
    assert said(capsys, "rollback", file, "--to", "0")[0] == 2 and saved(job) == [2]


def test_l4_a_process_that_has_rolled_the_run_back_may_live_on(
    finished: tuple[Job, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """L4: a notebook lives on after its roll-back, and then the run can be trained.  Until the branch is
    begun, a command that trains is refused, and says why.

    The control: a process that trains.
    """
    job, file = finished
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as other:
        its = f"process {other.pid} of this machine"
        about = {"life": alone.life_of(other.pid), "at": 0.0}
        claimed = Run.find(job).claim(LOCAL, **about, trains=False)
        with pytest.raises(JobError, match=f"{its} rolls this run back; wait for its end"):
            Run.find(job).claim_here()
        assert f"run is being rolled back by {its}" in said(capsys, "status", file, "--once")[1]
        resume.rewind(Run.look(job, branch=True), 0.0, OLDER, claimed)
        assert Run.find(job).claim_here() == claimed + 1
        Run.find(job).claim(LOCAL, **about, trains=True)
        with pytest.raises(JobError, match=re.escape(f"{its} trains this run (--local)")):
            Run.find(job).claim_here()
        other.communicate()


def test_l4_a_command_that_trains_goes_past_a_process_of_another_machine(
    tmp_path: Path, machine: Callable[[str], None]
) -> None:
    """L4: it says so.  The first process ends before its next save, as it does beside another command of its
    own machine.
    """
    job, lines = job_of(tmp_path / "bucket"), list[Line]()
    machine("host-a")

    def show(line: Line) -> None:
        if isinstance(line, StepLine) and line.step == 3:
            machine("host-b")
            begin(StartPoint(job), lines.append, False, lambda run, seen: 0)
            assert Run.open(job).claim_here() == 2
            machine("host-a")

    with pytest.raises(Refused, match="another command has taken this run over"):
        launch(job, local=True, show=show)
    assert len(lines) == 1 and lines[0].text.startswith("run was started with --local on host host-a at ")
    assert lines[0].text.endswith(
        "if it still trains there, it saves nothing more and ends at its next save"
    ) and saved(job) == [2]
    machine("host-b")
    assert "--local" not in told(trained(job)), "the control: one of this machine, which can be seen"
    machine("host-c")
    assert "--local" not in told(trained(job)) and saved(job) == [2, 4, 6], (
        "another control: it has told its end"
    )


def test_l4_a_process_whose_run_was_deleted_and_begun_anew_writes_nothing_there(tmp_path: Path) -> None:
    """L4: the new run has a claim of the same number.  The process neither saves into it nor says that it has
    ended.
    """
    job = job_of(tmp_path / "bucket")

    def show(line: Line) -> None:
        if isinstance(line, StepLine) and line.step == 3:
            shutil.rmtree(tmp_path / "bucket" / "run")
            assert Run.open(job.replace(seed=9)).claim(LOCAL, "another life") == 1

    with pytest.raises(Refused, match="another command has taken this run over"):
        launch(job, local=True, show=show)
    there = Run.find(job.replace(seed=9))
    assert (
        saved(job.replace(seed=9)) == []
        and there.end() is None
        and not [*(tmp_path / "bucket").rglob("ends/*")]
    )


@pytest.mark.parametrize(
    "when", ["while it writes the shard", "after its last look at the claims", "the control: never"]
)
def test_l4_what_a_process_of_another_machine_saves_after_a_roll_back_does_not_count(
    tmp_path: Path,
    machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
) -> None:
    """L4: the process goes on from step 4 in a generation of which the bucket knows nothing, and is in the
    middle of its first save.

    Meanwhile another machine takes it for dead and rolls the run back to step 2, with another rate.  The run
    goes on from there.
    """
    job, file = job_of(tmp_path / "bucket", steps=4), str(tmp_path / "job.toml")
    trained(job)
    job = job.replace(steps=6)
    Path(file).write_text(to_toml(job))
    machine("host-a")
    write_shard, commit = local.save_here, Run.commit

    def rolls_back(*_: object) -> None:
        machine("host-b")
        assert said(capsys, "rollback", file, "--to", "2", "--lr-scale", "0.1", "--force")[0] == 0
        machine("host-a")

    def after(first: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: (first(*args, **more), rolls_back())[0]

    def before(then: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: (rolls_back(), then(*args, **more))[1]

    if when.startswith("while"):
        monkeypatch.setattr(local, "save_here", after(write_shard))
    elif when.startswith("after"):
        monkeypatch.setattr(Run, "commit", before(commit))
    if when.startswith("while"):
        with pytest.raises(
            Refused,
            match=(
                r"another command has taken this run over .*: step 6 of "
                r"generation 2 is not saved"
            ),
        ):
            launch(job, local=True, branch=True, show=lambda line: None)
    else:
        assert launch(job, local=True, branch=True, show=lambda line: None).step == 6
    monkeypatch.setattr(local, "save_here", write_shard)
    monkeypatch.setattr(Run, "commit", commit)
    machine("host-b")
    wrote = [each.version for each in Run.find(job).checkpoints.at(6) if each.manifest is not None]
    assert wrote == ([] if when.startswith("while") else [Version(6, 2)])
    if when.startswith("the control"):
        assert Run.find(job).newest() == Version(6, 2)
        return
    assert Run.find(job).newest() == OLDER
    lines = trained(job.replace(optim={"lr": job.optim.lr * 0.1}))
    assert [line.step for line in lines if isinstance(line, StepLine)] == [3, 4, 5, 6]


@pytest.mark.parametrize("host", ["host-b", "the control: host-a"])
def test_l4_a_generation_of_a_process_that_cannot_be_seen_is_not_used_again(
    tmp_path: Path, machine: Callable[[str], None], host: str
) -> None:
    """L4: both would write the same step of the same generation.  The control: a process of this machine that
    is not there has died.
    """
    run = Run.open(job_of(tmp_path))
    run.commit(OLDER, write(run.checkpoints, OLDER, STATE, 1), ((1, 2),), Layout())
    machine("host-a")
    its = run.state(run.claim_here(), 0.0).next_generation
    machine(host.removeprefix("the control: "))
    later = [run.state(run.claim_here(), 0.0).next_generation for _ in range(2)]
    assert its == 2 and (later == [2, 2]) == host.startswith("the control")
    assert host.startswith("the control") or its < later[0] < later[1]
    assert run.state().next_generation == 2, "a reader skips none"
    changed = Run.look(run.job.replace(seed=9), branch=True)
    resume.rewind(changed, 0.0, OLDER, changed.claim_here(trains=False))
    after = [changed.state(changed.claim_here(), 0.0).next_generation for _ in range(2)]
    assert host.startswith("the control") or later[1] < after[0] < after[1], (
        "also after a roll-back, which ends at a number of its own"
    )


class Counting(Forwarding):
    """A store that notes what is read, and what is listed."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.asked = list[str]()

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        self.asked.append(key)
        return super().get(key, start, stop)

    def list(self, prefix: str = "") -> list[str]:
        self.asked.append(prefix)
        return super().list(prefix)


@pytest.mark.parametrize("lives", [True, False], ids=["one lives", "the control: all have ended"])
def test_l4_a_start_reads_no_more_claims_of_a_run_that_was_started_a_hundred_times(
    tmp_path: Path, machine: Callable[[str], None], lives: bool
) -> None:
    """L4: the first forty claims are of before the last coordinator that recorded anything, which has skipped
    what they may use.

    Of the sixty after it, one is of a process of another machine that may live, in the middle; the others
    have told their end.
    """
    run = Run.open(job_of(tmp_path))
    run.store = counting = Counting(run.store)
    machine("host-a")
    for _ in range(40):
        run.claim_here()
    life = Life(run, tmp_path / "disk", stepping(2))
    life.play.run = replace(life.play.run, incarnation=life.incarnation)
    life.step(1)
    end_as(life, Stopped("Ctrl-C"))
    for each in range(60):
        claimed = run.claim_here()
        if not lives or each != 30:
            alone.EndWriter(run.store, run.job.name, claimed, Stopped("Ctrl-C")).write()
    machine("host-b")
    last = run.last_recorded()
    assert last is not None and last.incarnation == 41, "of the first forty nobody knows anything"

    def asked_by(call: Callable[[], object]) -> list[str]:
        counting.asked.clear()
        call()
        return [key for key in counting.asked if "/owner/" in key or "/ends/" in key]

    seen = run.claim("10.0.0.1:6379")
    its = run.claim("10.0.0.1:6379", "life", "node")
    skipped = run.state(its, 0.0).generation - run.state().generation
    assert skipped == (its if lives else 0)
    asked = asked_by(lambda: run.state(its, 0.0))
    assert len(asked) <= (6 if lives else 4), asked
    assert len(asked_by(lambda: run.claims("life", seen))) <= 4 and run.claims("life", seen) == {its: "node"}
    later = run.claim("10.0.0.1:6379", "life", "node")
    assert len(asked_by(lambda: run.follows(its))) <= 3 and run.follows(its) == later
