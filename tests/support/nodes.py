"""Makes more machines on this one: raylets in mount namespaces of their own, in which some paths lead to
other folders or files.

Under those paths such a node sees what a machine with another disk, another checkout or another environment
would see.  Needs root.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray

from tests.support import warm
from tests.support.patience import PATIENCE_S
from tests.support.processes import Ended, Watched, children, frozen, kill_all, wait_gone

JOIN_S = 100.0
"""Seconds in which a node must join: it takes about 3.  Of two ``ray start`` at once in one session folder,
Ray loses one for ever.
"""


class NeverJoined(AssertionError):
    """A node that was started is no part of the cluster."""


@dataclass(frozen=True)
class Node:
    """A node to be.  ``instead`` maps a path to the path that it finds there; ``empty`` names folders of its
    own, which are empty.
    """

    name: str
    cpus: int
    instead: Mapping[Path, Path] = field(default_factory=dict)
    empty: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


class Joined(dict[str, str]):
    """Ids of nodes by name."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def cut_power(self, name: str) -> list[Ended]:
        """Kills the node's raylet and all its processes by SIGKILL, frozen first so that none sees another
        die.  Returns how each ended.
        """
        tree = frozen(self.processes[name].pid)
        kill_all(tree)
        return wait_gone(tree, PATIENCE_S)


@contextmanager
def joined(folder: Path, *nodes: Node) -> Iterator[Joined]:
    """Joins nodes to the cluster of this process, and ends them at the end.  What they print is in
    ``folder``.
    """
    found = Joined()
    processes = found.processes
    try:
        # one after the other: of two that start at once in one session folder, Ray lost one, which then never
        # came
        for node in nodes:
            processes[node.name] = _started(folder, node)
            _await(node.name, processes[node.name], folder)
        found.update({name: _alive()[name] for name in processes})
        yield found
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            _end(process)
        _until(lambda: not _alive().keys() & processes.keys(), folder)


def _started(folder: Path, node: Node) -> subprocess.Popen[bytes]:
    mounts = [
        f"mount --bind {shlex.quote(str(other))} {shlex.quote(str(path))}"
        for path, other in node.instead.items()
    ]
    mounts += [f"mount -t tmpfs none {shlex.quote(str(path))}" for path in node.empty]
    # else forks have imported already what lies there elsewhere
    forked = all(path.is_relative_to(folder) for path in node.instead)
    ray_of = [warm.__file__, "node"] if forked else ["-m", "ray.scripts.scripts"]
    start = [
        sys.executable,
        *ray_of,
        "start",
        "--block",
        "--disable-usage-stats",
        "--include-log-monitor",
        "false",
    ]
    start += ["--address", ray.get_runtime_context().gcs_address, "--object-store-memory", str(80 * 2**20)]
    start += [
        "--num-cpus",
        str(node.cpus),
        "--num-gpus",
        str(node.gpus),
        "--resources",
        json.dumps({f"test-{node.name}": 1}),
        *(
            ["--labels", ",".join(f"{name}={value}" for name, value in node.labels.items())]
            if node.labels
            else []
        ),
    ]
    ours = {"RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    with open(folder / f"node-{node.name}.log", "wb") as output:
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", "\n".join([*mounts, 'exec "$@"']), "sh", *start],
            env=dict(os.environ) | ours | dict(node.environment),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a node in good order, or by force if it does not end."""
    tree = []
    for pid in children(process.pid):
        with suppress(ProcessLookupError):
            tree.append(Watched(pid))
    process.wait(PATIENCE_S)
    for each in tree:
        if each.running:
            each.kill()
    wait_gone(tree, PATIENCE_S)


def _alive() -> dict[str, str]:
    """Returns the living nodes of the tests by name."""
    resources = {each["NodeID"]: each["Resources"] for each in ray.nodes() if each["Alive"]}
    return {
        name.removeprefix("test-"): node
        for node, has in resources.items()
        for name in has
        if name.startswith("test-")
    }


def _await(name: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until the node is part of the cluster.  Raises :class:`NeverJoined` if its process ends first, or
    after ``JOIN_S``.
    """
    end = time.monotonic() + JOIN_S
    while name not in _alive():
        if (code := process.poll()) is not None or time.monotonic() > end:
            why = (
                f"ended with code {code}"
                if code is not None
                else (f"did not join within {JOIN_S:g} s, as if two started at the same time")
            )
            raise NeverJoined(
                f"node {name!r} {why}; it "
                f"printed:\n{(folder / f'node-{name}.log').read_text(errors='replace')}"
            )
        time.sleep(0.01)


def _until(true: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "\n".join(
            log.read_text(errors="replace") for log in folder.glob("node-*.log")
        )
        time.sleep(0.01)
