"""A run on a storage backend that Elastic does not know: coordinator, keepers and workers find it as an
installed package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import ray

from actors import cluster
from storage.objects import ObjectStore
from storage.objects.fsspec import Fsspec
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.support.commands import ROOT
from tests.support.toy_store import install
from tests.support.toys import toy_job


@pytest.fixture(scope="module", autouse=True)
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster whose nodes have the package.  This process is told of the scheme directly: it has imported
    fsspec already.
    """
    site = tmp_path_factory.mktemp("site")
    install(site)
    fsspec.register_implementation("toy", "tests.support.toy_store.Toy", clobber=True)
    fsspec.register_implementation("late", "tests.support.toy_store.Late", clobber=True)
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{site}")
        cluster.connect("local")
        yield
        ray.shutdown()


@pytest.mark.full  # without Ray a job trains and resumes on it in tests/storage/test_backends.py
@pytest.mark.parametrize("scheme", ["toy", "late"])
def test_a_run_is_killed_and_goes_on_from_a_backend_that_a_package_brings(
    tmp_path: Path, scheme: str
) -> None:
    """One of two shards is SIGKILLed: the state is healed from the toy, and the bits are those of one process
    and a folder.

    The second toy lists new objects late.
    """

    def job_of(bucket: str, **changes: Any) -> Any:
        return toy_job(bucket, name="toy", steps=8, checkpoint={"save_every": 2}, **changes)

    reference = alone(job_of(f"{tmp_path}/folder"))
    bucket = f"{scheme}://{tmp_path}/objects.db/bucket"
    fault = {"point": "before_commit", "step": 5, "world_rank": 1}
    shards = {"parallel": {"dp_replicate": 1}, "copies": {"copy_every": 0}, "workers": {"min": 1, "max": 2}}
    run = trial(job_of(bucket, faults=[fault], **shards))
    assert run.result.state == "Finished", run.result
    assert run.hash == reference.hash and run.losses == reference.losses
    assert len(run.witness.killed()) == 1
    assert run.witness.total("healed_bucket_bytes") > 0
    assert type(ObjectStore.open(bucket)) is Fsspec
    assert_nothing_left(run)
