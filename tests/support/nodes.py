"""A second machine on this one: a raylet in a mount namespace of its own, in which some folders or files are others.

What it sees under those paths is what a machine with another disk, another checkout or another environment would see.  Needs to be
root, as the tests are in CI.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from tests.support.processes import Watched, children, wait_gone

DEADLINE_S = 60


@contextmanager
def node(
    log: Path,
    cpus: int,
    *,
    instead: Mapping[Path, Path] | None = None,
    empty: tuple[Path, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The id of a node that has joined the cluster of this process.

    ``instead``: where it looks at the first, it finds the second; ``empty``: folders that are its own, and empty.
    """
    mounts = [f"mount --bind {shlex.quote(str(theirs))} {shlex.quote(str(path))}" for path, theirs in (instead or {}).items()]
    mounts += [f"mount -t tmpfs none {shlex.quote(str(path))}" for path in empty]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--include-log-monitor", "false"]
    start += ["--address", ray.get_runtime_context().gcs_address, "--num-cpus", str(cpus), "--object-store-memory", str(80 * 2**20)]
    ours = {"RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    before = _alive()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", "\n".join([*mounts, 'exec "$@"']), "sh", *start],
            env={**os.environ, **ours, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _until(lambda: bool(_alive() - before) or process.poll() is not None, log)
        (found,) = _alive() - before
        yield found
    finally:
        _end(process)
        _until(lambda: not _alive() - before, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    """In good order, and whatever does not go in good order by force."""
    tree = [Watched(pid) for pid in children(process.pid)]
    process.send_signal(signal.SIGTERM)
    process.wait(DEADLINE_S)
    for each in tree:
        if each.running:
            each.kill()
    wait_gone(tree, DEADLINE_S)


def _alive() -> set[str]:
    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}


def _until(true: object, log: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, log.read_text(errors="replace")
        time.sleep(0.01)
