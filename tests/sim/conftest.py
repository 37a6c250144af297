"""Simulations collect garbage rarely, and never look at objects that were there before them; the seeds of the
suite run once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic.sim import Coverage, simulate
from elastic.sim.coverage import coverage_table, run_many
from tests.sim.scenarios import CALM, barren, edge, interregnum, storm

SEEDS, RARE = (
    range(300),
    (450, 495, 526, 719, 720, 732, 802, 1056, 1201, 1993, 1109, 2167, 2216, 5016, 5107, 5441, 5466, 1172),
)
"""The seeds of the suite, and some more in which pairs of state and event or occasions come that these have
not: of the first 2,000, ten are enough; in one a dead worker's report is evidence, and in the last one a loop
ends the run that waits.  The long version has 20,000.
"""
RARELY = 100_000
"""Number of new objects after which Python looks for garbage.  A simulation is one cycle of some thousand
objects, and Python's own 700 would cost a seventh of the time, or more after thousands of tests were
collected.
"""


@pytest.fixture(scope="package", autouse=True)
def garbage_is_collected_rarely() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(RARELY)
    yield
    gc.set_threshold(*usual)


@pytest.fixture(scope="package")
def seen() -> Coverage:
    """Returns what the seeds met, and five of each of the scenarios that have names.

    Promises are judged on the way: a broken one fails all tests that use this fixture.  All run in this
    process, beside which other tests hold deadlines.
    """
    coverage, broken = run_many([*SEEDS, *RARE])
    assert broken is None, simulate(broken)
    for seed in range(5):
        for scenario in (
            storm(seed),
            edge(seed),
            barren(seed),
            interregnum(seed),
            replace(CALM, stop_at_s=8.0 + seed),
        ):
            coverage.add(simulate(seed, scenario))
    print(coverage_table(coverage))
    return coverage
