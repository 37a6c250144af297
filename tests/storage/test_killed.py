"""H3, promise 6: a writer killed at any boundary never leaves half a checkpoint to be seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from storage.checkpoints import Checkpoints
from storage.checkpoints.manifest import MANIFEST
from storage.objects import ObjectStore
from tests.storage.killed_commit import BEFORE, DURING
from tests.storage.states import TENSORS, save, state_of
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def seen(folder: Path) -> bool:
    """Returns whether the second checkpoint is there; any checkpoint that is there must be whole."""
    checkpoints = Checkpoints(ObjectStore.open(str(folder)), "run")
    assert checkpoints.verify(BEFORE).good
    there = checkpoints.store.exists(f"{checkpoints.folder(DURING)}/{MANIFEST}")
    assert checkpoints.latest_good() == (DURING if there else BEFORE)
    assert checkpoints.verify(DURING).good == there
    return there


def boundaries(program: str, folder: Path) -> list[int]:
    """Runs ``program`` of this folder.  Returns its boundaries: at all but the last, a child was killed
    (SIGKILL, as the system says).
    """
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        str(ROOT / "tests/storage" / program),
        str(folder),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    *killed, undisturbed = json.loads(done.stdout)
    assert undisturbed[1] == 0
    assert all(end == signal.SIGKILL for _, end in killed)
    return [boundary for boundary, _ in (*killed, undisturbed)]


def test_killed_at_every_boundary_of_a_save(tmp_path: Path) -> None:
    *killed, undisturbed = boundaries("killed_commit.py", tmp_path)
    assert len(killed) >= 30
    visible = [seen(tmp_path / str(boundary)) for boundary in (*killed, undisturbed)]
    assert visible == sorted(visible)  # first not there, then there: nothing between
    assert visible[0] is False
    assert visible[-1] is True
    for boundary in killed[::5]:  # and a later writer can do the save again, in another layout
        checkpoints = Checkpoints(ObjectStore.open(str(tmp_path / str(boundary))), "run")
        if not visible[boundary - 1]:
            save(checkpoints, DURING, state_of(TENSORS, seed=2), 3)
        assert seen(tmp_path / str(boundary))


def test_a_manifest_written_first_would_be_noticed(tmp_path: Path) -> None:
    """The negative control: the same check goes red for a writer with the wrong order."""
    checkpoints = Checkpoints(ObjectStore.open(str(tmp_path / "right")), "run")
    save(checkpoints, BEFORE, state_of(TENSORS, seed=1), 1)
    save(checkpoints, DURING, state_of(TENSORS, seed=2), 2)
    key = f"{checkpoints.folder(DURING)}/{MANIFEST}"
    wrong = Checkpoints(ObjectStore.open(str(tmp_path / "wrong")), "run")
    save(wrong, BEFORE, state_of(TENSORS, seed=1), 1)
    wrong.store.put(key, checkpoints.store.get(key))
    try:
        seen(tmp_path / "wrong")
    except AssertionError:
        return
    raise AssertionError("a manifest without its files was taken for a checkpoint")
