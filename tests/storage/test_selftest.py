"""The start-up self-test finds each way in which a bucket may not keep its promises, and leaves nothing in
it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors.cli import main
from elastic.runs.run import Run
from elastic.train.checks.bucket import check_bucket
from storage.datasets import Coding, write_dataset
from storage.errors import Unavailable
from storage.objects import ObjectStore
from storage.objects.s3 import S3
from storage.objects.selftest import check
from tests.support.buckets import below, enter
from tests.support.job_file import to_toml
from tests.support.swift import UNCHANGED
from tests.support.toys import LIGHT, toy_job
from tests.support.unruly import Fault, Unruly, flipped, flipped_upload, framed, without


@pytest.mark.parametrize("server", ["moto", "swift"])
def test_a_good_store_passes(request: pytest.FixtureRequest, server: str) -> None:
    store = below(request.getfixturevalue(f"{server}_bucket"))
    check(store, "run")
    assert store.list() == []


@pytest.mark.fast
def test_memory_passes_and_a_folder_is_believed(tmp_path: Path) -> None:
    for url in (f"memory://{tmp_path.name}", str(tmp_path)):
        store = ObjectStore.open(url)
        check(store, "run")
        assert store.list() == []


@pytest.mark.parametrize(
    ("requests", "fault", "found"),
    [
        (
            r"PUT .*-\w+\?$|PUT .*selftest-\w+\?$",
            without("HTTP_IF_NONE_MATCH"),
            r"a create-only PUT .* replaced an object that existed; .* honours If-None-Match",
        ),
        (
            "POST .*uploadId",
            without("HTTP_IF_NONE_MATCH"),
            (r"a create-only upload in parts .* replaced an object that existed"),
        ),
        ("GET .*selftest", without("HTTP_RANGE"), "Range"),
        ("PUT", framed, "frame of a checksum trailer inside the object"),
        ("PUT", flipped_upload, "256 bytes were written, but 256 other bytes were read back"),
        ("GET .*selftest", flipped, "256 bytes were written, but 256 other bytes were read back"),
    ],
)
def test_a_store_that_misbehaves_is_refused_by_name(
    unruly: Unruly, moto_bucket: S3, requests: str, fault: Fault, found: str
) -> None:
    store = below(moto_bucket)
    unruly.when(requests, fault, times=99)
    with pytest.raises(Unavailable, match=found) as caught:
        check(store, "run")
    assert store.url in str(caught.value)
    unruly.behave()
    assert store.list() == []


def test_a_store_that_looks_first_and_writes_then_is_refused(swift_bucket: S3) -> None:
    """Unchanged Swift refuses a single create-only write of an object that exists; of several at the same
    time, all may win.
    """
    store = S3(swift_bucket.filesystem, f"{below(swift_bucket).root}/{UNCHANGED}")
    with pytest.raises(
        Unavailable,
        match=(
            r"of 8 create-only writes .* at the same time, \d succeeded, and exactly 1 may; use a "
            r"store that lets exactly one succeed"
        ),
    ):
        for _ in range(20):
            check(store, "run")
    assert store.list() == []


def test_it_costs_some_thirty_requests(unruly: Unruly, moto_bucket: S3) -> None:
    store = below(moto_bucket)
    unruly.behave()
    check(store, "run")
    assert unruly.asked(".") <= 36


def test_a_job_is_checked_before_anything_starts(
    unruly: Unruly, moto_bucket: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, unruly)
    unruly.when("POST .*uploadId", without("HTTP_IF_NONE_MATCH"), times=99)
    store = below(moto_bucket)
    job = toy_job(store.url, name="checked")
    with pytest.raises(Unavailable, match="lacks a property that every run relies on"):
        check_bucket(job)
    assert store.list() == []
    unruly.behave()
    check_bucket(job)
    assert store.list() == []


# ---- the file system of a folder


def unable(
    monkeypatch: pytest.MonkeyPatch, call: str, error: int, only: Callable[[object], bool] = lambda what: True
) -> None:
    """Makes a call of the kernel fail as a file system does that lacks it."""
    able = getattr(os, call)

    def fails(what: object, *more: object) -> object:
        if only(what):
            raise OSError(error, os.strerror(error), what)
        return able(what, *more)

    monkeypatch.setattr(os, call, fails)


@pytest.mark.parametrize(
    ("call", "error", "code", "said"),
    [
        (
            "link",
            errno.EOPNOTSUPP,
            1,
            "cannot hold objects (FOLDER): its file system has no hard links (Operation not supported)",
        ),
        (
            "link",
            errno.EPERM,
            1,
            "cannot hold objects (FOLDER): its file system has no hard links (Operation not permitted)",
        ),
        ("replace", errno.ENOSYS, 1, "cannot hold objects (FOLDER): [Errno 38] Function not implemented"),
        ("link", errno.ENOSPC, 2, "No space left on device"),
    ],
)
def test_a_file_system_that_cannot_hold_objects_is_refused_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: int,
    code: int,
    said: str,
) -> None:
    """The last row is the control: a full disk says nothing against the job."""
    job = toy_job(tmp_path / "mounted" / "bucket", steps=4, checkpoint={"save_every": 2}, **LIGHT)
    (tmp_path / "toy.toml").write_text(to_toml(job))
    unable(monkeypatch, call, error)
    assert main(["train", str(tmp_path / "toy.toml"), "--local"]) == code
    shown = capsys.readouterr().out
    assert said.replace("FOLDER", str(tmp_path)) in shown and ("(s3://bucket/prefix)" in shown) == (
        call == "link" and code == 1
    ), shown
    assert os.listdir(tmp_path) == ["toy.toml"]


@pytest.mark.fast
def test_a_folder_that_is_created_is_said_before(tmp_path: Path) -> None:
    """A typo in its name is seen.  The control: nothing is said of a folder that is there."""
    job = toy_job(tmp_path / "typo")
    assert check_bucket(job) == [f"bucket {tmp_path / 'typo'} is not there yet: the run makes it"]
    assert not (tmp_path / "typo").exists()
    (tmp_path / "typo").mkdir()
    assert check_bucket(job) == []


def test_a_folder_that_cannot_be_synced_is_used_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is a disk that fails."""
    job = toy_job(tmp_path / "bucket", steps=4, checkpoint={"save_every": 2}, **LIGHT)
    (tmp_path / "toy.toml").write_text(to_toml(job))

    def is_folder(what: object) -> bool:
        return isinstance(what, int) and stat.S_ISDIR(os.fstat(what).st_mode)

    for error, code, said in (
        (errno.EIO, 2, "Input/output error"),
        (errno.EINVAL, 0, "its file system cannot sync a folder"),
    ):
        with monkeypatch.context() as patch:
            unable(patch, "fsync", error, is_folder)
            assert main(["train", str(tmp_path / "toy.toml"), "--local"]) == code
        assert capsys.readouterr().out.count(said) == 1
    newest = Run.find(job).newest()
    assert newest is not None and newest.step == 4


@pytest.mark.fast
def test_a_dataset_is_not_prepared_for_a_folder_that_cannot_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be found at the end of hours."""
    unable(monkeypatch, "link", errno.EOPNOTSUPP)
    documents = iter([("a", np.arange(8))])
    with pytest.raises(
        Unavailable,
        match=(
            r"has no hard links .* if the folder is a mounted bucket, give the bucket's URL "
            r"\(s3://bucket/prefix\)"
        ),
    ):
        write_dataset(ObjectStore.open(str(tmp_path)), documents, Coding("bytes", 256, 0))
    assert next(documents)[0] == "a" and os.listdir(tmp_path) == []
