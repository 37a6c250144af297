"""Save a checkpoint in one process after another, each killed (SIGKILL, for real) one step later than the one
before.

``python killed_commit.py FOLDER``: forks a child for each boundary into its own bucket ``FOLDER/<n>``.  A
boundary is anything that the child asks of the operating system in its bucket (open, link, rename, remove a
file; make a folder), and each call of the hook between two slices.  Ends with the first child that is not
killed.  Prints ``[[n, signal], …]``, as the system reports it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from storage.slices import Version
from tests.storage.states import TENSORS, part_of, save, state_of

BEFORE, DURING = Version(1, 1), Version(2, 1)


class Countdown:
    def __init__(self, left: int, folder: str) -> None:
        self.left, self.folder = left, folder

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.link", "os.rename", "os.remove", "os.mkdir") and str(
            arguments[0]
        ).startswith(self.folder):
            self.tick()

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def child(boundary: int, folder: str) -> None:
    checkpoints = Checkpoints(ObjectStore.open(folder), "run")
    save(checkpoints, BEFORE, state_of(TENSORS, seed=1), 1)
    state, countdown = state_of(TENSORS, seed=2), Countdown(boundary, folder)
    sys.addaudithook(countdown.audit)
    halves = [
        [part_of(state, tensor, tensor.whole()) for tensor in half] for half in (TENSORS[::2], TENSORS[1::2])
    ]
    receipts = [
        checkpoints.write_shard(DURING, f"{n}", half, hook=countdown.tick) for n, half in enumerate(halves)
    ]
    checkpoints.commit(DURING, receipts, {})


def main(folder: str, child: Callable[[int, str], None]) -> None:
    """Forks a child for each boundary until one is not killed, and prints how each has ended."""
    ends = []
    for boundary in range(1, 1000):
        pid = os.fork()
        if pid == 0:
            child(boundary, f"{folder}/{boundary}")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        ends.append((boundary, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0))
        if not ends[-1][1]:
            break
    print(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1], child)
