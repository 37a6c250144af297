"""Ray's drain of a node is a notice."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from actors import cluster
from actors.notices.drain import Drain
from elastic.config.sections import Notices
from tests.support.clusters import TUNED
from tests.support.commands import ROOT
from tests.support.patience import until

SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
PREEMPTION = 2
"""The number of ``DRAIN_NODE_REASON_PREEMPTION`` in Ray's protocol."""


@pytest.fixture(scope="module", autouse=True)
def local_cluster() -> Iterator[Cluster]:
    """Starts a cluster, to which each test adds a node."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        for name, value in TUNED.items():
            patch.setenv(name, value)
        nodes = Cluster(initialize_head=True, connect=True, head_node_args=SMALL)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


class Resident:
    """Lives on a node: Ray ends a node that it drains as soon as nothing lives there."""

    def here(self) -> str:
        return cluster.here()


def test_a_node_that_ray_drains_has_notice(local_cluster: Cluster) -> None:
    """Its deadline is Ray's, or ``grace_s`` later while Ray names none.  The controls: no notice before, and
    none for the other node.
    """
    here, node = cluster.here(), local_cluster.add_node(**SMALL).node_id
    resident = ray.remote(num_cpus=0)(Resident).options(scheduling_strategy=cluster.only_on(node)).remote()
    assert ray.get(resident.here.remote()) == node
    drain = Drain(Notices(grace_s=40))
    assert drain.look() == {}, "the control"
    client = ray._private.worker.global_worker.gcs_client
    assert client.drain_node(node, PREEMPTION, "the test", 0)[0]
    found = until(drain.look)[node]
    assert abs(found.deadline - time.time() - 40) < 1
    assert found.text == "Ray drains this node" and not found.advice
    assert drain.look() == {node: found}, "it stays the same"
    deadline = time.time() + 77
    assert client.drain_node(node, PREEMPTION, "the test", int(deadline * 1000))[0]
    until(lambda: abs(drain.look()[node].deadline - deadline) < 1)
    assert here not in drain.look(), "the control"
