"""Ray's drain of a node is a notice."""

from __future__ import annotations

import time
from pathlib import Path

import ray

from actors import cluster
from actors.notices.drain import Drain
from elastic.config.sections import Notices
from elastic.ids import NodeId
from tests.support.nodes import Node, joined
from tests.support.patience import until

PREEMPTION = 2
"""The number of ``DRAIN_NODE_REASON_PREEMPTION`` in Ray's protocol."""


class Resident:
    """Lives on a node: Ray ends a node that it drains as soon as nothing lives there."""

    def here(self) -> str:
        return cluster.here()


def test_a_node_that_ray_drains_has_notice(tmp_path: Path) -> None:
    """Its deadline is Ray's, or ``grace_s`` later while Ray names none.  The controls: no notice before, and
    none for the other node.
    """
    with joined(tmp_path, Node("drained", 1)) as nodes:
        here, node = cluster.here(), NodeId(nodes["drained"])
        resident = (
            ray.remote(num_cpus=0)(Resident).options(scheduling_strategy=cluster.only_on(node)).remote()
        )
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
