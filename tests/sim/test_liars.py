"""Workers compute wrong gradients (R16): no step with reruns has them, and who was wrong is replaced."""

from __future__ import annotations

from collections import Counter

import pytest

from elastic.plan.layout import Layout
from elastic.plan.placement import counterparts, data_rank, model_group
from elastic.sim import simulate
from elastic.sim.coverage import run_in_processes, run_many
from elastic.sim.liars import place_of
from elastic.sim.scenario import WRONG_FROM, Scenario
from tests.sim.scenarios import lying

OCCASIONS = (
    "gradients of members differ",
    "a worker is called wrong for its gradients",
    "a liar differs from two others, or from itself",
    "a step that is done again shows who was wrong",
)
FOUND = (900018, 900038, 900058)
"""Seeds that once broke a promise, or in which a machine with two wrong workers ended the run."""


def test_r16_no_step_with_reruns_has_wrong_gradients() -> None:
    """The judge says so of every seed; here it is shown that it had something to judge."""
    met = Counter[str]()
    for seed in range(12):
        met += simulate(seed, lying(seed)).occasions
    assert all(met[occasion] for occasion in OCCASIONS), met


def test_gradients_are_wrong_with_all_other_faults() -> None:
    _, broken = run_many((*FOUND, *range(WRONG_FROM, WRONG_FROM + 5)))
    assert broken is None, simulate(broken)


def test_smaller_seeds_have_no_reruns() -> None:
    for seed in (*range(20), *range(WRONG_FROM - 20, WRONG_FROM)):
        scenario = Scenario.drawn(seed)
        assert not scenario.liars and not scenario.rerun_every
    assert all(Scenario.drawn(seed).rerun_every for seed in range(WRONG_FROM, WRONG_FROM + 20))


@pytest.mark.parametrize("more", [(), (("tp", 2),), (("cp", 2),), (("pp", 2), ("tp", 2))], ids=str)
def test_who_computes_the_same_gradients(more: tuple[tuple[str, int], ...]) -> None:
    """Members in one place of a model group do, and nobody else."""
    layout = Layout(2, 2, more)
    found = counterparts(layout)
    for place, ranks in enumerate(found):
        assert [place_of(layout, rank) for rank in ranks] == [(number, place) for number in range(4)]
        assert [data_rank(layout, rank) for rank in ranks] == [0, 1, 2, 3]
    assert [*zip(*found, strict=True)] == [model_group(layout, number) for number in range(4)]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_two_thousand_seeds_with_liars() -> None:
    coverage, broken = run_in_processes(range(WRONG_FROM, WRONG_FROM + 2000), 2)
    assert broken is None
    assert all(coverage.occasions[occasion] > 50 for occasion in OCCASIONS)
