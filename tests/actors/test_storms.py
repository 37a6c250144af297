"""R8: a second fault while the first is dealt with, and storms of them.  The long storm and the judge are in
tests/benchmarks/storm.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.chaos import Chaos
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.protocol.faults import Fault, Kind
from tests.benchmarks.storm import SHARDS, Storm, judge
from tests.support.chaos import Witness, trial
from tests.support.commands import ROOT
from tests.support.left import left_of
from tests.support.toys import toy_job

STEPS, GATE_STEP = 60, 40
SAMPLES = 16 * STEPS
DOUBLES = (
    Fault(0.0, Kind.SIGKILL, 0, state="Running"),
    Fault(0.0, Kind.SIGSEGV, 1, state="Stopping"),
    Fault(0.0, Kind.SIGKILL, 0, state="Forming"),
    Fault(0.1, Kind.EXCEPTION, 1, state="Forming"),
    Fault(0.1, Kind.STORE_LOSS, state="Stopping"),
)


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, SHARDS], ids=["replicas", "shards"])
def test_second_faults_while_stopping_and_forming(
    tmp_path: Path, sixty: Any, changes: dict[str, Any]
) -> None:
    """R8: one of three dies, a second while its world stops, another while the next one forms, which loses
    its store too.
    """
    gate = Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(GATE_STEP, 0, 2)[0]
    args = {"samples": SAMPLES, "read_s": 0.02, "gates": {str(gate): str(tmp_path / "gate")}}
    job = toy_job(
        tmp_path,
        name="doubles",
        steps=STEPS,
        data={"dataset": "tests.support.toys:Sums", "args": args},
        workers={"min": 1, "max": 3},
        checkpoint={"save_every": 5},
        deadlines={"grow_debounce_s": 0.5, "fence_s": 4, "form_s": 20},
        **changes,
    )
    chaos = Chaos(job, DOUBLES)

    def act(witness: Witness, view: View) -> bool:
        if view.step >= 8:
            chaos.heed(view)
        if not chaos.pending:
            (tmp_path / "gate").touch()
        return not chaos.pending

    try:
        struck = trial(job, act)
    finally:
        chaos.close()
    storm = Storm(job, chaos, struck.witness, len(DOUBLES), result=struck.result)
    # controls: nobody looked; things left
    for what in (storm.left, ("process 7 ray::Keeper", "segment elastic-doubles-0001-abcdef-w1")):
        assert judge(replace(storm, left=what), sixty.job)["wrong"] == [
            f"the run left things behind: {', '.join(what)}"
        ]
    found = judge(replace(storm, left=left_of(job.name, struck.witness.token)), sixty.job)
    assert not found["wrong"], found
    assert struck.losses[-1] <= 0.8 * struck.losses[0]
    assert {strike.state for strike in chaos.performed} == {"Running", "Stopping", "Forming"}
    assert len(chaos.performed) >= len(DOUBLES) - 1, chaos.strikes  # one may find its victim dying already
    assert struck.witness.total("healed_host_bytes") > 0 or not changes


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [[], ["--shards"]], ids=["replicas", "shards"])
@pytest.mark.parametrize("seed", [11, 12])
def test_a_storm(seed: int, more: list[str]) -> None:
    """R8, R2: twenty faults, drawn from fifteen kinds, on three nodes, in a process of its own, which judges
    the run itself.
    """
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.storm",
        "--seed",
        str(seed),
        "--faults",
        "20",
        "--rehearsal",
        *more,
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
