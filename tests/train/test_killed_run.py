"""L7: a real run, killed by the system at each write and at each deletion in its bucket, goes on from a good
checkpoint and cleans up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.patience import PATIENCE_S
from tests.train.killed_run import STEPS, Ended

KEPT = [STEPS - 1, STEPS]
FILES = ["MANIFEST.json", "index.jsonl", "shard-00000-of-00001.safetensors"]


def found(folder: Path, stride: int, *words: str) -> list[Ended]:
    """Returns what was found at each boundary; the last one was not reached."""
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        str(ROOT / "tests/train/killed_run.py"),
        str(folder),
        "1",
        str(stride),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=20 * PATIENCE_S, env=environment
    )
    assert done.returncode == 0, done.stderr
    each = [Ended(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    assert each[-1].signal == 0 and all(one.signal == signal.SIGKILL for one in each[:-1])
    return each


def harm(one: Ended, undisturbed: Ended) -> list[str]:
    """Returns what is wrong after a boundary."""
    wanted = sorted(f"{step:012d}/{name}".rstrip("/") for step in KEPT for name in ("", "", *FILES))
    return [
        what
        for what, holds in {
            "what looks like a checkpoint is not whole": one.whole == one.manifests,
            "there were two checkpoints, and now there are fewer": len(one.whole)
            >= min(2, max(one.whole, default=0)),
            "it did not go on to the end": one.state == "Finished",
            "other bits": one.hash == undisturbed.hash,
            "not what the rules keep": one.good == KEPT,
            "something is left of other checkpoints": sorted(one.left) == wanted,
            "a file is left that was never renamed": not one.partial,
        }.items()
        if not holds
    ]


@pytest.mark.full
def test_l7_a_run_is_killed_at_each_write_and_each_deletion(tmp_path: Path) -> None:
    *killed, undisturbed = found(tmp_path, 1)
    assert not harm(undisturbed, undisturbed)
    assert {one.at: (one.event, what) for one in killed if (what := harm(one, undisturbed))} == {}
    events = " ".join(one.event for one in killed)
    for change in ("os.link", "os.remove", "MANIFEST.json", "DELETED.json", "index.jsonl", "shard-00000"):
        assert change in events, f"the control: no child was killed at {change}"
    assert {max(one.whole, default=0) for one in killed} == {0, 1, 2, 3, 4, 5}, "and at every age of the run"


@pytest.mark.full
def test_a_deletion_in_another_order_would_be_noticed_by_a_run(tmp_path: Path) -> None:
    """The negative control: the shard goes first, and no note says so."""
    # there are two changes between the shard and the manifest
    *killed, undisturbed = found(tmp_path, 2, "torn")
    assert any("what looks like a checkpoint is not whole" in harm(one, undisturbed) for one in killed)
