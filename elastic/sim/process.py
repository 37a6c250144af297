"""Models a process: messages reach it or not, it stands still and goes on, and it has its own clock and pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic.ids import NodeId, WorkerId
from elastic.sim.network import Way

if TYPE_CHECKING:
    from elastic.protocol.faults import Point
    from elastic.sim.simulation import Simulation
    from elastic.sim.world import World

Call = tuple[Callable[..., object], tuple[Any, ...]]


class Process:
    """The process of one worker.  :class:`~elastic.sim.worker.Worker` is what runs in it."""

    def __init__(self, sim: Simulation, name: WorkerId, node: NodeId) -> None:
        self.sim, self.name, self.node = sim, name, node
        self.alive, self.frozen, self._frozen_until = True, False, 0.0
        self.clock_rate = 1.0
        """Speed of its own clock, by which it counts leases; 1 is right."""
        self._skewed_at = self._showed = sim.clock.now
        """Time at which the rate last changed, and what its own clock showed then."""
        self.slowness, self.slow_until = 1.0, 0.0
        self.world: World | None = None
        self._backlog: list[Call] = []
        self._arrived_at = 0.0

    def receive(self, call: Callable[..., object], *args: Any) -> None:
        """Takes a message, or anything else from outside.  It never reaches a dead process, and reaches a
        frozen one when it is thawed.
        """
        if self.alive and not self.frozen:
            call(*args)
        elif self.alive:
            self._backlog.append((call, args))

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Schedules work for the present world.  The work is dropped if the worker leaves that world before."""
        self.work(delay_s, None, call, *args)

    def work(self, delay_s: float, point: Point | None, call: Callable[..., object], *args: Any) -> None:
        """Schedules work like :meth:`later`, but a fault may strike at ``point`` before."""
        if self.slowness != 1.0 and self.sim.clock.now < self.slow_until:
            delay_s *= self.slowness
        self.sim.clock.after(delay_s, self.receive, self._in_world, self.world, point, call, args)

    def _in_world(
        self, world: World | None, point: Point | None, call: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if world is not self.world:
            return
        if point is not None:
            self.passes(point)
        if self.alive:
            self.receive(call, *args)

    def passes(self, point: Point) -> None:
        """Lets a fault strike the process at ``point``; the worker overrides it."""

    def freeze(self, thaw_s: float | None) -> None:
        self.frozen = True
        self._frozen_until = max(
            self._frozen_until, float("inf") if thaw_s is None else self.sim.clock.now + thaw_s
        )
        if thaw_s is not None:
            self.sim.clock.after(thaw_s, self.thaw)

    def thaw(self) -> None:
        if self.sim.clock.now < self._frozen_until - 1e-9:  # it was stopped again meanwhile, and for longer
            return
        backlog, self._backlog, self.frozen = self._backlog, [], False
        for call, args in backlog:
            self.receive(call, *args)

    def slow(self, factor: float, until: float) -> None:
        self.slowness, self.slow_until = factor, until

    @property
    def now(self) -> float:
        """The time by its own clock."""
        return self._showed + (self.sim.clock.now - self._skewed_at) * self.clock_rate

    def skew(self, amount: float) -> None:
        """Makes its clock run too fast by ``amount`` from now on."""
        self._showed, self._skewed_at, self.clock_rate = self.now, self.sim.clock.now, 1.0 + amount

    def post(self, event: Any) -> None:
        """Sends a message that may be lost.  Deadlines settle what follows if it does not arrive."""
        self.sim.network.send(Way.FROM, self.node, self.sim.coordinators.hear, self, event)

    def report(self, event: Any) -> None:
        """Sends a message that is repeated until it is acknowledged, as long as this process lives, in order.

        The ledger is made of these.
        """
        hear, before = self.sim.coordinators.hear, self._arrived_at
        self._arrived_at = self.sim.network.send_surely(
            Way.FROM, self.node, hear, self, event, not_before=before
        )
