"""Skipped steps and quarantined samples, under all faults of the simulator: what is known of them, and what the next world reads."""

from __future__ import annotations

import pytest

from elastic.ids import Version
from elastic.protocol.plan import Plan
from elastic.sim import Violation, simulate, spikes
from elastic.sim.truth import base_of
from tests.sim.mutants import Edit, Mutant

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


def test_keeping_what_was_given_up_in_quarantine_is_noticed() -> None:
    edit = Edit("edges", "        skips=run.skips.cut(plan.version.step),\n", "")
    assert "the coordinator knows" in first_violation(Mutant("keeping", (edit,)))


def test_forgetting_the_quarantine_is_noticed() -> None:
    edit = Edit("skips", "quarantined=(*skips.quarantined, *new)", "quarantined=new")
    assert "the coordinator knows the quarantine" in first_violation(Mutant("forgetting", (edit,)))
