"""An undisturbed run on a cluster ends with the bits of one process without Ray, and computes nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos import alone, trial
from tests.support.toys import toy_job

STEPS = 12


@pytest.mark.full  # every other run here ends with those bits too
def test_the_cluster_gives_the_bits_of_local(tmp_path: Path) -> None:
    """U9, B1: two workers under Ray, and one process without."""
    run = trial(toy_job(tmp_path, name="undisturbed", steps=STEPS, workers={"min": 2, "max": 2}))
    expected = alone(toy_job(tmp_path / "local", name="local", steps=STEPS))
    assert run.result.state == "Finished"
    assert (run.hash, run.losses) == (expected.hash, expected.losses)
    assert run.witness.total("microbatches_run") == STEPS * run.job.microbatches
    assert run.witness.generation == 1


@pytest.mark.full
def test_an_average_of_the_weights_lives_through_a_kill(tmp_path: Path) -> None:
    """The hash is of all state, with the averages and the moments of groups of parameters."""
    optim = {"average": 0.9, "groups": [{"names": ["*norm*"], "lr_scale": 2.0, "weight_decay": 0.1}]}
    faults = [{"point": "backward", "step": STEPS // 2, "world_rank": 1}]
    run = trial(
        toy_job(
            tmp_path, name="averaged", steps=STEPS, optim=optim, workers={"min": 1, "max": 2}, faults=faults
        )
    )
    expected = alone(toy_job(tmp_path / "local", name="local", steps=STEPS, optim=optim))
    assert run.witness.generation > 1, "the kill"
    assert (run.hash, run.losses) == (expected.hash, expected.losses)
