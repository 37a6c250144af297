"""The outcome rule is tested over all small worlds: each member at s-1, prepared or applied; evidence or
none; answering or silent.
"""

from __future__ import annotations

from itertools import product

import pytest

from elastic.control.commits import newest, settle
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Fenced
from elastic.protocol.plan import Plan
from tests.control.play import outcome
from tests.support.cells import cell

pytestmark = pytest.mark.fast

STEP, GENERATION = 5, 3
BEFORE, AFTER = Version(4, GENERATION), Version(STEP, GENERATION)
SITUATIONS = ("computing", "prepared", "seen", "applied", "harmed", "silent")
"""States of a member at its fence; "seen": the commit has arrived and nothing is applied; "harmed": applying
it failed.
"""


def plan(layout: Layout) -> Plan:
    members = tuple(WorkerId(f"w{number}") for number in range(layout.world))
    return Plan(1, GENERATION, layout, members, Version(3, 2), "live", (), NodeId("n1"))


def answer(plan: Plan, rank: int, situation: str) -> Fenced | None:
    worker, shard = plan.members[rank], (plan.layout.dp_shard, plan.layout.coordinates(rank)["dp_shard"])
    held = {"applied": (Holding(worker, AFTER, cell(*shard)),), "harmed": ()}.get(
        situation, (Holding(worker, BEFORE, cell(*shard)),)
    )
    prepared = STEP if situation in ("prepared", "seen") else None
    seen = (
        (outcome(4, GENERATION), outcome(STEP, GENERATION))
        if situation in ("seen", "applied", "harmed")
        else (outcome(4, GENERATION),)
    )
    return None if situation == "silent" else Fenced(worker, GENERATION, held, prepared, seen)


def twin(situations: tuple[str, ...], reported: bool) -> tuple[bool, list[Version | None]]:
    """A simple second implementation: returns whether the step is committed, and the version of each member
    afterwards, if any.
    """
    committed = reported or any(each in ("seen", "applied", "harmed") for each in situations)
    stands: list[Version | None] = []
    for each in situations:
        if each in ("prepared", "seen"):
            stands.append(AFTER if committed else BEFORE)
        else:
            stands.append({"applied": AFTER, "computing": BEFORE}.get(each))
    return committed, stands


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 3), Layout(2, 2)], ids=str)
@pytest.mark.parametrize("reported", [False, True])
def test_all_prepared_apply_or_none_does(layout: Layout, reported: bool) -> None:
    world = plan(layout)
    for situations in product(SITUATIONS, repeat=layout.world):
        answers = [
            each
            for rank, each in enumerate(answer(world, rank, name) for rank, name in enumerate(situations))
            if each
        ]
        told = (outcome(STEP, GENERATION),) if reported else ()
        top = newest([*told, *(seen for each in answers for seen in each.outcomes)], GENERATION)
        settlement = settle(world, answers, top)
        committed, stands = twin(situations, reported)
        assert (settlement.outcome is not None) == (
            committed and any(each in ("prepared", "seen") for each in situations)
        )
        assert settlement.outcome in (None, outcome(STEP, GENERATION))
        for rank, (situation, version) in enumerate(zip(situations, stands, strict=True)):
            held = settlement.holdings.get(world.members[rank], ())
            assert [each.version for each in held] == ([version] if version else []), (
                situations,
                reported,
                rank,
            )
            assert (world.members[rank] in settlement.applied_by) == (
                committed and situation in ("prepared", "seen")
            )


def test_never_applied_without_evidence() -> None:
    world = plan(Layout(2, 1))
    both = [each for rank in (0, 1) if (each := answer(world, rank, "prepared"))]
    assert settle(world, both, None).outcome is None
    assert settle(world, both, outcome(4, GENERATION)).outcome is None, (
        "evidence of the step before is none of this one"
    )


def test_evidence_of_another_generation_is_none() -> None:
    """A step that is done again is another version, so a commit of generation 2 says nothing about generation
    3.
    """
    assert newest([outcome(STEP, 2), outcome(4, GENERATION), None], GENERATION) == outcome(4, GENERATION)
    assert newest([outcome(STEP, 2), None], GENERATION) is None


def test_nobody_applies_to_another_base() -> None:
    """A member that prepared step s but does not hold s-1 keeps what it has."""
    world = plan(Layout(1, 1))
    worker = world.members[0]
    for held in ((), (Holding(worker, Version(3, 2), cell(1, 0)),), (Holding(worker, BEFORE, cell(2, 0)),)):
        settlement = settle(world, [Fenced(worker, GENERATION, held, STEP)], outcome(STEP, GENERATION))
        assert settlement.outcome is None and settlement.holdings == {worker: held}


def test_applying_drops_the_old_layout() -> None:
    world = plan(Layout(1, 2))
    worker = world.members[1]
    held = (Holding(worker, BEFORE, cell(3, 1)), Holding(worker, BEFORE, cell(2, 1)))
    settlement = settle(world, [Fenced(worker, GENERATION, held, STEP)], outcome(STEP, GENERATION))
    assert settlement.holdings == {worker: (Holding(worker, AFTER, cell(2, 1)),)}


def test_the_record_is_passed_on_bit_for_bit() -> None:
    world = plan(Layout(1, 1))
    record = Outcome(STEP, GENERATION, 0.1 + 0.2, (float("nan"),), (1,), ((7,),), True)
    prepared = answer(world, 0, "prepared")
    assert prepared is not None and settle(world, [prepared], record).outcome is record
