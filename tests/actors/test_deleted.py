"""A run lives on, and is found and ended, after somebody has deleted its folder in the bucket."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest

from actors.cli import main
from actors.launch import start
from actors.living import attach
from elastic.control.run import Stopped
from elastic.job import Job
from elastic.runs.run import Run
from elastic.train.checks.preflight import preflight
from tests.support.commands import Command, assert_no_actor_left, view_of
from tests.support.job_file import to_toml
from tests.support.patience import until
from tests.support.toys import LIGHT, toy_job


def file_of(folder: Path, job: Job) -> str:
    path = folder / f"{uuid.uuid4().hex}.toml"
    path.write_text(to_toml(job))
    return str(path)


def reached(name: str, step: int) -> bool:
    return (view := view_of(name)) is not None and view.step >= step


def check_that_who_trains_it_attaches(folder: Path, job: Job, note: str) -> None:
    """Checks that a command of another process finds ``job``.  The control: a run of that name in another
    bucket is another run.
    """
    first = Command(folder, "train", file_of(folder, job), warm=True)
    try:
        first.until(lambda: "attached to" in first.text or "a Ray cluster starts" in first.text)
        assert (
            f"attached to {job.name}, which runs on this cluster already" in first.text and note in first.text
        ), first.text
        first.interrupt()
        assert first.wait() == 3 and "this command ends, the run goes on" in " ".join(first.text.split()), (
            first.text
        )
    finally:
        if first.process.poll() is None:
            first.kill_everything()
    alone = Command(folder, "train", file_of(folder, job), "--local", warm=True)
    assert alone.wait() == 1 and "this run lives on the cluster at" in " ".join(alone.text.split()), (
        alone.text
    )
    assert (
        main(["train", file_of(folder, job.replace(bucket=str(folder / "third"), steps=2)), "--local"]) == 0
    )


@pytest.mark.full
def test_a_run_whose_folder_is_deleted_is_found_and_stopped_with_a_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It saves nothing before it is stopped.  The controls: a run of another name, and one of that name in
    another bucket, are no runs.

    A command of another process, which knows no cluster, finds it too.
    """
    name = f"deleted-{uuid.uuid4().hex[:6]}"
    data = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.1}}
    settings = LIGHT | {
        "steps": 10_000,
        "data": data,
        "checkpoint": {"save_every": 10_000},
        "workers": {"max": 1},
    }
    job = toy_job(tmp_path / "bucket", name=name, on_driver_exit="detach", **settings)
    file, other, elsewhere = (
        file_of(tmp_path, each)
        for each in (job, job.replace(name=f"{name}-2"), job.replace(bucket=str(tmp_path / "elsewhere")))
    )
    start(Run.open(job), preflight(job).build, uuid.uuid4().hex, 0)
    until(lambda: reached(name, 3) and [*(tmp_path / "bucket" / name).rglob("journal/**/*.gz")])
    shutil.rmtree(tmp_path / "bucket" / name)

    def told(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words]) == code
        shown = capsys.readouterr()
        return shown.out + shown.err

    asked = Command(tmp_path, "status", file, "--once", warm=True)
    note = (
        f"somebody has deleted {tmp_path}/bucket/{name}, or its job.json, while {name} runs on the cluster at"
    )
    assert asked.wait() == 0 and note in asked.text and ": Running, step" in asked.text, asked.text
    shown = told("status", file, "--once")
    assert note in shown and ": Running, step" in shown
    assert f"{name} lives (Running, step" in told("clean", file, code=2)
    assert (
        note in told("metrics", file) and note in (logs := told("logs", file, "w1")) and "w1: joined" in logs
    )
    for absent in (other, elsewhere):
        for words in (("status", absent, "--once"), ("stop", absent), ("metrics", absent), ("logs", absent)):
            assert "there is no run" in told(*words, code=1)
    check_that_who_trains_it_attaches(tmp_path, job, note)
    assert reached(name, 3), "none of them has stopped it"

    shown = told("stop", file)
    assert note in shown and "job.json and the claim of the run are written again" in shown
    assert "stopped (elastic stop), resumes from step" in shown
    until(lambda: attach(name) is None)
    assert_no_actor_left(name)
    run = Run.look(job)
    newest = run.newest()
    assert newest is not None and isinstance(run.end(), Stopped) and run.latest_claim() == 1
    _, sentence = run.begins(run.latest_claim() + 1, 0.0)
    assert f"goes on from step {newest.step}" in sentence, "whoever trains it again goes on from there"
    steps = [json.loads(line)["step"] for line in told("metrics", file).splitlines()]
    assert steps == [*range(newest.step + 1 - len(steps), newest.step + 1)], (
        "only what was deleted before anybody read it is lost"
    )
    assert "is not running; newest good checkpoint" in told("status", file), "and it is a run like another"
