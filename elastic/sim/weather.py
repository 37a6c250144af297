"""How bad it is: the chances and rates that a simulated cluster's faults are drawn by."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elastic.sim.faults import Kind, Point


@dataclass(frozen=True)
class Weather:
    """How bad it is from ``since_s`` to ``until_s``.  Rates are per second of virtual time, chances per occasion."""

    since_s: float = 0.0
    until_s: float = 40.0
    point_chance: float = 0.0
    """That a worker suffers a fault at a point it passes; three times that at a delicate one."""
    points: tuple[Point, ...] = tuple(Point)
    """Where that may be."""
    kinds: tuple[Kind, ...] = (Kind.SIGKILL, Kind.SIGSEGV, Kind.SIGSTOP, Kind.EXCEPTION, Kind.EXIT)
    loss_chance: float = 0.0
    """That a message never arrives."""
    late_chance: float = 0.0
    duplicate_chance: float = 0.0
    event_rate: float = 0.0
    """Of ``calamities``, each of them as likely."""
    calamities: tuple[str, ...] = ("kill", "kill", "freeze", "node", "keeper", "cut", "isolate", "drought")
    """See ``Cluster.calamity``."""
    start_failure_chance: float = 0.0
    save_failure_chance: float = 0.0
    store_failure_chance: float = 0.0
    """That a generation's store cannot be reached although its keeper is alive."""
    kill_lost_chance: float = 0.0
    damage_chance: float = 0.0
    """That a manifest cannot be read when it is needed."""
    misfit_chance: float = 0.0
    """That a node joins, beside others, which does not see the bucket as the same place."""
    aftershock_chance: float = 0.0
    """That a fault is followed by another one at once: faults have common causes."""

    @staticmethod
    def drawn(rng: random.Random) -> Weather:
        """One seed in ten is calm, the others from a drizzle to a storm."""
        severity = rng.choice((0.0, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.0, 1.5, 2.5))
        weather = Weather(since_s=rng.choice((0.0, 4.0)))  # half of them let a world form and step first
        return weather.scaled(severity, until_s=rng.uniform(10.0, 50.0))

    def scaled(self, severity: float, until_s: float) -> Weather:
        """The usual weather, made worse or milder."""
        return replace(
            self,
            until_s=until_s,
            point_chance=0.006 * severity,
            loss_chance=0.01 * severity,
            late_chance=0.03 * severity,
            duplicate_chance=0.05 * severity,
            event_rate=0.05 * severity,
            start_failure_chance=min(0.15 * severity, 0.5),
            save_failure_chance=min(0.15 * severity, 0.5),
            store_failure_chance=min(0.05 * severity, 0.5),
            kill_lost_chance=min(0.3 * severity, 0.8),
            damage_chance=min(0.1 * severity, 0.3),
            misfit_chance=min(0.4 * severity, 0.8),
            aftershock_chance=min(0.2 * severity, 0.5),
        )
