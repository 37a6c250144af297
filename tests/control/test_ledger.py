"""R14: in the surviving lineage each step and each sample counts once, whoever told of it and however often."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.control.run import Finished
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.plan.layout import LayoutRule
from elastic.protocol.events import Fenced, StepDone
from elastic.report.ledger import ledger
from tests.control.play import Play, outcome, reformed, stepping

pytestmark = pytest.mark.fast


class Journalled(Play):
    """A story that keeps the records of its journal."""

    def __init__(self, play: Play) -> None:
        super().__init__(play.rules, play.run)
        self.begun = codec.snapshot(play.run)
        self.records: list[dict[str, Any]] = []

    @property
    def segments(self) -> list[codec.Segment]:
        return [(self.begun, self.records)]

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
    found = ledger(play.segments)
    assert {step: each.generation for step, each in found.items()} == {
        1: 1,
        2: 1,
        3: 1,
        4: 1,
        5: 1,
        6: 2,
        7: 2,
        8: 2,
    }
    assert found[6] == outcome(6, 2)
    assert [sample for each in found.values() for (sample,) in each.samples] == list(range(1, 9))


def test_r14_a_dead_world_rank_0_leaves_no_hole() -> None:
    """Its report of step 4 comes after its generation has ended: refused, but still a fact.  Step 5 is told
    only in an answer.
    """
    play = Journalled(stepping(2))
    play.steps(1, 3)
    play.lose("w1")
    play.answer("w2", Version(5, 1), saw=5)
    assert play.tell(StepDone(WorkerId("w1"), 1, outcome(4, 1))).startswith("refused: ")
    assert sorted(ledger(play.segments)) == [1, 2, 3, 4, 5]


def test_r14_a_dropped_step_is_no_entry() -> None:
    """Only a worker that was already lost saw the commit, and said so after the step was dropped."""
    play = Journalled(stepping(2))
    play.steps(1, 3)
    play.lose("w1")
    play.answer("w2", Version(3, 1), prepared=4)
    play.tell(StepDone(WorkerId("w1"), 1, outcome(4, 1)))
    assert sorted(ledger(play.segments)) == [1, 2, 3]


def test_a_resumed_journal_begins_with_the_lineage_of_its_snapshot() -> None:
    play = stepping(1)
    play.steps(1, 2)
    resumed = Journalled(play)
    resumed.steps(3, 4)
    assert sorted(ledger(resumed.segments)) == [3, 4]
    assert ledger([(codec.snapshot(play.run), [])]) == ledger([]) == {}


def test_what_only_a_dead_coordinator_was_told_is_asked_for_before_the_end() -> None:
    """R6: world rank 0 is heard, but does not hear that there is a new coordinator to which it must repeat
    its reports.
    """
    play = stepping(2, target_step=4, save_every=4)
    play.step(1)
    play.step(4)
    assert play.run.history.untold == (2, 3) and play.run.history.recorded_step == 1, (
        "whoever has seen the commit of 2 must keep it"
    )
    reason = play.save(Version(4, 1), "w1", "w2")
    assert reason.endswith("the samples of step 2 are not recorded yet: stop generation 1 of 2 workers")
    assert play.deeds == ["Fence"]
    for worker, seen in (("w1", ()), ("w2", (2, 3, 4))):
        held = (play.shard(worker, Version(4, 1)),)
        play.tell(Fenced(WorkerId(worker), 1, held, None, tuple(outcome(step, 1) for step in seen)))
    assert isinstance(play.run.state, Finished) and play.run.history.untold == ()


def test_nothing_is_asked_for_where_all_was_told() -> None:
    play = stepping(2, target_step=4, save_every=4)
    play.steps(1, 4)
    play.save(Version(4, 1), "w1", "w2")
    assert isinstance(play.run.state, Finished) and "Fence" not in play.deeds
