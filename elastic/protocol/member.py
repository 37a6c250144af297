"""A worker's side of the protocol, as a value: which orders count, what is held, and whether a step may still be applied.

A ``Member`` has no lock, no clock and no tensors.  The time comes in as an argument, by the worker's own clock; memory goes through it
unseen.  A worker drives it under a lock (``train/apply_fence.py``), the simulator drives the same class in virtual time.

    idle --enter--> forming --healed--> ready --go--> (prepare --> apply --> applied)* --settle--> leaving --leave--> idle

Five rules make every step one that all members apply or none:

* A fence bars its generation and every older one: nothing of them is prepared or applied any more, except what a settlement says.
* The answer to a fence says what is held.  It waits while something could still change that: an update, a settlement, an older world.
* A member is in one world at a time.  A plan for the next one waits until the present one is left.
* Nothing is applied on a lease that ran out.  A lease counts from when this member asked, so it ends here before it ends elsewhere.
* Of two coordinators only the later one is heeded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from elastic.errors import FencedOff
from elastic.ids import Version, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import GO_ON, PAUSE, SAVE_AND_PAUSE, Outcome
from elastic.protocol.events import Attached, Event, Fenced, StepDone
from elastic.protocol.plan import Plan


class Member:
    """The methods that take an order return whether it counts; one that does not count changes nothing but the fence."""

    def __init__(self, worker: WorkerId, lease_s: float = float("inf")) -> None:
        """``lease_s``: how long the member may go on after it asked for its lease.  A run without a coordinator has no end of it."""
        self.worker, self.lease_s = worker, lease_s
        self.incarnation = 0
        """The latest coordinator that was heard."""
        self.heard_at = -float("inf")
        """When the member asked the question that a coordinator answered last."""
        self.waiting: Plan | None = None
        """The plan that was taken and not entered yet."""
        self.plan: Plan | None = None
        """The plan of the world the member is in, or was in last."""
        self.inside = False
        """The member has entered the world of ``plan`` and has not left it."""
        self.fenced = 0
        """The highest generation in which nothing may be prepared or applied any more."""
        self.ready_at: float | None = None
        """When the shard of the present world was complete."""
        self.went = False
        """The present world was told to step."""
        self.lease_until = -float("inf")
        self.boundary = GO_ON
        """What this member asks for, in its next commit record, at the boundary after it."""
        self.held: dict[Holding, Any] = {}
        """What is complete and unharmed, with the memory it is in; the last one is of the present world.  Empty during an update."""
        self.prepared: int | None = None
        """The step whose gradients are complete here and not applied."""
        self.applying = False
        self.leaving = False
        """The present world is settled, and not left yet."""
        self.outcomes: deque[Outcome] = deque()
        """Commits applied here that no coordinator has acknowledged, oldest first: evidence, and the ledger of a dead world rank 0."""
        self._updated: tuple[Holding, Any] | None = None
        self._settlement: Outcome | None = None
        self._said: list[Event] = []
        self._owed = 0
        """The generation whose fence is still to be answered; 0: none."""
        self._answered = 0
        """The generation whose fence was answered last."""

    @property
    def generation(self) -> int:
        """The generation that the member is in, or was in last."""
        return 0 if self.plan is None else self.plan.generation

    @property
    def barred(self) -> bool:
        """The generation is fenced."""
        return self.fenced >= self.generation

    # ---- orders

    def heed(self, incarnation: int) -> bool:
        """Whether what the coordinator of ``incarnation`` says counts: not if a later one was heard.

        A plan that was not entered is void once there is a new coordinator.  That one may know nothing of it; if it does, it says so again.
        """
        if incarnation < self.incarnation:
            return False
        if incarnation > self.incarnation:
            self.incarnation, self.waiting = incarnation, None
        return True

    def form(self, plan: Plan) -> bool:
        """The world of ``plan`` is to be formed.  The plan waits for :meth:`enter`; a later one takes its place."""
        latest = self.generation if self.waiting is None else self.waiting.generation
        if plan.generation <= max(latest, self.fenced):
            return False
        self.waiting = plan
        return True

    def go(self, generation: int) -> bool:
        """The world may step: what is held in older layouts is dropped.

        The lease counts from this member's own last word, so that it ends here before it ends for the coordinator.
        """
        if generation != self.generation or self.ready_at is None or self.went or self.barred:
            return False
        self.went, self.lease_until = True, self.ready_at + self.lease_s
        newest, memory = next(reversed(self.held.items()))
        self.held = {newest: memory}
        return True

    def pause(self, generation: int, save: bool) -> bool:
        """Ask the others, in the next commit record, to stop at the boundary after it."""
        if generation != self.generation or not self.inside:
            return False
        self.boundary = max(self.boundary, SAVE_AND_PAUSE if save else PAUSE)
        return True

    def fence(self, generation: int) -> Fenced | None:
        """Bar ``generation``.  Returns what :meth:`answer` does: the answer, unless it is deferred; an older generation gets none."""
        if generation < self.generation:
            return None
        self._bar(generation)
        self._owed = max(self._owed, generation)
        return self.answer()

    def settle(self, generation: int, outcome: Outcome | None) -> bool:
        """All members of the world are fenced or expelled: apply what :meth:`settles` returns, then leave."""
        self._bar(generation)
        if generation != self.generation or not self.inside or self.leaving:
            return False
        self.leaving, self._settlement = True, outcome
        return True

    def _bar(self, generation: int) -> None:
        self.fenced = max(self.fenced, generation)

    # ---- one world

    def enter(self, plan: Plan) -> bool:
        """Whether the world of ``plan`` is entered now: the plan waits, was not fenced since, and no older world is to be left first."""
        if plan is not self.waiting or self.inside:
            return False
        self.waiting = None
        if plan.generation <= self.fenced:
            return False
        self.plan, self.inside = plan, True
        self.ready_at, self.went, self.lease_until = None, False, -float("inf")
        self.boundary, self.prepared, self._said = GO_ON, None, []
        return True

    def go_on(self, doing: str) -> None:
        """Raises :class:`FencedOff` if the generation is fenced.  ``doing``: what the member is at, such as "formed"."""
        if self.barred:
            raise FencedOff(f"generation {self.generation} was fenced while it was {doing}")

    def healed(self, now: float, holding: Holding, memory: Any = None) -> None:
        """The shard of this world is complete.  Raises :class:`FencedOff` if the generation is fenced.

        Whoever has aborted the groups since the fence has made garbage look complete.
        """
        self.go_on("healed")
        self.held.pop(holding, None)  # it is the last one from now on
        self.held[holding], self.ready_at = memory, now

    def prepare(self, step: int) -> None:
        """The gradients of ``step`` are complete here.  Raises :class:`FencedOff` if the generation is fenced.

        The answer to the fence said what is prepared; a commit that counts on more must not come to be.
        """
        if self.barred:
            raise FencedOff(f"step {step} of generation {self.generation} was fenced before it was prepared")
        self.prepared = step

    def apply(self, outcome: Outcome, now: float, *, settled: bool = False) -> Any:
        """The update of ``outcome`` begins; returns the memory that it changes.  Raises :class:`FencedOff` if it must not begin.

        ``settled``: the coordinator decided this outcome after the fence.  Neither the fence nor the lease bars it.
        """
        if not settled and self.barred:
            raise FencedOff(f"step {outcome.step} of generation {self.generation} was fenced before it was applied")
        if not settled and now > self.lease_until:
            raise FencedOff(f"no coordinator was heard; the lease on generation {self.generation} ran out", lease=True)
        self._updated = next(reversed(self.held.items()))
        self.held, self.applying = {}, True
        return self._updated[1]

    def applied(self, outcome: Outcome) -> None:
        """The update is complete: what it changed is the version of ``outcome``, and nothing else is held."""
        assert self._updated is not None
        holding, memory = self._updated
        self.held = {replace(holding, version=Version(outcome.step, outcome.generation)): memory}
        self.applying, self.prepared, self._updated = False, None, None
        self.outcomes.append(outcome)

    def failed(self) -> None:
        """The update failed: nothing is held, for half an update is no version."""
        self.held, self.applying, self.prepared, self._updated = {}, False, None, None
        self.ready_at = None

    def lose(self) -> bool:
        """The memory is lost, such as with the device: nothing is held.  Returns whether the process may live on.

        It may not once it has answered the fence: the coordinator counts on what the answer said, until it learns that the process ended.
        """
        if self._answered >= self.generation:
            return False
        self.failed()
        return True

    def settles(self) -> Outcome | None:
        """What is to be applied before the world is left: the settled outcome, if exactly that step is prepared here."""
        outcome = self._settlement
        return outcome if outcome is not None and outcome.step == self.prepared and self.held else None

    def leave(self) -> Fenced | None:
        """The world is left.  What was prepared and not applied is void.  Returns the answer that waited for this, if one did.

        The plan is kept: it proves to a new coordinator that there was this generation.
        """
        self.inside = self.leaving = False
        self.prepared, self._settlement, self._said = None, None, []
        return self.answer()

    def answer(self) -> Fenced | None:
        """The answer to the latest fence, once; None while it is deferred.  To be asked for after an update and after leaving."""
        older = self.inside and self.generation < self._owed
        if not self._owed or self.applying or self.leaving or older:
            return None
        generation, self._owed = self._owed, 0
        self._answered = generation
        return Fenced(self.worker, generation, tuple(self.held), self.prepared, tuple(self.outcomes))

    # ---- the lease

    def heard(self, asked_at: float) -> None:
        """A coordinator answered a question of that time."""
        self.heard_at = max(self.heard_at, asked_at)

    def renewed(self, generation: int, asked_at: float, granted: bool, recorded_step: int) -> None:
        """The answer to a question for the lease on ``generation``, asked at ``asked_at``.

        ``recorded_step``: the coordinator had every commit up to it in its journal when it was at ``generation``; of a later one it says
        nothing.  The newest commit is kept all the same: the next coordinator's journal may end earlier.
        """
        self.heard(asked_at)
        while len(self.outcomes) > 1 and self.outcomes[0].step <= recorded_step and self.outcomes[0].generation <= generation:
            self.outcomes.popleft()
        if granted and generation == self.generation and self.went:
            self.lease_until = max(self.lease_until, asked_at + self.lease_s)

    def forsaken(self, now: float) -> bool:
        """No coordinator has answered for two leases: the process is of no use any more and ends itself."""
        return now > self.heard_at + 2 * self.lease_s

    # ---- what is said again

    def say(self, event: Event) -> Event:
        """``event`` is said now, and again to every coordinator that takes over before the world is left."""
        self._said.append(event)
        return event

    def attached(self) -> tuple[Event, ...]:
        """What a coordinator that took over is told: where this member stands, and all that may have been lost with the one before.

        The answer to a fence comes last.  Where it is deferred it comes when it is due.
        """
        events: list[Event] = [Attached(self.worker, self.plan, self.inside and self.went and not self.leaving), *self._said]
        if self.plan is not None and self.plan.world_rank(self.worker) == 0:
            events += (StepDone(self.worker, outcome.generation, outcome) for outcome in self.outcomes)
        if self.plan is not None and self.barred and (answer := self.fence(self.generation)) is not None:
            events.append(answer)
        return tuple(events)
