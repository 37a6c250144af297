"""Worlds whose members divide the model along several axes: every two axes meet what matters, and the judge
knows their cells.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ids import NodeId
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, held, largest_cells
from elastic.plan.routes import Routes
from elastic.plan.transfer import Holding, covered
from elastic.sim import Coverage, Violation, simulate
from elastic.sim.coverage import AXIS_PAIRS, run_in_processes, run_many
from elastic.sim.scenario import AXES, TOGETHER, TOGETHER_FROM, UNLIKE_ROWS, Scenario
from elastic.sim.truth import BLOWS, axes_of, check_routes, covers, rows_in
from storage.slices import Version
from tests.sim.scenarios import CALM

SEEDS = range(TOGETHER_FROM, TOGETHER_FROM + 2 * len(TOGETHER))
"""Two seeds for every two and every three axes."""


def unmet(coverage: Coverage) -> list[str]:
    """Returns what no world with both axes of a pair has met."""
    return [f"{pair}: {blow}" for pair in AXIS_PAIRS for blow in BLOWS if not coverage.axes[pair, blow]]


def test_every_two_axes_lose_members_that_heal_and_keepers_and_take_workers_in() -> None:
    """The control: seeds without experts meet no pair of expert parallelism."""
    coverage, broken = run_many(SEEDS)
    assert broken is None, simulate(broken)
    assert unmet(coverage) == []
    few, _ = run_many(SEEDS[:: len(TOGETHER)])
    assert sum("ep" in each.split(":")[0].split() for each in unmet(few)) == (len(AXES) - 1) * len(BLOWS)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_three_thousand_seeds_of_several_axes() -> None:
    coverage, broken = run_in_processes(range(TOGETHER_FROM, TOGETHER_FROM + 3000), 2)
    assert broken is None
    assert min(coverage.axes[pair, blow] for pair in AXIS_PAIRS for blow in BLOWS) > 100


def test_seeds_go_through_the_axes_in_turn() -> None:
    for seed in SEEDS:
        scenario, axes = Scenario.drawn(seed), TOGETHER[seed % len(TOGETHER)]
        rule = scenario.rules.layout
        rule.check(scenario.rules.min_workers, scenario.rules.max_workers)
        assert (scenario.experts > 1) is ("ep" in axes)
        assert {name for name, _ in rule.model} == {"pp", "cp", "tp"}.intersection(axes)
    assert {axis for axes in TOGETHER for axis in axes} == set(AXES)
    assert Scenario.drawn(TOGETHER_FROM - 1).experts == 1


# ---- the judge

SEVERAL = (
    (("cp", 2), ("tp", 2)),
    (("pp", 2), ("cp", 2), ("tp", 2)),
    (("pp", 3), ("cp", 2)),
    (("cp", 3),),
    (("tp", 3),),
)
"""Degrees of the axes that divide the model."""


@given(
    ranks=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(SEVERAL), st.integers(0, 35)), min_size=1),
    rows=st.sampled_from(UNLIKE_ROWS),
)
def test_the_oracle_and_the_product_agree_on_cells_of_several_axes(
    ranks: list[tuple[int, tuple[tuple[str, int], ...], int]], rows: tuple[int, ...]
) -> None:
    """They agree on what is covered, on how much a cell has, and that no cell has more than the largest."""
    layouts = [(Layout(1, shards, model), rank) for shards, model, rank in ranks]
    cells = [cell_of(layout, rank % layout.world) for layout, rank in layouts]
    tensors = replace(CALM, rows=rows).classes
    holdings = [Holding(f"w{number}", Version(1, 1), cell) for number, cell in enumerate(cells)]
    assert covered(holdings, tensors) == covers(frozenset(cells), rows)
    for (layout, _), cell in zip(layouts, cells, strict=True):
        boxes = [box for tensor in tensors for box in held(tensor, cell).boxes]
        assert rows_in(cell, rows) == sum(box.slice.count for box in boxes)
        assert rows_in(cell, rows) <= max(rows_in(each, rows) for each in largest_cells(layout))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 8),
        Layout(2, 4),
        Layout(2, 2, (("tp", 2),)),
        Layout(1, 2, (("pp", 2), ("tp", 2))),
        Layout(4, 1, (("pp", 2),)),
    ],
    ids=str,
)
@pytest.mark.parametrize("nodes", ["aaaaaaaa", "aaaabbbb", "abababab", "aaabbbcd", "abcdefgh"])
def test_every_piece_of_a_gradient_has_one_way_to_its_owner(layout: Layout, nodes: str) -> None:
    check_routes(Routes, layout, tuple(map(NodeId, nodes)))


def test_experts_that_do_not_divide_the_shards_are_noticed() -> None:
    """A rule that leaves the number of shards open may form such a world."""
    with pytest.raises(Violation, match="and experts over 3 members"):
        simulate(0, replace(CALM, experts=3))
    assert simulate(0, replace(CALM, experts=2)).end == "Finished"
    assert axes_of(Layout(1, 2, (("tp", 2),)), 2) == ("dp_shard", "ep", "tp")
