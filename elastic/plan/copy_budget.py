"""Computes how often the state is copied to host memory and on to buddies, and how much memory the copies
take.

A copy is made while the next step runs.  It costs nothing if it ends before that step does.  So a copy is
made every step, or, if a copy takes longer, every few steps.  Copies to buddies share the network with the
training, so they are made as often as their share of a node's link allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

LATER = 2**20
"""Number of steps that no run reaches: no copy is due before a worker reports a smaller number."""
FIRST_BUDDY_EVERY = 10
"""Number of steps between copies to the buddy until the time that one takes has been measured."""
SELDOM_S = 1.0
"""Smallest time in seconds between copies to the buddy.  More frequent ones would cost a small job more than
a failure costs it.
"""
REMEMBERED = 8
"""Number of newest copies whose times decide how often copies are made."""
BUDDY_SLOTS = 2
"""Number of slots in which a keeper holds copies of a worker on another node: the newest version that all
buddies have, and the next.
"""
SAVE_SLOTS = 1
"""Number of slots for saves.  A save on its way to the bucket is not overwritten, and steps go on meanwhile.
"""
OFFLOAD_SLOTS = 1
"""Number of slots more where state lives in slots: an update writes the next version while the present one
may not be protected yet.
"""
UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class CopyRule:
    """Says which intervals the run chooses by itself ("auto"), and how much of a link copies to buddies may
    take.
    """

    copies: bool = False
    buddies: bool = False
    link_share: float = 0.2


@dataclass
class Pace:
    """Computes how often one worker can make copies, from what it has measured.

    Every member puts its answer into each commit, and the slowest member decides.
    """

    rule: CopyRule
    step_s: float = 0.0
    """Mean time of a step in seconds, without waiting for copies.  The newest step counts one half, the one
    before a quarter, and so on.
    """
    _copies_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def stepped(self, seconds: float) -> None:
        self.step_s = (self.step_s + seconds) / 2 if self.step_s else seconds

    def copied(self, seconds: float) -> None:
        self._copies_s.append(seconds)

    def copy_every(self, *, able: bool = True) -> int:
        """Returns the number of steps between copies at which each is done before the next begins, or 0 to
        keep the planned number.

        Returns ``LATER`` while the worker is not ``able`` to make the next copy at full speed, because memory
        for it is still being pinned: such a copy would hold up a step for seconds.

        The quickest of the last few copies decides.  The first copy into each slot is slow, since the system
        maps its memory page by page, and a copy that was held up tells nothing about the others.
        """
        if self.rule.copies and not able:
            return LATER
        if not self.rule.copies or len(self._copies_s) < REMEMBERED or not self.step_s:
            return 0
        return ceil(min(self._copies_s) / self.step_s)

    def buddy_every(self, brought_s: float) -> int:
        """Returns the number of steps between copies to the buddy, chosen so that they take at most their
        share of the link.

        Returns 0 if the planned number is to stay.

        ``brought_s`` is the time for which one copy kept the node's link busy, 0 if it is not known yet.
        """
        if not self.rule.buddies:
            return 0
        if not brought_s or not self.step_s:
            return FIRST_BUDDY_EVERY
        return ceil(max(brought_s / self.rule.link_share, SELDOM_S) / self.step_s)


def slots_for(copy_every: int, buddy_every: int, *, offload: bool = False) -> int:
    """Returns the number of slots for a worker's own state: one for a save on its way to the bucket, and
    those for copies.

    Copies need one slot for a version that is known to be complete and one for the next version.  With
    buddies they need two more: one for the version that all buddies have, and one for the version on its way
    to them.  With ``offload`` the state itself lives in them.
    """
    return SAVE_SLOTS + (4 if buddy_every else 2 if copy_every else 0) + (OFFLOAD_SLOTS if offload else 0)


def slots_a_worker(copy_every: int, buddy_every: int, *, offload: bool = False) -> int:
    """Returns the number of slots that a node needs for each of its workers: the worker's own, and those for
    a worker on another node.
    """
    return slots_for(copy_every, buddy_every, offload=offload) + (BUDDY_SLOTS if buddy_every else 0)


def slot_size(has: int, needed: int, foreseen: int, free: int, others: int) -> int:
    """Returns how many bytes a pinned slot should have that has ``has`` bytes and gets a copy of ``needed``
    bytes.

    Memory that is pinned stays, and the slot also gets what a copy of ``foreseen`` bytes will need, as long
    as ``others`` bytes of the node, the room for one more worker, are still ``free`` then.  If less is free,
    the slot gives back what its copy does not need.
    """
    wished = max(has, needed, foreseen)
    if free - (wished - has) >= others:
        return wished
    return needed if has < needed or free < others else has


def explained(
    smallest: float,
    largest: float,
    copy_every: int,
    buddy_every: int,
    *,
    offload: bool = False,
    folder: str = "",
) -> str:
    """Returns the sentence on the memory, or the disk of ``folder``, that copies and saves take.

    ``smallest`` and ``largest`` are the bytes of a worker's state in a world of all workers, and in one that
    cuts it into the fewest parts.
    """
    slots = slots_a_worker(copy_every, buddy_every, offload=offload)
    takes = f"{amount(slots * smallest)} of its {'disk' if folder else 'node'} for each worker"
    most = amount(slots * largest)
    more = (
        ""
        if smallest == largest
        else (f"; up to {most} if fewer workers share the state and the node has room")
    )
    if not copy_every:
        return (
            "no copies in host memory (copies.copy_every = 0): state that only a dead worker held is "
            f"read from the bucket; a save on its way to the bucket takes {takes}{more}"
        )
    copies = slots_for(copy_every, buddy_every, offload=offload) - SAVE_SLOTS
    what, own = (
        ("state", "its own state and copies of it") if offload else ("copies", "copies of its own state")
    )
    text = (
        f"{what} in {f'files of {folder}' if folder else 'host memory'} and saves take {takes}, in {slots} "
        f"slots of {amount(smallest)}: "
    )
    text += f"{SAVE_SLOTS} for a save, {copies} for {own}"
    return text + (f", {BUDDY_SLOTS} for copies of a worker on another node" if buddy_every else "") + more


def amount(size: float) -> str:
    """Returns a number of bytes as text, such as ``1.5 GB``."""
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"


def no_room(
    copy_every: int | str,
    needed: int,
    free: int,
    where: str,
    slots: int,
    *,
    offload: bool = False,
    folder: str = "",
) -> str:
    """Returns why copies of ``needed`` bytes do not fit into ``free`` bytes, or "" if they fit.

    ``needed`` is what they take in a world of all workers; ``where`` names the limit.  With ``folder`` they
    are in files there.
    """
    if needed <= free:
        return ""
    fewer = {"copies.buddy_every = 0": slots_for(1, 0, offload=offload)} | (
        {} if offload else {"copies.copy_every = 0": slots_for(0, 0)}
    )
    less = [f"{setting} leaves {left} of {slots} slots" for setting, left in fewer.items() if left < slots]
    setting, medium = (
        (f"offload_folder = {folder!r}", "disk")
        if folder
        else (f"copies.copy_every = {copy_every}", "memory")
    )
    missing = amount(needed - free)
    raised = (
        f"raise the limit by {missing} for each worker (on Kubernetes resources.limits.memory of the pod)"
    )
    return (
        f"{setting}: this worker's copies and saves take at least {amount(needed)} of {medium} "
        f"({slots} slots), and {where} leaves only {amount(free)} after the copies of the node's other "
        "workers; "
        f"{f'make {missing} free for each worker, name a folder of a larger disk' if folder else raised}, "
        "or need less: "
        f"{', '.join((*less, 'more workers that share the state make each part smaller (parallel.min_shard, workers.min)'))}"
    )
