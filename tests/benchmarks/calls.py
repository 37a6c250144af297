"""Measures what a round of orders and answers costs the coordinator: with a call for each worker, and with
one for each node.

    python -m tests.benchmarks.calls [--nodes 8] [--per-node 8] [--rounds 20]

The workers and keepers are processes with the product's outbox, orders and keeper methods
(``tests/support/relay.py``).  In a round, the coordinator's process orders every worker to say something, and
the round ends when all have been heard.  ``cpu`` is the time of that process, all threads, Ray's among them.
How long a round takes says little, because all processes share the cores of one machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import ray

from actors import cluster
from actors.keeper import GROUPS
from actors.relay import Orders
from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import Event
from tests.support.clusters import TUNED
from tests.support.relay import FENCE_S, Desk, Gatherer, Speaker

LIMIT_S = 120.0


class Head(Desk):
    """Stands in for the coordinator: gives the orders, and waits for the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = 0

    def post_all(self, said: tuple[Event, ...]) -> None:
        self.calls.append(())
        self.heard += len(said)

    @ray.method(concurrency_group="rounds")  # type: ignore[untyped-decorator]
    def rounds(
        self,
        actors: dict[WorkerId, Any],
        homes: dict[WorkerId, NodeId],
        keepers: dict[NodeId, Any],
        count: int,
    ) -> Any:
        """Returns (cpu, seconds until the orders were sent, seconds until all were heard, calls that arrived)
        of each round.
        """
        orders, found = Orders(1, actors, homes, keepers, FENCE_S), []
        for number in range(count):
            self.calls.clear()
            self.heard = 0
            began, used = time.monotonic(), time.process_time()
            orders.send(tuple(actors), "say", number)
            sent = time.monotonic()
            while self.heard < len(actors):
                assert time.monotonic() < began + LIMIT_S, f"only {self.heard} of {len(actors)} were heard"
                time.sleep(0.001)
            heard = time.monotonic()
            time.sleep(0.2)  # until Ray has done what follows an answer
            found.append((time.process_time() - used, sent - began, heard - began, len(self.calls)))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    known = parser.parse_args()
    os.environ.update(TUNED)
    cluster.connect("local")
    head = ray.remote(num_cpus=0, concurrency_groups={"rounds": 1})(Head).remote()
    nodes = [NodeId(f"n{number}") for number in range(known.nodes)]
    homes = {
        WorkerId(f"w{number}"): nodes[number % len(nodes)] for number in range(known.nodes * known.per_node)
    }
    actors = {worker: ray.remote(num_cpus=0)(Speaker).remote(worker, head) for worker in homes}
    ray.get([actor.read.remote() for actor in actors.values()])
    print(f"{len(homes)} workers on {len(nodes)} nodes", flush=True)
    for way in ("a call for each worker", "a call for each node"):
        keepers = {}
        if way == "a call for each node":
            keepers = {
                node: ray.remote(num_cpus=0, concurrency_groups=GROUPS)(Gatherer).remote(node, head)
                for node in nodes
            }
            ray.get([keepers[node].follow.remote(worker, actors[worker]) for worker, node in homes.items()])
            ray.get([actors[worker].speak_through.remote(keepers[node]) for worker, node in homes.items()])
        ray.get(head.rounds.remote(actors, homes, keepers, 2))
        found = ray.get(head.rounds.remote(actors, homes, keepers, known.rounds))
        cpu, sent, heard, calls = (statistics.median(column) for column in zip(*found, strict=True))
        figures = {
            "cpu_ms": 1e3 * cpu,
            "cpu_us_a_worker": 1e6 * cpu / len(homes),
            "sent_ms": 1e3 * sent,
            "heard_ms": 1e3 * heard,
            "calls": calls,
        }
        print(way, {name: round(value, 1) for name, value in figures.items()}, flush=True)


if __name__ == "__main__":
    main()
