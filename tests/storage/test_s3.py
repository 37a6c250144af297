"""S3, against a real server and against one that misbehaves."""

from __future__ import annotations

import pytest

from storage.objects import ObjectStore
from storage.s3 import S3
from tests.storage.conformance import Conformance
from tests.support.buckets import below


class TestSwift(Conformance):
    @pytest.fixture
    def store(self, swift_bucket: S3) -> ObjectStore:
        return below(swift_bucket)


class TestSwiftInParts(Conformance):
    """Every object, the smallest too, goes up as parts and is completed."""

    @pytest.fixture
    def store(self, swift_bucket: S3) -> ObjectStore:
        return below(swift_bucket, single_bytes=0)


class TestMoto(Conformance):
    @pytest.fixture
    def store(self, moto_bucket: S3) -> ObjectStore:
        return below(moto_bucket)
