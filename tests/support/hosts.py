"""Makes hosts with a network between them that can be cut.

Each host is a raylet of one cluster in a network namespace of its own.  It has its own monotonic clock,
because machines were not all started at the same time.

Host 0 is this one: the tests' process, the head and with it the coordinator.  The others are joined to it,
and to each other, by ``tests/support/wire.py`` alone.  Disk and shared memory are common to all, as is the
bucket, which no cut reaches.  Needs root, ``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import ray

from actors import cluster, heads
from tests.support import warm
from tests.support.clusters import TUNED
from tests.support.commands import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.processes import Watched, frozen, processes

MTU = 9000
UPTIME_S = 1_000_000
"""Time in seconds by which the clock of each host is ahead of that of the host before it."""
MARK = "HOST_OF_TEST"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=PATIENCE_S)


class Hosts:
    """Makes ``number`` hosts beside this one, with ``cpus`` CPUs each; this one gives none.

    A context manager, which connects to the cluster.
    """

    def __init__(self, number: int, cpus: int = 1) -> None:
        self.number, self.cpus = number + 1, cpus
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))  # short, as paths of Unix sockets must be
        pid = os.getpid()
        self.names = [f"h{pid}-{host}" for host in range(self.number)]
        self.subnet = f"10.{100 + pid % 100}.{pid // 100 % 250}"
        self.raylets: dict[int, subprocess.Popen[bytes]] = {}
        self.ice: list[Watched] = []
        self.wire = subprocess.Popen(
            [sys.executable, "-m", "tests.support.wire", *self.names],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"{self.subnet}.{host + 1}"

    # ---- the network

    def rule(self, source: int, target: int, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """Sets what happens to packets from one host to another.  The rule is in force when this returns."""
        assert self.wire.stdin is not None and self.wire.stdout is not None
        line = json.dumps({"source": source, "target": target, "loss": loss, "delay_s": delay_s})
        self.wire.stdin.write(f"{line}\n")
        self.wire.stdin.flush()
        assert self.wire.stdout.readline().strip() == line

    def weather(self, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """Sets what happens to packets between all hosts, both ways."""
        for source in range(self.number):
            for target in range(self.number):
                if source != target:
                    self.rule(source, target, loss=loss, delay_s=delay_s)

    def cut(
        self, host: int, *, to: bool = True, off: bool = True, others: tuple[int, ...] | None = None
    ) -> None:
        """Cuts a host off.

        With ``to`` nothing from ``others`` (by default all hosts) reaches it; with ``off`` nothing that it
        sends reaches them.
        """
        for other in range(self.number) if others is None else others:
            if other != host and to:
                self.rule(other, host, loss=1.0)
            if other != host and off:
                self.rule(host, other, loss=1.0)

    def mend(self) -> None:
        self.weather()

    def freeze(self, host: int) -> None:
        """Stops all processes of a host until ``thaw``."""
        self.ice += frozen(self.raylets[host].pid)

    def thaw(self) -> None:
        for process in self.ice:
            with contextlib.suppress(ProcessLookupError):
                process.kill(signal.SIGCONT)
        self.ice.clear()

    # ---- the cluster

    def _start(self) -> None:
        assert self.wire.stdout is not None
        assert self.wire.stdout.readline() == "ready\n", (
            "no TUN device could be made: this needs root and /dev/net/tun"
        )
        _ip("addr", "add", f"{self.address(0)}/24", "dev", self.names[0])
        _ip("link", "set", self.names[0], "mtu", str(MTU), "up")
        for host, name in enumerate(self.names[1:], 1):
            _ip("netns", "add", name)
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "mtu", str(MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._ray(0, "--head", "--port=6399", "--include-dashboard=false", "--num-cpus=0")
        self._until(lambda: heads.reachable(f"{self.address(0)}:6399"))
        os.environ["RAY_AUTH_MODE"] = "disabled"
        ray.init(
            address=f"{self.address(0)}:6399",
            namespace=cluster.NAMESPACE,
            log_to_driver=False,
            logging_level="warning",
            _node_ip_address=self.address(0),
        )
        for host in range(1, self.number):
            self.join(host)
        for host in range(1, self.number):
            self._until(lambda host=host: self.node(host) is not None)  # type: ignore[misc]

    def join(self, host: int) -> None:
        """Starts the raylet of a host, for the first time or after the cluster gave up the one before."""
        self._ray(host, f"--address={self.address(0)}:6399", f"--num-cpus={self.cpus}")

    def left(self, host: int) -> bool:
        """Returns whether the raylet of a host has ended, as it does when it hears that the cluster has given
        it up.
        """
        return self.raylets[host].poll() is not None

    def rejoin(self) -> None:
        """Restores hosts that have left or were given up, for the next test."""
        self.mend()
        self.thaw()
        for host in range(1, self.number):
            self._until(lambda host=host: self.node(host) is not None or self.left(host))  # type: ignore[misc]
            if self.left(host):
                self.join(host)
            self._until(lambda host=host: self.node(host) is not None)  # type: ignore[misc]

    def _ray(self, host: int, *arguments: str) -> None:
        ahead = str(UPTIME_S * host)
        clock = ["unshare", "--time", "--fork", "--monotonic", ahead, "--boottime", ahead]
        inside = ["ip", "netns", "exec", self.names[host], *clock] if host else []
        ray_start = [sys.executable, warm.__file__, "node", "start", "--block"]
        lean = ["--object-store-memory=80000000", "--include-log-monitor=false"]
        places = [f"--node-ip-address={self.address(host)}", f"--temp-dir={self.folder}/{host}"]
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with open(self.folder / f"host-{host}.log", "wb") as output:
            self.raylets[host] = subprocess.Popen(
                [*inside, *ray_start, *lean, *places, *arguments],
                env=ours | TUNED | {"PYTHONPATH": str(ROOT), MARK: str(self.folder)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def node(self, host: int) -> str | None:
        """Returns the node id of a host, or None if Ray does not know it as alive."""
        alive = {each["NodeManagerAddress"]: each["NodeID"] for each in ray.nodes() if each["Alive"]}
        return alive.get(self.address(host))

    def _until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not true():
            logs = "\n".join(log.read_text(errors="replace") for log in self.folder.glob("host-*.log"))
            assert time.monotonic() < until and self.raylets[0].poll() is None, logs
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the cluster by force: nothing of it is kept, and Ray takes ten seconds to end a node in good
        order.
        """
        ray.shutdown()
        while left := processes(f"{MARK}={self.folder}"):
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            for raylet in self.raylets.values():
                raylet.poll()
            time.sleep(0.05)
        for raylet in self.raylets.values():
            raylet.wait(PATIENCE_S)
        assert self.wire.stdin is not None and self.wire.stdout is not None
        self.wire.stdin.close()
        self.wire.wait(PATIENCE_S)
        self.wire.stdout.close()
        for name in self.names[1:]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=PATIENCE_S)
        shutil.rmtree(self.folder, ignore_errors=True)
