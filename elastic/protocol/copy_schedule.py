"""Which versions are copied to host memory, and which copies may be overwritten.

It follows from the plan and the commits, so it is the same on every member.  Each copies its shard beside the next step, into one of a
few slots.  The world may break at any moment, and then one version must be complete in *all* of them.  So members do not choose for
themselves: a version is begun by all or by none, and only once the one begun before is known to be complete everywhere.  What is in the
slots is that one, still complete, and the one being written.  (Were each to skip a copy when it is late, the least of the members'
newest copies could be a version that some of them never made.)

For buddies the same: a version goes to them once the one before is known to be complete at all of them.  It must stay in its own slot
too: of a node that dies the buddy has it, but whoever has the dead node for a buddy is left with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.ids import Cell, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.protocol.commit_record import Outcome
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


@dataclass(frozen=True)
class Copies:
    """``copied``: this member's part of the newest version known to be complete in all members' host memory; ``buddied``: at all buddies.

    ``begun``: of the newest that all members of this generation copy; ``sent``: that goes on to the buddies.  A generation begins with a
    copy of its plan's version: what there is is in other layouts, and in the memory of workers that are gone.
    """

    plan: Plan
    cell: Cell
    copied: Copy | None = None
    buddied: Copy | None = None
    begun: Copy | None = None
    sent: Copy | None = None

    @staticmethod
    def begin(plan: Plan, worker: WorkerId, before: Copies | None = None, slots: Sequence[Copy | None] = ()) -> Copies:
        """Of a new generation; ``slots``: what this worker's hold complete.

        What was known to be complete ``before`` stays protected, unless the plan knows better, or the version was given up.
        """

        def still(copy: Copy | None) -> Copy | None:
            return copy if copy is not None and copy.version <= plan.version else None

        def known(version: Version | None, copy: Copy | None) -> Copy | None:
            if version is None or (copy is not None and copy.version == version):
                return copy
            return next((each for each in slots if each is not None and each.version == version), None)

        copied, buddied = (still(before.copied), still(before.buddied)) if before else (None, None)
        copied, buddied = known(plan.protected, copied), known(plan.buddied, buddied)
        cell = cell_of(plan.layout, plan.world_rank(worker))
        first = Copy(plan.version, cell) if plan.copy_every else None
        return Copies(plan, cell, copied, buddied, first, first if plan.buddy_every else None)

    def after(self, outcome: Outcome) -> Copies:
        """Having seen the commit ``outcome``: its version is copied if it is ``begun`` now, and goes to the buddy if it is ``sent``."""
        copied, buddied = self._of(outcome.copied_through), self._of(outcome.buddied_through)
        new = replace(self, copied=copied or self.copied, buddied=buddied or self.buddied)
        if self.begun is None or copied != self.begun or not _due(self.begun, outcome.step, self.plan.copy_every, outcome.copy_every):
            return new
        begun = self._of(outcome.step)
        sends = self.sent and buddied == self.sent and _due(self.sent, outcome.step, self.plan.buddy_every, outcome.buddy_every)
        return replace(new, begun=begun, sent=begun if sends else self.sent)

    def _of(self, step: int) -> Copy | None:
        """This member's part of ``step``."""
        version = version_at(self.plan, step)
        return Copy(version, self.cell) if version is not None else None

    def slot(self, slots: Sequence[Copy | None]) -> int | None:
        """Where the copy of ``begun`` goes: an empty or torn slot (None), else the oldest that is not protected.  None: it is there."""
        if self.begun is None or self.begun in slots:
            return None
        kept = (self.copied, self.buddied, self.sent)
        free = [n for n, held in enumerate(slots) if held is None or held not in kept]
        return min(free, key=lambda n: (-1, -1) if (held := slots[n]) is None else held.age)


def _due(last: Copy, step: int, planned: int, agreed: int) -> bool:
    """Are so many steps over since ``last`` as the plan says, or as the members agreed on in their commit, if that is more?"""
    return step - last.version.step >= max(planned, agreed)
