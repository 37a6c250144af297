"""The budgets and deadlines that ``advance`` decides by: all settings of a run's decisions, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.plan.layout import LayoutRule

SLOWEST = 1.05
"""Factor for times that another machine counts: its clock may be a twentieth slower."""


@dataclass(frozen=True)
class Rules:
    """The budgets and deadlines of one run.

    Names that end in ``_s`` are seconds.  A deadline is the last resort: it decides what no message has told.
    """

    min_workers: int
    max_workers: int
    layout: LayoutRule
    target_step: int
    save_every: int
    form_s: float = 120.0
    """Time limit from sending a plan until every member is ready; also the time limit for a new process to join."""
    fence_s: float = 10.0
    """Time from a fence until a member that has not answered is expelled."""
    stall_s: float = 60.0
    """Time without progress of any member after which one of them is blamed; three recent steps, if they take longer."""
    silence_s: float = 5.0
    """Without a beat of a node's keeper while the world stands still and others are heard, before the world is stopped.  After another half
    of this time, members there that have not answered the fence are expelled."""
    lease_s: float = 120.0
    """Time that a member which hears no coordinator may go on."""
    wait_s: float = 600.0
    """Time that a run waits for enough workers before it gives up."""
    stop_s: float = 60.0
    """For a last save, while no part of it arrives."""
    max_fruitless: int = 5
    """Number of generations in a row that may end without the commit of a new step."""
    grow_debounce_s: float = 2.0
    """How long to wait for other newcomers after one joined, and before another start after one failed."""
    spares: int = 0
    """Number of workers beyond ``max_workers`` that are kept warm."""
    refused_s: float = 10.0
    """Time that a run which has not begun waits for better nodes, if it has too few workers and the only room is on refused nodes."""
    copy_every: int = 0
    """Least number of steps from one copy of the state in host memory to the next; 0 means no copies."""
    buddy_every: int = 0
    """Least number of steps from one copy at a buddy keeper to the next; 0 means no copies there."""
    cross_zone: bool = False
    """Buddies are in other zones instead of the same one."""
    reproducible: bool = True
    """Only workers of one kind are members: others do not give equal bits."""

    @property
    def leave_s(self) -> float:
        """From the first member that takes a plan until one that has not is expelled: it cannot leave its old world."""
        return min(2 * self.fence_s, self.form_s)

    @property
    def lease_over_s(self) -> float:
        """After this time a lease has certainly run out: a member counts it by a clock of its own."""
        return SLOWEST * self.lease_s

    @property
    def mandate_s(self) -> float:
        """How long a coordinator may act on what its keepers hold, after it last knew that no other one had followed it."""
        return self.lease_s / 2

    @property
    def mandate_over_s(self) -> float:
        """After this time an earlier coordinator that nobody can reach acts no more."""
        return SLOWEST * self.mandate_s
