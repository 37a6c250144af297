"""The start-up self-test finds each way in which a bucket may not keep its promises, and leaves nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.train.preflight import preflight
from storage.errors import Unavailable
from storage.objects import ObjectStore
from storage.objects.s3 import S3
from storage.objects.selftest import check
from tests.support.buckets import below, enter
from tests.support.swift import UNCHANGED
from tests.support.toys import toy_job
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
            r"a create-only PUT .* replaced what was there; .* honours it",
        ),
        ("POST .*uploadId", without("HTTP_IF_NONE_MATCH"), r"a create-only upload in parts .* replaced what was there"),
        ("GET .*selftest", without("HTTP_RANGE"), "Range"),
        ("PUT", framed, "frame of a checksum trailer inside the object"),
        ("PUT", flipped_upload, "256 bytes were written and 256 others came back"),
        ("GET .*selftest", flipped, "256 bytes were written and 256 others came back"),
    ],
)
def test_a_store_that_misbehaves_is_refused_by_name(unruly: Unruly, moto_bucket: S3, requests: str, fault: Fault, found: str) -> None:
    store = below(moto_bucket)
    unruly.when(requests, fault, times=99)
    with pytest.raises(Unavailable, match=found) as caught:
        check(store, "run")
    assert store.url in str(caught.value)
    unruly.behave()
    assert store.list() == []


def test_a_store_that_looks_first_and_writes_then_is_refused(swift_bucket: S3) -> None:
    """Unchanged Swift refuses a single create-only write of an object that exists; of several at the same time, all may win."""
    store = S3(swift_bucket.filesystem, f"{below(swift_bucket).root}/{UNCHANGED}")
    with pytest.raises(Unavailable, match=r"\d of 8 create-only writes .* were told that they won; use one that decides them one by one"):
        for _ in range(20):
            check(store, "run")
    assert store.list() == []


def test_it_costs_some_thirty_requests(unruly: Unruly, moto_bucket: S3) -> None:
    store = below(moto_bucket)
    unruly.behave()
    check(store, "run")
    assert unruly.asked(".") <= 36


def test_a_job_is_checked_before_anything_starts(unruly: Unruly, moto_bucket: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, unruly)
    unruly.when("POST .*uploadId", without("HTTP_IF_NONE_MATCH"), times=99)
    store = below(moto_bucket)
    job = toy_job(store.url, name="checked")
    with pytest.raises(Unavailable, match="does not keep what a run relies on"):
        preflight(job)
    assert store.list() == []
    unruly.behave()
    preflight(job)
    assert store.list() == []
