"""R14: in the surviving lineage each step and each sample counts once, whoever told of it and however often."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.control import codec
from elastic.control.events import StepDone
from elastic.ids import Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.report.ledger import ledger
from tests.control.play import Play, outcome, reformed, stepping

pytestmark = pytest.mark.fast


class Journalled(Play):
    """Keeps the records of its story."""

    def __init__(self, play: Play) -> None:
        super().__init__(play.rules, play.run)
        self.records: list[dict[str, Any]] = []

    def tell(self, event: Any) -> str:
        before = self.run
        reason = super().tell(event)
        self.records.append(codec.record(len(self.records), self.now, event, before, self.last))
        return reason


def test_r14_each_step_counts_once() -> None:
    play = Journalled(stepping(3, layout=LayoutRule(1, None, 1, "all"), save_every=5))
    play.steps(1, 5)
    play.save(Version(5, 1), "w1", "w2", "w3")
    play.steps(6, 7)
    play.lose("w2")
    play.answer("w1", Version(7, 1))
    play.answer("w3", Version(7, 1))
    reformed(play)
    play.steps(6, 8)
    found = ledger(play.records)
    assert {step: each.generation for step, each in found.items()} == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2}
    assert found[6] == outcome(6, 2)
    assert [sample for each in found.values() for (sample,) in each.samples] == list(range(1, 9))


def test_r14_a_dead_world_rank_0_leaves_no_hole() -> None:
    """Its last report came late, after its generation: refused, and still a fact; the one before is only in an answer."""
    play = Journalled(stepping(2))
    play.steps(1, 3)
    play.lose("w1")
    play.answer("w2", Version(5, 1), saw=5)
    assert play.tell(StepDone(WorkerId("w1"), 1, outcome(4, 1))).startswith("refused: ")
    assert sorted(ledger(play.records)) == [1, 2, 3, 4, 5]


def test_r14_a_dropped_step_is_no_entry() -> None:
    """A zombie saw its commit; nobody who counts did."""
    play = Journalled(stepping(2))
    play.steps(1, 3)
    play.lose("w1")
    play.answer("w2", Version(3, 1), prepared=4)
    play.tell(StepDone(WorkerId("w1"), 1, outcome(4, 1)))
    assert sorted(ledger(play.records)) == [1, 2, 3]


def test_a_resumed_journal_begins_with_the_lineage_of_its_snapshot() -> None:
    play = stepping(1)
    play.steps(1, 2)
    resumed = Journalled(play)
    resumed.steps(3, 4)
    assert sorted(ledger(resumed.records, lineage=play.run.lineage)) == [3, 4]
    assert ledger([], lineage=((1, 2),)) == {}
