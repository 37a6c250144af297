"""R3, R10: a process that is only busy is not taken for dead.

Others take both cores, and the keeper digests, copies and reads logs all the time.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import cluster
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.runs.run import Run
from tests.support.busy import burn, busy_cores, hold_the_gil, worst_beat_s
from tests.support.chaos import Witness, alone, assert_survived, trial
from tests.support.patience import PATIENCE_S
from tests.support.toys import toy_job

STEPS, BEGIN, LAST = 40, 4, 30
STALL_S, LATE_S, HELD_S = 10.0, 2.0, 3.0
THREADS = 3
"""Number of the keeper's four threads that are kept busy; the fourth answers the test."""


class Load:
    """Makes load from step ``BEGIN`` to ``LAST``, then reads how late the keeper's beats were.

    Then it holds the interpreter's lock of the keeper for ``HELD_S``, and reads this again.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.stack = stack
        self.done, self.gate = folder / "done", folder / "gate"
        self.burning: list[Any] = []
        self.rounds: list[int] = []
        self.late_s = self.held_late_s = 0.0

    def __call__(self, witness: Witness, view: View) -> bool:
        if view.step < BEGIN or (self.burning and view.step < LAST - 1):
            return False
        (keeper,) = [
            actor for name, actor in cluster.named(f"{view.token}/").items() if name.startswith("keeper-")
        ]
        if not self.burning:
            self.stack.enter_context(busy_cores(3))
            self.burning = [keeper.__ray_call__.remote(burn, str(self.done)) for _ in range(THREADS)]
            return False
        self.late_s = ray.get(keeper.__ray_call__.remote(worst_beat_s), timeout=PATIENCE_S)
        self.done.touch()
        self.rounds = ray.get(self.burning, timeout=PATIENCE_S)
        self.stack.close()
        ray.get(keeper.__ray_call__.remote(hold_the_gil, HELD_S), timeout=PATIENCE_S)
        self.held_late_s = ray.get(keeper.__ray_call__.remote(worst_beat_s), timeout=PATIENCE_S)
        self.gate.touch()
        return True


@pytest.mark.full
def test_nobody_is_taken_for_dead_who_is_only_busy(tmp_path: Path) -> None:
    """No beat is late by 2 s, and no world is formed anew.  The control: a lock that is held for 3 s is seen
    by the same measure, and does no harm either, for the world steps on."""
    stack = ExitStack()
    load, samples = Load(tmp_path, stack), 16 * STEPS
    sample = Cursor(samples, 16, 0, "permutation").microbatch_ids(LAST, 0, 2)[0]
    args = {"samples": samples, "read_s": 0.01, "gates": {str(sample): str(load.gate)}}
    job = toy_job(
        tmp_path,
        name="busy",
        steps=STEPS,
        data={"dataset": "tests.support.toys:Sums", "args": args},
        deadlines={"grow_debounce_s": 20, "stall_s": STALL_S, "fence_s": 2},
    )
    load.gate.touch()
    reference = alone(job.replace(name="alone"))
    load.gate.unlink()
    with stack:
        chaos = trial(job, load)
    assert_survived(chaos, reference, worlds=(2,), tiers=("init",))
    assert min(load.rounds) > 0 and load.late_s < LATE_S, load.late_s
    assert load.held_late_s > LATE_S, "the control"
    events = [record["event"]["$"] for record in Run.open(job).records()]
    finishing = [record["state"] for record in Run.open(job).records()].index("Finishing")
    assert not {"Lost", "KeeperLost", "Broken", "Fenced"} & set(events[:finishing])
    print(f"worst beat {load.late_s:.3f} s late, {load.rounds} rounds of work in the keeper")
