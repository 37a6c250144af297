"""A10: training with a batch that grows.  ``test_covering.py`` has it in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.segments import train_here
from tests.support.toys import small_job

SMALL = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2, "dropout": 0.1}
RAMP: dict[str, Any] = {
    "batch_ramp": {"start": 4, "increment": 4, "samples": 48},
    "global_batch": 16,
    "microbatch": 4,
    "steps": 9,
    "model_args": SMALL,
}
SIZES = [4, 4, 4, 4, 8, 8, 12, 12, 16]


def test_a10_each_step_has_the_samples_of_the_ramp_and_none_is_lost_or_repeated(tmp_path: Path) -> None:
    """A10: also over a stop in the middle of the ramp.  The control: without the ramp the bits are others."""
    alone, job = train_here(small_job(tmp_path / "alone", **RAMP), 9), small_job(tmp_path / "run", **RAMP)
    assert [sum(map(len, outcome.samples)) for outcome in alone.outcomes] == SIZES
    ids = [sample for outcome in alone.outcomes for part in outcome.samples for sample in part]
    assert len(ids) == sum(SIZES) and all(ids.count(sample) <= -(-len(ids) // 64) for sample in ids)
    assert train_here(job, 9, train_here(job, 5).version).hash == alone.hash
    assert train_here(small_job(tmp_path / "even", **{**RAMP, "batch_ramp": {}}), 9).hash != alone.hash
    assert alone.outcomes[-1].loss < alone.outcomes[0].loss
