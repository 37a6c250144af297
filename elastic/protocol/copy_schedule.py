"""The copy schedule: decides which versions are copied to host memory, which copies are saves, and which may
be overwritten.

All of it follows from the plan and the commits, so it is the same on every member.  Each member copies its
shard during the next step, into one of a few slots.  The world may break at any moment, and then one version
must be complete in the slots of *all* members.  So members do not choose for themselves: all of them begin a
version or none does.  They begin one only after the version begun before is known to be complete everywhere.
The slots then hold the complete version and the one being written.  (If each member skipped copies when it is
late, the oldest of the members' newest copies could be a version that some of them never made.)

A save is one of these copies, which the keepers also bring to the bucket.  The members agree on it in a
commit: it is the first version copied at or after the step at which a save is due, and a due save makes a
copy due.  Its slot is not overwritten before the save is in the bucket or given up.  For this there is one
slot more than copies need, even if nothing but saves is copied.

The same holds for buddies: a version goes to them once the version before is known to be complete at all of
them.  The member must also keep that version in its own slot.  When a node dies, its buddy has the dead
node's copies; but the nodes whose buddy was the dead node have only their own.

Where state is offloaded it lives in the slots, and each update writes the next version there.  Then all
members begin every version, whether the one before is known to be complete or not, and nobody overwrites the
slot in which a member lives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.ids import Cell, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.protocol import lineage
from elastic.protocol.commit_record import DUE, HAND_OVER, LAST, NO_SAVE, Outcome
from elastic.protocol.plan import Plan


def version_at(plan: Plan, step: int) -> Version | None:
    """Returns the version of ``step`` in the generation of ``plan``: the version that it began with, if that
    is of ``step``; None for -1.
    """
    if step < 0:
        return None
    return plan.version if step == plan.version.step else Version(step, plan.generation)


def age(version: Version) -> tuple[int, int]:
    """Returns the key that orders versions: a version of an earlier generation is older whatever its step,
    which may have been given up.
    """
    return version.generation, version.step


class Copy(NamedTuple):
    """A copy as its slot's header names it: the part of the state that ``cell`` names, at ``version``."""

    version: Version
    cell: Cell

    @property
    def age(self) -> tuple[int, int]:
        return age(self.version)


def due(step: int, save_every: int, target_step: int) -> bool:
    """Returns whether a save (or a validation) is due after ``step``: after every ``save_every`` steps, and
    after the last step.
    """
    return step > 0 and (step % save_every == 0 or step == target_step)


class SaveRule(NamedTuple):
    """The rule that says when saves are due: after every ``save_every`` steps, and after the last step."""

    save_every: int
    target_step: int

    def due(self, step: int) -> bool:
        return due(step, *self)


NO_SAVES = SaveRule(sys.maxsize, sys.maxsize)
"""The rule of a world that no keeper saves from: no step is ever due."""


