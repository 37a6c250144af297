"""Fixtures that start each S3 server once a session, and make buckets on it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from fsspec.asyn import sync

from storage.objects import ObjectStore
from storage.objects.s3 import S3
from tests.support.budgets import uncounted
from tests.support.swift import Swift
from tests.support.unruly import Unruly


class Server(Protocol):
    @property
    def environment(self) -> dict[str, str]: ...


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    """Starts OpenStack Swift, a real server."""
    with uncounted():
        server = Swift(tmp_path_factory.mktemp("swift")).__enter__()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _moto() -> Iterator[Unruly]:
    with Unruly() as server:
        yield server


@pytest.fixture
def unruly(_moto: Unruly) -> Iterator[Unruly]:
    """Gives the test moto, which misbehaves as the test asks, and makes it behave again afterwards."""
    yield _moto
    _moto.behave()


@pytest.fixture(scope="session")
def aws_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path at which the nodes of the tests' cluster look for endpoint and credentials.  It does
    not exist yet.
    """
    return tmp_path_factory.mktemp("node") / "aws-config"


@pytest.fixture(scope="session")
def swift_bucket(swift: Swift) -> S3:
    return new_bucket(swift)


@pytest.fixture(scope="session")
def _moto_bucket(_moto: Unruly) -> S3:
    return new_bucket(_moto)


@pytest.fixture
def moto_bucket(_moto_bucket: S3, unruly: Unruly) -> S3:
    return _moto_bucket


def new_bucket(server: Server) -> S3:
    """Creates a bucket on the server and returns it.  It keeps the server's credentials, however the
    environment changes later.
    """
    with pytest.MonkeyPatch.context() as patch:
        enter(patch, server)
        store = ObjectStore.open(f"s3://bucket-{uuid.uuid4().hex}")
        assert isinstance(store, S3)
        sync(store.filesystem.loop, _create, store)
    return store


def below(bucket: S3, **options: object) -> S3:
    """Returns a store in a new folder of the bucket, which uses the bucket's connections."""
    return S3(bucket.filesystem, f"{bucket.root}/{uuid.uuid4().hex}", **options)  # type: ignore[arg-type]


def allow(config: Path, server: Server) -> None:
    """Makes everybody who reads ``config`` use the server from now on."""
    names = {"AWS_ENDPOINT_URL_S3": "endpoint_url", "AWS_EC2_METADATA_DISABLED": ""}
    settings = [
        (names.get(name, name.lower().replace("aws_region", "region")), value)
        for name, value in server.environment.items()
    ]
    config.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in settings if name))


def enter(patch: pytest.MonkeyPatch, server: Server) -> None:
    """Makes this process and its children use the server from now on."""
    for name, value in server.environment.items():
        patch.setenv(name, value)
    patch.delenv("AWS_PROFILE", raising=False)
    patch.delenv("AWS_SESSION_TOKEN", raising=False)


async def _create(store: S3) -> None:
    client = await store.filesystem.set_session()
    await client.create_bucket(Bucket=store.bucket)
