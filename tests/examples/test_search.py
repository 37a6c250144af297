"""A12: a search for hyperparameters whose trials are real runs; a trial that is killed costs no other one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic.data.prepare import prepare
from elastic.job import Job
from elastic.train.alone.revisit import evaluate_here
from tests.examples.blocks import ROOT
from tests.support.patience import PATIENCE_S

pytest.importorskip("pandas", reason="ray[tune] is not installed")
pytest.importorskip("tensorboardX", reason="ray[tune] is not installed")

JOB = """
name = "base"
bucket = "out"
model_args = {{ dim = 16, layers = 1, heads = 2 }}
data = {{ args = {{ path = "data", seq_len = 32 }} }}
steps = {steps}
global_batch = 4
microbatch = 4
workers = {{ min = 1, max = 1 }}
checkpoint = {{ save_every = 12 }}
[validation]
every = 4
samples = 8
args = {{ path = "data/held-out", seq_len = 32 }}
"""


def test_a12_a_space_has_a_grid_and_random_draws() -> None:
    """A12: of each draw another value, within its ends."""
    from ray.tune.search.sample import Float

    from examples.search import space_of

    space = space_of(["model_args.layers=2,4", "optim.kind='sgd','adamw'"], ["optim.lr=1e-4..1e-2"])
    assert space["model_args.layers"] == {"grid_search": [2, 4]} and space["optim.kind"] == {
        "grid_search": ["sgd", "adamw"]
    }
    draw = space["optim.lr"]
    assert isinstance(draw, Float) and (draw.lower, draw.upper) == (1e-4, 1e-2)
    drawn = {draw.sample() for _ in range(100)}
    assert len(drawn) > 50 and all(1e-4 <= each <= 1e-2 for each in drawn) and min(drawn) < 1e-3 < max(drawn)


@pytest.mark.full
def test_a12_a_killed_trial_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: three real runs, three rows, the best by validation loss.

    The process of one trial gets SIGKILL; Tune starts it again, and it goes on with its run.  The judge of
    the best is another process that measures the checkpoint on the held-out samples.  The control: an earlier
    one loses something else.
    """
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(
            " ".join(f"{number * word % 97} is a word" for word in range(60))
        )
    prepare(tmp_path / "text", str(tmp_path / "data"), (".txt",), held_out=0.2)
    (tmp_path / "job.toml").write_text(JOB.format(steps=24))
    words = [
        sys.executable,
        str(ROOT / "examples" / "search.py"),
        "job.toml",
        "--grid",
        "optim.lr=1e-4,3e-3,1e-2",
        "--at-once",
        "3",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    killed: list[int] = []
    thread = threading.Thread(target=kill_a_trial, args=(command.pid, tmp_path / "out", killed))
    thread.start()
    said, _ = command.communicate(timeout=500)
    thread.join()
    assert command.returncode == 0 and killed, said
    rows = dict(re.findall(r"^(trial-\w+): optim.lr = \S+: loss (\S+)$", said, re.MULTILINE))
    best = re.search(r"^the best of 3: (trial-\w+), loss (\S+) after step 24$", said, re.MULTILINE)
    assert len(rows) == 3 and best is not None, said
    assert min(rows.values(), key=float) == rows[best[1]]
    stored = json.loads((tmp_path / "out" / best[1] / "job.json").read_text())["job"]
    job = Job.from_json(json.dumps(stored | {"bucket": str(tmp_path / "out")}))
    monkeypatch.chdir(tmp_path)
    (last, found), (_, before) = evaluate_here(job), evaluate_here(job, 12)
    assert last.step == 24 and f"{found.mean:.6g}" == best[2] != f"{before.mean:.6g}"


def kill_a_trial(driver: int, bucket: Path, killed: list[int]) -> None:
    """Sends SIGKILL to a process that follows a trial, of the cluster of process ``driver``, once a run has
    begun.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not killed:
        time.sleep(0.05)
        if not [*bucket.glob("trial-*/owner/000001.json")]:
            continue
        for entry in Path("/proc").iterdir():
            if (
                entry.name.isdigit()
                and b"ImplicitFunc.train" in command_line(entry)
                and is_under(int(entry.name), driver)
            ):
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
                return


def command_line(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def is_under(pid: int, above: int) -> bool:
    """Returns whether process ``above`` is an ancestor of ``pid``."""
    while pid > 1:
        if pid == above:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False
