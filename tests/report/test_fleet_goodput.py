"""R18: the goodput of a fleet whose nodes are known, beside a script that has no code of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.report.goodput import Interval, of_fleet
from elastic.report.page.parquet import parquet_of
from elastic.sim.trace import Row, numbers_of, text_of
from tests.support.goodput_by_hand import goodput

pytestmark = pytest.mark.fast


def interval(begin: float, end: float, bucket: str, nodes: int, there: int, steps: int) -> Interval:
    return Interval(begin, end, bucket, 1, nodes, nodes, nodes, there, there, there, 12, steps, 24 * steps)


TIMELINE = [
    interval(100.0, 101.0, "stepping", 3, 3, 1),
    interval(101.0, 111.0, "stepping", 3, 3, 10),
    # two have notice: the run has let them go, and they stay for 5 s
    interval(111.0, 112.0, "re-form", 1, 1, 0),
    interval(112.0, 136.0, "stepping", 1, 1, 8),
]
PRESENT = (
    *(Row(90.0, True, name) for name in "abc"),
    *(Row(116.0, False, name) for name in "bc"),
)
PAID = (*(Row(80.0, True, name) for name in "abc"), *PRESENT[3:], Row(126.0, True, "d"))


def test_r18_a_node_that_the_run_has_left_counts_until_it_goes(tmp_path: Path) -> None:
    """Three nodes take 1 s a step, one takes 3 s: 15 s and 20 s are 15 and 6⅔ steps, of which 18 were done.  The
    control counts the nodes as gone when the run lets them go, which hides 5 s of two nodes.
    """
    found = of_fleet(TIMELINE, numbers_of(PRESENT), numbers_of(PAID))
    assert found.present == pytest.approx(18 / (15 + 20 / 3))
    assert found.paid == pytest.approx(18 / (15 + 10 / 3 + 10 / 1.5))  # two: 6 rounds of ¼ s
    files = [tmp_path / name for name in ("present.csv", "paid.csv", "timeline.parquet")]
    files[0].write_text(text_of(PRESENT, "present"))
    files[1].write_text(text_of(PAID, "paid"))
    files[2].write_bytes(parquet_of(TIMELINE))
    assert goodput(*files) == pytest.approx([found.present, found.paid], rel=1e-9)
    early = [Row(min(row.at, 111.0), row.comes, row.node) for row in PRESENT]
    assert of_fleet(TIMELINE, numbers_of(early), numbers_of(PAID)).present > found.present + 0.05
