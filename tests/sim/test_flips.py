"""Bits flip in the states of workers without a sign (R16): no checkpoint is made of replicas that differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from elastic.control.machine import advance
from elastic.control.run import Dispute, History, Members, RunState, Saves, Saving, Vote, Waiting
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of
from elastic.sim import Violation, simulate
from elastic.sim.coverage import run_in_processes, run_many
from elastic.sim.flips import mixed, replicas_of
from elastic.sim.scenario import FLIPPED_FROM, Scenario
from elastic.sim.simulation import Simulation
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


def test_replicas_are_those_of_the_same_cell_in_the_save_and_not_of_a_later_world() -> None:
    """Two of three replicas come from a flip, so the third is called wrong, although a worker has joined since, and
    although most members of the world hold other cells.  The control: only one of the three does.
    """
    names = w1, _, w3, _, w5, _, w7 = tuple(WorkerId(f"w{number}") for number in range(1, 8))
    nodes = tuple(NodeId(f"n{number}") for number in range(1, 7))
    save = Saving(Version(23, 6), names[:6], nodes, Layout(3, 1, (("tp", 2),)), 0.0)
    run = RunState(1, 7, Waiting(0.0), members=Members(seats=names), saves=Saves((save,)))
    assert replicas_of(w3, 23, run) == {w1, w3, w5} and replicas_of(w3, 22, run) == set()
    cell = str(cell_of(save.layout, 2))
    disputed = replace(run, history=History(dispute=Dispute(23, (Vote(w7, nodes[0], cell, "1"),))))
    assert replicas_of(w3, 23, disputed) == {w1, w3, w5, w7}
    sim = Simulation(3, flipped(3), advance)
    sim.run()  # so that there are workers of these names
    sim.flips.flipped = {w1, w5}
    sim.flips.judge_reason(run, "w3 held other bits after step 23 than the other replicas: the run goes back")
    sim.flips.flipped = {w1}
    with pytest.raises(Violation, match="w3 is called wrong"):
        sim.flips.judge_reason(run, "w3 held other bits after step 23 than the other replicas")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_two_thousand_seeds_with_flips() -> None:
    coverage, broken = run_in_processes(range(FLIPPED_FROM, FLIPPED_FROM + 2000), 2)
    assert broken is None
    assert all(coverage.occasions[occasion] > 50 for occasion in OCCASIONS)
