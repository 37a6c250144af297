"""Ray's view of the machines: the connection, free room, and nodes that come and go.

All private Ray calls but those of :mod:`actors.heads`, and all settings by environment variables, are in this
file and :mod:`actors.own_cluster`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import heads, own_cluster
from elastic.config.sections import Workers
from elastic.errors import PlatformGaveUp, Refused
from elastic.ids import NodeId, WorkerId
from elastic.train.machine.gpus import NVML

NAMESPACE = own_cluster.NAMESPACE
MARKET = "ray.io/market-type"
ZONE = "ray.io/availability-zone"
NODES_SHOWN = 8
GPU_S = 60.0
"""Seconds in which a node must say what memory its GPUs have; a process imports torch for it."""
ROOM_S, ROOM_POLL_S = 5.0, 0.1
"""The time in seconds for which a run waits for room before it is refused, and the time between two looks."""
STATUS_S = 10
"""Seconds that the cluster's head may take to say what its autoscaler does."""
WITHOUT_GPUS = (
    "workers.gpus = 0 (and precision = 'fp32', compile = false and a small model, since that is slow)"
)
HEAD_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112 # Ray's name
"""Seconds for which the cluster's head may be out of reach, before Ray ends this process without a useful
message.
"""


def connect(
    address: str | None,
    workers: Workers | None = None,
    *,
    answered: bool = False,
    tell: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Joins the cluster at ``address``, or the one that this process was submitted to, or starts one here
    ("local"), unless :func:`begin_here` has begun to.  ``answered`` means that the head has just answered.

    It also sets ``NVML``, so that an import of torch's compiler does not ask CUDA's driver.  Raises
    :class:`PlatformGaveUp` if Ray does not start, or does not answer; and as :func:`heads.answers`.
    """
    begin_here(address, workers, tell)
    if own_cluster.pending():
        return own_cluster.wait()
    if ray.is_initialized():
        return None
    # Ray prefers RAY_ADDRESS to "auto"
    submitted = os.environ.get("RAY_ADDRESS", "") if address in (None, "", "auto") else ""
    named = "the environment variable RAY_ADDRESS" if submitted else "--address"
    if answered:
        check_here(str(address))
    else:
        _check_head(submitted or address or "auto", named)
    there = address or "auto"
    try:
        own_cluster.init(address=there)
    except Exception as error:  # Ray raises plain ones if it cannot join
        why = error.__cause__ or error  # Ray gives the reason only in the cause
        raise PlatformGaveUp(
            f"the Ray cluster at {there} cannot be joined ({type(why).__name__}: {str(why).strip()}); "
            f"check {named}"
        ) from error


def begin_here(address: str | None, workers: Workers | None, tell: Callable[[str], None]) -> None:
    """Begins to start a cluster on this machine, as :func:`own_cluster.begin` does, if a run at ``address``
    has one.
    """
    for variable, value in NVML.items():
        os.environ.setdefault(variable, value)
    if starts_here(address):
        own_cluster.begin(workers, _gpus(), tell)


def _check_head(address: str, named: str) -> None:
    """Raises :class:`PlatformGaveUp` if no cluster can be joined at ``address``, which the user gave by
    ``named``.

    Raises as :func:`heads.answers`, too.
    """
    if address != "auto" and not re.fullmatch(r"[^/]+:\d+", address):
        raise Refused(
            f"{named} = {address!r} is not the address of a Ray cluster's head, such as 10.0.0.7:6379; "
            "a URL does not work here: http://… is for `ray job submit`, and ray://… is for Ray "
            "clients"
        )
    if not (there := _resolved(address)):
        return  # Ray says so itself
    if not heads.answers(there):
        ports = (
            "the head's port is usually 6379; 8265 is the port of Ray's web pages, and 10001 the port "
            "of Ray clients"
        )
        other = f", where another program listens ({ports})" if heads.reachable(there) else ""
        where = (
            f"{there}, the cluster that was started last on this machine" if address == "auto" else address
        )
        raise PlatformGaveUp(f"no Ray cluster answers at {where}{other}; correct {named}, or leave it out")
    check_here(there)


def _resolved(address: str) -> str:
    """Returns the address at which Ray joins the cluster: of "auto" one of which this machine is a node, or
    "" if there is none.
    """
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # a private call
        return "" if address == "auto" else address
    try:
        return canonicalize_bootstrap_address(address) or ""
    except (ConnectionError, ValueError):
        return ""


def starts_here(address: str | None) -> bool:
    """Returns whether a cluster starts on this machine for a run at ``address``."""
    return not ray.is_initialized() and (address == "local" or (address is None and begins_here()))


def begins_here() -> bool:
    """Returns whether this process would start a cluster of its own, because it is part of none and was not
    submitted to one.
    """
    return (
        not ray.is_initialized()
        and not own_cluster.pending()
        and os.environ.get("RAY_ADDRESS", "") in ("", "local")
    )


def joined(address: str) -> bool:
    """Returns whether this process is part of the cluster at ``address``, ``host:port`` of its head."""
    return ray.is_initialized() and bool(ray.get_runtime_context().gcs_address == address)


def check_here(address: str) -> None:
    """Raises :class:`Refused` if this machine is not a node of any cluster.  Ray itself would take a minute
    to say so.
    """
    try:
        from ray._private.services import find_node_ids
    except ImportError:  # a private call
        return
    if not find_node_ids():
        raise Refused(
            f"the cluster at {address} answers, but this machine is not one of its nodes: run the command "
            "on one of them, or submit it (ray job submit --address http://HEAD:8265 --working-dir . -- "
            "elastic …)"
        )


def known() -> list[str]:
    """Returns the addresses of the clusters that this process can find by itself: the cluster that it has
    joined; or else the cluster to which it was submitted, and those of which this machine is a node.
    """
    if ray.is_initialized():
        return [ray.get_runtime_context().gcs_address]
    word = os.environ.get("RAY_ADDRESS", "")  # or "auto", or the URL of a server for clients
    submitted = [word] if re.fullmatch(r"[^/]+:\d+", word) else []
    try:
        from ray._private.services import find_gcs_addresses
    except ImportError:  # a private call
        return submitted
    return list(dict.fromkeys([*submitted, *sorted(find_gcs_addresses())]))


def own() -> bool:
    """Returns whether this process started the cluster.  Such a cluster ends with the process."""
    from ray._private import worker

    # a private name; without it every cluster is treated as one that outlives this process
    node = getattr(worker, "_global_node", None)
    return bool(node is not None and node.is_head())


def search_path() -> list[str]:
    """Returns the folders where this process finds code, so that workers find it in the same places.

    Folders that Ray brings to every node by itself (working directory, packages of the runtime environment)
    are left out: a worker uses the copy on its own node.
    """
    brought = "/runtime_resources/"
    entries = [os.path.abspath(entry) for entry in (os.getcwd(), *sys.path) if entry]
    return [entry for entry in dict.fromkeys(entries) if os.path.isdir(entry) and brought not in f"{entry}/"]


def named(prefix: str) -> dict[str, Any]:
    """Returns the living actors whose names begin with ``prefix``, by the rest of the name."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # it has ended since
                found[entry["name"].removeprefix(prefix)] = ray.get_actor(entry["name"], namespace=NAMESPACE)
    return found


def titled(actor: type, name: str) -> type:
    """Returns ``actor`` as a class whose processes are called after ``name``: ``ray::Worker toy/w3.train`` in
    ``ps``.

    Ray sets the title of a process at every call, to the name of the class and the method; a title that the
    process gave itself would not last.
    """
    return type(f"{actor.__name__} {name}", (actor,), {})


def nodes() -> tuple[NodeId, ...]:
    """Returns the nodes that are alive."""
    return tuple(sorted(NodeId(node["NodeID"]) for node in ray.nodes() if node["Alive"]))


def _free_by_node() -> Mapping[str, Mapping[str, float]]:
    try:
        from ray._private.state import available_resources_per_node
    # a private call; the fallback is the sum over all nodes, which cannot see how free resources are split
    except ImportError:
        return {"cluster": ray.available_resources()}
    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def _known(node: NodeId) -> Mapping[str, Any] | None:
    """Returns what Ray knows of a node."""
    return next((each for each in ray.nodes() if each["NodeID"] == node), None)


def node_name(node: NodeId) -> str:
    """Returns the name of a node in messages: the beginning of its id, and its host."""
    found = _known(node)
    return (
        f"node {node[:8]} ({found['NodeManagerHostname']}, {found['NodeManagerAddress']})"
        if found
        else f"node {node[:8]}"
    )


def zone(node: NodeId) -> str:
    """Returns Ray's label of the node's availability zone, or "" if it has none."""
    return str((_known(node) or {}).get("Labels", {}).get(ZONE, ""))


def here() -> NodeId:
    """Returns the node of this process."""
    return NodeId(ray.get_runtime_context().get_node_id())


def only_on(node: str) -> NodeAffinitySchedulingStrategy:
    """Returns the rule by which Ray runs a task or an actor on ``node``, and nowhere else."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def on_this_node() -> dict[str, str]:
    """Returns the labels of the preferred node of a coordinator: this node, or, if its label
    ``ray.io/market-type`` says spot, any node that is not spot.
    """
    spot = any(
        node["NodeID"] == here() and node.get("Labels", {}).get(MARKET) == "spot" for node in ray.nodes()
    )
    return {MARKET: "!spot"} if spot else {"ray.io/node-id": here()}


def elsewhere() -> list[dict[str, dict[str, str]]]:
    """Returns the labels of the nodes that a coordinator may take instead: any node that is not spot, then
    any node.

    A soft node affinity is not used: with it Ray chose another node in one of three starts.
    """
    return [{"label_selector": {MARKET: "!spot"}}, {"label_selector": {}}]


def host() -> str:
    """Returns the name of this machine in messages."""
    return f"{socket.gethostname()}, {ray.util.get_node_ip_address()}"


def _about(actor: Any) -> Mapping[str, Any]:
    """Returns what Ray's head knows of an actor; nothing if Ray does not say."""
    try:
        from ray._private.state import actors
    except ImportError:  # a private call
        return {}
    return actors(actor._actor_id.hex()) or {}


def node_of(actor: Any) -> NodeId | None:
    """Returns the node of an actor, also of one that failed to start there; None if Ray does not say."""
    node = _about(actor).get("Address", {}).get("NodeID")
    return NodeId(node) if node else None


def is_this_process(actor: Any) -> bool:
    """Returns whether Ray's head says that ``actor`` is alive and is this process."""
    known = _about(actor)
    return (known.get("State"), known.get("Pid"), known.get("Address", {}).get("NodeID")) == (
        "ALIVE",
        os.getpid(),
        here(),
    )


def placed(actors: Mapping[WorkerId, Any]) -> frozenset[WorkerId]:
    """Returns those of ``actors`` that have been placed on a node."""
    return frozenset(worker for worker, actor in actors.items() if node_of(actor) is not None)


def pid_of(actor: Any) -> int | None:
    """Returns the process id of a living actor on its node; None if Ray does not say."""
    return _about(actor).get("Pid") or None


def slots(workers: Workers, avoid: Container[str] = ()) -> int:
    """Returns how many more workers of this size the cluster could start now, outside the nodes ``avoid``."""
    return _slots(workers, {node: free for node, free in _free_for(workers).items() if node not in avoid})


def _free_for(workers: Workers) -> Mapping[str, Mapping[str, float]]:
    """Returns the free resources of the nodes that have the labels that workers want."""
    free = _free_by_node()
    if not workers.labels:
        return free
    there = {node["NodeID"] for node in ray.nodes() if has_labels(node.get("Labels", {}), workers.labels)}
    return {node: resources for node, resources in free.items() if node in there}


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Returns whether a node with ``labels`` is one of those that a label selector of Ray describes: each value
    is a text, or ``in(a, b)``, and ``!`` before it says that the node must not have it.
    """
    for name, selector in wanted.items():
        text = selector.removeprefix("!")
        several = re.fullmatch(r"in\((.*)\)", text)
        values = [each.strip() for each in several[1].split(",")] if several else [text]
        if (labels.get(name) in values) == selector.startswith("!"):
            return False
    return True


def selector_of(workers: Workers, avoid: Collection[NodeId] = ()) -> dict[str, str] | None:
    """Returns the label selector of the nodes on which a worker may start, or None if it may start on any."""
    return {**workers.labels, **(not_on(avoid) if avoid else {})} or None


def grows() -> bool:
    """Returns whether the cluster has Ray's autoscaler of version 2, as ``ray up`` and KubeRay start it, which
    adds nodes.  The older one cannot be told from the watcher that every head has.
    """
    try:
        from ray.autoscaler.v2.utils import is_autoscaler_v2
    except ImportError:  # a private call
        return False
    # else it answers for the first cluster of this process
    found: bool = is_autoscaler_v2(fetch_from_server=True)
    return found


def request(workers: Workers, number: int, avoid: Collection[NodeId] = ()) -> None:
    """Tells the autoscaler to have nodes for ``number`` workers of this size, the nodes ``avoid`` not counted.
    It replaces what was told before, by whomever.
    """
    from ray.autoscaler.sdk import request_resources

    takes = {name: amount for name, amount in _wanted(workers).items() if amount}
    bundles, selector = [takes] * number if takes else [], selector_of(workers, avoid)
    request_resources(
        bundles=bundles,
        bundle_label_selectors=[selector] * len(bundles) if selector and bundles else None,
    )


def refused_request() -> int:
    """Returns the number of workers that the autoscaler was asked for if it cannot have as many, or 0."""
    try:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
    except ImportError:  # a private call
        return 0
    address = ray.get_runtime_context().gcs_address
    reply = GetClusterStatusReply()
    reply.ParseFromString(GcsClient(address).get_cluster_status(timeout_s=STATUS_S))
    refused = reply.autoscaling_state.infeasible_cluster_resource_constraints
    return sum(each.count for constraint in refused for each in constraint.resource_requests)


def not_on(nodes: Collection[NodeId]) -> dict[str, str]:
    """Returns the label selector of all nodes but ``nodes``."""
    return {"ray.io/node-id": f"!in({', '.join(nodes)})"}


def freest(nodes: Collection[NodeId]) -> NodeId:
    """Returns the one of ``nodes`` with the most free CPUs, or this node if there is none."""
    free = _free_by_node()
    return max(sorted(nodes), key=lambda node: free.get(node, {}).get("CPU", 0.0), default=here())


def workers_here(workers: Workers) -> int:
    """Returns how many workers of this size this node could have, at most all of the run's."""
    node = _known(here()) or {}
    return min(_slots(workers, {here(): node.get("Resources", {})}), workers.max)


def _slots(workers: Workers, free_by_node: Mapping[str, Mapping[str, float]]) -> int:
    count = 0
    for free in free_by_node.values():
        fits = [
            int(free.get(resource, 0.0) // amount) for resource, amount in _wanted(workers).items() if amount
        ]
        count += min(fits) if fits else workers.max + workers.spares
    return count


def _wanted(workers: Workers) -> dict[str, float]:
    """Returns the resources that a worker takes."""
    return {"CPU": workers.cpus, "GPU": float(workers.gpus)}


def smallest_gpu(workers: Workers) -> int:
    """Returns the bytes of the smallest GPU of the nodes that have room for a worker.  Each node is asked by
    a task that takes a GPU.

    Ray ends the process of such a task, so no context stays.  Raises :class:`PlatformGaveUp` if no node
    answers in ``GPU_S``.
    """
    free = _free_for(workers)
    ask = ray.remote(num_cpus=0, num_gpus=workers.gpus, max_calls=1, max_retries=0)(gpu_bytes)
    asked = [
        ask.options(scheduling_strategy=only_on(node)).remote()
        for node in nodes()
        if _slots(workers, {node: free.get(node, {})})
    ]
    answered, late = ray.wait(asked, num_returns=len(asked), timeout=GPU_S) if asked else ([], [])
    for each in late:
        ray.cancel(each, force=True)
    found, why = list[int](), "none answered"
    for each in answered:
        try:
            found.append(ray.get(each))
        except ray.exceptions.RayError as error:  # its node has gone, or its torch finds no GPU
            why = str(error).strip().splitlines()[-1]
    if not found:
        raise PlatformGaveUp(
            f"microbatch = 'auto': no node of the cluster could say what memory its GPUs have ({why}); "
            "set workers.device_gb, or set microbatch to a number"
        )
    return min(found)


def gpu_bytes() -> int:
    """Returns the memory of this process's GPU.  Its context ends with the process."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def check_room(workers: Workers) -> str:
    """Raises :class:`PlatformGaveUp` if the cluster has no room for the smallest permitted world, and does not
    grow; or :class:`Refused` for labels that no label selector can have.  Returns a sentence for the user if it
    grows and has no room yet, or "".

    The head learns the free resources from its nodes' reports, which tell of a new node, or of a process that
    has just ended, a moment later.  So this looks again and again for ``ROOM_S`` seconds.
    """
    _check_labels(workers)
    deadline = time.monotonic() + ROOM_S
    while (room := _slots(workers, free_by_node := _free_for(workers))) < workers.min:
        if grows():
            return (
                f"the cluster has room for {room} of at least {workers.min} workers; its autoscaler is asked "
                "for more nodes, for which the run waits"
            )
        if time.monotonic() > deadline:
            raise PlatformGaveUp(_no_room(workers, room, free_by_node))
        time.sleep(ROOM_POLL_S)
    return ""


def _check_labels(workers: Workers) -> None:
    try:
        from ray._private.label_utils import validate_label_selector
    except ImportError:  # a private call; Ray says so when the first worker starts
        return
    if why := validate_label_selector(workers.labels):
        raise Refused(f"workers.labels = {workers.labels}: {why}")


def _without_labels(workers: Workers) -> str:
    """Returns why no node can have a worker if none has the labels that workers want, or ""."""
    there = [node.get("Labels", {}) for node in ray.nodes() if node["Alive"]]
    if not workers.labels or any(has_labels(labels, workers.labels) for labels in there):
        return ""
    names = sorted({f"{name} = {labels.get(name, 'none')}" for name in workers.labels for labels in there})
    return (
        f"workers.labels = {workers.labels}, but no node of the cluster has these labels (there are: "
        f"{', '.join(names[:NODES_SHOWN])}): start nodes with ray start --labels, or change workers.labels"
    )


def check_gpus(workers: Workers) -> None:
    """Raises :class:`Refused` if a cluster that starts on this machine would have too few GPUs for the
    smallest permitted world.
    """
    if (there := _gpus()) is None:
        return  # the cluster says so once it has started
    if there < workers.min * workers.gpus:
        need = (
            f"workers.min = {workers.min} with workers.gpus = {workers.gpus}"
            if there
            else f"workers.gpus = {workers.gpus}"
        )
        fewer = f"lower workers.min to {there // workers.gpus}, or set" if there >= workers.gpus else "or set"
        raise Refused(
            f"{need}, but Ray sees {there or 'no'} GPU{'s' * (there > 1)} on this machine: train on a "
            f"cluster (--address), {fewer} {WITHOUT_GPUS}"
        )


def _gpus() -> int | None:
    """Returns the number of GPUs of this machine that Ray would see; None if it does not say."""
    try:
        from ray._private.accelerators import get_accelerator_manager_for_resource
    except ImportError:  # a private call
        return None
    sees = get_accelerator_manager_for_resource("GPU")
    visible, there = (
        sees.get_current_process_visible_accelerator_ids(),
        int(sees.get_current_node_num_accelerators()),
    )
    return there if visible is None else min(there, len(visible))


def _no_room(workers: Workers, room: int, free_by_node: Mapping[str, Mapping[str, float]]) -> str:
    wanted = ["CPU"] + ["GPU"] * bool(workers.gpus)
    total = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    have = "; ".join(
        f"{node_name(NodeId(node))}: "
        + ", ".join(
            f"{free.get(r, 0):g} of {total.get(node, {}).get('Resources', {}).get(r, 0):g} {r}s free"
            for r in wanted
        )
        for node, free in sorted(free_by_node.items())[:NODES_SHOWN]
    )
    need = f"{workers.cpus:g} CPU" + (f" and {workers.gpus} GPU" if workers.gpus else "")
    more = f"; and {len(total) - NODES_SHOWN} more nodes" if len(total) > NODES_SHOWN else ""
    if why := _without_labels(workers):
        return why
    if workers.gpus and not any(node.get("Resources", {}).get("GPU") for node in total.values()):
        return (
            f"workers.gpus = {workers.gpus}, but no node of the cluster has a GPU that Ray sees "
            f"({have}{more}): add a node with GPUs, or set {WITHOUT_GPUS}"
        )
    return (
        f"workers.min = {workers.min}, but the cluster has room for {room} (each needs {need}; "
        f"{have or 'no node has reported'}{more}): wait for other jobs to end, add nodes, or lower "
        f"workers.min{' or workers.cpus' if workers.cpus else ''}{'; workers.gpus = 0 trains without GPUs' if workers.gpus else ''}"
    )


def split(bucket: str, home: str, key: str) -> str:
    """Returns the end of a sentence about a node that did not find ``key``, which the coordinator wrote to
    the bucket.
    """
    return (
        f"does not see bucket = {bucket!r} as the same place as {home}, where the coordinator runs: one of "
        f"them did not find the object that the other wrote there ({key}); name a folder that every node "
        "mounts, or a URL such as s3://bucket/prefix"
    )
