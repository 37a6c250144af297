"""How often the state is copied to host memory and on to buddies, what that costs, and whether there is room.

A copy is made beside the next step and costs nothing as long as it is done before that is: so every step, unless it takes longer.  What
goes to buddies shares the network with the training: so often that it takes no more than its share of a link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

GPU_COPY_RATE, CPU_COPY_RATE = 20e9, 2e9
"""Bytes a second into host memory, digests included: half of what was measured (H200: 40 GB/s a GPU with four at once)."""
LINK_RATE = 1.25e9
"""Of a node's link where nothing better is known: 10 Gbit/s."""
FIRST_BUDDY_EVERY = 10
"""Steps, at least: more often costs a small job more than it can lose."""
UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class CopyRule:
    """What is left to be chosen ("auto"), how quick a copy is, and how much of a link may be used."""

    copies: bool = False
    buddies: bool = False
    copy_rate: float = CPU_COPY_RATE
    link_share: float = 0.2


def slots_for(buddy_every: int) -> int:
    """A version known to be complete, the next one; with buddies also the one complete at them, and the next one of those."""
    return 4 if buddy_every else 2


def copy_every(shard_bytes: float, step_s: float, copy_rate: float) -> int:
    """Steps from one copy to the next, so that each is done before the next begins."""
    return max(1, ceil(shard_bytes / copy_rate / step_s)) if step_s > 0 else 1


def buddy_every(node_bytes: float, step_s: float, link_share: float) -> int:
    """Steps from one copy at a buddy to the next: ``node_bytes`` leave a node each time, at ``link_share`` of its link on average."""
    return max(FIRST_BUDDY_EVERY, ceil(node_bytes / (LINK_RATE * link_share) / step_s)) if step_s > 0 else FIRST_BUDDY_EVERY


def explained(state_bytes: int, shards: int, copy_every: int, buddy_every: int, rule: CopyRule, price_per_gb: float = 0.0) -> str:
    """The sentence for the user, before anything was measured.  ``shards``: into how few parts the state is cut at worst."""
    if not copy_every:
        return "no copies in host memory (copies.copy_every = 0): what a dead worker alone held is read from the bucket"
    slots = slots_for(buddy_every)
    text = f"copies in host memory {_often(copy_every, rule.copies)}, of {amount(state_bytes)} of state: "
    text += (
        f"up to {amount(slots * state_bytes / shards)} a worker ({slots} slots, {shards} {'shard' if shards == 1 else 'shards'} at least)"
    )
    if not buddy_every:
        return f"{text}; none on other nodes (copies.buddy_every = 0)"
    a_step = state_bytes / buddy_every
    text += f"; on to another node {_often(buddy_every, rule.buddies)}, {amount(a_step)} a step over all links"
    text += f", at most {rule.link_share:.0%} of each" if rule.buddies else ""
    return text + (f"; {a_step / 1e9 * price_per_gb:.4f} a step at copies.price_per_gb = {price_per_gb:g}" if price_per_gb else "")


def _often(every: int, auto: bool) -> str:
    return f"every {f'{every} steps' if every > 1 else 'step'}{' or more seldom (auto)' if auto else ''}"


def amount(size: float) -> str:
    """``1.5 GB``."""
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"


def no_room(needed: int, free: int, where: str, slots: int) -> str:
    """Why copies of ``needed`` bytes do not fit where ``free`` are left; "" where they do.  ``where``: whose limit that is."""
    if needed <= free:
        return ""
    less = "copies.buddy_every = 0 takes half of it, " if slots > 2 else ""
    return (
        f"copies.copy_every: this worker's copies take {amount(needed)} of memory ({slots} slots), and {where} leaves {amount(free)}; "
        f"raise it by {amount(needed - free)} a worker (on Kubernetes resources.limits.memory of the pod), or copy less: "
        f"{less}copies.copy_every = 0 all of it, workers.min = more makes the largest shard smaller"
    )
