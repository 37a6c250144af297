"""The Ray cluster that a command starts on its own machine.  It ends with the process.

Ray takes 5 to 10 s to start, and its processes take as long for their imports.  So Ray starts in a thread,
while the job is checked.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from actors.cores import usable_cores
from actors.signals import kept_from_children
from elastic.config.sections import Workers
from elastic.errors import PlatformGaveUp
from elastic.train.machine.gpus import LAUNCHES

NAMESPACE = "elastic"
PRELOADED = "torch,numpy,pyarrow.parquet,pydantic.main,blake3"
"""The modules that processes import before they are needed: half of what a worker imports.  The coordinator,
too, waits until the first of these processes has imported them, so the other half would cost more than it
saves (RESULTS.md has figures).  No module of Elastic or of the user is among them: a waiting process does not
know yet which code the run has.
"""
OTHERS = 3
"""Processes beside the workers: the coordinator, a keeper, and one that replaces a dead process."""
SMALL = 8
"""Smallest number of CPUs of a cluster that starts without a job: room for a few small runs."""
NODE_S = 60
"""Seconds in which the head must know a node that starts here; it takes about 2."""
STARTS_S = "5 to 20 s"
"""The time that Ray's own processes take to start, by the speed of the machine."""


class _ClusterStart(threading.Thread):
    """Starts a cluster, and does not end: Linux ends Ray's processes with the thread that started them
    (PR_SET_PDEATHSIG).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(name="ray", daemon=True)
        self.options, self.over = options, threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            init(address="local", include_dashboard=False, **self.options)
        except Exception as error:  # Ray raises plain ones if its processes do not come up
            self.error = error
        self.over.set()
        if self.error is None:
            threading.Event().wait()


_start: _ClusterStart | None = None


def init(**options: Any) -> None:
    """Joins or starts a cluster with these ``options`` of ``ray.init``, without usage reports."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray._private.worker").addFilter(_is_news)
    with kept_from_children():
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="warning", **options)
    _leave_deaths_to_the_story()


def _is_news(record: logging.LogRecord) -> bool:
    """Returns False for Ray's warning that it has not replaced a signal handler: the handler of this process
    is meant to stay.
    """
    return "SIGTERM handler is not set" not in str(record.msg)


def begin(workers: Workers | None, gpus: int | None, tell: Callable[[str], None]) -> None:
    """Begins to start a cluster for ``workers`` on this machine, which has ``gpus`` GPUs (None: unknown),
    unless a cluster is on its way already.

    The cluster has waiting processes that have imported ``PRELOADED``, if :func:`prepared` says so.  Ray
    starts one process for each of its CPUs, so Ray gets as many CPUs as the run has processes.

    ``tell`` gets a sentence that the cluster starts, and another one if the workers want more cores than this
    machine has.
    """
    global _start  # a process has one cluster
    if pending():
        return
    set_variables()
    cores = usable_cores()
    if workers is not None and prepared(workers, cores, gpus):
        os.environ.setdefault("RAY_preload_python_modules", PRELOADED)
    lasting = (
        f"; --address auto uses the cluster at {there}, of which this machine is a node"
        if (there := _lasting())
        else ""
    )
    tell(f"a Ray cluster starts on this machine, in {STARTS_S}{lasting}")
    tell(crowded(workers, cores) if workers is not None else "")
    cpus = max(SMALL, cores) if workers is None else wanted(workers, gpus)
    _start = _ClusterStart({"object_store_memory": 80 * 2**20, "num_cpus": cpus})
    _start.start()
    atexit.register(_start.over.wait)  # Ray crashes a process that ends while it starts


def start_node(cpus: int, object_store_bytes: int) -> Any:
    """Starts another node of the cluster of this process, on this machine, and returns Ray's object for it once
    the head knows the node.  Linux ends the processes of the node with the thread that calls this.
    """
    from ray._private import node, parameter, services

    settings = parameter.RayParams(
        num_cpus=cpus,
        num_gpus=0,
        object_store_memory=object_store_bytes,
        gcs_address=ray.get_runtime_context().gcs_address,
        include_log_monitor=False,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=None,
    )
    # a handler of signals can be set by the main thread only, and the handlers here are ours
    started = node.Node(settings, head=False, shutdown_at_exit=False, spawn_reaper=True)
    services.wait_for_node(started.gcs_address, started.plasma_store_socket_name, NODE_S)
    return started


