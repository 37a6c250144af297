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

from elastic.control.commit import Outcome
from elastic.control.saving import copy_due
from elastic.ids import Version
from elastic.plan.plan import Plan


def slots_for(buddy_every: int) -> int:
    """A version known to be complete, the next one; with buddies also the one complete at them, and the next one of those."""
    return 4 if buddy_every else 2


def age(version: Version) -> tuple[int, int]:
    """Of two versions the one with the smaller is the older one: of an earlier generation, whatever its step."""
    return version.generation, version.step


@dataclass(frozen=True)
class Copies:
    """``copied``: the newest version known to be complete in all members' host memory; ``buddied``: at all their buddies.

    ``begun``: the newest of this generation that all members copy; ``sent``: that goes on to the buddies.
    """

    copy_every: int = 0
    buddy_every: int = 0
    base: int = 0
    """Step that the generation began from."""
    copied: Version | None = None
    buddied: Version | None = None
    begun: Version | None = None
    sent: Version | None = None

    @staticmethod
    def begin(plan: Plan, before: Copies | None = None) -> Copies:
        """Of a new generation.  What was protected ``before`` stays so, unless the plan knows better, or the version was given up."""

        def kept(version: Version | None) -> Version | None:
            return version if version is not None and version <= plan.version else None

        before = before or Copies()
        copied = plan.protected if plan.protected is not None else kept(before.copied)
        return Copies(plan.copy_every, plan.buddy_every, plan.version.step, copied, kept(before.buddied))

    def after(self, outcome: Outcome) -> Copies:
        """Having seen the commit ``outcome``: its version is copied if it is ``begun`` now, and goes to the buddy if it is ``sent``."""
        version = Version(outcome.step, outcome.generation)
        copied = _newest(self.copied, outcome.copied_through, outcome)
        buddied = _newest(self.buddied, outcome.buddied_through, outcome)
        new = replace(self, copied=copied, buddied=buddied)
        if copy_due(outcome.step, self.copy_every) and self.begun in (None, copied):
            sends = self._sends(outcome.step) and self.sent in (None, buddied)
            return replace(new, begun=version, sent=version if sends else self.sent)
        return new

    def _sends(self, step: int) -> bool:
        """The first copy at or after every ``buddy_every``-th step."""
        last = self.base if self.sent is None else self.sent.step
        return self.buddy_every > 0 and step // self.buddy_every > last // self.buddy_every

    @property
    def protected(self) -> frozenset[Version]:
        """What must not be overwritten."""
        return frozenset(each for each in (self.copied, self.buddied, self.begun, self.sent) if each is not None)

    def slot(self, slots: Sequence[Version | None]) -> int | None:
        """Where the copy of ``begun`` goes: an empty or torn slot (None), else the oldest that is not protected."""
        free = [n for n, version in enumerate(slots) if version is None or version not in self.protected]
        return min(free, key=lambda n: (-1, -1) if (held := slots[n]) is None else age(held), default=None)


def _newest(known: Version | None, through: int, outcome: Outcome) -> Version | None:
    return Version(through, outcome.generation) if through >= 0 else known
