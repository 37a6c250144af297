"""Errors of the job itself, processes that crash, and what they leave to read."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.launch import launch
from actors.result import Result
from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from tests.support.chaos import Trial, assert_nothing_left, exported_hash, samples, trial
from tests.support.commands import assert_no_actor_left, user_job, user_package
from tests.support.job_file import to_toml
from tests.support.toys import LIGHT, toy_job
from tests.train.test_samples import deadly

STEPS = 12


def job_of(bucket: Path, name: str, *faults: dict[str, Any], **changes: Any) -> Job:
    data = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.01}}
    return toy_job(bucket, name=name, steps=STEPS, data=data, faults=list(faults), **changes)


@pytest.fixture(scope="module")
def undisturbed_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    job = job_of(tmp_path_factory.mktemp("local"), "local")
    assert run_local(job, lambda line: None)[0] == "Finished"
    return exported_hash(job)


def assert_nothing_lost(chaos: Trial, undisturbed_hash: str) -> None:
    """Checks the bits, that each step counts once, and that at most the step in flight was computed a second
    time.
    """
    assert chaos.result.state == "Finished", chaos.result
    assert chaos.hash == undisturbed_hash
    assert [step for step, _ in samples(chaos.ledger)] == list(range(1, STEPS + 1))
    assert chaos.witness.total("microbatches_run") <= (STEPS + 1) * chaos.job.microbatches
    assert chaos.witness.total("healed_bucket_bytes") == 0
    assert_nothing_left(chaos)


def test_an_error_that_always_comes_back_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R20, U10: one retry on another worker, then the user's own traceback, with the samples that it is
    about.
    """
    user_package(tmp_path, "poison")
    monkeypatch.syspath_prepend(tmp_path)
    clean = user_job(tmp_path, "poison")
    ids = Cursor(96, clean.global_batch, clean.seed, clean.data.sampling).microbatch_ids(
        3, 5, clean.microbatch
    )
    job = user_job(tmp_path, "poison", data={"dataset": "poison.code:Walks", "args": {"poisoned": ids[0]}})

    assert main(["train", str(tmp_path / "job.toml")]) == 1

    shown = capsys.readouterr().out
    told = shown[shown.index("step 3, microbatch 5") :]
    assert (
        told.index(str(list(ids)))
        < told.index("Traceback")
        < told.index("ValueError: this model cannot read the word 28")
    )
    assert told.index("ValueError") < told.index("Failed at step 2 of 16: ")
    assert f'{tmp_path}/poison/code.py", line' in told
    events = [record["event"] for record in Run.open(job).records()]
    broken = [event for event in events if event["$"] == "Broken" and event["cause"] == "job"]
    assert [each["generation"] for each in broken] == [1, 2], "exactly one retry"
    assert len({each["worker"] for each in broken}) == 2, "on a second worker"
    assert_no_actor_left("poison")

    assert main(["logs", str(tmp_path / "job.toml")]) == 0
    logs = capsys.readouterr().out
    assert logs.count("ValueError: this model cannot read the word 28") == 2
    assert logs.count("exited with code") == 2


@pytest.mark.full  # the scripts of test_kill_points have such errors too
def test_an_error_that_comes_once_is_survived_in_place(tmp_path: Path, undisturbed_hash: str) -> None:
    """R20, R1: an exception in the forward pass; the same two processes go on, and no step is lost."""
    chaos = trial(
        job_of(tmp_path, "one-off", {"kind": "exception", "point": "forward", "step": 5, "world_rank": 1})
    )
    assert_nothing_lost(chaos, undisturbed_hash)
    assert sorted(chaos.witness.seen) == ["w1", "w2"]
    assert all(seen.ended is not None and seen.ended.exit_code == 0 for seen in chaos.witness.seen.values())
    assert chaos.witness.generation == 2
    assert any("InjectedError" in line.text for line in chaos.lines if isinstance(line, Sentence))


