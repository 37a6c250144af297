"""A member aborts before the others are fenced.  No worker of the product does this; if one did, still nobody
would apply the step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos import assert_nothing_left, trial
from tests.support.mischief import STEP
from tests.support.toys import toy_job


@pytest.mark.full
def test_nobody_applies_a_step_that_one_aborted_too_early(tmp_path: Path) -> None:
    """R1: rank 2 is frozen before it contributes to the commit, rank 0 is fenced and aborts, rank 1 is not
    fenced for 0.3 s more.
    """
    same = {"steps": 24, "workers": {"min": 1, "max": 3}, "deadlines": {"stall_s": 5, "fence_s": 2}}
    quiet = trial(toy_job(tmp_path, name="quiet", **same))
    frozen = [{"point": "before_commit", "step": STEP, "world_rank": 2, "kind": "SIGSTOP"}]
    chaos = trial(
        toy_job(tmp_path, name="chaos", **same, faults=frozen, loss="tests.support.mischief:early_abort")
    )
    assert (chaos.result.state, chaos.hash) == ("Finished", quiet.hash)
    assert chaos.losses == quiet.losses
    first = {
        name: seen.final["updates_applied"]
        for name, seen in chaos.witness.seen.items()
        if name in ("w1", "w2", "w3")
    }
    # the frozen one; the others each step once, in whatever generation
    assert sorted(first.values()) == [STEP - 1, 24, 24]
    assert chaos.ledger[STEP].generation > 1
    logs = [path.read_text() for path in Path(chaos.job.bucket).glob("chaos/logs/*/*.log")]
    assert sum("aborted early" in log for log in logs) == 1
    assert_nothing_left(chaos)
