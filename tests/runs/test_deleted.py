"""A run that lives writes anew what somebody has deleted of it, so that it is the run that it was."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from elastic.job import Job
from elastic.runs import resume
from elastic.runs.deleted import put_back
from elastic.runs.run import Run
from storage.errors import Damaged, Deposed
from storage.journal import Journal
from storage.objects import ObjectStore
from tests.runs.test_forks import job_of, trained
from tests.support.journals import newest
from tests.support.stores import Forwarding

pytestmark = pytest.mark.fast


def began(job: Job, kind: str) -> Job:
    """Begins a run of that kind, and returns its job."""
    trained(job if kind == "first" else job.replace(steps=4))
    if kind == "fork":
        job = job.replace(name="fork", seed=5)
        resume.start_of(job, "run@4").begin()
    elif kind == "branch":
        job = job.replace(seed=5)
        trained(job, branch=True)
    return job


@pytest.mark.parametrize("kind", ["first", "branch", "fork"])
def test_a_run_whose_folder_was_deleted_is_the_same_run_again(tmp_path: Path, kind: str) -> None:
    """The samples of its steps, its origin and its trajectory are those of before.  The controls: nothing is
    missing; another life.
    """
    run = Run.open(began(job_of(tmp_path, steps=6), kind))
    number = run.claim("here", "its life")
    again = lambda: run.claim("here", "its life", after=number - 1)  # noqa: E731
    before = (run.job.digest, run.job.stretches(), run.origin, number)
    there = sorted(tmp_path.rglob("*"))
    assert put_back(run, number, "its life", again) == "" and sorted(tmp_path.rglob("*")) == there, (
        "nothing is missing"
    )
    shutil.rmtree(tmp_path / run.job.name)
    assert "job.json and the claim of the run are written again" in put_back(run, number, "its life", again)
    found = Run.look(run.job)
    assert (found.job.digest, found.job.stretches(), found.origin, found.latest_claim()) == before
    assert (len(before[1]) > 1, before[2] is not None) == (kind != "first", kind == "fork"), (
        "the control: there was something to lose"
    )
    assert put_back(run, number, "its life", again) == ""
    with pytest.raises(Deposed, match=f"owner/{number:06d}"):
        put_back(run, number, "another life", again)
    (tmp_path / run.job.name / "job.json").unlink()
    assert (
        "job.json of the run are" in put_back(run, number, "its life", again)
        and Run.look(run.job).job.digest == before[0]
    )


@pytest.mark.parametrize("claims", [1, 3], ids=("fewer claims", "more"))
def test_a_run_that_was_begun_anew_in_the_place_of_a_deleted_one_is_left_alone(
    tmp_path: Path, claims: int
) -> None:
    """Its claims say whose the folder is now, whatever their numbers.  Nothing is written there."""
    run = Run.open(began(job_of(tmp_path, steps=6), "first"))
    number = run.claim("here", "its life")
    shutil.rmtree(tmp_path / "run")
    other = Run.open(run.job.replace(seed=9))
    for _ in range(claims):
        other.claim("there", "another life")
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(Deposed, match=f"owner/{claims:06d}"):
        put_back(run, number, "its life", lambda: run.claim("here", "its life", after=number - 1))
    assert sorted(tmp_path.rglob("*")) == there


def test_a_save_asks_three_things_where_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many coordinators and branches the run has had.  The control: more is asked, and written, where
    something is missing.
    """
    run = Run.open(began(job_of(tmp_path, steps=6), "branch"))
    number = [run.claim("here", "its life") for _ in range(3)][-1]
    asked = list[tuple[str, str]]()
    for request in ("put", "put_if_absent", "get", "size", "children", "list", "delete"):

        def noted(self: Forwarding, key: str, *arguments: Any, request: str = request) -> Any:
            asked.append((request, key))
            return getattr(self.store, request)(key, *arguments)

        monkeypatch.setattr(Forwarding, request, noted)
    watched = Run(run.job, Forwarding(run.store))
    assert put_back(watched, number, "its life", lambda: None) == ""
    newest, next_one = (f"run/owner/{each:06d}.json" for each in (number, number + 1))
    assert asked == [("list", "run/owner/"), ("size", next_one), ("get", newest), ("size", "run/job.json")]
    shutil.rmtree(tmp_path / "run")
    asked.clear()
    assert (
        put_back(watched, number, "its life", lambda: watched.claim("here", "its life", after=number - 1))
        != ""
    )
    assert [key for request, key in asked if request == "put_if_absent"] == [
        "run/job.json",
        f"run/owner/{number:06d}.json",
    ]


def test_the_job_of_a_run_with_branches_in_the_bucket_is_not_guessed(tmp_path: Path) -> None:
    run = Run.open(began(job_of(tmp_path, steps=6), "branch"))
    (tmp_path / "run" / "job.json").unlink()
    assert put_back(run, run.latest_claim(), str((run.owner() or {})["life"]), lambda: None) == ""
    assert not (tmp_path / "run" / "job.json").exists()


@pytest.mark.parametrize("anew", [True, False], ids=("anew", "the control"))
def test_a_journal_that_begins_anew_can_be_read_without_what_was_deleted(tmp_path: Path, anew: bool) -> None:
    store, numbers = ObjectStore.open(str(tmp_path / "bucket")), itertools.count()
    journal = Journal(
        store, "run", tmp_path / "local", 0, {"run": "long " * 100}, segment_s=3600.0, retry_s=0.001
    )

    def written() -> None:
        number = next(numbers)
        journal.append({"n": number}, lambda: {"run": "long " * 100, "to": number}, durable=False)
        assert journal.ship(60.0)

    for _ in range(3):
        written()
    shutil.rmtree(tmp_path / "bucket" / "run")
    if anew:
        journal.begin_anew()
    for _ in range(3):
        written()
    journal.close()
    if anew:
        assert newest(store, "run") == ({"run": "long " * 100, "to": 2}, [{"n": 3}, {"n": 4}, {"n": 5}])
    else:
        with pytest.raises(Damaged):
            newest(store, "run")
