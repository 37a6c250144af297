"""Ray's view of the machines: connecting, free room, nodes that come and go.  All private or environment-dependent Ray calls are here."""

from __future__ import annotations

import os
import socket
from collections.abc import Container, Mapping
from typing import Any

import ray

from elastic.errors import PlatformGaveUp
from elastic.ids import NodeId
from elastic.job import Workers

NAMESPACE = "elastic"


def connect(address: str | None) -> None:
    """Join the cluster at ``address``, or the one this process was submitted to, or start one here ("local").

    The variables are Ray's own and must be set before it starts: no usage reports, no waiting for a drain when a local
    cluster is ended, and no token for a cluster that only this machine reaches.
    """
    if ray.is_initialized():
        return
    local = address == "local" or (address is None and "RAY_ADDRESS" not in os.environ)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if local:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    options: dict[str, Any] = {"address": "local", "include_dashboard": False} if local else {"address": address or "auto"}
    if local:
        options |= {"object_store_memory": 80 * 2**20, "num_cpus": max(8, os.cpu_count() or 1)}
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="warning", **options)
    _leave_deaths_to_the_story()


def _leave_deaths_to_the_story() -> None:
    """Ray prints a paragraph for every process that ends, also for those that were told to; the run's own story says it in a sentence."""
    from ray._private import worker

    printed = getattr(worker, "print_to_stdstream", None)
    if printed is None:  # a private name: without it there is just more to read
        return

    def print_others(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if not any(line.startswith("A worker died or was killed") for line in data.get("lines", ())):
            printed(data, *arguments, **options)

    worker.print_to_stdstream = print_others


def reachable(address: str) -> bool:
    """Whether a cluster's head answers at ``host:port``; asking Ray itself would wait for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def nodes() -> tuple[NodeId, ...]:
    """The nodes that are alive."""
    return tuple(sorted(NodeId(node["NodeID"]) for node in ray.nodes() if node["Alive"]))


def _free_by_node() -> Mapping[str, Mapping[str, float]]:
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:  # a private call: fall back to the sum, which cannot see that what is free is split over nodes
        return {"cluster": ray.available_resources()}
    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def place(node: NodeId) -> str:
    """What messages call a node: the beginning of its id, its host."""
    found = next((each for each in ray.nodes() if each["NodeID"] == node), None)
    return f"node {node[:8]} ({found['NodeManagerHostname']}, {found['NodeManagerAddress']})" if found else f"node {node[:8]}"


def here() -> NodeId:
    """The node of this process."""
    return NodeId(ray.get_runtime_context().get_node_id())


def host() -> str:
    """What messages call this process's machine."""
    return f"{socket.gethostname()}, {ray.util.get_node_ip_address()}"


def node_of(actor: Any) -> NodeId | None:
    """Where an actor was put, also one that failed there; None where Ray does not say."""
    try:
        from ray._private.state import actors
    except ImportError:  # a private call
        return None
    address = actors(actor._actor_id.hex()).get("Address", {})
    return NodeId(address["NodeID"]) if address.get("NodeID") else None


def slots(workers: Workers, avoid: Container[str] = ()) -> int:
    """How many more workers of this size the cluster could start now, on other nodes than those to ``avoid``."""
    wanted = {"CPU": workers.cpus, "GPU": float(workers.gpus)}
    count = 0
    for node, free in _free_by_node().items():
        if node in avoid:
            continue
        fits = [int(free.get(resource, 0.0) // amount) for resource, amount in wanted.items() if amount]
        count += min(fits) if fits else workers.max
    return count


def check_room(workers: Workers) -> None:
    """Raises, before anything is started, when the cluster cannot hold the smallest permitted world."""
    room = slots(workers)
    if room < workers.min:
        free, total = ray.available_resources(), ray.cluster_resources()
        have = ", ".join(f"{free.get(r, 0):g} of {total.get(r, 0):g} {r}s free" for r in ("CPU", "GPU") if r == "CPU" or workers.gpus)
        need = f"{workers.cpus:g} CPU" + (f" and {workers.gpus} GPU" if workers.gpus else "")
        raise PlatformGaveUp(
            f"workers.min = {workers.min}, but the cluster has room for {room} (each needs {need}; {have}): "
            f"wait for other jobs to end, add nodes, or lower workers.min or workers.cpus"
        )
