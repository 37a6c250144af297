"""R16: a processor computes a wrong gradient, and nothing tells: not the loss, nor the replicas, which all apply
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.job import Job
from elastic.runs.run import Run
from tests.actors.test_corruption import flipped, members, said
from tests.support.chaos import alone, assert_nothing_left, formed, samples, trial
from tests.support.mischief import STEP
from tests.support.toys import LIGHT, toy_job


def job_of(folder: Path, name: str, workers: int, loss: str, rerun_every: int = STEP, **changes: Any) -> Job:
    values = {
        "workers": {"min": 1, "max": workers, "rerun_every": rerun_every},
        **({"loss": f"tests.support.mischief:{loss}"} if loss else {}),
    }
    return toy_job(folder, name=name, **{**LIGHT, "steps": 2 * STEP, **values, **changes})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return alone(job_of(tmp_path_factory.mktemp("quiet"), "quiet", 1, ""))


def test_r16_a_wrong_gradient_reaches_no_weight_and_its_worker_is_replaced(
    tmp_path: Path, undisturbed: Any
) -> None:
    """No committed step is done again.  The control: without reruns nobody notices, and the weights are others."""
    chaos = trial(job_of(tmp_path, "chaos", 2, "wrong_gradient"))
    liar = flipped(chaos)
    assert said(
        chaos, f"computed different gradients from the same microbatch in step {STEP}, and nobody knows"
    )
    assert said(chaos, f"{liar} computed other gradients in step {STEP} than the same step gave")
    assert (chaos.result.state, chaos.hash, chaos.losses) == (
        "Finished",
        undisturbed.hash,
        undisturbed.losses,
    )
    assert samples(chaos.ledger) == samples(undisturbed.ledger)
    first, second, *later = members(chaos)
    assert first == second and liar in first and later and not any(liar in each for each in later)
    assert [each.redone for each in formed(Run.open(chaos.job).records())] == [0] * (2 + len(later))
    assert chaos.ledger[STEP].reran and not chaos.ledger[STEP - 1].reran
    assert_nothing_left(chaos)

    silent = trial(job_of(tmp_path, "silent", 2, "wrong_gradient", rerun_every=0))
    assert flipped(silent) and not said(silent, "gradients") and silent.hash != undisturbed.hash
    assert len(members(silent)) == 1


@pytest.mark.full
def test_r16_a_processor_that_stays_wrong_is_outvoted_when_the_step_is_done_again(
    tmp_path: Path, undisturbed: Any
) -> None:
    """It is compared with another one in the second world.  Each has one part of the state of three."""
    parallel = {"dp_replicate": 1}
    chaos = trial(job_of(tmp_path, "chaos", 3, "wrong_gradients", parallel=parallel))
    (line,) = said(chaos, f"computed other gradients in step {STEP} than others did from the same microbatch")
    assert (chaos.result.state, chaos.hash) == ("Finished", undisturbed.hash)
    first, second, *later = members(chaos)
    liar = first[1]
    assert line.startswith(f"{liar} computed") and liar in second and later
    assert not any(liar in each for each in later)
    assert_nothing_left(chaos)
