"""Room in a Ray cluster: processes that hold CPUs, so that a test decides how many workers there is room for."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray._private import state  # no public call tells, without a dashboard, whether an actor waits

from tests.support.patience import PATIENCE_S


class Taker:
    """An actor that holds the resources it was started with."""


class Room:
    """The actors that hold room.

    ``take`` starts an actor that holds free CPUs, ``queue`` an actor that waits for the next free CPUs before
    all who ask later; ``free`` ends one of them, and its CPUs are free.
    """

    def __init__(self) -> None:
        self._takers: list[Any] = []

    def take(self, cpus: float) -> Any:
        taker = self._start(cpus)
        ray.get(taker.__ray_ready__.remote(), timeout=PATIENCE_S)
        return taker

    def queue(self, cpus: float) -> Any:
        """Starts an actor that waits for CPUs.  Ray knows that it waits when this returns."""
        taker, until = self._start(cpus), time.monotonic() + PATIENCE_S
        while state.actors(taker._actor_id.hex()).get("State") != "PENDING_CREATION":
            if time.monotonic() > until:
                raise TimeoutError(
                    "the actor does not wait for CPUs, perhaps because enough were free: "
                    f"{state.actors(taker._actor_id.hex())}"
                )
            time.sleep(0.01)
        return taker

    def free(self, taker: Any) -> None:
        self._takers.remove(taker)
        ray.kill(taker)

    def close(self) -> None:
        for taker in list(self._takers):
            self.free(taker)

    def _start(self, cpus: float) -> Any:
        taker = ray.remote(Taker).options(num_cpus=cpus, max_restarts=0).remote()
        self._takers.append(taker)
        return taker
