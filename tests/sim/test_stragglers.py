"""Workers that are slow for long: they are named, and leave if the job says so, whatever else the run does."""

from __future__ import annotations

from collections import Counter

import pytest

from elastic.protocol.faults import Kind
from elastic.sim import simulate
from elastic.sim.coverage import run_in_processes, run_many
from elastic.sim.scenario import SLOW_FROM, Scenario
from tests.sim.scenarios import straggling

OCCASIONS = ("a straggler is named", "a straggler leaves", "a world goes on without a straggler")


def test_stragglers_leave_and_nothing_is_done_again() -> None:
    """R15.  The judge says so of every seed; here it is shown that it had something to judge."""
    met = Counter[str]()
    for seed in range(12):
        report = simulate(seed, straggling(seed))
        assert report.end == "Finished"
        met += report.occasions
    assert all(met[occasion] >= 3 for occasion in OCCASIONS), met


def test_stragglers_come_with_all_other_faults() -> None:
    coverage, broken = run_many(range(SLOW_FROM, SLOW_FROM + 24))
    assert broken is None, simulate(broken)
    assert coverage.occasions["a straggler is named"]


def test_smaller_seeds_measure_nobody_and_evict_nobody() -> None:
    for seed in (*range(50), *range(SLOW_FROM - 50, SLOW_FROM)):
        assert not Scenario.drawn(seed).measures and not Scenario.drawn(seed).rules.evicts
    some = [Scenario.drawn(seed) for seed in range(SLOW_FROM, SLOW_FROM + 60)]
    assert sum(any(each.kind is Kind.SLOW for each in scenario.faults) for scenario in some) > 50
    assert 20 < sum(scenario.rules.evicts for scenario in some) < 50


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_three_thousand_seeds_with_stragglers() -> None:
    coverage, broken = run_in_processes(range(SLOW_FROM, SLOW_FROM + 3000), 2)
    assert broken is None
    assert all(coverage.occasions[occasion] > 100 for occasion in OCCASIONS)