@dataclass(frozen=True)
class CopySchedule:
    """The copies of a world as one member knows them.  Each is this member's part of a version.

    ``copied`` is the newest copy that is known to be complete in all members' host memory, ``buddied`` the
    newest that is known to be complete at all buddies.  ``begun`` is the newest that all members of this
    generation copy, ``sent`` the newest that goes on to the buddies.  A generation begins with a copy of its
    plan's version, because existing copies use older layouts and lie with workers that are gone.

    ``saving`` holds the saves that may not be in the bucket yet.  ``owed`` says that a save was due and has
    not begun.  ``step`` is the newest committed step.  ``lives`` says that the state itself lives in the
    slots.
    """

    plan: Plan
    cell: Cell
    rule: SaveRule
    step: int
    copied: Copy | None = None
    buddied: Copy | None = None
    begun: Copy | None = None
    sent: Copy | None = None
    saving: tuple[Copy, ...] = ()
    owed: bool = False
    lives: bool = False

    @staticmethod
    def begin(
        plan: Plan,
        worker: WorkerId,
        before: CopySchedule | None = None,
        slots: Sequence[Copy | None] = (),
        rule: SaveRule = NO_SAVES,
        *,
        lives: bool = False,
    ) -> CopySchedule:
        """Returns the copies of a new generation; ``slots`` lists the complete copies in this worker's slots.

        A copy that was known to be complete ``before`` stays protected, unless the plan names a newer one or
        its version was given up.  A copy on its way to the bucket stays protected too.  A generation that
        begins with the last step was formed to save it.
        """

        def still(copy: Copy | None) -> Copy | None:
            return copy if copy is not None and copy.version <= plan.version else None

        def known(version: Version | None, copy: Copy | None) -> Copy | None:
            if version is None or (copy is not None and copy.version == version):
                return copy
            return next((each for each in slots if each is not None and each.version == version), None)

        copied, buddied = (still(before.copied), still(before.buddied)) if before else (None, None)
        copied, buddied = known(plan.protected, copied), known(plan.buddied, buddied)
        rule = rule._replace(target_step=min(plan.ends or rule.target_step, rule.target_step))
        cell, last = cell_of(plan.layout, plan.world_rank(worker)), plan.version.step >= rule.target_step
        own, saving = Copy(plan.version, cell), before.saving if before else ()
        # saves off the lineage were given up
        saving = tuple(each for each in saving if lineage.contains(plan.lineage, each.version))
        if last:  # this world's copy replaces an earlier save of the same version
            saving = (*(each for each in saving if each.version != plan.version), own)
        return CopySchedule(
            plan,
            cell,
            rule,
            plan.version.step,
            copied,
            buddied,
            begun=own if plan.copy_every or last else None,
            sent=own if plan.buddy_every else None,
            saving=saving,
            owed=before.owed if before else False,
            lives=lives,
        )

    @property
    def asks(self) -> int:
        """The save that this member's record of the next step asks for: NO_SAVE, DUE or LAST."""
        step = self.step + 1
        if step == self.rule.target_step:
            return LAST
        return DUE if self.owed or self.rule.due(step) else NO_SAVE

    def after(self, outcome: Outcome) -> CopySchedule:
        """Returns the copies after the commit ``outcome``: its version is copied if it is ``begun``, and goes
        to the buddy if ``sent``.  A version that is handed over is always copied.
        """
        plan, step = self.plan, outcome.step
        copied, buddied = (
            (self._of(outcome.copied_through), self._of(outcome.buddied_through))
            if plan.copy_every
            else (None, None)
        )
        new = replace(
            self,
            step=step,
            copied=copied or self.copied,
            buddied=buddied or self.buddied,
            saving=self.saving if outcome.behind else (),
            owed=not outcome.saves and (self.owed or self.rule.due(step)),
        )
        complete = self.begun is not None and copied == self.begun
        if (
            not outcome.saves
            and outcome.boundary != HAND_OVER
            and not self.lives
            and not (complete and _due(self.begun, step, plan.copy_every, outcome.copy_every))
        ):
            return new
        begun = Copy(Version(step, plan.generation), self.cell)
        sends = (
            self.sent is not None
            and buddied == self.sent
            and _due(self.sent, step, plan.buddy_every, outcome.buddy_every)
        )
        return replace(
            new,
            begun=begun,
            sent=begun if sends else self.sent,
            saving=(*new.saving, begun) if outcome.saves else new.saving,
        )

    def ended(self) -> CopySchedule:
        """Returns the copies once the loops of all members have ended the run at the present step: it is the
        last save.
        """
        own = Copy(version_at(self.plan, self.step) or self.plan.version, self.cell)
        saving = self.saving if own in self.saving else (*self.saving, own)
        return replace(self, begun=own, saving=saving, rule=self.rule._replace(target_step=self.step))

    def promised(self, before: CopySchedule) -> Copy | None:
        """Returns the save that the last commit began, if the next world may copy its version without knowing
        of the save; None otherwise.

        A member that applies a commit when its world is over makes no copy.  But the next world begins with a
        copy of that version, perhaps in the same cell: then this copy stays protected if the member has named
        it to the keeper as a save.  Where nothing but saves is copied, the next world does not begin with a
        copy.  After the last step, the next world saves its version itself.
        """
        new = self.begun if self.begun != before.begun and self.begun in self.saving else None
        return new if self.plan.copy_every and self.step < self.rule.target_step else None

    def _of(self, step: int) -> Copy | None:
        """Returns this member's part of ``step``."""
        version = version_at(self.plan, step)
        return Copy(version, self.cell) if version is not None else None

    def free(self, slots: Sequence[Copy | None]) -> list[int]:
        """Returns the slots that hold no protected copy."""
        kept = (self.copied, self.buddied, self.sent, *self.saving)
        return [n for n, held in enumerate(slots) if held is None or held not in kept]

    def slot(self, slots: Sequence[Copy | None]) -> int | None:
        """Returns the slot for the copy of ``begun``; None if the copy is in a slot already.

        An empty or torn slot is taken first, otherwise the one with the oldest unprotected copy.  Raises
        :class:`NoRoom` if every slot is protected.  That happens only if nothing but saves is copied, to the
        last save of a world while the save before is on its way.
        """
        if self.begun is None or self.begun in slots:
            return None
        free = self.free(slots)
        if not free:
            raise NoRoom(f"no slot is free for {self.begun.version}")
        return min(free, key=lambda n: (-1, -1) if (held := slots[n]) is None else held.age)


class NoRoom(Exception):
    """Every slot holds a copy that may not be overwritten."""


def _due(last: Copy | None, step: int, planned: int, agreed: int) -> bool:
    """Returns whether enough steps have passed since ``last``: as many as planned, or as the members agreed
    on if that is more.
    """
    return last is not None and step - last.version.step >= max(planned, agreed)
