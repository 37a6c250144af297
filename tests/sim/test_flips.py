"""Bits flip in the states of workers without a sign (R16): no checkpoint is made of replicas that differ."""

from __future__ import annotations

from collections import Counter

import pytest

from elastic.sim import simulate
from elastic.sim.coverage import run_in_processes, run_many
from elastic.sim.flips import mixed
from elastic.sim.scenario import FLIPPED_FROM, Scenario
from tests.sim.scenarios import flipped

OCCASIONS = ("a bit flips", "replicas differ at a save", "a worker is called wrong")


def test_r16_no_checkpoint_is_made_of_replicas_that_differ() -> None:
    """The judge says so of every seed; here it is shown that it had something to judge."""
    met = Counter[str]()
    for seed in range(20):
        report = simulate(seed, flipped(seed))
        assert report.end == "Finished"
        met += report.occasions
    assert all(met[occasion] > 5 for occasion in OCCASIONS), met


def test_bits_flip_with_all_other_faults() -> None:
    _, broken = run_many(range(FLIPPED_FROM, FLIPPED_FROM + 16))
    assert broken is None, simulate(broken)


def test_smaller_seeds_have_no_flips() -> None:
    assert not any(
        Scenario.drawn(seed).flips for seed in (*range(50), *range(FLIPPED_FROM - 50, FLIPPED_FROM))
    )
    assert all(Scenario.drawn(seed).flips for seed in range(FLIPPED_FROM, FLIPPED_FROM + 50))


def test_bits_that_are_right_stay_right() -> None:
    assert mixed((0, 0)) == 0 != mixed((0, 5)) == mixed((0, 5)) != mixed((5, 0))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_two_thousand_seeds_with_flips() -> None:
    coverage, broken = run_in_processes(range(FLIPPED_FROM, FLIPPED_FROM + 2000), 2)
    assert broken is None
    assert all(coverage.occasions[occasion] > 50 for occasion in OCCASIONS)
