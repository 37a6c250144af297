"""The vocabulary of faults, shared by the simulator and by real chaos runs (``job.faults``, ``actors/chaos.py``).

A fault is a *kind* at a *point*: what happens to a process, and where in its work.  The strings are part of the job format.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """What happens to the process."""

    SIGKILL = "SIGKILL"
    SIGSEGV = "SIGSEGV"
    SIGSTOP = "SIGSTOP"
    """Stands still, sockets open: nobody is told.  May be thawed later: a zombie."""
    EXCEPTION = "exception"
    """The user's code raises, or ours: the process lives, and says so."""
    EXIT = "exit"

    @property
    def fatal(self) -> bool:
        """The process is gone."""
        return self in (Kind.SIGKILL, Kind.SIGSEGV, Kind.EXIT)


class Point(StrEnum):
    """Where in its work a worker is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BEFORE_COMMIT = "before_commit"
    """Gradients complete, record not yet contributed."""
    BEFORE_UPDATE = "before_update"
    """The commit was seen, nothing applied yet."""
    IN_UPDATE = "in_update"
    """Parts of the state are new, parts are old: whoever fails here holds nothing."""
    SAVE = "save"
    FORMING = "forming"
    """The plan has arrived, the groups are not up."""
    HEALING = "healing"


DELICATE_POINTS = frozenset({Point.BEFORE_UPDATE, Point.IN_UPDATE})
"""Where members may differ in what they have applied."""


@dataclass(frozen=True)
class Weather:
    """How bad it is from ``since_s`` to ``until_s``.  Rates are per second of virtual time, chances per occasion."""

    since_s: float = 0.0
    until_s: float = 40.0
    point_chance: float = 0.0
    """That a worker suffers a fault at a point it passes; three times that at a delicate one."""
    points: tuple[Point, ...] = tuple(Point)
    """Where that may be."""
    kinds: tuple[Kind, ...] = tuple(Kind)
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
