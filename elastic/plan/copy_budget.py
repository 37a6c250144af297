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
SAVE_SLOTS = 1
"""Slots for saves: what is on its way to the bucket is not overwritten, and steps go on meanwhile."""
UNITS = ("B", "kB", "MB", "GB", "TB")
GBIT = 1e9 / 8
"""Bytes."""


@dataclass(frozen=True)
class CopyRule:
    """What is left to be chosen ("auto"), and how much of a link may be used."""

    copies: bool = False
    buddies: bool = False
    link_share: float = 0.2


@dataclass(frozen=True)
class Spread:
    """Of the state over the workers, in the worst of the layouts that there may be: in how few parts, and how many workers copy each."""

    state_bytes: int
    shards: int = 1
    replicas: int = 1

    @property
    def part_bytes(self) -> float:
        """Of one copy of one worker."""
        return self.state_bytes / self.shards

    @property
    def sent_bytes(self) -> int:
        """By all members together, each time that copies go to buddies."""
        return self.replicas * self.state_bytes


@dataclass(frozen=True)
class Link:
    """An interface by which nodes reach each other; ``bytes_per_s`` one way, 0 where it does not say."""

    name: str = ""
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        return f"a link like {self.name} here ({self.bytes_per_s / GBIT:g} Gb/s)"


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


def slots_for(copy_every: int, buddy_every: int) -> int:
    """Returns how many slots a worker has: for a save on its way to the bucket, and for copies.

    Those are a version known to be complete and the next one; with buddies also the one complete at them, and the next one of those.
    """
    return SAVE_SLOTS + (4 if buddy_every else 2 if copy_every else 0)


def slots_a_worker(copy_every: int, buddy_every: int) -> int:
    """Returns how many slots a worker takes: its own, and those in which its node holds copies of a worker of another one."""
    return slots_for(copy_every, buddy_every) + (BUDDY_SLOTS if buddy_every else 0)


def explained(spread: Spread, copy_every: int, buddy_every: int, rule: CopyRule, link: Link = Link(), price_per_gb: float = 0.0) -> str:
    """The sentence for the user, before anything was measured.  ``link``: of the machine where it is said."""
    slots, part, shards = slots_a_worker(copy_every, buddy_every), spread.part_bytes, spread.shards
    if not copy_every:
        return (
            "no copies in host memory (copies.copy_every = 0): what a dead worker alone held is read from the bucket; "
            f"a save on its way there takes up to {amount(slots * part)} a worker"
        )
    text = f"copies in host memory {_often(copy_every, rule.copies)}, of {amount(spread.state_bytes)} of state: "
    text += (
        f"up to {amount(slots * part)} a worker ({slots} slots of {amount(part)}, {shards} {'shard' if shards == 1 else 'shards'} at least)"
    )
    if not buddy_every:
        return f"{text}; none on other nodes (copies.buddy_every = 0)"
    price = price_per_gb / 1e9
    sent, cost = _as_allowed(spread, rule, link, price) if rule.buddies else _every_so_often(spread, buddy_every, link, price)
    return f"{text}; on to another node {sent}" + (f"; {cost} at copies.price_per_gb = {price_per_gb:g}" if price_per_gb else "")


def _as_allowed(spread: Spread, rule: CopyRule, link: Link, price: float) -> tuple[str, str]:
    """What is sent at most, and what that costs: all of it as often as it may be, or what a node's link takes where that is less."""
    sent, most, where, whose = spread.sent_bytes, spread.sent_bytes / SELDOM_S, "", "in all"
    allowed = rule.link_share * (link.bytes_per_s or 10 * GBIT)
    if allowed < most and link.bytes_per_s:
        most, where, whose = allowed, f" from a node with {link}", "a node"
    elif allowed < most:
        most, whose = allowed, "for every 10 Gb/s of a node's link"
        where = f" {whose}"
    return (
        f"as often as {rule.link_share:.0%} of each link allow, once a second at most (auto): {amount(sent)} each time over all links, "
        f"at most {amount(most)}/s{where}",
        f"{_money(sent * price)} each time, at most {_money(3600 * most * price)} an hour {whose},",
    )


def _every_so_often(spread: Spread, every: int, link: Link, price: float) -> tuple[str, str]:
    """What is sent, and what that costs, a step: how much of a link that is depends on how long a step takes."""
    sent, part = spread.sent_bytes / every, spread.part_bytes / every
    share = f", {part / link.bytes_per_s:.2%} of {link}" if link.bytes_per_s else " of its node's link"
    return (
        f"{_often(every, auto=False)}: {amount(spread.sent_bytes)} each time, {amount(sent)} a step over all links; "
        f"from one worker {amount(part)} a step, with steps of 1 s {amount(part)}/s{share}",
        f"{_money(sent * price)} a step",
    )


def _often(every: int, auto: bool) -> str:
    return f"every {f'{every} steps' if every > 1 else 'step'}{' or more seldom (auto)' if auto else ''}"


def _money(price: float) -> str:
    return f"{price:.2f}" if price >= 1 else f"{price:.4f}"


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
    less = [
        f"{setting} leaves {left} of {slots} slots"
        for setting, left in (("copies.buddy_every = 0", slots_for(1, 0)), ("copies.copy_every = 0", slots_for(0, 0)))
        if left < slots
    ]
    return (
        f"copies.copy_every = {copy_every}: this worker's copies and saves take {amount(needed)} of memory ({slots} slots), and {where} "
        f"leaves {amount(free)} beside those of the node's other workers; raise it by {amount(needed - free)} a worker (on Kubernetes "
        f"resources.limits.memory of the pod), or save it: {', '.join((*less, 'workers.min = more makes the largest shard smaller'))}"
    )
