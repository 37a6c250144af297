"""Which copies are begun and which are protected: whatever the members' pace, one version is complete on all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from elastic.control.commit import Outcome
from elastic.control.copying import Copies, age, slots_for
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.plan import Plan

pytestmark = pytest.mark.fast

MEMBERS = (WorkerId("w1"), WorkerId("w2"), WorkerId("w3"))
PLAN = Plan(1, 1, Layout(1, 3), MEMBERS, Version(0, 0), "init", (), NodeId("n"), copy_every=1)


def outcome(step: int, copied: int = -1, buddied: int = -1, generation: int = 1) -> Outcome:
    return Outcome(step, generation, 1.0, (1.0,), (1,), ((0,),), True, copied_through=copied, buddied_through=buddied)


def test_the_next_copy_is_begun_when_the_one_before_is_everywhere() -> None:
    copies = Copies.begin(PLAN).after(outcome(1))
    assert copies.begun == Version(1, 1) and copies.copied is None
    assert copies.after(outcome(2)).begun == Version(1, 1), "it is still on its way somewhere"
    assert copies.after(outcome(2, copied=1)).begun == Version(2, 1)
    assert copies.after(outcome(2, copied=1)).protected == {Version(1, 1), Version(2, 1)}


def test_copies_are_made_when_due() -> None:
    copies, begun = Copies.begin(replace(PLAN, copy_every=3)), []
    for step in range(1, 10):
        copies = copies.after(outcome(step, copied=begun[-1] if begun else -1))
        begun += [step] if copies.begun == Version(step, 1) else []
    assert begun == [3, 6, 9]
    assert Copies.begin(replace(PLAN, copy_every=0)).after(outcome(4)).begun is None


def test_what_was_complete_stays_protected_in_the_next_generation() -> None:
    before = replace(Copies.begin(PLAN), copied=Version(5, 1), buddied=Version(3, 1), begun=Version(6, 1))
    later = replace(PLAN, generation=2, version=Version(6, 1))
    assert Copies.begin(later, before).protected == {Version(5, 1), Version(3, 1)}
    assert Copies.begin(replace(later, version=Version(4, 1)), before).protected == {Version(3, 1)}, "step 5 was given up"
    assert Copies.begin(replace(later, protected=Version(6, 1)), before).copied == Version(6, 1), "the plan knows better"


def test_the_oldest_that_is_not_protected_gives_way() -> None:
    copies = replace(Copies.begin(PLAN), copied=Version(9, 2))
    assert copies.slot([Version(9, 2), Version(12, 1)]) == 1, "of an earlier generation is older, whatever its step"
    assert copies.slot([Version(9, 2), None]) == 1
    assert copies.slot([Version(9, 2)]) is None
    assert age(Version(12, 1)) < age(Version(9, 2))


@dataclass
class Member:
    """Copies and sends at a pace of its own.  ``slots``: version, and whether it is complete; ``buddy``: its copies there."""

    rng: random.Random
    copies: Copies
    slots: list[tuple[Version, bool] | None]
    buddy: list[tuple[Version, bool] | None] = field(default_factory=lambda: [None, None])

    def through(self, slots: list[tuple[Version, bool] | None]) -> int:
        return max((each[0].step for each in slots if each and each[1] and each[0].generation == 1), default=-1)

    def goes_on(self) -> None:
        """A copy or a transfer that is on its way may end."""
        for slots in (self.slots, self.buddy):
            for n, each in enumerate(slots):
                ready = slots is self.slots or (each is not None and (each[0], True) in self.slots)
                if each and ready and self.rng.random() < 0.6:
                    slots[n] = (each[0], True)

    def sees(self, seen: Outcome, rule: Callable[[Copies, Outcome], Copies]) -> None:
        version, self.copies = Version(seen.step, 1), rule(self.copies, seen)
        if self.copies.begun == version:
            place = self.copies.slot([each[0] if each and each[1] else None for each in self.slots])
            if place is not None:
                self.slots[place] = (version, False)
        if self.copies.sent == version:
            kept = [n for n, each in enumerate(self.buddy) if each and each[0] == self.copies.buddied]
            self.buddy[0 if kept == [1] else 1] = (version, False)


def complete(members: list[Member], where: Callable[[Member], list[tuple[Version, bool] | None]]) -> set[Version]:
    """What is complete at every member."""
    return set.intersection(*({each[0] for each in where(member) if each and each[1]} for member in members))


def torn(seed: int, slots: int, rule: Callable[[Copies, Outcome], Copies] = Copies.after) -> str:
    """Sixty steps of members that copy at different paces; what was complete everywhere and no longer is, if anything."""
    rng = random.Random(seed)
    begin = Copies.begin(replace(PLAN, copy_every=rng.randint(1, 3), buddy_every=rng.choice((1, 2, 5))))
    members = [Member(random.Random(seed + n), begin, [None] * slots) for n in range(3)]
    copied, buddied = False, False
    for step in range(1, 61):
        copied_through = min(member.through(member.slots) for member in members)
        buddied_through = min(member.through(member.buddy) for member in members)
        seen = outcome(step, copied_through, buddied_through)
        copied, buddied = copied or copied_through >= 0, buddied or buddied_through >= 0
        for late in rng.sample(members, 3):  # the world may break between any two of them
            late.sees(seen, rule)
            if copied and Version(copied_through, 1) not in complete(members, lambda each: each.slots):
                return f"copies at step {step}"
            if buddied and not complete(members, lambda each: each.buddy):
                return f"buddies at step {step}"
            if buddied and Version(buddied_through, 1) not in complete(members, lambda each: each.slots):
                return f"own copies of what the buddies have, at step {step}"
        for member in members:
            member.goes_on()
    newest = max(complete(members, lambda each: each.slots), default=Version(-1, 0))
    return "" if newest.step > 40 else f"nothing was copied after {newest}"


def test_one_version_is_complete_everywhere_from_the_first_on() -> None:
    for seed in range(300):
        assert torn(seed, slots_for(1)) == ""


def test_with_one_slot_less_it_is_not() -> None:
    """Control: the fourth slot is needed with buddies."""
    assert any(torn(seed, slots_for(1) - 1) for seed in range(300))


def test_members_that_copy_whenever_they_can_lose_it() -> None:
    """Control: the least of the members' newest copies may be a version that some never made."""

    rng = random.Random(0)

    def alone(copies: Copies, seen: Outcome) -> Copies:
        begun = replace(copies, begun=None) if rng.random() < 0.5 else copies
        return Copies.after(begun, seen)

    assert any(torn(seed, 2, alone) for seed in range(300))
