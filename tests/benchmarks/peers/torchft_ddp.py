"""Runs torchft 0.2: two replica groups of one rank each, with gloo and DDP, a lighthouse, and one torchrun
per replica as its guide starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseServer

from tests.benchmarks.peers import toy
from tests.benchmarks.peers.nodes import kill
from tests.benchmarks.peers.toy import Mark
from tests.support.processes import frozen, wait_gone

LIGHTHOUSE: dict[str, Any] = {
    "min_replicas": 1,
    "quorum_tick_ms": 100,
    "join_timeout_ms": 10_000,
    "heartbeat_timeout_ms": 1000,
}
"""Settings of the lighthouse: the first three are those of its README; the heartbeat timeout is 5000 ms by
default.
"""


class Torchft:
    settings = f"lighthouse {LIGHTHOUSE}, ProcessGroupGloo(timeout=5 s), torchrun --max_restarts 100"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "steps"
        self.folder.mkdir()
        self.lighthouse = LighthouseServer(bind="[::]:0", **LIGHTHOUSE)
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for replica in range(toy.WORKERS):
            self.launch(replica)

    def launch(self, replica: int) -> None:
        """Starts a node of one replica."""
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--nproc_per_node=1",
            "--max_restarts=100",
        ]
        command = [
            *torchrun,
            f"--master_port={free_port()}",
            "-m",
            "tests.benchmarks.peers.torchft_replica",
            str(self.folder),
            str(replica),
        ]
        address = self.lighthouse.address()
        log = (self.folder / f"replica{replica}.log").open("ab")
        environment = os.environ | {
            "TORCHFT_LIGHTHOUSE": address,
            "OMP_NUM_THREADS": "1",
            "LOGLEVEL": "WARNING",
        }
        self.launchers[replica] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def marks(self) -> Sequence[Mark]:
        return toy.read_marks(self.folder)

    def kill_process(self) -> None:
        """Kills the process of the last replica; its torchrun starts it again."""
        kill([mark.pid for mark in self.marks() if mark.rank == toy.WORKERS - 1][-1])

    def kill_node(self) -> None:
        self.end(toy.WORKERS - 1)

    def give_notice(self, lead_s: float) -> Callable[[], None]:
        return self.kill_node

    def end(self, replica: int) -> None:
        launcher = self.launchers.pop(replica)
        tree = frozen(launcher.pid)
        for each in tree:
            each.kill(signal.SIGKILL)
        launcher.wait()
        wait_gone(tree, 10)

    def add_node(self) -> None:
        self.launch(toy.WORKERS - 1)

    def phases(self, killed_at: float) -> dict[str, float]:
        """Returns how long after the kill the survivor dropped the broken step, in seconds."""
        dropped = [mark.at for mark in self.marks() if mark.what == "dropped" and mark.at > killed_at]
        return {"dropped_s": dropped[0] - killed_at} if dropped else {}

    def close(self) -> None:
        for replica in list(self.launchers):
            self.end(replica)
        self.lighthouse.shutdown()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
