"""The control thread's part of a worker: each order goes to the member first, and an order that counts is
queued for the training thread.

The control thread never waits for the training thread, except for an update that is under way.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from elastic.ids import Version
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Event
from elastic.protocol.plan import Plan
from elastic.train.apply_fence import ApplyFence


@dataclass(frozen=True)
class Enter:
    """An order to form the world of ``plan`` in the store at (host, port)."""

    plan: Plan
    store: tuple[str, int]


@dataclass(frozen=True)
class Settled:
    """An order to apply the settlement of ``generation``, whose world has ended, and to leave that world."""

    generation: int


@dataclass(frozen=True)
class Went:
    """An order that lets ``generation`` begin to step."""

    generation: int


@dataclass(frozen=True)
class Evaluate:
    """An order to measure what the checkpoint of ``version`` loses on the held-out samples, if no other order
    comes.
    """

    version: Version


class Leave(Exception):
    """The run is over for this worker."""


class Controlled:
    """Base class of the :class:`~elastic.train.loop.Trainer`: takes orders on the control thread.
    ``report(event)`` tells the coordinator and does not block.
    """

    def __init__(self, fence: ApplyFence, report: Callable[[Event], None]) -> None:
        self.apply_fence, self.report = fence, report
        self.worker = fence.member.worker
        self.orders: queue.SimpleQueue[Enter | Settled | Went | Evaluate | None] = queue.SimpleQueue()
        """Accepted orders for the training thread; None means that it leaves the run."""
        self._early: Enter | None = None
        """The order to enter the next world, if it came before the present one was settled: orders may
        overtake each other.
        """

    # ---- control thread

    def form(self, plan: Plan, store: tuple[str, int]) -> None:
        """Orders the training thread into the world of ``plan``, once it has left the present one."""
        with self.apply_fence as member:
            taken = member.form(plan)
        if taken:
            self.orders.put(Enter(plan, store))

    def connect_ahead(self, plan: Plan, store: tuple[str, int]) -> None:
        """Begins to connect the world of ``plan`` beside the steps, unless the order is an older one."""
        with self.apply_fence as member:
            taken = member.connect_ahead(plan)
        if taken:
            self._connect_ahead(plan, store)

    def _connect_ahead(self, plan: Plan, store: tuple[str, int]) -> None:
        """Begins to connect the world of ``plan``; the base class does nothing.  It must not wait."""

    def go(self, generation: int) -> None:
        """Orders the training thread to begin to step."""
        with self.apply_fence as member:
            taken = member.go(generation)
        if taken:
            self.orders.put(Went(generation))

    def pause(self, generation: int, save: bool, hand_over: bool = False) -> None:
        """Makes this member ask in the next commit for a stop at the boundary after it."""
        with self.apply_fence as member:
            member.pause(generation, save, hand_over)

    def fence(self, generation: int, whole: bool = False) -> None:
        """Stops this member from applying more steps of ``generation``, and reports what state the member
        holds.

        If an update is under way, the answer is deferred and the training thread gives it.  ``whole``: see
        :meth:`Member.fence`.
        """
        with self.apply_fence as member:
            answer = member.fence(generation, whole)
        self._answer(answer)

    def settle(self, generation: int, outcome: Outcome | None) -> None:
        """Takes the settlement of a generation and ends its world, which is allowed because all members are
        fenced or expelled by then.
        """
        with self.apply_fence as member:
            taken = member.settle(generation, outcome)
        if taken:
            self._end_world(generation)
            self.orders.put(Settled(generation))

    def _end_world(self, generation: int) -> None:
        """Frees the training thread from the world of ``generation``, in which it may hang.  It must not
        wait.
        """

    def exit(self) -> None:
        """Orders the training thread to leave the run, after the orders that were given before this one."""
        self.orders.put(None)

    def evaluate(self, version: Version) -> None:
        """Orders the training thread to validate a checkpoint if it is in no world and has no other order."""
        self.orders.put(Evaluate(version))

    def attach(self) -> None:
        """Tells a new coordinator where this worker stands, and repeats the events that the previous
        coordinator may not have passed on.
        """
        with self.apply_fence as member:
            events = member.attached()
        for event in events:
            self.report(event)

    # ---- training thread

    def _next_plan(self) -> Enter:
        """Waits for the order to enter a world and returns it, at once if it came early; other orders are
        skipped.
        """
        order: Enter | Settled | Went | Evaluate | None = self._early
        self._early = None
        while not isinstance(order, Enter):
            order = self._take()
            if isinstance(order, Evaluate) and self.orders.empty():
                self._evaluate(order.version)
        return order

    def _evaluate(self, version: Version) -> None:
        """Validates a checkpoint until an order comes; the base class does nothing."""

    def _take(self) -> Enter | Settled | Went | Evaluate:
        """Waits for an order and returns it.  Raises :class:`Leave` if the run is over for this worker."""
        order = self.orders.get()
        if order is None:
            raise Leave
        return order

    def _await(self, generation: int, *kinds: type[Went] | type[Settled]) -> Went | Settled:
        """Waits for an order of one of ``kinds`` for ``generation`` and returns it.

        Other orders are skipped, but the order to enter the next world is kept for :meth:`_next_plan`.
        """
        while True:
            order = self._take()
            if isinstance(order, Enter):
                self._early = order
            elif isinstance(order, kinds) and order.generation == generation:
                return order

    # ---- both

    def _answer(self, answer: Event | None) -> None:
        """Reports the answer to a fence; None means that there is no answer yet."""
        if answer is not None:
            self.report(answer)

    def _say(self, event: Event) -> None:
        """Reports ``event`` now, and to each coordinator that takes over before the world is left."""
        with self.apply_fence as member:
            member.say(event)
        self.report(event)
