"""The rules: all budgets and deadlines of ``advance``, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.plan.layout import LayoutRule
from elastic.plan.retention import Keep

SLOWEST = 1.05
"""Factor for times that another machine counts: its clock may be 5% slower."""


@dataclass(frozen=True)
class WatchRule:
    """The limits by which gradients and the loss are judged (``health.py``, ``skips.py``).  A record is a
    commit with the gradient norms of layers.
    """

    patience: int = 5
    """Number of records in a row for which a gradient must be zero, or vanish, before a warning."""
    vanishing: float = 1e-6
    """A gradient with a norm below this part of the largest layer's vanishes; 0 means that none does."""
    exploding: float = 100.0
    """A gradient with a norm above this multiple of its usual norm explodes; 0 means that none does."""
    stationary: int = 200
    """Number of records over which the loss must fall to avoid a warning; 0 means no warning."""
    max_skipped: int = 20
    """Number of steps skipped in a row after which the run fails; 0 means never."""


@dataclass(frozen=True)
class Rules:
    """The budgets and deadlines of one run.

    Names that end in ``_s`` are seconds.  A deadline is the last resort: it decides only where no message
    came.
    """

    min_workers: int
    max_workers: int
    layout: LayoutRule
    target_step: int
    save_every: int
    form_s: float = 120.0
    """Time limit from sending a plan until every member is ready; also the time limit for a new process to
    join.
    """
    fence_s: float = 10.0
    """Time from a fence until a member that has not answered is expelled."""
    stall_s: float = 60.0
    """Time without progress of any member after which the culprit is blamed; three recent steps if they take
    longer.
    """
    silence_s: float = 5.0
    """Time without a beat of a node's keeper after which a world that stands still is stopped, if other nodes
    are heard.

    After 1.5 times this time, members of the silent node that have not answered the fence are expelled.
    """
    lease_s: float = 120.0
    """Time for which a member that hears no coordinator may go on."""
    wait_s: float = 600.0
    """Time for which a run waits for enough workers before it gives up."""
    stop_s: float = 60.0
    """Time for which the run waits for a last save while no part of it arrives."""
    max_fruitless: int = 5
    """Number of generations in a row that may end without the commit of a new step."""
    grow_debounce_s: float = 2.0
    """Time to wait for other newcomers after one joined, and before the next start after one failed."""
    spares: int = 0
    """Number of workers beyond ``max_workers`` that are kept warm."""
    refused_s: float = 10.0
    """Time for which a run that has not begun waits for better nodes, if it has too few workers and the only
    room is on refused nodes.
    """
    microbatches: int = 0
    """Number of microbatches of a step, from which the rounds of a world follow; 0 if it is not known."""
    may_wait: bool = False
    """True if workers that could form a world may wait for workers that are starting (``growth.py``)."""
    lemon_after: int = 0
    """Number of incidents after which a node gets no worker for a while (``lemons.py``); 0 means never."""
    lemon_window_s: float = 3600.0
    """Time within which these incidents count."""
    lemon_cool_s: float = 600.0
    """Time for which such a node gets no worker the first time; it doubles each time."""
    copy_every: int = 0
    """Least number of steps from one copy of the state in host memory to the next; 0 means no copies."""
    buddy_every: int = 0
    """Least number of steps from one copy at a buddy keeper to the next; 0 means no copies there."""
    cross_zone: bool = False
    """True if buddies are in other zones; False if they are in the same one."""
    validates_last: bool = False
    """True if the state after the last step is validated, so that the last world gets the time for it."""
    validates_every: int = 0
    """Number of steps from one validation that the members make to the next; 0 means that they make none."""
    patience: int = 0
    """Number of validations in a row without a better loss after which the run ends; 0 means never."""
    min_delta: float = 0.0
    """A loss counts as better for ``patience`` only if it is lower than the best loss by more than this."""
    reproducible: bool = True
    """True if only workers of one kind may be members, because different kinds do not give equal bits."""
    compare: bool = True
    """True if a checkpoint is written only if all replicas of the state have the same bits."""

    evicts: bool = False
    """True if a straggler is replaced, False if it is only reported."""
    watch: WatchRule = WatchRule()
    keep: Keep = field(default_factory=Keep)
    """The checkpoints that are kept."""

    @property
    def leave_s(self) -> float:
        """Time after the first member takes a plan until members that have not taken it are expelled: they
        cannot leave their old world.
        """
        return min(2 * self.fence_s, self.form_s)

    @property
    def lease_over_s(self) -> float:
        """Time after which a lease has run out for certain, even if the member's clock is slow."""
        return SLOWEST * self.lease_s

    @property
    def coordinator_lease_s(self) -> float:
        """Time for which a coordinator may act on its keepers' answers after it last learned that no other
        coordinator had taken over.
        """
        return self.lease_s / 2

    @property
    def coordinator_lease_over_s(self) -> float:
        """Time after which an earlier coordinator that cannot be reached does not act any more."""
        return SLOWEST * self.coordinator_lease_s
