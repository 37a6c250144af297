"""A worker's side of the protocol, as a value: it decides which orders count, what is held, and whether a
step may still be applied.

A ``Member`` has no lock, no clock and no tensors.  The time comes in as an argument, read from the worker's
own clock; memory passes through without being looked at.  A worker drives it under a lock
(``train/apply_fence.py``); the simulator drives the same class in virtual time.

    idle --enter--> forming --healed--> ready --go--> (prepare --> apply --> applied)* --settle--> leaving
    --leave--> idle

Five rules ensure that each step is applied by all members or by none:

* A fence bars its generation and every older one: nothing of them is prepared or applied any more, except
  what a settlement says.
* The answer to a fence says what is held.  It is deferred while that may still change: in an update, a
  settlement, or an older world.
* A member is in one world at a time.  A plan for the next world waits until the member has left the present
  one.
* Nothing is applied on a lease that ran out.  A lease counts from the member's question, so it ends here
  before it ends elsewhere.
* If there are two coordinators, the member obeys only the later one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from elastic.errors import FencedOff
from elastic.ids import Version, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import ENDS, GO_ON, HAND_OVER, PAUSE, SAVE_AND_PAUSE, Outcome, strongest
from elastic.protocol.events import Attached, Event, Fenced, StepDone
from elastic.protocol.plan import Plan

SPEAKERS = 2
"""Number of members whose answers to a fence bring the commits that are not acknowledged.  All members have
seen nearly the same, and a commit has the losses and samples of all of them: if each member brought them, a
fence would cost the square of the number of members.  One member would do; if both are gone, another member
is asked for the commits that only it has seen.
"""


@dataclass(frozen=True)
class Lease:
    """The coordinator's answer to a member that asks for its lease.

    Every commit up to ``recorded_step`` is in the journal, at the coordinator and on a majority of the
    keepers; 0 means that nothing is known of the member's generation.  ``incarnation`` names the coordinator
    that answers.  ``dismissed`` means that the run does not know the member any more; its process then ends
    itself.
    """

    granted: bool
    recorded_step: int
    incarnation: int
    dismissed: bool


class Member:
    """One worker's state in the protocol.

    Methods that take an order return whether it counts.  An order that does not count changes nothing but the
    fence.
    """

    def __init__(self, worker: WorkerId, lease_s: float = float("inf")) -> None:
        """``lease_s`` is how long the member may go on, in seconds, after it asked for its lease; without a
        coordinator it is infinite.
        """
        self.worker, self.lease_s = worker, lease_s
        self.incarnation = 0
        """The incarnation of the latest coordinator heard."""
        self.heard_at = -float("inf")
        """The time at which the member asked the last question that a coordinator answered."""
        self.waiting: Plan | None = None
        """The plan that was accepted but not entered yet."""
        self.connecting = (0, 0, 0)
        """The incarnation, generation and attempt of the newest world that the member was to connect ahead."""
        self.plan: Plan | None = None
        """The plan of the world that the member is in, or was in last."""
        self.inside = False
        """The member has entered the world of ``plan`` and has not left it."""
        self.fenced = 0
        """The highest generation in which nothing may be prepared or applied any more."""
        self.ready_at: float | None = None
        """The time at which the shard of the present world was complete."""
        self.went = False
        """True once the present world was told to step."""
        self.lease_until = -float("inf")
        self.boundary = GO_ON
        """The request of this member, in its next commit record, for the boundary after that step."""
        self.held: dict[Holding, Any] = {}
        """The complete and unharmed state, with its memory; the last entry is that of the present world.  It
        is empty during an update.
        """
        self.prepared: int | None = None
        """The step whose gradients are complete here but not applied."""
        self.applying = False
        self.leaving = False
        """True while the present world is settled but not left yet."""
        self.outcomes: deque[Outcome] = deque()
        """The commits that were applied here and that no coordinator has acknowledged, oldest first.

        They are evidence, and they replace the ledger if world rank 0 is dead.
        """
        self._updated: tuple[Holding, Any] | None = None
        self._settlement: Outcome | None = None
        self._said: list[Event] = []
        self._owed, self._whole = 0, False
        """The generation whose fence is not answered yet, 0 if there is none; and whether the answer was
        asked to be whole.
        """
        self._answered = 0
        """The generation whose fence was answered last."""
        self._listed = (0, 0)
        """The coordinator, and the generation, to which the samples in quarantine were told last."""

    @property
    def generation(self) -> int:
        """The generation that the member is in, or was in last."""
        return 0 if self.plan is None else self.plan.generation

    @property
    def barred(self) -> bool:
        """True if the generation is fenced."""
        return self.fenced >= self.generation

    # ---- orders

    def heed(self, incarnation: int) -> bool:
        """Returns whether the orders of coordinator ``incarnation`` count; they do unless a later coordinator
        was heard.

        A new coordinator makes a plan void that was not entered yet.  It may not know of that plan; if it
        does, it sends the plan again.
        """
        if incarnation < self.incarnation:
            return False
        if incarnation > self.incarnation:
            self.incarnation, self.waiting = incarnation, None
        return True

    def form(self, plan: Plan) -> bool:
        """Accepts the order to form the world of ``plan``.  The plan waits for :meth:`enter`; a later plan
        replaces it.
        """
        latest = self.generation if self.waiting is None else self.waiting.generation
        if plan.generation <= max(latest, self.fenced):
            return False
        self.waiting = plan
        return True

    def connect_ahead(self, plan: Plan) -> bool:
        """Accepts the order to connect the world of ``plan`` beside the steps, unless it is older than another
        one.
        """
        key = plan.incarnation, plan.generation, plan.ahead
        if key <= self.connecting or plan.generation <= max(self.generation, self.fenced):
            return False
        self.connecting = key
        return True

    def go(self, generation: int) -> bool:
        """Lets the world step and drops the state in older layouts.

        The lease counts from the time at which this member became ready, so that it ends here before it ends
        for the coordinator.
        """
        if generation != self.generation or self.ready_at is None or self.went or self.barred:
            return False
        self.went, self.lease_until = True, self.ready_at + self.lease_s
        newest, memory = next(reversed(self.held.items()))
        self.held = {newest: memory}
        return True

    def pause(self, generation: int, save: bool, hand_over: bool = False) -> bool:
        """Makes the next commit record ask the other members to stop at the boundary after that step."""
        if generation != self.generation or not self.inside:
            return False
        asked = SAVE_AND_PAUSE if save else HAND_OVER if hand_over else PAUSE
        self.boundary = strongest((self.boundary, asked))
        return True

    def end(self) -> None:
        """Makes the next commit record end the run with its step, because the loop asks for it."""
        self.boundary = ENDS

    def fence(self, generation: int, whole: bool = False) -> Fenced | None:
        """Bars ``generation``.  Returns the answer, or None if it is deferred (see :meth:`answer`) or
        ``generation`` is an older one.

        ``whole`` asks for the commits that nobody has acknowledged; otherwise only a few members of a large
        world bring them.
        """
        if generation < self.generation:
            return None
        self._bar(generation)
        self._owed, self._whole = max(self._owed, generation), self._whole or whole
        return self.answer()

    def settle(self, generation: int, outcome: Outcome | None) -> bool:
        """Begins to leave, since all members of the world are fenced or expelled: first what :meth:`settles`
        returns is to be applied.
        """
        self._bar(generation)
        if generation != self.generation or not self.inside or self.leaving:
            return False
        self.leaving, self._settlement = True, outcome
        return True

    def _bar(self, generation: int) -> None:
        self.fenced = max(self.fenced, generation)

    # ---- one world

    def enter(self, plan: Plan) -> bool:
        """Enters the world of ``plan`` and returns True.

        Returns False if the plan does not wait any more, if it was fenced meanwhile, or if the member has not
        left an older world yet.
        """
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
        """Raises :class:`FencedOff` if the generation is fenced.  ``doing`` names what was under way, such as
        "formed".
        """
        if self.barred:
            raise FencedOff(f"generation {self.generation} was fenced while it was {doing}")

    def healed(self, now: float, holding: Holding, memory: Any = None) -> None:
        """Notes that the shard of this world is complete.  Raises :class:`FencedOff` if the generation is
        fenced.

        After a fence, a member may have aborted the groups, which makes garbage look complete.
        """
        self.go_on("healed")
        self.held.pop(holding, None)  # it becomes the last entry
        self.held[holding], self.ready_at = memory, now

    def prepare(self, step: int) -> None:
        """Notes that the gradients of ``step`` are complete here.  Raises :class:`FencedOff` if the
        generation is fenced.

        The answer to the fence has already said what is prepared, so no commit may count on anything later.
        """
        if self.barred:
            raise FencedOff(f"step {step} of generation {self.generation} was fenced before it was prepared")
        self.prepared = step

    def apply(self, outcome: Outcome, now: float, *, settled: bool = False) -> Any:
        """Begins the update of ``outcome`` and returns the memory that it changes.  Raises :class:`FencedOff`
        if it must not begin.

        ``settled`` means that the coordinator decided this outcome after the fence; then neither the fence
        nor the lease bars it.
        """
        if not settled and self.barred:
            raise FencedOff(
                f"step {outcome.step} of generation {self.generation} was fenced before it was applied"
            )
        if not settled and now > self.lease_until:
            raise FencedOff(
                f"no coordinator was heard; the lease on generation {self.generation} ran out", lease=True
            )
        self._updated = next(reversed(self.held.items()))
        self.held, self.applying = {}, True
        return self._updated[1]

    def applied(self, outcome: Outcome) -> None:
        """Ends the update: the changed memory is now the version of ``outcome``, and nothing else is held."""
        assert self._updated is not None
        holding, memory = self._updated
        self.held = {replace(holding, version=Version(outcome.step, outcome.generation)): memory}
        self.applying, self.prepared, self._updated = False, None, None
        self.outcomes.append(outcome)

    def failed(self) -> None:
        """Notes that the update failed.  Nothing is held any more, because half an update is not a version."""
        self.held, self.applying, self.prepared, self._updated = {}, False, None, None
        self.ready_at = None

    def lose(self) -> bool:
        """Notes that the memory is lost, for example with the device: nothing is held.  Returns whether the
        process may live on.

        It may not if it has answered the fence: the coordinator counts on that answer until it learns that
        the process has ended.
        """
        if self._answered >= self.generation:
            return False
        self.failed()
        return True

    def settles(self) -> Outcome | None:
        """Returns the outcome to apply before the world is left: the settled one, if exactly that step is
        prepared here; otherwise None.
        """
        outcome = self._settlement
        return outcome if outcome is not None and outcome.step == self.prepared and self.held else None

    def leave(self) -> Fenced | None:
        """Leaves the world and drops a prepared step that was not applied.  Returns the answer to a fence
        that waited for this, if any.

        The plan is kept: it proves to a new coordinator that this generation existed.
        """
        self.inside = self.leaving = False
        self.prepared, self._settlement, self._said = None, None, []
        return self.answer()

    def answer(self) -> Fenced | None:
        """Returns the answer to the latest fence, once; None while it is deferred.  The caller asks after an
        update and after leaving.
        """
        older = self.inside and self.generation < self._owed
        if not self._owed or self.applying or self.leaving or older:
            return None
        whole = self._whole or self._speaks()
        generation, self._owed, self._whole = self._owed, 0, False
        self._answered = generation
        if whole:
            return Fenced(
                self.worker,
                generation,
                tuple(self.held),
                self.prepared,
                tuple(self.outcomes),
                heeds=self.incarnation,
            )
        newest = max((each.step for each in self.outcomes if each.generation == generation), default=None)
        seen = Version(newest, generation) if newest is not None else None
        return Fenced(
            self.worker,
            generation,
            tuple(self.held),
            self.prepared,
            (),
            seen,
            whole=False,
            heeds=self.incarnation,
        )

    def _speaks(self) -> bool:
        """Returns whether this member's answers bring the commits: those of ``SPEAKERS`` members do, spread
        evenly over the world.
        """
        plan = self.plan
        return (
            plan is None
            or self.worker not in plan.ranks
            or plan.ranks[self.worker] % max(len(plan.members) // SPEAKERS, 1) == 0
        )

    # ---- the lease

    def heard(self, asked_at: float) -> None:
        """Notes that a coordinator answered a question that was asked at ``asked_at``."""
        self.heard_at = max(self.heard_at, asked_at)

    def renewed(self, generation: int, asked_at: float, granted: bool, recorded_step: int) -> None:
        """Takes the answer to this member's question, asked at ``asked_at``, for the lease on ``generation``.

        The coordinator had every commit up to ``recorded_step`` in its journal while it was at
        ``generation``.
        """
        self.heard(asked_at)
        self.recorded(generation, recorded_step)
        if granted and generation == self.generation and self.went:
            self.lease_until = max(self.lease_until, asked_at + self.lease_s)

    def recorded(self, generation: int, step: int) -> None:
        """Drops the commits up to ``step``, of ``generation`` or an older one: they are recorded elsewhere,
        or nobody will ask for them.

        The newest commit is kept anyway, because the journal that the next coordinator reads may end earlier.
        """
        while (
            len(self.outcomes) > 1
            and self.outcomes[0].step <= step
            and self.outcomes[0].generation <= generation
        ):
            self.outcomes.popleft()

    def forsaken(self, now: float) -> bool:
        """Returns whether no coordinator has answered for two leases; then the process is useless and ends
        itself.
        """
        return now > self.heard_at + 2 * self.lease_s

    # ---- what is said again

    def say(self, event: Event) -> Event:
        """Returns ``event``, and repeats it to every coordinator that takes over before the world is left."""
        self._said.append(event)
        return event

    def lists(self) -> bool:
        """Returns whether the report of a step tells all samples in quarantine: the first one in this world,
        or to this coordinator.
        """
        before, self._listed = self._listed, (self.incarnation, self.generation)
        return before != self._listed

    def attached(self) -> tuple[Event, ...]:
        """Returns what a new coordinator is told: where this member stands, and everything that may have been
        lost with the one before.

        The answer to a fence comes last; a deferred answer comes when it is due.
        """
        events: list[Event] = [
            Attached(self.worker, self.plan, self.inside and self.went and not self.leaving),
            *self._said,
        ]
        if self.plan is not None and self.plan.world_rank(self.worker) == 0:
            events += (StepDone(self.worker, outcome.generation, outcome) for outcome in self.outcomes)
        if self.plan is not None and self.barred and (answer := self.fence(self.generation)) is not None:
            events.append(answer)
        return tuple(events)
