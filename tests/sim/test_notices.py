"""Notices that nodes will be taken, or may be taken: with enough time nothing is lost, whatever else the run does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from elastic.protocol.faults import RECORDED, Fault, Kind
from elastic.sim import simulate
from elastic.sim.coverage import NOTICES, missing, run_in_processes, run_many
from elastic.sim.scenario import NOTICED_FROM, Scenario
from tests.sim.scenarios import CALM, noticed

FOUND = (500129, 500200, 500253, 500492, 500603, 501587)
"""Seeds that broke a promise once: the state was handed over to too few, a buddy was about to be taken, advice
had expired, the bucket was too slow, a notice came after the boundary, and all nodes were announced.
"""
OCCASIONS = ("a node leaves in time", "a node is let go", "a notice is undone")


def test_nodes_leave_in_time_and_nothing_is_done_again() -> None:
    """R5.  The judge says so of every seed; here it is shown that it had something to judge."""
    met = Counter[str]()
    for seed in range(10):
        report = simulate(seed, noticed(seed))
        assert report.end == "Finished"
        met += report.occasions
    assert all(met[occasion] > 5 for occasion in OCCASIONS), met


def test_the_schedules_that_found_something_are_survived() -> None:
    _, broken = run_many(FOUND)
    assert broken is None, simulate(broken)


def test_notices_come_with_all_other_faults() -> None:
    """The control of the table: without notices, their events and pairs are not missing."""
    coverage, broken = run_many(range(NOTICED_FROM, NOTICED_FROM + 12))
    assert broken is None, simulate(broken)
    absent = missing(coverage)
    assert any(str(Kind.NODE_NOTICE) in pair for pair in absent)
    coverage.struck = Counter({pair: n for pair, n in coverage.struck.items() if pair[0] in RECORDED})
    assert not [
        pair for pair in missing(coverage) if str(Kind.NODE_NOTICE) in pair or pair.split()[0] in NOTICES
    ]


@pytest.mark.parametrize(("amount", "taken"), [(0.0, True), (-1.0, True), (0.5, False), (1.0, False)])
def test_a_notice_with_an_amount_above_nothing_is_withdrawn(amount: float, taken: bool) -> None:
    notice = Fault(6.0, Kind.NODE_NOTICE, 1, 12.0, amount)
    rules = replace(CALM.rules, target_step=25)
    report = simulate(0, replace(CALM, rules=rules, faults=(notice,)))
    said = [reason for _, _, reason in report.lines]
    assert any("is taken" in each and each.startswith("the machine of") for each in said) is taken
    assert any("is not taken after all" in each for each in said) is not taken


def test_smaller_seeds_have_no_notices() -> None:
    for seed in (*range(50), *range(NOTICED_FROM - 50, NOTICED_FROM)):
        assert Kind.NODE_NOTICE not in {fault.kind for fault in Scenario.drawn(seed).faults}
    with_some = [
        seed
        for seed in range(NOTICED_FROM, NOTICED_FROM + 50)
        if Kind.NODE_NOTICE in {fault.kind for fault in Scenario.drawn(seed).faults}
    ]
    assert len(with_some) > 40, "a few seeds are scenarios of isolation"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_three_thousand_seeds_with_notices() -> None:
    coverage, broken = run_in_processes(range(NOTICED_FROM, NOTICED_FROM + 3000), 2)
    assert broken is None
    assert all(coverage.occasions[occasion] > 100 for occasion in OCCASIONS)
