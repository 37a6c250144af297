"""Which versions are copied to host memory, and which copies may be overwritten.

It follows from the plan and the commits, so it is the same on every member.  Each copies its shard beside the next step, into one of a
few slots.  The world may break at any moment, and then one version must be complete in *all* of them.  So members do not choose for
themselves: a version is begun by all or by none, and only once the one begun before is known to be complete everywhere.  What is in the
slots is that one, still complete, and the one being written.  (Were each to skip a copy when it is late, the least of the members'
newest copies could be a version that some of them never made.)

A save is one of these copies, which the keepers also bring to the bucket.  The members agree on it in a commit: it is the first version
copied at or after the step at which a save is due, for a due save makes a copy due.  Its slot is not overwritten before the save is in the
bucket or given up; one slot more than copies need is there for it, also where nothing else is copied.

For buddies the same: a version goes to them once the one before is known to be complete at all of them.  It must stay in its own slot
too: of a node that dies the buddy has it, but whoever has the dead node for a buddy is left with its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.ids import Cell, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.protocol.commit_record import DUE, LAST, NO_SAVE, Outcome
from elastic.protocol.plan import Plan


def version_at(plan: Plan, step: int) -> Version | None:
    """That of ``step`` in the generation of ``plan``, which began with a version of an earlier one; None for -1."""
    if step < 0:
        return None
    return plan.version if step == plan.version.step else Version(step, plan.generation)


def age(version: Version) -> tuple[int, int]:
    """The smaller, the older: of an earlier generation, whatever its step (that may have been given up)."""
    return version.generation, version.step


class Copy(NamedTuple):
    """What a slot's header says: the part of the state that ``cell`` names, at ``version``."""

    version: Version
    cell: Cell

    @property
    def age(self) -> tuple[int, int]:
        return age(self.version)


def due(step: int, save_every: int, target_step: int) -> bool:
    """Returns whether the state after ``step`` is to be saved to the bucket."""
    return step > 0 and (step % save_every == 0 or step == target_step)


class SaveRule(NamedTuple):
    """When saves are due: after every ``save_every`` steps, and after the last one."""

    save_every: int
    target_step: int

    def due(self, step: int) -> bool:
        return due(step, *self)


NO_SAVES = SaveRule(sys.maxsize, sys.maxsize)
"""Of a world that no keeper saves from."""


@dataclass(frozen=True)
class Copies:
    """``copied``: this member's part of the newest version known to be complete in all members' host memory; ``buddied``: at all buddies.

    ``begun``: of the newest that all members of this generation copy; ``sent``: that goes on to the buddies.  A generation begins with a
    copy of its plan's version: what there is is in other layouts, and in the memory of workers that are gone.

    ``saving``: this member's parts of the saves that may not be in the bucket yet; ``owed``: a save was due and has not begun.  ``step``
    is the newest that is committed.
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

    @staticmethod
    def begin(
        plan: Plan, worker: WorkerId, before: Copies | None = None, slots: Sequence[Copy | None] = (), rule: SaveRule = NO_SAVES
    ) -> Copies:
        """Returns the copies of a new generation; ``slots``: what this worker's hold complete.

        What was known to be complete ``before`` stays protected, unless the plan knows better, or the version was given up.  So does what
        is on its way to the bucket.  A generation that begins with the last step was formed to save it.
        """

        def still(copy: Copy | None) -> Copy | None:
            return copy if copy is not None and copy.version <= plan.version else None

        def known(version: Version | None, copy: Copy | None) -> Copy | None:
            if version is None or (copy is not None and copy.version == version):
                return copy
            return next((each for each in slots if each is not None and each.version == version), None)

        copied, buddied = (still(before.copied), still(before.buddied)) if before else (None, None)
        copied, buddied = known(plan.protected, copied), known(plan.buddied, buddied)
        cell, last = cell_of(plan.layout, plan.world_rank(worker)), plan.version.step >= rule.target_step
        own, saving = Copy(plan.version, cell), before.saving if before else ()
        if last:  # this world's copy takes the place of what another one had begun of the same version
            saving = (*(each for each in saving if each.version != plan.version), own)
        return Copies(
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
        )

    @property
    def asks(self) -> int:
        """What this member's record of the next step asks for: NO_SAVE, DUE or LAST."""
        step = self.step + 1
        if step == self.rule.target_step:
            return LAST
        return DUE if self.owed or self.rule.due(step) else NO_SAVE

    def after(self, outcome: Outcome) -> Copies:
        """Having seen the commit ``outcome``: its version is copied if it is ``begun`` now, and goes to the buddy if it is ``sent``."""
        plan, step = self.plan, outcome.step
        copied, buddied = (self._of(outcome.copied_through), self._of(outcome.buddied_through)) if plan.copy_every else (None, None)
        new = replace(
            self,
            step=step,
            copied=copied or self.copied,
            buddied=buddied or self.buddied,
            saving=self.saving if outcome.behind else (),
            owed=not outcome.saves and (self.owed or self.rule.due(step)),
        )
        complete = self.begun is not None and copied == self.begun
        if not outcome.saves and not (complete and _due(self.begun, step, plan.copy_every, outcome.copy_every)):
            return new
        begun = Copy(Version(step, plan.generation), self.cell)
        sends = self.sent is not None and buddied == self.sent and _due(self.sent, step, plan.buddy_every, outcome.buddy_every)
        return replace(new, begun=begun, sent=begun if sends else self.sent, saving=(*new.saving, begun) if outcome.saves else new.saving)

    def _of(self, step: int) -> Copy | None:
        """This member's part of ``step``."""
        version = version_at(self.plan, step)
        return Copy(version, self.cell) if version is not None else None

    def slot(self, slots: Sequence[Copy | None]) -> int | None:
        """Where the copy of ``begun`` goes: an empty or torn slot (None), else the oldest that is not protected.  None: it is there.

        Raises :class:`NoRoom` where all are protected: only where nothing but saves is copied, and only for a save that is forced while
        the one before is on its way.
        """
        if self.begun is None or self.begun in slots:
            return None
        kept = (self.copied, self.buddied, self.sent, *self.saving)
        free = [n for n, held in enumerate(slots) if held is None or held not in kept]
        if not free:
            raise NoRoom(f"no slot is free for {self.begun.version}")
        return min(free, key=lambda n: (-1, -1) if (held := slots[n]) is None else held.age)


class NoRoom(Exception):
    """Every slot holds what may not be overwritten."""


def _due(last: Copy | None, step: int, planned: int, agreed: int) -> bool:
    """Are so many steps over since ``last`` as the plan says, or as the members agreed on in their commit, if that is more?"""
    return last is not None and step - last.version.step >= max(planned, agreed)
