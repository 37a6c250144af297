"""How often the state is copied to host memory and on to buddies, what that costs, and whether there is room.

A copy is made beside the next step and costs nothing as long as it is done before that is: so every step, unless it takes longer.  What
goes to buddies shares the network with the training: so often that it takes no more than its share of a link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

FIRST_BUDDY_EVERY = 10
"""Steps, until it was measured what bringing a copy to a buddy takes."""
SELDOM_S = 1.0
"""From one copy at a buddy to the next, at least: more often costs a small job more than it can lose."""
REMEMBERED = 8
BUDDY_SLOTS = 2
"""In which a keeper holds copies of another node's worker: the newest that all buddies have complete, and the next one."""
UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class CopyRule:
    """What is left to be chosen ("auto"), and how much of a link may be used."""

    copies: bool = False
    buddies: bool = False
    link_share: float = 0.2


@dataclass
class Pace:
    """How often one worker's copies can be made, by what it measured: it goes into each commit, and the slowest member decides."""

    rule: CopyRule
    step_s: float = 0.0
    """Of a step without waiting for a copy: half of it the last one's, a quarter the one's before, ..."""
    _copies_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def stepped(self, seconds: float) -> None:
        self.step_s = (self.step_s + seconds) / 2 if self.step_s else seconds

    def copied(self, seconds: float) -> None:
        self._copies_s.append(seconds)

    def copy_every(self) -> int:
        """Steps from one copy to the next, so that each is done before the next begins; 0: as planned.

        By the quickest of the last few: the first into each slot take the system's memory page by page, and one that was held up says
        nothing of the others.
        """
        if not self.rule.copies or len(self._copies_s) < REMEMBERED or not self.step_s:
            return 0
        return ceil(min(self._copies_s) / self.step_s)

    def buddy_every(self, brought_s: float) -> int:
        """Steps from one copy at the buddies to the next, so that ``brought_s``, which the node's link was busy with one, is its share."""
        if not self.rule.buddies:
            return 0
        if not brought_s or not self.step_s:
            return FIRST_BUDDY_EVERY
        return ceil(max(brought_s / self.rule.link_share, SELDOM_S) / self.step_s)


def slots_for(buddy_every: int) -> int:
    """A version known to be complete, the next one; with buddies also the one complete at them, and the next one of those."""
    return 4 if buddy_every else 2


def slots_a_worker(buddy_every: int) -> int:
    """Its own, and those in which its node holds copies of a worker of another one."""
    return slots_for(buddy_every) + (BUDDY_SLOTS if buddy_every else 0)


def explained(state_bytes: int, shards: int, copy_every: int, buddy_every: int, rule: CopyRule, price_per_gb: float = 0.0) -> str:
    """The sentence for the user, before anything was measured.  ``shards``: into how few parts the state is cut at worst."""
    if not copy_every:
        return "no copies in host memory (copies.copy_every = 0): what a dead worker alone held is read from the bucket"
    slots = slots_a_worker(buddy_every)
    text = f"copies in host memory {_often(copy_every, rule.copies)}, of {amount(state_bytes)} of state: "
    text += (
        f"up to {amount(slots * state_bytes / shards)} a worker ({slots} slots, {shards} {'shard' if shards == 1 else 'shards'} at least)"
    )
    if not buddy_every:
        return f"{text}; none on other nodes (copies.buddy_every = 0)"
    often, sent, each = _often(buddy_every, auto=False), state_bytes / buddy_every, "a step"
    if rule.buddies:
        often, sent, each = f"as often as {rule.link_share:.0%} of each link allow (auto)", state_bytes, "each time"
    text += f"; on to another node {often}, {amount(sent)} {each} over all links"
    return text + (f"; {sent / 1e9 * price_per_gb:.4f} {each} at copies.price_per_gb = {price_per_gb:g}" if price_per_gb else "")


def _often(every: int, auto: bool) -> str:
    return f"every {f'{every} steps' if every > 1 else 'step'}{' or more seldom (auto)' if auto else ''}"


def amount(size: float) -> str:
    """``1.5 GB``."""
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"


def no_room(copy_every: int | str, needed: int, free: int, where: str, slots: int) -> str:
    """Why copies of ``needed`` bytes do not fit where ``free`` are left; "" where they do.  ``where``: whose limit that is."""
    if needed <= free:
        return ""
    less = "copies.buddy_every = 0 two thirds of it, " if slots > slots_for(0) else ""
    return (
        f"copies.copy_every = {copy_every}: this worker's copies take {amount(needed)} of memory ({slots} slots), and {where} leaves "
        f"{amount(free)} beside those of the node's other workers; raise it by {amount(needed - free)} a worker (on Kubernetes "
        f"resources.limits.memory of the pod), or save it: "
        f"{less}copies.copy_every = 0 all of it, workers.min = more makes the largest shard smaller"
    )
