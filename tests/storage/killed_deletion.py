"""Delete a checkpoint in one process after another, each killed (SIGKILL, for real) one step later than the
one before.

``python killed_deletion.py FOLDER``: like ``killed_commit.py``; each bucket has three checkpoints and what
was begun of a fourth, and the oldest checkpoint and the one that was begun are marked and removed.
"""

from __future__ import annotations

import sys

from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from storage.slices import Version
from tests.storage.killed_commit import Countdown, main
from tests.storage.states import TENSORS, save, state_of, write

OLD, BEGUN, BEFORE, NEWEST = Version(1, 1), Version(2, 1), Version(3, 2), Version(4, 2)


def prepare(checkpoints: Checkpoints) -> None:
    for number, version in enumerate((OLD, BEFORE, NEWEST)):
        save(checkpoints, version, state_of(TENSORS, seed=number), 2)
    write(checkpoints, BEGUN, state_of(TENSORS, seed=9), 2)


def child(boundary: int, folder: str) -> None:
    checkpoints = Checkpoints(ObjectStore.open(folder), "run")
    prepare(checkpoints)
    sys.addaudithook(Countdown(boundary, folder).audit)
    for version in (OLD, BEGUN):
        checkpoints.mark(version, "a test")
    for version in (OLD, BEGUN):
        checkpoints.remove(version)


if __name__ == "__main__":
    main(sys.argv[1], child)
