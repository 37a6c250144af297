"""Skipped steps and quarantined samples, under all faults of the simulator: what is known of them, and what the next world reads."""

from __future__ import annotations

import pytest

from elastic.ids import Version
from elastic.protocol.plan import Plan
from elastic.sim import Violation, simulate, spikes
from elastic.sim.truth import base_of
from tests.sim.mutants import Edit, Mutant
from tests.sim.scenarios import unshipped

SEEDS = range(60)


def first_violation(mutant: Mutant | None = None) -> str:
    """Returns what is said of the first seed that breaks a promise, or "" if none does."""
    for seed in SEEDS:
        try:
            simulate(seed, **({} if mutant is None else {"advance": mutant.advance()}))
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


def test_g1_the_promises_about_spikes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """G1: no step on the lineage reads a sample that was in quarantine before it, whatever dies, and the coordinator knows what is there.
    The control: worlds that begin without the memory that the state has of them read one again.
    """
    assert first_violation() == ""

    def forgetful(plan: Plan, step: int) -> Version:
        return Version(0, 0) if step == plan.version.step + 1 else base_of(plan, step)

    monkeypatch.setattr(spikes, "base_of", forgetful)
    assert "in quarantine since step" in first_violation()


def test_g1_a_coordinator_that_lost_the_end_of_the_journal_learns_what_is_in_quarantine() -> None:
    """G1: in half of these runs the record of a skipped step is lost with its coordinator; the next step that is reported tells it.  The
    control: a coordinator that does not listen goes on without it.
    """
    deaf = Mutant("deaf", (Edit("commits", "        _complete_the_quarantine(decision, event)\n", "        pass\n"),)).advance()
    learnt, violations = 0, list[str]()
    for seed in range(12):
        learnt += simulate(seed, unshipped(seed)).occasions["a quarantine that was lost is listed"]
        try:
            simulate(seed, unshipped(seed), deaf)
        except Violation as violation:
            violations.append(str(violation))
    assert learnt >= 2 and len(violations) >= 2 and all("the coordinator knows the quarantine" in each for each in violations)


def test_keeping_what_was_given_up_in_quarantine_is_noticed() -> None:
    edit = Edit("edges", "        skips=run.skips.cut(plan.version.step),\n", "")
    assert "the coordinator knows" in first_violation(Mutant("keeping", (edit,)))


def test_forgetting_the_quarantine_is_noticed() -> None:
    edit = Edit("skips", "quarantined=(*skips.quarantined, *new)", "quarantined=new")
    assert "the coordinator knows the quarantine" in first_violation(Mutant("forgetting", (edit,)))


def test_a_microbatch_that_was_left_out_counts_as_no_skipped_step() -> None:
    """The steps that put samples into quarantine and were lost with a coordinator: some were skipped, and some went on without them.  The
    control: a coordinator that takes all for skipped counts too many.
    """
    edit = Edit("commits", "completed(event.quarantined, event.quarantined_by)", "completed(event.quarantined)")
    all_skipped = Mutant("all_skipped", (edit,)).advance()
    assert simulate(5, unshipped(5)).occasions["a microbatch is left out"]
    with pytest.raises(Violation, match="the coordinator knows of 2 skipped steps, and 1 of those that are known were skipped"):
        simulate(5, unshipped(5), all_skipped)
