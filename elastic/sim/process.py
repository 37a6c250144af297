"""Models a process: it gets messages, freezes and thaws, and has a clock and a pace of its own."""

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
    """The process of one worker.  :class:`~elastic.sim.worker.Worker` adds the work."""

    def __init__(self, sim: Simulation, name: WorkerId, node: NodeId) -> None:
        self.sim, self.name, self.node = sim, name, node
        self.alive, self.frozen, self._frozen_until = True, False, 0.0
        self.clock_rate = 1.0
        """Speed of its own clock, by which it counts leases; 1 is right."""
        self._skewed_at = self._showed = sim.clock.now
        """Time at which the rate last changed, and the time that its own clock showed then."""
        self.slowness, self.slow_until = 1.0, 0.0
        self.world: World | None = None
        self._backlog: list[Call] = []
        self._arrived_at = 0.0

    def receive(self, call: Callable[..., object], *args: Any) -> None:
        """Takes a message, or any other call from outside.  The call never reaches a dead process, and
        reaches a frozen one when it thaws.
        """
        if self.alive and not self.frozen:
            call(*args)
        elif self.alive:
            self._backlog.append((call, args))

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Schedules work for the present world.  The work is dropped if the worker leaves this world
        before.
        """
        self.work(delay_s, None, call, *args)

    def work(self, delay_s: float, point: Point | None, call: Callable[..., object], *args: Any) -> None:
        """Schedules work like :meth:`later`, but a fault may strike at ``point`` just before the work."""
        if self.slowness != 1.0:
            delay_s *= self.slowness_now
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
        """Lets a fault strike the process at ``point``.  The worker overrides this."""

    def freeze(self, thaw_s: float | None) -> None:
        self.frozen = True
        self._frozen_until = max(
            self._frozen_until, float("inf") if thaw_s is None else self.sim.clock.now + thaw_s
        )
        if thaw_s is not None:
            self.sim.clock.after(thaw_s, self.thaw)

    def thaw(self) -> None:
        if self.sim.clock.now < self._frozen_until - 1e-9:  # it was frozen again meanwhile, and for longer
            return
        backlog, self._backlog, self.frozen = self._backlog, [], False
        for call, args in backlog:
            self.receive(call, *args)

    @property
    def slowness_now(self) -> float:
        """The factor by which its work takes longer."""
        return self.slowness if self.sim.clock.now < self.slow_until else 1.0

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
        """Sends a message that may be lost.  Deadlines handle its loss."""
        self.sim.network.send(Way.FROM, self.node, self.sim.coordinators.hear, self, event)

    def report(self, event: Any) -> None:
        """Sends a message that is repeated until it arrives, as long as this process lives.  These messages
        keep their order.

        The ledger is made of these messages.
        """
        hear, before = self.sim.coordinators.hear, self._arrived_at
        self._arrived_at = self.sim.network.send_surely(
            Way.FROM, self.node, hear, self, event, not_before=before
        )
