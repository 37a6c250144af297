"""A Ray cluster of several nodes on this machine, whose nodes can be killed with all that runs on them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from actors import cluster
from tests.support.processes import frozen, kill_all, wait_gone

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Settings by which the head notices a dead node; with Ray's defaults that takes 15 s.  They serve both
systems that run on Ray.
"""
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


class Nodes:
    """A head without room for workers, and two nodes with room for one each."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": 80 * 2**20,
                "include_dashboard": False,
                "_system_config": HEALTH,
            },
        )
        ray.init(
            address=self.cluster.address,
            namespace=cluster.NAMESPACE,
            log_to_driver=False,
            logging_level="warning",
        )
        self.nodes: dict[str, Any] = {}
        self.still: list[Any] = []

    def add(self, cpus: int = 1) -> None:
        node = self.cluster.add_node(num_cpus=cpus, object_store_memory=80 * 2**20)
        self.nodes[node.node_id] = node

    def replace_the_dead(self, cpus: int) -> None:
        """Adds another node for each one whose raylet has ended."""
        for node_id, node in list(self.nodes.items()):
            if node.all_processes["raylet"][0].process.poll() is not None:
                del self.nodes[node_id]
                self.cluster.worker_nodes.discard(node)
                node.kill_all_processes(check_alive=False, allow_graceful=False)
                self.add(cpus)

    def kill(self, node_id: str) -> None:
        node = self.nodes.pop(node_id)
        end(node)
        self.cluster.worker_nodes.discard(node)

    def drain(self, node_id: str, lead_s: float) -> None:
        drain(self.cluster.address, node_id, lead_s)

    def freeze(self, node_id: str) -> None:
        """Freezes a node with all its processes; no connection is closed."""
        node = self.nodes.pop(node_id)
        frozen(node.all_processes["raylet"][0].process.pid)
        self.still.append(node)

    def bury(self) -> None:
        """Ends the nodes that stood still."""
        for node in self.still:
            end(node)
            self.cluster.worker_nodes.discard(node)
        self.still.clear()

    def close(self) -> None:
        """Kills all nodes, the head last: a driver of Ray Train that still waits for its run does not survive
        an orderly shutdown.
        """
        self.bury()
        for node in [*self.nodes.values(), self.cluster.head_node]:
            end(node)


def drain(address: str, node_id: str, lead_s: float) -> None:
    """Tells Ray's head that the node's machine will be taken in ``lead_s`` seconds."""
    deadline_ms = int(1000 * (time.time() + lead_s))
    preempted = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=address).drain_node(node_id, preempted, "spot", deadline_ms)
    assert accepted, why


def end(node: Any) -> None:
    """Kills the raylet and everything below it by SIGKILL, then what else belongs to the node."""
    (raylet,) = node.all_processes["raylet"]
    tree = frozen(raylet.process.pid)
    kill_all(tree)
    raylet.process.wait()
    wait_gone(tree, 10)
    node.kill_all_processes(check_alive=False, allow_graceful=False)


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, how)
