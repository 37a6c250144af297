"""A Ray cluster of several nodes on this machine, whose nodes come and go as those of a spot fleet do.

Each node is a raylet with processes of its own.  The head has no room for workers: the driver and the
coordinator live there, and it stays.  Whatever a node of a real cluster takes with it, a node here takes too,
except the machine: cores, memory and network are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil
from typing import Any

import ray

from actors import own_cluster
from actors.chaos import kill_below
from actors.cores import usable_cores
from actors.processes import describe
from elastic.config.sections import Workers
from elastic.errors import JobError
from elastic.ids import NodeId

OBJECT_STORE_BYTES = 80 * 2**20
"""Memory of each node for Ray's own objects, of which a run has next to none; Ray's default is a third of the
machine's memory.
"""
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""Settings of Ray by which the head knows of a dead node in about 1.5 s.  With Ray's own it takes 15 s, and a
node that is lost for a minute of a trace at 60 times its speed would never be missed.
"""


class LocalNodes:
    """A cluster of up to ``number`` nodes, which together have room for all workers.  It begins without a node.
    A context manager; the cluster ends with it.

    All nodes start in one thread, one after the other: of two that start at once Ray lost one, and Linux ends
    the processes of a node with the thread that started them.  Raises :class:`JobError` if a worker needs a
    GPU: nodes of one machine cannot share GPUs.
    """

    def __init__(self, workers: Workers, number: int, tell: Callable[[str], None]) -> None:
        if workers.gpus:
            raise JobError(
                f"workers.gpus = {workers.gpus}: --nodes starts several nodes on this machine, and its nodes "
                "cannot share GPUs; leave --nodes out, or give --workers.gpus 0"
            )
        own_cluster.set_variables()
        self.number = number
        self.room = max(-(-(workers.max + workers.spares) // number), 1)
        """Number of workers for which a node has room."""
        self.cpus = ceil(self.room * max(workers.cpus, 1))
        tell(
            f"a Ray cluster of {number} nodes starts on this machine, in {own_cluster.STARTS_S} and some "
            f"seconds for each node; all nodes share its {usable_cores()} cores"
        )
        self._thread = ThreadPoolExecutor(1, "local-nodes")
        self._nodes: dict[NodeId, Any] = {}
        self._thread.submit(_begin).result()

    def add(self) -> Future[NodeId]:
        """Begins to start a node.  Returns its id, which is known once the head knows the node."""
        return self._thread.submit(self._add)

    def _add(self) -> NodeId:
        node = own_cluster.start_node(self.cpus, OBJECT_STORE_BYTES)
        self._nodes[found := NodeId(node.node_id)] = node
        return found

    def fill(self) -> None:
        """Starts nodes until there are ``number``, and returns once they are part of the cluster."""
        for each in [self.add() for _ in range(self.number - len(self.living()))]:
            each.result()

    def empty(self) -> None:
        """Kills all nodes."""
        for node in self.living():
            self.kill(node)

    def living(self) -> list[NodeId]:
        """Returns the nodes whose raylet lives, without the head."""
        return [node for node, each in [*self._nodes.items()] if _raylet(each).poll() is None]

    def kill(self, node: NodeId) -> str:
        """Kills all processes of a node at once, as if its machine had lost its power.  Returns in words how its
        raylet ended, as the kernel says.
        """
        raylet = _raylet(self._nodes[node])
        kill_below(raylet.pid)
        self._forget(node)
        return describe(-raylet.returncode if raylet.returncode < 0 else raylet.returncode << 8)

    def bury(self) -> int:
        """Removes what is left of nodes whose raylet has died, and returns their number."""
        dead = [node for node, each in [*self._nodes.items()] if _raylet(each).poll() is not None]
        for node in dead:
            self._forget(node)
        return len(dead)

    def _forget(self, node: NodeId) -> None:
        gone = self._nodes.pop(node)
        _raylet(gone).wait()
        gone.kill_all_processes(check_alive=False, allow_graceful=False)

    def close(self) -> None:
        self._thread.submit(lambda: None).result()  # a node that is starting has started
        self.empty()
        ray.shutdown()
        self._thread.shutdown()

    def __enter__(self) -> LocalNodes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _begin() -> None:
    """Starts the head, and joins it."""
    own_cluster.init(
        address="local",
        num_cpus=0,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _system_config=HEALTH,
    )


def _raylet(node: Any) -> Any:
    """Returns the process of a node's raylet."""
    (found,) = node.all_processes["raylet"]
    return found.process
