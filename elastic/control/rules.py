"""The budgets and deadlines that ``advance`` decides by: all that a run may be told, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.plan.layout import LayoutRule

SLOWEST = 1.05
"""A clock somewhere else may be a twentieth slower."""


@dataclass(frozen=True)
class Rules:
    """``*_s`` are seconds; a deadline is the last resort, for what nobody knows."""

    min_workers: int
    max_workers: int
    layout: LayoutRule
    target_step: int
    save_every: int
    form_s: float = 120.0
    """From sending a plan until every member is ready; also how long a new process may take to join."""
    fence_s: float = 10.0
    """From a fence until a member that has not answered is expelled."""
    stall_s: float = 60.0
    """Without progress of any member, before somebody is blamed; at least three recent steps."""
    silence_s: float = 5.0
    """Without a beat of a node's keeper while the world stands still and others' are heard, before it is stopped.  After half as long again
    who has not answered the fence there is expelled."""
    lease_s: float = 120.0
    """How long a member that hears no coordinator may go on."""
    wait_s: float = 600.0
    """Waiting for enough workers before the run gives up."""
    stop_s: float = 60.0
    """For a last save, without any part of it arriving."""
    max_fruitless: int = 5
    """Generations in a row that may end without the commit of a new step."""
    grow_debounce_s: float = 2.0
    """How long to wait for other newcomers after one joined, and before starting again after a start failed."""
    spares: int = 0
    """Workers beyond ``max_workers`` that are kept warm."""
    refused_s: float = 10.0
    """At the start, with too few workers, nodes refused and no room elsewhere: how long until the run gives up waiting for better ones."""
    copy_every: int = 0
    """Steps from one copy of the state in host memory to the next, at least (0: none) ..."""
    buddy_every: int = 0
    """... and from one copy at a buddy keeper to the next."""
    cross_zone: bool = False
    """Buddies are in other zones, not in the same one."""
    reproducible: bool = True
    """Workers of one kind only: others do not give equal bits."""

    @property
    def leave_s(self) -> float:
        """From the first member that takes a plan until one that has not is expelled: it cannot leave the world before."""
        return min(2 * self.fence_s, self.form_s)

    @property
    def lease_over_s(self) -> float:
        """After so long a lease has run out for certain: a member counts it by a clock of its own."""
        return SLOWEST * self.lease_s

    @property
    def mandate_s(self) -> float:
        """How long a coordinator may act on what its keepers hold, after it last knew that no other had followed it."""
        return self.lease_s / 2

    @property
    def mandate_over_s(self) -> float:
        """After so long an earlier coordinator that nobody can reach acts no more."""
        return SLOWEST * self.mandate_s
