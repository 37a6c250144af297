"""Skipped steps and quarantined samples, under all faults of the simulator: what is known of them, and what
the next world reads.
"""

from __future__ import annotations

import pytest

from elastic.ids import Version
from elastic.protocol.plan import Plan
from elastic.sim import Coverage, Violation, run_many, simulate, spikes
from elastic.sim.truth import base_of
from tests.sim.mutants import Edit, mutated
from tests.sim.scenarios import unshipped


def test_g1_the_promises_about_spikes_hold(monkeypatch: pytest.MonkeyPatch, seen: Coverage) -> None:
    """G1: no step on the lineage reads a sample that was in quarantine before it, whatever dies, and the
    coordinator knows what is there. The control: worlds that begin without the memory that the state has of
    them read one again.
    """
    assert seen.occasions["a spike is skipped"] and seen.occasions["a microbatch is left out"]

    def forgetful(plan: Plan, step: int) -> Version:
        return Version(0, 0) if step == plan.version.step + 1 else base_of(plan, step)

    monkeypatch.setattr(spikes, "base_of", forgetful)
    _, broken = run_many(range(60))
    assert broken is not None
    with pytest.raises(Violation, match="in quarantine since step"):
        simulate(broken)


def test_g1_a_coordinator_that_lost_the_end_of_the_journal_learns_what_is_in_quarantine() -> None:
    """G1: in half of these runs the record of a skipped step is lost with its coordinator; the next step that
    is reported tells it.  The control: a coordinator that does not listen goes on without it.
    """
    deaf = mutated(Edit("commits", "        _complete_the_quarantine(decision, event)\n", "        pass\n"))
    learnt, violations = 0, list[str]()
    for seed in range(12):
        learnt += simulate(seed, unshipped(seed)).occasions["a quarantine that was lost is listed"]
        try:
            simulate(seed, unshipped(seed), deaf)
        except Violation as violation:
            violations.append(str(violation))
    assert (
        learnt >= 2
        and len(violations) >= 2
        and all("the coordinator knows the quarantine" in each for each in violations)
    )


def test_a_microbatch_that_was_left_out_counts_as_no_skipped_step() -> None:
    """The steps that put samples into quarantine and were lost with a coordinator: some were skipped, and
    some went on without them.  The control: a coordinator that takes all for skipped counts too many.
    """
    all_skipped = mutated(
        Edit("commits", "completed(event.quarantined, event.quarantined_by)", "completed(event.quarantined)")
    )
    assert simulate(5, unshipped(5)).occasions["a microbatch is left out"]
    with pytest.raises(
        Violation,
        match="the coordinator knows of 2 skipped steps, and 1 of those that are known were skipped",
    ):
        simulate(5, unshipped(5), all_skipped)
