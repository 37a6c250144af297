from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors import cluster
from tests.support.commands import ROOT


@pytest.fixture(scope="session", autouse=True)
def local_cluster(aws_config: Path) -> Iterator[None]:
    """One Ray cluster on this machine for all of these tests, and for drivers that they start in other folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_CONFIG_FILE", str(aws_config))  # what a node is allowed to use; nothing, until a test writes it
        patch.setenv("PYTHONPATH", str(ROOT))  # of the cluster's processes; where Elastic is installed nobody needs it
        cluster.connect("local")
        yield
        ray.shutdown()
