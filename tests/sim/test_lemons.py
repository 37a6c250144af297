"""Nodes on which workers fail again and again are closed for a while, whatever else the run does."""

from __future__ import annotations

from collections import Counter

import pytest

from elastic.control.machine import advance
from elastic.control.run import Cluster, Lemon, RunState, Waiting
from elastic.ids import NodeId
from elastic.sim import Violation, simulate
from elastic.sim.coverage import run_in_processes, run_many
from elastic.sim.scenario import LEMONS_FROM, Scenario
from elastic.sim.simulation import Simulation
from elastic.sim.sour import LATE_S
from tests.sim.scenarios import lemons

FOUND = (800059, 800172, 800190, 800203, 800288)
"""Seeds that broke a promise once: a closed node was used before the room of a failed worker was free again."""
OCCASIONS = ("a worker fails on a lemon", "a lemon is closed", "a closed node is used")


def test_lemons_are_closed_and_the_last_one_is_used() -> None:
    """The judge says so of every seed; here it is shown that it had something to judge."""
    met = Counter[str]()
    for seed in range(25):
        met += simulate(seed, lemons(seed)).occasions
    assert all(met[occasion] for occasion in OCCASIONS), met


def test_the_schedules_that_found_something_are_survived() -> None:
    _, broken = run_many(FOUND)
    assert broken is None, simulate(broken)


def test_smaller_seeds_have_no_lemons() -> None:
    for seed in (*range(20), *range(LEMONS_FROM - 20, LEMONS_FROM)):
        scenario = Scenario.drawn(seed)
        assert not scenario.lemons and not scenario.rules.lemon_after
    assert all(Scenario.drawn(seed).lemons for seed in range(LEMONS_FROM, LEMONS_FROM + 20))


def test_the_second_closed_node_is_due_after_the_first_one_is_used() -> None:
    """The room of the first one may come.  The control: nothing comes for as long again."""
    sim = Simulation(6, lemons(6), advance)
    judge, refused_s, cool_s = sim.oracle.lemons, sim.rules.refused_s, sim.rules.lemon_cool_s
    n1, n2 = NodeId("n1"), NodeId("n2")
    judge.told.update({n1: [0.0, 1.0], n2: [0.0, 1.0]})
    closed, used = Lemon((0.0, 1.0), 1, 1.0, cool_s), Lemon((0.0, 1.0), 1, refused_s, refused_s)
    both = RunState(1, 1, Waiting(0.0), cluster=Cluster(lemons={n1: closed, n2: closed}))
    one = RunState(1, 1, Waiting(0.0), cluster=Cluster(lemons={n1: used, n2: closed}))
    judge.note(both, (), (), both, 1.0)
    judge.note(both, (), (), one, refused_s + 1.0)
    judge.note(one, (), (), one, refused_s + LATE_S + 2.0)
    with pytest.raises(Violation, match="does not use a node that is closed"):
        judge.note(one, (), (), one, 2 * refused_s + LATE_S + 2.0)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_three_thousand_seeds_with_lemons() -> None:
    coverage, broken = run_in_processes(range(LEMONS_FROM, LEMONS_FROM + 3000), 2)
    assert broken is None
    assert all(coverage.occasions[occasion] > 50 for occasion in OCCASIONS)
