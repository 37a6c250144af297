"""The worker's side of the protocol: stories of orders that come late, twice, too early, or from the wrong
coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import FencedOff
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import GO_ON, SAVE_AND_PAUSE, Outcome
from elastic.protocol.events import Attached, Event, Fenced, Here, Ready, StepDone
from elastic.protocol.member import Member
from elastic.protocol.plan import Plan
from tests.support.cells import cell

pytestmark = pytest.mark.fast

ME, OTHER = WorkerId("w0"), WorkerId("w1")
LEASE_S = 10.0


def plan(generation: int, step: int = 0, members: tuple[WorkerId, ...] = (ME, OTHER)) -> Plan:
    version = Version(step, generation - 1) if step else Version(0, 0)
    return Plan(1, generation, Layout(1, 2), members, version, "live", (), NodeId("n"))


def holding(version: Version, index: int = 0) -> Holding:
    return Holding(ME, version, cell(2, index))


def outcome(step: int, generation: int = 1) -> Outcome:
    return Outcome(step, generation, 1.0, (1.0,), (4,), ((step,),), True)


def entered(member: Member, generation: int = 1, step: int = 0) -> Plan:
    begun = plan(generation, step)
    assert member.form(begun) and member.enter(begun)
    return begun


def stepping(*, ready_at: float = 0.0) -> Member:
    """Returns a member of generation 1 at step 0 that was told to go."""
    member = Member(ME, LEASE_S)
    begun = entered(member)
    member.healed(ready_at, holding(begun.version), "memory")
    assert member.go(1)
    return member


def step(member: Member, number: int, *, now: float = 0.0, generation: int = 1) -> None:
    member.prepare(number)
    assert member.apply(outcome(number, generation), now) == "memory"
    member.applied(outcome(number, generation))


def held(member: Member) -> list[Version]:
    return [each.version for each in member.held]


def test_a_step_is_prepared_applied_and_held() -> None:
    member = stepping()
    step(member, 1)
    assert member.held == {holding(Version(1, 1)): "memory"} and member.prepared is None
    assert tuple(member.outcomes) == (outcome(1),)


# ---- plans


def test_a_plan_waits_until_the_world_before_is_left() -> None:
    member, later = stepping(), plan(2)
    assert member.form(later) and not member.enter(later)
    member.fence(1)
    assert member.settle(1, None)
    assert not member.enter(later), "it is settled, and not left"
    member.leave()
    assert member.enter(later) and member.generation == 2


@pytest.mark.parametrize("generation", [0, 1])
def test_a_plan_of_the_present_or_an_older_generation_is_refused(generation: int) -> None:
    assert not stepping().form(plan(generation))


def test_a_later_plan_takes_the_place_of_one_that_waits() -> None:
    member, older, later = Member(ME), plan(3), plan(4)
    assert member.form(older) and member.form(later)
    assert not member.form(older) and not member.enter(older)
    assert member.enter(later)


def test_a_plan_that_was_fenced_meanwhile_is_not_entered() -> None:
    member, waiting = Member(ME), plan(3)
    assert member.form(waiting)
    answer = member.fence(3)
    assert answer == Fenced(ME, 3, (), None, heeds=0)
    assert not member.enter(waiting) and not member.form(plan(3)) and member.form(plan(4))


def test_a_plan_that_was_not_entered_is_void_for_another_coordinator() -> None:
    """Otherwise the new coordinator's plan would wait behind it.  The control: the same coordinator speaks
    again.
    """
    for incarnation, enters in ((1, True), (2, False)):
        member, waiting = Member(ME), plan(1)
        assert member.heed(1) and member.form(waiting) and member.heed(incarnation)
        assert member.enter(waiting) == enters
    again = replace(waiting)
    assert member.form(again) and not member.enter(waiting) and member.enter(again), (
        "it was said again, with another store perhaps"
    )


def test_only_the_latest_coordinator_is_heeded() -> None:
    member = Member(ME)
    assert [member.heed(incarnation) for incarnation in (1, 3, 2, 3, 4)] == [True, True, False, True, True]


# ---- go, pause


def test_go_drops_what_is_held_in_older_layouts() -> None:
    member = Member(ME, LEASE_S)
    begun = entered(member)
    member.held = {holding(begun.version, 1): "old", holding(begun.version, 0): "older"}
    member.healed(0.0, holding(begun.version, 1), "new")
    assert len(member.held) == 2, "until then other members may need them"
    assert member.go(1) and member.held == {holding(begun.version, 1): "new"}


def test_go_counts_once_for_its_generation_once_ready_and_not_fenced() -> None:
    member = Member(ME, LEASE_S)
    begun = entered(member)
    assert not member.go(1), "not ready"
    member.healed(0.0, holding(begun.version))
    assert not member.go(2) and member.go(1) and not member.go(1)
    fenced = Member(ME, LEASE_S)
    entered(fenced)
    fenced.healed(0.0, holding(begun.version))
    fenced.fence(1)
    assert not fenced.go(1)


def test_a_pause_counts_in_its_own_world_and_the_greater_wish_stays() -> None:
    member = stepping()
    assert not member.pause(2, save=True) and member.boundary == GO_ON
    assert member.pause(1, save=True) and member.pause(1, save=False) and member.boundary == SAVE_AND_PAUSE
    member.fence(1)
    member.settle(1, None)
    member.leave()
    assert not member.pause(1, save=False)
    entered(member, 2)
    assert member.boundary == GO_ON


# ---- the fence


def test_the_answer_to_a_fence_waits_for_the_update() -> None:
    member = stepping()
    member.prepare(1)
    member.apply(outcome(1), 0.0)
    assert member.fence(1) is None
    member.applied(outcome(1))
    assert member.answer() == Fenced(ME, 1, (holding(Version(1, 1)),), None, (outcome(1),), heeds=0)
    assert member.answer() is None, "it is given once"
    assert member.fence(1) is not None, "and again when it is asked for again"


def test_the_answer_to_a_fence_after_a_failed_update_holds_nothing() -> None:
    member = stepping()
    member.prepare(1)
    member.apply(outcome(1), 0.0)
    member.failed()
    assert member.fence(1) == Fenced(ME, 1, (), None, (), heeds=0)
    assert not member.go(1)


def test_the_answer_to_a_fence_waits_for_a_settlement_under_way() -> None:
    member = stepping()
    member.prepare(1)
    assert member.settle(1, outcome(1))
    assert member.fence(1) is None
    assert member.settles() == outcome(1)
    member.apply(outcome(1), 0.0, settled=True)
    member.applied(outcome(1))
    assert member.answer() is None
    assert member.leave() == Fenced(ME, 1, (holding(Version(1, 1)),), None, (outcome(1),), heeds=0)


def test_an_older_fence_is_not_answered_and_a_later_one_bars_at_once() -> None:
    member = stepping()
    assert member.fence(0) is None and not member.barred
    assert member.fence(2) is None, "its answer waits until this world is left"
    with pytest.raises(FencedOff):
        member.prepare(1)
    assert member.leave() == Fenced(ME, 2, (holding(Version(0, 0)),), None, (), heeds=0)


def test_a_fenced_member_neither_heals_nor_prepares_nor_applies() -> None:
    member = stepping()
    member.prepare(1)
    member.fence(1)
    for barred in (
        lambda: member.healed(0.0, holding(Version(0, 0), 1)),
        lambda: member.prepare(2),
        lambda: member.apply(outcome(1), 0.0),
    ):
        with pytest.raises(FencedOff) as caught:
            barred()
        assert not caught.value.lease
    assert held(member) == [Version(0, 0)] and member.prepared == 1 and not member.outcomes


def test_memory_that_is_lost_after_the_answer_ends_the_process() -> None:
    """The coordinator counts on the answer.  Before the answer the process lives on, and says that it holds
    nothing.
    """
    before, after = stepping(), stepping()
    assert before.lose() and before.fence(1) == Fenced(ME, 1, (), None, (), heeds=0)
    after.fence(1)
    assert not after.lose() and held(after) == [Version(0, 0)]


# ---- the settlement


@pytest.mark.parametrize(
    ("prepared", "settled", "applies"),
    [(1, 1, True), (1, 2, False), (2, 1, False), (None, 1, False), (1, None, False)],
)
def test_a_settled_outcome_is_applied_where_it_is_prepared(
    prepared: int | None, settled: int | None, applies: bool
) -> None:
    member = stepping()
    member.prepared = prepared
    member.fence(1)
    assert member.settle(1, None if settled is None else outcome(settled))
    assert (member.settles() is not None) == applies


def test_a_settlement_counts_once_and_only_in_its_own_world() -> None:
    member = stepping()
    assert not member.settle(2, None) and member.barred, "a later one bars all the same"
    assert member.settle(1, None) and not member.settle(1, None)
    member.leave()
    assert not member.settle(1, None)


# ---- the lease


def test_a_lease_counts_from_when_the_member_asked() -> None:
    member = stepping(ready_at=100.0)
    assert member.lease_until == 110.0
    member.renewed(1, 105.0, True, 0)
    member.renewed(1, 103.0, True, 0)  # asked earlier, answered later
    assert member.lease_until == 115.0
    step(member, 1, now=115.0)
    member.prepare(2)
    with pytest.raises(FencedOff) as caught:
        member.apply(outcome(2), 115.1)
    assert caught.value.lease and member.prepared == 2
    member.fence(1)
    member.settle(1, outcome(2))
    assert member.apply(outcome(2), 200.0, settled=True) == "memory", "what is settled needs no lease"


@pytest.mark.parametrize(("generation", "granted"), [(1, False), (2, True), (0, True)])
def test_a_lease_that_is_refused_or_of_another_generation_changes_nothing(
    generation: int, granted: bool
) -> None:
    member = stepping(ready_at=100.0)
    member.renewed(generation, 105.0, granted, 0)
    assert member.lease_until == 110.0


def test_a_lease_ends_with_its_world() -> None:
    member = stepping(ready_at=100.0)
    member.fence(1)
    member.settle(1, None)
    member.leave()
    begun = entered(member, 2)
    member.renewed(2, 105.0, True, 0)
    member.healed(106.0, holding(begun.version))
    with pytest.raises(FencedOff):
        member.apply(outcome(1, 2), 106.0)
    assert member.go(2) and member.lease_until == 116.0


def test_a_member_that_nobody_answers_for_two_leases_is_forsaken() -> None:
    member = Member(ME, LEASE_S)
    member.heard(100.0)
    member.renewed(1, 90.0, False, 0)
    assert not member.forsaken(120.0) and member.forsaken(120.1)


# ---- commits that are not acknowledged


def test_an_acknowledgement_of_an_older_generation_says_nothing_of_a_later_one() -> None:
    member = stepping()
    member.outcomes.extend((outcome(1, 2), outcome(2, 2)))
    member.renewed(1, 0.0, False, 9)
    assert tuple(member.outcomes) == (outcome(1, 2), outcome(2, 2))
    member.renewed(2, 0.0, False, 9)
    assert tuple(member.outcomes) == (outcome(2, 2),), "the newest is kept"


@dataclass
class Dumb:
    """A simple second implementation applies the same rule commit by commit."""

    kept: list[Outcome] = field(default_factory=list)

    def acknowledge(self, generation: int, step: int) -> None:
        for each in self.kept[:-1]:
            if each.step > step or each.generation > generation:
                break
            self.kept = self.kept[1:]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 6)), max_size=30))
def test_the_acknowledgements_and_their_dumb_twin_agree(words: list[tuple[bool, int, int]]) -> None:
    member, dumb = Member(ME), Dumb()
    for applies, generation, number in words:
        if applies:
            member.outcomes.append(outcome(number, generation))
            dumb.kept.append(outcome(number, generation))
        else:
            member.renewed(generation, 0.0, False, number)
            dumb.acknowledge(generation, number)
        assert list(member.outcomes) == dumb.kept
    assert bool(dumb.kept) == any(applies for applies, _, _ in words)


# ---- another coordinator


def test_the_quarantine_is_listed_once_for_each_world_and_coordinator() -> None:
    member, found = stepping(), list[bool]()
    for order in (lambda: None, lambda: member.heed(2), lambda: member.heed(2), lambda: member.heed(1)):
        order()
        found += [member.lists(), member.lists()]
    assert found == [True, False, True, False, False, False, False, False]
    member.fence(1)
    member.settle(1, None)
    member.leave()
    entered(member, 2)
    assert [member.lists(), member.lists()] == [True, False]


def test_a_new_coordinator_is_told_all_that_may_be_lost() -> None:
    member = stepping()
    said: list[Event] = [member.say(Here(ME, 1)), member.say(Ready(ME, 1))]
    step(member, 1)
    assert member.attached() == (Attached(ME, member.plan, True), *said, StepDone(ME, 1, outcome(1)))
    member.fence(1)
    fenced = Fenced(ME, 1, (holding(Version(1, 1)),), None, (outcome(1),), heeds=2)
    member.heed(2)
    assert member.attached()[-1] == fenced
    member.settle(1, None)
    assert member.attached() == (Attached(ME, member.plan, False), *said, StepDone(ME, 1, outcome(1)))
    assert member.leave() == fenced, "an answer that is deferred comes when it is due"
    assert member.attached() == (Attached(ME, member.plan, False), StepDone(ME, 1, outcome(1)), fenced), (
        "the plan is proof of the generation"
    )


def test_steps_are_told_again_by_world_rank_0_alone() -> None:
    member = Member(OTHER, LEASE_S)
    assert member.attached() == (Attached(OTHER, None, False),)
    begun = entered(member)
    member.healed(0.0, holding(begun.version), "memory")
    member.go(1)
    step(member, 1)
    assert member.attached() == (Attached(OTHER, begun, True),)


# ---- all together


ORDERS = st.sampled_from(("form", "go", "fence", "settle", "prepare", "apply", "applied", "failed", "leave"))


@given(st.lists(st.tuples(ORDERS, st.integers(1, 4)), max_size=40))
def test_in_any_order_what_was_answered_stays_true_until_the_settlement(words: list[tuple[str, int]]) -> None:
    """All else rests on this promise: after its answer a member holds what it said, or what the settlement
    made of it.
    """
    member, answer = Member(ME), None
    for word, number in words:
        found: Fenced | None = None
        try:
            match word:
                case "form":
                    waiting = plan(number)
                    if member.form(waiting) and member.enter(waiting):
                        member.healed(0.0, holding(waiting.version))
                case "go":
                    member.go(number)
                case "fence":
                    found = member.fence(number)
                case "settle":
                    member.settle(number, outcome(number, number))
                case "prepare" if member.went and member.inside and not member.applying:
                    member.prepare(number)
                case "apply" if member.inside and not member.applying and member.held:
                    member.apply(
                        outcome(number, member.generation),
                        0.0,
                        settled=member.settles() == outcome(number, member.generation),
                    )
                case "applied" if member.applying and (updated := member._updated) is not None:
                    member.applied(outcome(number, member.generation))
                    found = member.answer()
                    assert updated[1] is None
                case "failed" if member.applying:
                    member.failed()
                    found = member.answer()
                case "leave" if member.leaving and not member.applying:
                    found = member.leave()
        except FencedOff:
            assert not member.applying
        answer = found or answer
        if (
            answer is not None
            and answer.generation >= member.generation
            and not member.leaving
            and member.inside
        ):
            assert (tuple(member.held), member.prepared) == (answer.held, answer.prepared)
        if found is not None:
            assert not member.applying and found.generation >= member.generation