@pytest.mark.full  # in test_kill_points.py one of many faults is such a crash, whose log is read
def test_a_crash_leaves_its_traceback(
    tmp_path: Path, undisturbed_hash: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """R1, U10: a segmentation fault; the log names the signal and the line of Python, and stays in the
    bucket.
    """
    chaos = trial(
        job_of(tmp_path, "segv", {"kind": "SIGSEGV", "point": "backward", "step": 5, "world_rank": 1})
    )
    assert_nothing_lost(chaos, undisturbed_hash)
    (crashed,) = chaos.witness.killed(by=signal.SIGSEGV)
    assert 0 < crashed.final["step"] < STEPS - 1

    (tmp_path / "job.toml").write_text(to_toml(chaos.job))
    assert main(["logs", str(tmp_path / "job.toml"), crashed.worker]) == 0
    log = capsys.readouterr().out
    assert "killed by signal 11 (SIGSEGV)" in log
    assert "Fatal Python error: Segmentation fault" in log and "in strike" in log and "in _backward" in log
    assert main(["logs", str(tmp_path / "job.toml"), "w99"]) == 1, "nobody of that name"


@pytest.mark.full  # the short run has a hang in test_hangs
def test_a_worker_that_hangs_is_expelled(tmp_path: Path, undisturbed_hash: str) -> None:
    """R1: a worker gets SIGSTOP, so its sockets stay open and nobody is told; it is named, expelled and
    replaced.

    The other replica loses nothing.
    """
    fault = {"kind": "SIGSTOP", "point": "backward", "step": 5, "world_rank": 1}
    chaos = trial(job_of(tmp_path, "hang", fault, deadlines={"stall_s": 2, "fence_s": 2}))
    assert_nothing_lost(chaos, undisturbed_hash)
    hung = chaos.witness.killed()[0]
    (survivor,) = {"w1", "w2"} - {hung.worker}
    assert chaos.witness.seen[survivor].final["updates_applied"] == STEPS
    told = " ".join(line.text for line in chaos.lines if isinstance(line, Sentence))
    assert f"expel {hung.worker}" in told and "start w3" in told


def test_a_result_without_a_traceback_is_the_platforms(tmp_path: Path) -> None:
    """The exit code depends on whose error it was, not on the words of the reason."""
    job = job_of(tmp_path, "codes")
    ends: list[Result] = [
        Result.of(job, "Failed", "job error: in words only", 1),
        Result.of(job, "Failed", "anything", 1, "Traceback"),
    ]
    assert [end.exit_code for end in ends] == [2, 1]


def test_samples_that_end_a_worker_are_named(tmp_path: Path) -> None:
    """U10: the process of a worker exits in ``read``, and another one goes on."""
    said, job = list[str](), deadly(tmp_path, "exits", workers={"max": 1})
    assert launch(job, show=lambda line: said.append(str(line))).state == "Finished"
    (line,) = [each for each in said if " while it read " in each]
    ids = list(Cursor(48, 12, 0).microbatch_ids(3, 0, 2))
    assert re.search(
        (
            rf"w1 (exited with code 3|ended) while it read samples {re.escape(str(ids))} of "
            r"data\.dataset: read these"
        ),
        line,
    )


def test_l9_a_loss_that_returns_a_mean_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L9: the worker tries it before it joins, and the run ends as the job's fault; no world is formed."""
    job = toy_job(
        tmp_path, name="mean", loss="tests.train.test_contract:mean_and_one", workers={"max": 1}, **LIGHT
    )
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["train", str(tmp_path / "job.toml")]) == 1
    shown = capsys.readouterr().out
    assert (
        "loss = 'tests.train.test_contract:mean_and_one': for 4 samples it returns the count 1, but "
        "the two halves have the counts 1 and 1"
    ) in shown
    assert "two scalars, the sum over the terms of the microbatch and their number, not a mean" in shown
    assert (
        "form generation" not in shown and "Traceback" not in shown and "a Ray cluster starts" not in shown
    ), "there is one already"
    assert_no_actor_left("mean")


@pytest.mark.parametrize("trial", [True, pytest.param(False, marks=pytest.mark.full)])
def test_u1_a_trial_refuses_before_a_world_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trial: bool
) -> None:
    """U1: what a model keeps from one microbatch to the next ends a new run as the job's fault, by name.  The
    control has no trial.
    """
    job = toy_job(
        tmp_path,
        name="kept",
        model="tests.train.test_trial:CountingOwn",
        model_args={},
        steps=2,
        trial=trial,
        workers={"max": 2},
    )
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["train", str(tmp_path / "job.toml")]) == trial
    shown = capsys.readouterr().out
    said = "forward or the loss changes 'calls' of 'tests.train.test_trial:CountingOwn' with each microbatch"
    assert ("form generation" not in shown) is (said in shown) is trial and "Traceback" not in shown
    assert_no_actor_left("kept")


@pytest.mark.parametrize("kind", ["teacher", pytest.param("swapped", marks=pytest.mark.full)])
def test_members_that_run_unlike_blocks_end_the_run_with_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """R20, C4: members wait for each other, or reach the commit with unlike blocks.  After one retry the run
    ends as the job's fault, with the blocks and what to set.
    """
    model: dict[str, Any] = {
        "model": "tests.engine.test_unlike_order:Ways",
        "model_args": {"kind": kind},
        "workers": {"min": 2, "max": 2},
    }
    job = toy_job(
        tmp_path,
        name="unlike",
        **model,
        parallel={"zero": 3, "dp_shard": 2},
        deadlines={"stall_s": 6},
        trial=False,
    )
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["train", str(tmp_path / "job.toml")]) == 1
    shown = capsys.readouterr().out
    told = shown[
        shown.rindex("with parallel.zero = 3 the weights of a block are gathered from all members") :
    ]
    assert (
        "was gathered and on world rank" in told
        and "set parallel.zero = 2" in told
        and "Failed at step 0 of 12" in told
    ), shown
    broken = [
        record["event"]
        for record in Run.open(job).records()
        if record["event"]["$"] == "Broken" and record["event"]["cause"] == "job"
    ]
    assert {each["generation"] for each in broken} == {1, 2}, "exactly one retry"
    assert_no_actor_left("unlike")
