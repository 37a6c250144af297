"""A green simulator proves nothing until mutants go red: each rule of the product that it runs, broken, must
be noticed.

The broken rules are listed by families: a family has the rules that keep one promise on one side.  Much the
same notices them: a check of the oracle, and the faults that lead to it.  So the suite breaks the first rule
of each family, which is noticed the soonest, and ``pytest -m full`` breaks all the others.  Unbroken copies
of the product pass the seeds that were taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from elastic.control.machine import advance
from elastic.protocol.authority import Authority
from elastic.sim import Violation, simulate
from elastic.sim.coordinator import Advance
from elastic.sim.simulation import Simulation
from tests.sim.control_breaches import CONTROL
from tests.sim.mutants import Breach, Edit, mutant
from tests.sim.plan_breaches import PLAN
from tests.sim.protocol_breaches import PROTOCOL
from tests.sim.scenarios import ALL, flapping, seeds_of

FAMILIES = CONTROL | PLAN | PROTOCOL
BREACHES = [breach for family in FAMILIES.values() for breach in family]
TAKEN: dict[str, set[int]] = {}
"""Seeds of each scenario that the mutants of this session needed, up to the one that broke a promise."""
UNTAKEN = 2
"""Number of seeds of a scenario in which no mutant of this session was noticed."""


def first_violation(decide: Advance, scenario: str, seeds: Iterable[int]) -> str:
    """Returns what is said of the first of ``seeds`` that breaks a promise, or "" if none does."""
    for seed in seeds:
        try:
            simulate(seed, ALL[scenario](seed), decide)
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


CASES = [
    pytest.param(
        breach, id=f"{family}: {breach.name}".replace(" ", "-"), marks=[pytest.mark.full] if number else []
    )
    for family, breaches in FAMILIES.items()
    for number, breach in enumerate(breaches)
]


@pytest.mark.parametrize("breach", CASES)
def test_a_broken_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, breach: Breach) -> None:
    def taken() -> Iterator[int]:
        for seed in dict.fromkeys((breach.seed, *seeds_of(breach.scenario))):
            TAKEN.setdefault(breach.scenario, set()).add(seed)
            yield seed

    with mutant(*breach.edits) as decide:
        for patch in breach.patches:
            patch(monkeypatch)
        assert breach.notices in first_violation(decide, breach.scenario, taken())


def test_every_edit_still_applies() -> None:
    """The product's text that a mutant of ``full`` replaces is there: who changes it thinks about the mutant
    again.
    """
    assert all(edit.applies() for breach in BREACHES for edit in breach.edits)


def test_an_edit_that_no_longer_applies_fails() -> None:
    for module in ("stopping", "authority"):
        stale = Edit(module, "text that is not there", "")
        with pytest.raises(LookupError, match=f"is 0 times in {module}"), mutant(stale):
            pass
        with pytest.raises(LookupError, match=f"is 0 times in {module}"):
            stale.applies()


def test_a_copy_of_the_authority_is_really_used() -> None:
    with mutant():
        assert Simulation(0, None, advance).coordinators.present.journal.authority.__class__ is not Authority
    assert Simulation(0, None, advance).coordinators.present.journal.authority.__class__ is Authority


def worlds(decide: Advance, stay_s: float) -> tuple[int, float]:
    """Returns the number of worlds and the virtual seconds that the runs took."""
    reports = [simulate(seed, flapping(seed, stay_s), decide) for seed in range(2)]
    assert {report.end for report in reports} == {"Finished"}
    return sum(report.generations for report in reports), sum(report.virtual_s for report in reports)


def test_taking_in_a_machine_that_comes_and_goes_each_time_is_noticed() -> None:
    """R4: each stay costs two worlds and does not pay, so the runs take longer.  The control: stays that do
    pay are not declined.
    """
    with mutant(
        Edit("growth", "good = pays(times, len(members), len(group), 1, stays[host])", "good = True")
    ) as eager:
        (many, slow_s), (few, quick_s) = worlds(eager, 6.0), worlds(advance, 6.0)
        assert many > 2 * few and slow_s > 1.1 * quick_s
        assert worlds(eager, 30.0) == worlds(advance, 30.0)


# ---- the control of all the others: it is the edit that kills, not the copying


@pytest.mark.parametrize("scenario", ALL)
def test_unbroken_copies_pass_the_same_seeds(scenario: str) -> None:
    """The tests above have run by now, so the seeds of each scenario are those that a mutant was given."""
    with mutant() as unbroken:
        assert first_violation(unbroken, scenario, sorted(TAKEN.get(scenario, range(UNTAKEN)))) == ""


@pytest.mark.full
@pytest.mark.parametrize("scenario", ALL)
def test_unbroken_copies_pass_all_seeds(scenario: str) -> None:
    """No mutant may take a seed at which the unbroken rules fail."""
    theirs = {breach.seed for breach in BREACHES if breach.scenario == scenario}
    with mutant() as unbroken:
        assert first_violation(unbroken, scenario, sorted(theirs.union(seeds_of(scenario)))) == ""
