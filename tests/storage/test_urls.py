"""A place is a folder or a URL, and some texts only look like a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import Unavailable
from storage.objects import ObjectStore
from storage.objects.urls import folder_of

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("place", "folder"),
    [
        ("/data/a:b", "/data/a:b"),
        ("data", "data"),
        ("./s3:/data", "./s3:/data"),
        ("runs//new", "runs//new"),
        ("file:///data", "/data"),
        ("s3://bucket/prefix", None),
        ("memory://name", None),
        ("gs://bucket/prefix", None),
    ],
)
def test_a_folder_is_one_and_a_url_is_none(place: str, folder: str | None) -> None:
    assert folder_of(place) == folder


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3:/bucket/x", "write 's3://bucket/x', or './s3:/bucket/x' for a folder of that name"),
        ("s3:bucket/x", "write 's3://bucket/x'"),
        ("s3//bucket/x", "write 's3://bucket/x'"),
        (":s3//bucket", "write 's3://bucket'"),
        ("file:/data", "write 'file:///data'"),
        ("C:/data", "write 's3://bucket/prefix', or './C:/data'"),
        ("file://data", "must name its folder by an absolute path: 'file:///data'"),
        ("s4://bucket", "has an unknown scheme; did you mean 's3://bucket'"),
        ("S3://bucket", "did you mean 's3://bucket'"),
        ("zzzz://bucket", "has an unknown scheme; use a folder, or a URL such as s3://bucket/prefix"),
    ],
)
def test_what_only_looks_like_a_url_is_refused(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the parser and the store refuse it; otherwise a store would take it for a folder and write there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        folder_of(place)
    assert said in str(caught.value)
    with pytest.raises(Unavailable) as unavailable:
        ObjectStore.open(place)
    assert said in str(unavailable.value)
    assert list(tmp_path.iterdir()) == []