def set_variables() -> None:
    """Sets environment variables that Ray and its processes read as they start.

    They mean: no token (so a firewall must keep strangers out), no wait for a drain at the end, and no
    monitor that kills processes to free memory.
    """
    os.environ |= LAUNCHES
    for name in ("GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "memory_monitor_refresh_ms"):
        os.environ.setdefault(f"RAY_{name}", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def pending() -> bool:
    """Returns whether a cluster is on its way for which nobody has waited yet."""
    return _start is not None and (
        not _start.over.is_set() or _start.error is not None or ray.is_initialized()
    )


def wait() -> None:
    """Returns once the cluster on its way is there.  Raises :class:`PlatformGaveUp` if Ray does not start."""
    global _start
    if _start is None:
        return
    _start.over.wait()
    error, _start = _start.error, None
    if error is not None:
        advice = "is this machine overloaded, or its temporary folder full or read-only?"
        raise PlatformGaveUp(
            f"a local Ray cluster did not start ({type(error).__name__}: {str(error).strip()}); {advice}"
        ) from error


def drop() -> None:
    """Ends a cluster for which nobody has waited, since the job for which it was begun has failed in its
    checks.
    """
    global _start
    if pending():
        with suppress(PlatformGaveUp):
            wait()
            ray.shutdown()
    _start = None


def leave(code: int) -> None:
    """Ends this process, and Ray's processes with it, with exit code ``code`` if Ray is still starting;
    otherwise does nothing.
    """
    if _start is not None and not _start.over.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wanted(workers: Workers, gpus: int | None) -> int:
    """Returns the number of CPUs that Ray gets in a cluster that starts for ``workers`` on a machine with
    ``gpus`` GPUs: one for each process.

    The machine may have fewer cores; :func:`crowded` then warns the user.
    """
    most = workers.max + workers.spares
    most = min(most, gpus) if workers.gpus and gpus is not None else most
    return math.ceil(most * max(workers.cpus, 1)) + OTHERS


def crowded(workers: Workers, cores: int) -> str:
    """Returns a sentence for the user if the workers want more than ``cores`` cores; "" otherwise."""
    most = workers.max + workers.spares
    if most * workers.cpus <= cores:
        return ""
    return (
        f"this machine has {cores} {'core' if cores == 1 else 'cores'}, and {most} workers with "
        f"workers.cpus = {workers.cpus:g} share them: more workers are not faster here; lower workers.max, "
        "or train on a cluster of several machines (--address)"
    )


def prepared(workers: Workers, cores: int, gpus: int | None) -> int:
    """Returns how many processes wait, with their imports done, in a cluster that starts on a machine with
    ``cores`` cores; 0 means none.

    One waits for each worker and spare, and ``OTHERS`` more.  All import at the same time, while the run
    begins: with fewer cores than processes, the first worker would start later than without waiting
    processes.
    """
    return processes if (processes := wanted(workers, gpus)) <= cores else 0


def _lasting() -> str:
    """Returns the address of the cluster of which ``ray start`` has made this machine a node, or "" if there
    is none.
    """
    try:
        from ray._private.services import find_bootstrap_address, find_gcs_addresses
    except ImportError:  # private calls
        return ""
    address = find_bootstrap_address(None) or ""
    return address if address in find_gcs_addresses() else ""


def _leave_deaths_to_the_story() -> None:
    """Silences the paragraph that Ray prints for every process that ends.  The story of the run says the same
    in one sentence.
    """
    from ray._private import worker

    # a private name; without it, Ray only prints more
    if (printed := getattr(worker, "print_to_stdstream", None)) is None:
        return

    def print_others(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if not any(
            line.startswith(("A worker died or was killed", "Task Coordinator", "The node with node id:"))
            for line in data.get("lines", ())
        ):
            printed(data, *arguments, **options)

    worker.print_to_stdstream = print_others
