"""The schedule says which copies are begun and protected: at any pace of the members, one version is complete
on all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.copy_budget import slots_for
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import GO_ON, Outcome, is_saved
from elastic.protocol.copy_schedule import Copy, CopySchedule, NoRoom, SaveRule
from elastic.protocol.plan import Plan
from tests.support.cells import cell

pytestmark = pytest.mark.fast

MEMBERS = (WorkerId("w1"), WorkerId("w2"), WorkerId("w3"))
PLAN = Plan(1, 1, Layout(1, 3), MEMBERS, Version(0, 0), "init", (), NodeId("n"), copy_every=1)
LATER = replace(
    PLAN, generation=2, version=Version(6, 1), tier="host", members=(MEMBERS[1], MEMBERS[2], WorkerId("w4"))
)


def outcome(step: int, copied: int = -1, buddied: int = -1, generation: int = 1) -> Outcome:
    return Outcome(
        step, generation, 1.0, (1.0,), (1,), ((0,),), True, copied_through=copied, buddied_through=buddied
    )


def first(plan: Plan = PLAN) -> CopySchedule:
    return CopySchedule.begin(plan, MEMBERS[1])


def own(step: int, generation: int = 1, index: int = 1) -> Copy:
    return Copy(Version(step, generation), cell(3, index))


def test_the_next_copy_is_begun_when_the_one_before_is_everywhere() -> None:
    assert first().begun == own(0, 0), "a generation begins with a copy of what it begins from"
    copies = first().after(outcome(1, copied=0))
    assert copies.begun == own(1) and copies.copied == own(0, 0)
    assert copies.after(outcome(2, copied=0)).begun == own(1), "it is still on its way somewhere"
    assert copies.after(outcome(2, copied=1)).begun == own(2)


def test_copies_are_made_when_due() -> None:
    copies, begun = first(replace(PLAN, copy_every=3)), [0]
    for step in range(1, 10):
        copies = copies.after(outcome(step, copied=begun[-1]))
        begun += [step] if copies.begun == own(step) else []
    assert begun == [0, 3, 6, 9]
    assert first(replace(PLAN, copy_every=0)).after(outcome(4)).begun is None


def test_copies_are_made_as_seldom_as_the_members_agreed() -> None:
    """The plan gives the smallest interval; a larger one that a commit carries is the same on all members."""
    copies, begun, sent = first(replace(PLAN, copy_every=1, buddy_every=2)), [0], [0]
    for step in range(1, 22):
        agreed = replace(
            outcome(step, copied=begun[-1], buddied=sent[-1]), copy_every=3 if step > 6 else 0, buddy_every=5
        )
        copies = copies.after(agreed)
        begun += [step] if copies.begun == own(step) else []
        sent += [step] if copies.sent == own(step) else []
    assert begun == [0, 1, 2, 3, 4, 5, 6, 9, 12, 15, 18, 21]
    assert sent == [0, 5, 12, 18]


def test_what_was_complete_stays_protected_in_the_next_generation() -> None:
    before = replace(first(), copied=own(5), buddied=own(3), begun=own(6))
    copies = CopySchedule.begin(LATER, MEMBERS[1], before)
    assert (copies.copied, copies.buddied) == (own(5), own(3))
    earlier = CopySchedule.begin(replace(LATER, version=Version(4, 1)), MEMBERS[1], before)
    assert (earlier.copied, earlier.buddied) == (None, own(3)), "step 5 was given up"


def test_what_the_plan_knows_is_protected() -> None:
    """This member has not seen the last commit; another one, which died, had seen it, and had gone on to
    overwrite its copy of step 5.
    """
    before = replace(first(), copied=own(5), begun=own(6))
    copies = CopySchedule.begin(replace(LATER, protected=Version(6, 1)), MEMBERS[1], before, [own(5), own(6)])
    assert copies.copied == own(6) and copies.slot([own(5), own(6)]) == 0


def test_the_same_version_in_another_place_is_another_copy() -> None:
    """A member in a new seat copies its first version anew, and keeps the old copy until the new one is
    everywhere.
    """
    copies = CopySchedule.begin(LATER, MEMBERS[1], replace(first(), copied=own(6)))
    assert copies.begun == own(6, index=0) and copies.slot([own(6), own(5)]) == 1
    later = copies.after(outcome(7, copied=6, generation=2))
    assert later.copied == own(6, index=0) and later.slot([own(6), own(6, index=0)]) == 0


def test_a_copy_of_the_generation_before_does_not_count_for_this_one() -> None:
    """A member that kept its seat has this copy and a newcomer does not; both begin the next copy after the
    same commit.
    """
    before, stays = (
        replace(first(), copied=own(6)),
        replace(LATER, members=(WorkerId("w4"), MEMBERS[1], MEMBERS[2])),
    )
    copies = CopySchedule.begin(stays, MEMBERS[1], before)
    assert copies.begun == copies.copied == own(6)
    assert copies.after(outcome(7, generation=2)).begun == own(6)
    assert copies.after(outcome(8, copied=6, generation=2)).begun == own(8, 2)


def test_the_oldest_that_is_not_protected_gives_way() -> None:
    copies = replace(first(), copied=own(9, 2), begun=own(10, 2))
    assert copies.slot([own(9, 2), own(8, 2), own(12, 1), own(7, 2)]) == 2, (
        "of an earlier generation is older, whatever its step"
    )
    assert copies.slot([own(9, 2), own(12, 1), None]) == 2, "torn"
    assert copies.slot([own(9, 2), own(10, 2)]) is None, "it is there already"


@dataclass
class Member:
    """Copies and sends at its own pace.  ``slots``: its copies, each with whether it is complete; ``buddy``:
    those at its buddy.
    """

    rng: random.Random
    copies: CopySchedule
    slots: list[tuple[Copy, bool] | None]
    buddy: list[tuple[Copy, bool] | None] = field(default_factory=lambda: [None, None])
    saving: Copy | None = None
    """The save that it has begun and of whose end it has not heard."""

    def through(self, slots: list[tuple[Copy, bool] | None]) -> int:
        return max((each[0].version.step for each in slots if each and each[1]), default=-1)

    def goes_on(self) -> None:
        """Each copy or transfer that is on its way may end now."""
        for slots in (self.slots, self.buddy):
            for n, each in enumerate(slots):
                ready = slots is self.slots or (each is not None and (each[0], True) in self.slots)
                if each and ready and self.rng.random() < 0.6:
                    slots[n] = (each[0], True)

    def begins(self, before: CopySchedule | None) -> None:
        """Begins the copy and the transfer that are due after the last commit."""
        copies = self.copies
        if copies.begun is not None and (before is None or before.begun != copies.begun):
            place = copies.slot([each[0] if each and each[1] else None for each in self.slots])
            if place is not None:
                self.slots[place] = (copies.begun, False)
            if copies.begun in copies.saving:
                self.saving = copies.begun
        if copies.sent is not None and (before is None or before.sent != copies.sent):
            kept = [n for n, each in enumerate(self.buddy) if each and each[0] == copies.buddied]
            self.buddy[0 if kept == [1] else 1] = (copies.sent, False)


def everywhere(
    members: list[Member], where: Callable[[Member], list[tuple[Copy, bool] | None]]
) -> set[Version]:
    """Returns the versions that are complete at every member."""
    return set.intersection(
        *({each[0].version for each in where(member) if each and each[1]} for member in members)
    )


def lost(
    seed: int, slots: int, rule: Callable[[CopySchedule, Outcome], CopySchedule] = CopySchedule.after
) -> str:
    """Runs sixty steps of members that copy at different paces; returns which promised copies are missing, or
    an empty text.

    A save on its way to the bucket counts too: it takes some steps, and the last save may overtake it.
    """
    rng = random.Random(seed)
    plan = replace(PLAN, copy_every=rng.randint(1, 3), buddy_every=rng.choice((1, 2, 5)))
    saves = SaveRule(rng.choice((1, 4, 7)), 60)
    members = [
        Member(random.Random(seed + n), CopySchedule.begin(plan, worker, rule=saves), [None] * slots)
        for n, worker in enumerate(MEMBERS)
    ]
    for member in members:
        member.begins(None)
    on_their_way = set[Version]()
    for step in range(1, 61):
        copied = min(member.through(member.slots) for member in members)
        buddied = min(member.through(member.buddy) for member in members)
        if rng.random() < 0.3:
            on_their_way.clear()
        for member in members:
            if member.saving is not None and member.saving.version not in on_their_way and rng.random() < 0.7:
                member.saving = None
        incomplete = [
            member.copies.begun not in [each[0] for each in member.slots if each and each[1]]
            for member in members
        ]
        behind = any(member.saving is not None for member in members) or any(incomplete)
        saved = is_saved(GO_ON, max(member.copies.asks for member in members), behind)
        on_their_way |= {Version(step, 1)} if saved else set()
        for late in rng.sample(members, 3):  # the world may break between any two of them
            agreed = replace(
                outcome(step, copied, buddied),
                copy_every=step // 9 % 4,
                buddy_every=step // 5 % 7,
                behind=behind,
                saves=saved,
            )
            before, late.copies = late.copies, rule(late.copies, agreed)
            whole = {each[0].version for each in late.slots if each and each[1]}
            try:
                late.begins(before)
            except NoRoom:
                return f"no slot at step {step}"
            there = {each[0].version for each in late.slots if each}
            if lacking := on_their_way & whole - there:
                return f"the save of {min(lacking)}, overwritten at step {step}"
            if copied >= 0 and Version(copied, min(copied, 1)) not in everywhere(
                members, lambda each: each.slots
            ):
                return f"copies at step {step}"
            if buddied >= 0 and not everywhere(members, lambda each: each.buddy):
                return f"buddies at step {step}"
            if buddied >= 0 and Version(buddied, min(buddied, 1)) not in everywhere(
                members, lambda each: each.slots
            ):
                return f"own copies of what the buddies have, at step {step}"
        for member in members:
            member.goes_on()
    newest = max(everywhere(members, lambda each: each.slots), default=Version(-1, 0))
    return "" if newest.step > 40 else f"nothing was copied after {newest}"


def test_one_version_is_complete_everywhere_from_the_first_on() -> None:
    for seed in range(100):
        assert lost(seed, slots_for(1, 1)) == ""


def test_with_one_slot_less_it_is_not() -> None:
    """Control: with buddies and saves, every slot is needed."""
    assert any(lost(seed, slots_for(1, 1) - 1) for seed in range(300))


def test_a_save_that_nobody_protects_is_overwritten() -> None:
    """Control: a rule that forgets the saves under way."""

    def careless(copies: CopySchedule, seen: Outcome) -> CopySchedule:
        return replace(CopySchedule.after(copies, seen), saving=())

    assert any("the save of" in lost(seed, slots_for(1, 1), careless) for seed in range(300))


def test_a_save_begins_with_the_first_version_copied_at_or_after_the_step_at_which_it_is_due() -> None:
    """A due save makes a copy due; while a member has no room it is owed, and begins as soon as all have."""
    copies, saved = (
        CopySchedule.begin(replace(PLAN, copy_every=5), MEMBERS[1], rule=SaveRule(4, 20)),
        list[int](),
    )
    begun = [0]
    for step in range(1, 21):
        behind = 8 <= step < 11 or step >= 17
        seen = replace(
            outcome(step, copied=begun[-1]), behind=behind, saves=is_saved(GO_ON, copies.asks, behind)
        )
        copies = copies.after(seen)
        begun += [step] if copies.begun == own(step) else []
        saved += [step] if seen.saves else []
    assert saved == [4, 11, 12, 16, 20], "owed at 8; the last one waits for nobody"
    assert begun == [0, 4, 9, 11, 12, 16, 20], "five steps after another copy, or where a save is due"
    assert copies.saving == (own(16), own(20)), "the one before may still be on its way"


def test_where_nothing_else_is_copied_saves_are() -> None:
    copies = CopySchedule.begin(replace(PLAN, copy_every=0), MEMBERS[1], rule=SaveRule(4, 20))
    assert copies.begun is None
    copies = copies.after(replace(outcome(4), saves=True))
    assert (copies.begun, copies.saving, copies.copied) == (own(4), (own(4),), None) and copies.slot(
        [None]
    ) == 0
    waits = copies.after(replace(outcome(20, copied=4), behind=True, saves=True))
    with pytest.raises(NoRoom):
        waits.slot([own(4)])
    assert copies.after(replace(outcome(20), saves=True)).slot([own(4)]) == 0


def test_a_world_that_begins_with_the_last_step_saves_it() -> None:
    """The world was formed again for that save: a copy of it that an earlier world had begun gives way; other
    saves on their way do not.
    """
    before = replace(first(), saving=(own(4), own(6)))
    copies = CopySchedule.begin(
        replace(LATER, copy_every=0, lineage=((1, 6),)), MEMBERS[1], before, rule=SaveRule(4, 6)
    )
    assert copies.begun == own(6, index=0) and copies.saving == (own(4), own(6, index=0))
    assert copies.slot([own(6)]) == 0
    assert (
        CopySchedule.begin(
            replace(LATER, copy_every=0, lineage=((1, 6),)), MEMBERS[1], before, rule=SaveRule(4, 7)
        ).begun
        is None
    )


def test_members_that_copy_whenever_they_can_lose_it() -> None:
    """Control: the oldest of the members' newest copies may be a version that some members never copied."""
    rng = random.Random(0)

    def alone(copies: CopySchedule, seen: Outcome) -> CopySchedule:
        return CopySchedule.after(
            replace(copies, begun=copies.copied) if rng.random() < 0.5 else copies, seen
        )

    assert any(lost(seed, slots_for(1, 1), alone) for seed in range(300))


def test_a_save_that_was_given_up_protects_nothing_in_the_next_generation() -> None:
    before = replace(first(), saving=(own(4), own(7)))
    assert CopySchedule.begin(replace(LATER, lineage=((1, 6),)), MEMBERS[1], before).saving == (own(4),)
