"""The rules by which a keeper uploads saves: when a save is over, and when a part of one can never be
uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.ids import Version, WorkerId
from elastic.protocol.actions import Save
from elastic.protocol.copy_schedule import age

REFUSALS = 5
"""Number of refusals after which a part no longer counts as being written: the bucket may refuse the end of
it for ever.
"""


@dataclass(frozen=True)
class Told:
    """The newest list from the coordinator: the saves under way, and the version of the run that it knew
    then.

    ``number`` grows with the coordinator's incarnation and with each of its calls, because calls may overtake
    each other.
    """

    number: tuple[int, int] = (0, 0)
    saves: Sequence[Save] = ()
    generation: int = 0
    version: Version = field(default_factory=lambda: Version(0, 0))

    def is_over(self, worker: WorkerId, version: Version) -> bool:
        """Returns whether the save of ``version`` and all earlier ones of ``worker`` are in the bucket or
        given up.

        A worker has one mark for all that it has saved, so its newest save is not over while an older one is
        under way.  A later save may wait for the slot of the older one.  A version of a later generation than
        this list's is never over, even if the run had come further before it went back to a save.
        """
        if any(age(save.version) <= age(version) and worker in save.members for save in self.saves):
            return False
        if version.generation != self.generation:
            return version.generation < self.generation
        return version.step <= self.version.step


def hopeless(save: Save, generation: int, *, ended: bool, failed: bool = False) -> str:
    """Returns why a worker's incomplete copy for ``save`` will never be complete; "" while it still may be.

    ``generation`` is the latest world that the worker has entered.  ``ended`` must have been true before the
    copy was looked for: it may have become complete just before the end.  ``failed`` says that the worker has
    tried to make this copy in vain.
    """
    if ended:
        return "the worker ended before its copy was complete"
    if generation > save.by:
        return "the worker went on without a copy"
    return "the copy failed" if failed else ""
