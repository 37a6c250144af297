"""The README's first command, and the README's own model: killed on the way, each ends with the bits of a run
that was left alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.job import Job
from tests.examples.blocks import ROOT
from tests.support.chaos import alone, trial
from tests.support.state_hash import state_hash

STEPS = 40


@pytest.mark.full
def test_the_quickstart_ends_three_times_with_the_same_bits(tmp_path: Path) -> None:
    """H1: the quickstart says so itself, and an independent program finds equal hashes."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "quickstart-out" / "result.json").read_text())
    assert result["same"] and set(result["exports"]) == {"undisturbed", "killed", "resumed"}
    assert len({state_hash(files) for files in result["exports"].values()}) == 1
    for said in (
        "--- SIGKILL to w2",
        "w2 is lost (its process died)",
        "start w3",
        "(bucket)",
        "bit-identical",
    ):
        assert said in done.stdout, f"the README shows {said!r}"


def own_job(bucket: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> Job:
    """Returns the README's job with another bucket and few steps."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    sys.modules.pop("own_model", None)
    return Job.load(ROOT / "examples" / "own_model.toml").replace(
        bucket=str(bucket), **{"steps": STEPS, **changes}
    )


def test_l13_the_example_of_a_loop_of_ones_own_has_the_bits_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L13: examples/own_loop.py, in a folder outside of the package.  The control is another learning rate."""
    expected = alone(own_job(tmp_path, monkeypatch, steps=6))
    looped = Job.load(ROOT / "examples" / "own_loop.toml").replace(bucket=str(tmp_path), steps=6)
    assert alone(looped).hash == expected.hash
    other = looped.replace(name="other", optim=looped.optim.model_copy(update={"lr": 1e-2}))
    assert alone(other).hash != expected.hash
    rows = [
        json.loads(line)
        for line in next((tmp_path / "looped" / "metrics").iterdir()).read_text().splitlines()
    ]
    assert [row["progress"] for row in rows] == [step / 6 for step in range(1, 7)]


@pytest.mark.full
# a Linear with a bias returns a view; nothing here writes into it
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_the_readmes_own_model_is_killed_and_ends_with_the_bits_of_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U1, U2, U3: SIGKILL in the backward pass of a step."""
    expected = alone(own_job(tmp_path / "local", monkeypatch))
    killed = own_job(
        tmp_path / "killed",
        monkeypatch,
        deadlines={"grow_debounce_s": 8},  # the first world has all for whom there is room
        faults=[{"point": "backward", "step": 12, "world_rank": 1, "kind": "SIGKILL"}],
    )
    chaos = trial(killed)
    assert chaos.hash == expected.hash and chaos.losses == expected.losses
    (victim,) = chaos.witness.killed(signal.SIGKILL)
    assert victim.worker in ("w1", "w2") and victim.final["step"] == 11
