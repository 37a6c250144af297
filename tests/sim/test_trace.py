"""Traces are thinned to a few machines, sped up, and written as they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.sim.replay import most_machines
from elastic.sim.trace import Row, rows_of, sped_up, text_of, thinned

pytestmark = pytest.mark.fast

TRACES = sorted((Path(__file__).parent / "traces").glob("*.csv"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_a_thinned_trace_has_whole_stays_of_few_machines(path: Path, nodes: int) -> None:
    rows = rows_of(path.read_text())
    found = thinned(rows, nodes)
    assert 0 < most_machines(found) <= nodes
    assert rows_of(text_of(found, "thinned")) == found, "it is a trace"
    for node in {row.node for row in found}:
        # every stay is one of the whole trace: no machine comes later or goes earlier
        assert {row for row in found if row.node == node} <= set(rows)


def test_a_trace_of_few_machines_stays_as_it_is() -> None:
    rows = (Row(5.0, True, "a"), Row(5.0, True, "b"), Row(65.0, False, "a"), Row(125.0, True, "c"))
    assert thinned(rows, 8) == rows
    assert sped_up(rows, 60.0) == (
        Row(0.0, True, "a"),
        Row(0.0, True, "b"),
        Row(1.0, False, "a"),
        Row(2.0, True, "c"),
    )


def test_losses_that_come_together_stay_together() -> None:
    rows = (
        *(Row(0.0, True, f"m{number}") for number in range(8)),
        *(Row(9.0, False, f"m{number}") for number in range(8)),
    )
    found = thinned(rows, 4)
    assert [row.at for row in found] == [0.0] * 4 + [9.0] * 4
