"""Models the network: messages may come late, twice, out of order or not at all, and a node can be cut off,
also in one direction only.

Control and the members' collectives travel on different networks.  A node can be cut off from the coordinator
while its workers train on (two worlds might commit then), and it can be cut off from its peers while it hears
every order.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from elastic.ids import NodeId
from elastic.protocol.faults import Kind
from elastic.sim.clock import Clock

REPEATED_S = 0.5
"""Time in seconds after which a message that must arrive is sent again."""


class Way(StrEnum):
    """The way of a message: from the coordinator to a node, from a node to the coordinator, or between
    members on different nodes.
    """

    TO = "to"
    FROM = "from"
    PEER = "peer"


class Network:
    """Delivers messages by calling.  Each delivery has its own delay, so messages do not keep their order."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self._until: dict[tuple[Way, NodeId], float] = {}
        self._conditions: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
        self._rough_until = 0.0

    def worsen(self, kind: Kind, amount: float, until: float) -> None:
        """Makes the condition ``kind`` hold everywhere, with its ``amount``, until the time ``until``."""
        self._conditions[kind].append((until, amount))
        self._rough_until = max(self._rough_until, until)

    def level(self, kind: Kind) -> float:
        """Returns the present amount of a condition.  If several hold at the same time, the worst counts."""
        if self.clock.now >= self._rough_until:
            return 0.0
        return max(
            (amount for until, amount in self._conditions[kind] if until > self.clock.now), default=0.0
        )

    def happens(self, kind: Kind) -> bool:
        """Draws whether a condition strikes now.  Its amount is the probability."""
        level = self.level(kind)
        return level > 0.0 and self.rng.random() < level

    def cut(self, way: Way, node: NodeId, until: float) -> None:
        self._until[way, node] = max(until, self._until.get((way, node), 0.0))

    def cut_s(self, way: Way, node: NodeId) -> float:
        """Returns the time in seconds for which the way ``way`` of ``node`` stays cut."""
        return max(0.0, self._until.get((way, node), 0.0) - self.clock.now) if self._until else 0.0

    def send(self, way: Way, node: NodeId, deliver: Callable[..., object], *args: Any) -> None:
        rng, after = self.rng, self.clock.after
        delay_s = 0.01 + 0.05 * rng.random()
        if self.clock.now < self._rough_until:
            if self.happens(Kind.LOSS):
                return
            delay_s += self.level(Kind.DELAY) * rng.random()
            if self.happens(Kind.DUPLICATE):
                after(delay_s + rng.expovariate(0.2), deliver, *args)
        if cut_s := self.cut_s(way, node):
            if rng.random() < 0.5:
                return
            delay_s += cut_s
        after(delay_s, deliver, *args)

    def send_surely(
        self, way: Way, node: NodeId, deliver: Callable[..., object], *args: Any, not_before: float = 0.0
    ) -> float:
        """Sends a message that is repeated until it arrives: perhaps late, perhaps twice.  Returns the time
        of its arrival.

        It arrives at ``not_before`` or later, and so after all messages that must come before it.
        """
        delay_s = 0.01 + 0.1 * self.rng.random() + self.cut_s(way, node)
        if self.clock.now < self._rough_until:
            while self.happens(Kind.LOSS) and delay_s < self._rough_until - self.clock.now:
                delay_s += REPEATED_S
            delay_s += self.level(Kind.DELAY) * self.rng.random()
            if self.happens(Kind.DUPLICATE):
                self.clock.after(delay_s + self.rng.expovariate(0.2), deliver, *args)
        delay_s = max(delay_s, not_before - self.clock.now)
        self.clock.after(delay_s, deliver, *args)
        return self.clock.now + delay_s
