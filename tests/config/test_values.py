"""Values that a setting cannot have, and deadlines that nobody can keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.config.sections import Deadlines
from elastic.errors import JobError
from elastic.job import Job

pytestmark = pytest.mark.fast


def job(**settings: Any) -> Job:
    return Job(**{"name": "run", "bucket": "/bucket", **settings})


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "a\n"])
def test_a_run_has_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(JobError, match="must be a legal folder name"):
        job(name=name)


def test_a_run_has_a_name_that_fits_into_names_of_files() -> None:
    assert job(name="a" * 200).name == "a" * 200
    with pytest.raises(JobError, match="must have 200 letters or fewer"):
        job(name="a" * 201)


def test_a_path_is_made_absolute_and_a_url_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job(bucket="out").bucket == str(tmp_path / "out")
    assert job(bucket="~/out").bucket == str(Path.home() / "out")
    assert job(bucket="file:///out").bucket == "/out"
    for url in ("s3://bucket/prefix", "memory://x", "/bucket"):
        assert job(bucket=url).bucket == url
    with pytest.raises(JobError, match="bucket = ' ' must be a folder"):
        job(bucket=" ")


@pytest.mark.parametrize("bucket", ["s3:/bucket/x", "s3//bucket/x", "s4://bucket/x"])
def test_a_bucket_that_looks_like_a_url_is_not_taken_for_a_folder(bucket: str) -> None:
    with pytest.raises(JobError, match=rf"^Job: bucket = '{bucket}' .*s3://bucket/x"):
        job(bucket=bucket)


@pytest.mark.parametrize(
    ("deadlines", "said"),
    [
        (
            {"lease_s": 0.01},
            "deadlines.lease_s = 0.01 is less than 1: a member renews its lease four times in this time, and a healthy one would stop",
        ),
        ({"stall_s": 0.1}, "deadlines.stall_s = 0.1 is less than 1: "),
        ({"driver_s": 0.001}, "deadlines.driver_s = 0.001 is less than 1: "),
        ({"wait_s": 1e-9}, "deadlines.wait_s = 1e-09 is less than 1: "),
        ({"silence_s": 1.9}, "deadlines.silence_s = 1.9 is less than 2: a node beats each 0.5 s"),
        ({"fence_s": 1000, "lease_s": 1}, "deadlines.fence_s = 1000 is more than 4 × deadlines.lease_s = 1: "),
    ],
)
def test_deadlines_that_strike_those_that_are_well_are_refused(deadlines: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as caught:
        job(deadlines=deadlines)
    assert str(caught.value).startswith(f"Job: {said}") and "\n" not in str(caught.value)


def test_short_deadlines_that_can_be_kept() -> None:
    job(deadlines=Deadlines(lease_s=1, stall_s=1, silence_s=2, driver_s=1, wait_s=1, fence_s=4))
