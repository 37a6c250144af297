"""A green simulator proves nothing until mutants go red: each rule of the machine, broken, must be noticed.

Each test breaks one rule in a copy of ``elastic.control``, runs seeds until a promise is broken, and says which one.  The
unbroken machine passes the same seeds.
"""

from __future__ import annotations

import pytest

from elastic.sim import Violation, simulate
from elastic.sim.coordinators import Advance
from tests.sim.mutants import Edit, Mutant
from tests.sim.scenarios import ALL

pytestmark = pytest.mark.fast

SEEDS = range(300)


def first_violation(advance: Advance, scenario: str) -> str:
    """Of ``SEEDS``; "" when there is none."""
    for seed in SEEDS:
        try:
            simulate(seed, ALL[scenario](seed), advance)
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


@pytest.fixture(scope="module", params=list(ALL))
def unbroken(request: pytest.FixtureRequest) -> str:
    return first_violation(Mutant("none", ()).advance(), request.param)


def test_the_unbroken_copy_passes_the_same_seeds(unbroken: str) -> None:
    """The control of all the others: it is the edit that kills, not the copying."""
    assert unbroken == ""


def killed_by(name: str, *edits: Edit, scenario: str = "drawn") -> str:
    return first_violation(Mutant(name, edits).advance(), scenario)


def test_not_waiting_for_the_answers_to_the_fence_is_noticed() -> None:
    edit = Edit("settling", "if state.pending or not _certain(turn, state)", "if not _certain(turn, state)")
    assert "has neither answered its fence nor been expelled" in killed_by("hasty", edit)


def test_dropping_a_step_in_spite_of_evidence_is_noticed() -> None:
    edit = Edit("settling", "newest((run.last,), plan.generation)", "None")
    assert "is dropped in spite of evidence" in killed_by("forgetful", edit)


def test_applying_a_step_without_evidence_is_noticed() -> None:
    """It takes the commit of the step before for that of the prepared one."""
    old = "settle(plan, answers, newest((run.last,), plan.generation))"
    new = "settle(plan, answers, run.last and __import__('dataclasses').replace(run.last, step=run.last.step + 1))"
    assert "without evidence" in killed_by("credulous", Edit("settling", old, new))


def test_hearing_older_generations_is_noticed() -> None:
    edit = Edit("refusals", "if event.generation != run.generation:", "if event.generation > run.generation:")
    assert killed_by("nostalgic", edit)


def test_ignoring_coverage_is_noticed() -> None:
    edit = Edit("seating", "live = newest_covered(held, run.rows)", "live = max((each.version for each in held), default=None)")
    assert "which nobody holds whole" in killed_by("careless", edit)


def test_giving_up_what_is_still_held_is_noticed() -> None:
    edit = Edit("seating", "live = newest_covered(held, run.rows)", "live = None")
    assert "although every slice of it is held" in killed_by("wasteful", edit)


def test_forgetting_the_leases_of_a_silent_world_is_noticed() -> None:
    edit = Edit("settling", "bool(state.answers or state.lost) or turn.now >= turn.run.lease_until", "True")
    assert "nobody is out and a lease runs" in killed_by("impatient", edit, scenario="isolation")


def test_counting_a_zombies_manifest_is_noticed() -> None:
    """The rule is kept twice: by the lineage, and by what was asked for."""
    lineage = Edit("checkpoints", "if not lineage.contains(run.lineage, version):", "if False:")
    asked = Edit("checkpoints", "if known is None or not known.asked:", "if False:")
    assert "given up" in killed_by("haunted", lineage, asked)


def test_a_lineage_that_is_not_cut_is_noticed() -> None:
    edit = Edit("forming", "lineage=kept,", "lineage=run.lineage,")
    assert killed_by("boastful", edit)


def test_leaving_a_world_unsettled_is_noticed() -> None:
    edit = Edit("settling", "        turn.do(Settle(plan.generation, survivors, settlement.outcome))", "        pass")
    assert "was not settled" in killed_by("silent", edit)


def test_failing_with_the_budget_unspent_is_noticed() -> None:
    edit = Edit("stepping", "        fruitless=0,\n", "")
    assert "budget unspent" in killed_by("gloomy", edit, scenario="poor")


def test_never_expelling_the_silent_is_noticed() -> None:
    edit = Edit("settling", "if state.pending and turn.now >= state.deadline:", "if False:")
    assert "no end after" in killed_by("patient", edit)


def test_an_edit_that_no_longer_applies_fails() -> None:
    with pytest.raises(LookupError, match="is 0 times in settling"):
        killed_by("stale", Edit("settling", "text that is not there", ""))
