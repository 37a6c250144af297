"""Messages between the coordinator and everybody else: late, lost, twice, out of order, or cut off with a whole node.

Only control travels here.  Members of a world reach each other over another network, so that a node can be cut off from the
coordinator while its workers train on: the case in which two worlds might commit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from elastic.ids import NodeId
from elastic.sim.clock import Clock
from elastic.sim.weather import Weather


class Network:
    """Delivers by calling; each delivery has its own delay, so nothing keeps its order."""

    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self.clock, self.rng, self.weather = clock, rng, weather
        self.cut_until: dict[NodeId, float] = {}

    @property
    def rough(self) -> bool:
        """Faults still happen."""
        return self.weather.since_s <= self.clock.now < self.weather.until_s

    def cut(self, node: NodeId) -> bool:
        return self.cut_until.get(node, 0.0) > self.clock.now

    def send(self, node: NodeId, deliver: Callable[..., object], *args: Any) -> None:
        """Between the coordinator and ``node``, either way."""
        rng, after = self.rng, self.clock.after
        delay_s = 0.01 + 0.05 * rng.random()
        if self.rough:
            if rng.random() < self.weather.loss_chance:
                return
            if rng.random() < self.weather.late_chance:
                delay_s += rng.expovariate(0.5)
            if rng.random() < self.weather.duplicate_chance:
                after(delay_s + rng.expovariate(0.2), deliver, *args)
            if self.cut(node):
                if rng.random() < 0.5:
                    return
                delay_s += self.cut_until[node] - self.clock.now
        after(delay_s, deliver, *args)

    def send_surely(self, node: NodeId, deliver: Callable[..., object], *args: Any) -> None:
        """As ``send``, but repeated until it arrives: late at worst, perhaps twice."""
        delay_s = 0.01 + 0.1 * self.rng.random() + max(0.0, self.cut_until.get(node, 0.0) - self.clock.now)
        self.clock.after(delay_s, deliver, *args)
        if self.rough and self.rng.random() < self.weather.duplicate_chance:
            self.clock.after(delay_s + self.rng.expovariate(0.2), deliver, *args)
