"""A10: training with a batch that grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import toy_job

RAMP: dict[str, Any] = {"batch_ramp": {"start": 4, "increment": 4, "samples": 48}, "global_batch": 16, "microbatch": 2, "steps": 9}
SIZES = [4, 4, 4, 4, 8, 8, 12, 12, 16]


@pytest.mark.parametrize(("first", "then"), [(Layout(3, 1), Layout(1, 2)), (Layout(2, 2), Layout(1, 3))], ids=str)
def test_the_bits_do_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path, first: Layout, then: Layout) -> None:
    """Promises 1 and 4: stopped in the middle of the ramp and resumed in another layout; some ranks idle while the batch is small.

    The control: without the ramp the bits are others.
    """
    alone = train(ranks, toy_job(tmp_path / "alone", **RAMP), Layout(1, 1), 9)
    assert [sum(map(len, outcome.samples)) for outcome in alone.outcomes] == SIZES
    ids = [sample for outcome in alone.outcomes for part in outcome.samples for sample in part]
    assert len(ids) == sum(SIZES) and all(ids.count(sample) <= -(-len(ids) // 64) for sample in ids)
    job = toy_job(tmp_path / "run", **RAMP)
    begun = train(ranks, job, first, 5)
    assert train(ranks, job, then, 9, begun.version).hash == alone.hash
    assert train(ranks, toy_job(tmp_path / "even", **{**RAMP, "batch_ramp": {}}), Layout(1, 1), 9).hash != alone.hash
    assert alone.outcomes[-1].loss < alone.outcomes[0].loss
