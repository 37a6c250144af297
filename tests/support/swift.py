"""A real S3 server: OpenStack Swift with s3api, on loopback, in a folder of its own, its four servers each a
real process.

It checks signatures, honours create-only writes and ranges, and keeps what it has when it is killed.  As it
comes, though, it may tell several overlapping create-only writes that each has won; the filter ``once``
before it lets them in one by one. The folder must be on a file system with user xattrs; nothing else is
needed of the machine.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.support.patience import PATIENCE_S
from tests.support.processes import free_ports

KEY, SECRET = "test:tester", "testing"
REGION = "us-east-1"
ROOT = Path(__file__).parents[2]
UNCHANGED = "unchanged"
"""The folder below which the filter ``once`` does nothing."""
SERVERS = ("object", "container", "account", "proxy")

PIPELINE = (
    "catch_errors gatekeeper proxy-logging cache once listing_formats bulk s3api tempauth copy slo dlo "
    "versioned_writes proxy-logging proxy-server"
)
PROXY = """
[pipeline:main]
pipeline = {pipeline}
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
error_suppression_interval = 0
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
[filter:s3api]
use = egg:swift#s3api
location = {region}
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{nowhere}
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:once]
paste.filter_factory = tests.support.swift_once:filter_factory
"""
PLAIN = "".join(
    f"[filter:{name}]\nuse = egg:swift#{name}\n"
    for name in PIPELINE.split()[:-1]
    if f"[filter:{name}]" not in PROXY
)


RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, port in (each.split("=") for each in sys.argv[2:]):
    builder = RingBuilder(1, 1, 0)
    builder.add_dev(dict(id=0, region=1, zone=1, weight=1, ip="127.0.0.1", port=int(port), device="d",
                         replication_ip="127.0.0.1", replication_port=int(port)))
    builder.rebalance()
    builder.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz", format_version=1)
"""
"""Program that writes the rings, with one device for each server; ``swift-ring-builder`` would need nine
processes.
"""


class Swift:
    """``with Swift(folder) as server:`` serves S3 at ``server.endpoint``; ``kill`` and ``start`` are for
    tests of outages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip((*SERVERS, "nowhere"), free_ports(len(SERVERS) + 1), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "devices" / "d").mkdir(parents=True)
        self._configure()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['proxy']}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a node that may use the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Starts the servers that do not run.  Returns when all listen.

        The proxy comes last: while it finds no server that knows a bucket, it says that there is no such
        bucket.
        """
        for names in (SERVERS[:-1], SERVERS[-1:]):
            for name in names:
                if name not in self.processes or self.processes[name].poll() is not None:
                    self._begin(name)
            deadline = time.monotonic() + PATIENCE_S
            for name in names:
                self._await(name, deadline)

    def _begin(self, name: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                f"swift.{name if name != 'object' else 'obj'}.server",
            ]
            config = str(self.folder / f"{name}-server.conf")
            self.processes[name] = subprocess.Popen(
                [*command, config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,  # a server that is told to end signals its whole process group
            )

    def _await(self, name: str, deadline: float) -> None:
        while not listening(self.ports[name]):
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                said = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                self.stop()
                raise RuntimeError(
                    f"swift's {name} server does not listen on port {self.ports[name]}; it said: {said}"
                )
            time.sleep(0.02)

    def kill(self, *names: str) -> None:
        """Kills servers by SIGKILL, as a power cut would; all of them by default."""
        for name in names or SERVERS:
            self.processes[name].send_signal(signal.SIGKILL)
            self.processes[name].wait(PATIENCE_S)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE_S)

    def __enter__(self) -> Swift:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configure(self) -> None:
        shared = (
            "[swift-hash]\nswift_hash_path_suffix = tests\n[storage-policy:0]\nname = one\ndefault = yes\n"
        )
        (self.folder / "swift.conf").write_text(shared)
        for name in SERVERS:
            common = (
                f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {self.ports[name]}\nworkers = 0\nswift_dir = "
                f"{self.folder}\n"
                f"devices = {self.folder}/devices\nmount_check = false\nuser = "
                f"{getpass.getuser()}\nlog_udp_host = 127.0.0.1\n"
                f"log_udp_port = {self.ports['nowhere']}\nrecon_cache_path = {self.folder}\n"
            )
            rest = f"[app:{name}-server]\nuse = egg:swift#{name}\n[pipeline:main]\npipeline = {name}-server\n"
            if name == "proxy":
                rest = (
                    PROXY.format(
                        pipeline=PIPELINE, secret=SECRET, region=REGION, nowhere=self.ports["nowhere"]
                    )
                    + PLAIN
                )
            (self.folder / f"{name}-server.conf").write_text(common + rest)
        ports = [f"{name}={self.ports[name]}" for name in SERVERS[:-1]]
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RINGS, str(self.folder), *ports],
            check=True,
            timeout=PATIENCE_S,
        )


def listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
