"""The product's outbox, orders and keeper methods in real processes, with no run around them."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray

from actors import relay
from actors.keeper import Keeper
from actors.relay import HOPS, Outbox, answered
from elastic.ids import NodeId, WorkerId
from elastic.protocol.authority import Replica
from elastic.protocol.events import Event, Here
from tests.support.patience import PATIENCE_S

FENCE_S = 10.0
"""``fence_s`` where a keeper stands still, and is to be found late."""
PATIENT_S = HOPS * PATIENCE_S
"""``fence_s`` where nobody is to be found late, however busy the machine is."""


class Desk:
    """Stands in for the coordinator: notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Event, ...]] = []
        self.asked: list[int] = []
        self.takes_s = 0.0

    def take(self, seconds: float) -> None:
        """Takes so many seconds for each call from now on."""
        self.takes_s = seconds

    def post_all(self, said: tuple[Event, ...]) -> None:
        time.sleep(self.takes_s)
        self.calls.append(said)

    def renew_all(self, asked: tuple[tuple[WorkerId, int], ...]) -> list[str]:
        time.sleep(self.takes_s)
        self.asked.append(len(asked))
        return [f"{worker} may step in {generation}" for worker, generation in asked]

    def read(self) -> list[tuple[Event, ...]]:
        return self.calls

    def read_asked(self) -> list[int]:
        """Returns the number of leases that each call asked for."""
        return self.asked


class Gatherer(Keeper):
    """A keeper that does nothing but pass on, and does not give up a coordinator that is slow."""

    def __init__(self, node: NodeId, desk: Any) -> None:
        relay.PASSED_S = PATIENCE_S
        self.node, self.replica, self._hearing = node, Replica(), threading.Lock()
        self.actors = {}
        self.pass_to(desk)

    def follow(self, worker: WorkerId, actor: Any) -> None:
        self.actors[worker] = actor

    def pid(self) -> int:
        return os.getpid()


class Forgetful(Gatherer):
    """A keeper that dies after it has answered and before it has passed an order on."""

    @ray.method(concurrency_group="orders")  # type: ignore[untyped-decorator]
    def relay(
        self, incarnation: int, workers: tuple[WorkerId, ...], order: str, arguments: tuple[Any, ...]
    ) -> tuple[WorkerId, ...]:
        return ()


class Speaker:
    """Stands in for a worker: it says what it is told to say, and notes its orders."""

    def __init__(self, worker: WorkerId, desk: Any, fence_s: float) -> None:
        self.worker, self.desk, self.post_all, self.direct = worker, desk, self, 0
        self.outbox = Outbox(self, fence_s)
        self.orders: list[Any] = []

    def remote(self, said: tuple[Event, ...]) -> Any:
        """Tells the desk directly."""
        self.direct += 1
        return self.desk.post_all.remote(said)

    def spoke_directly(self) -> int:
        return self.direct

    def all_answered(self) -> bool:
        """Returns whether a keeper that was late has answered, and the desk has answered what went to it
        directly.
        """
        return answered(self.outbox._late) and self.outbox._nothing_waits()

    def be_patient(self) -> None:
        """Finds no keeper late from now on."""
        self.outbox._in_time_s = PATIENCE_S

    def speak_through(self, keeper: Any) -> None:
        self.outbox.through(keeper)

    def say(self, *numbers: int) -> None:
        for number in numbers:
            self.outbox.put(Here(self.worker, number))

    def obey(self, incarnation: int, order: str, *arguments: Any) -> None:
        """Notes the order.  An order to say something is obeyed, too."""
        self.orders.append((incarnation, order, *arguments))
        if order == "say":
            self.say(*arguments)

    def read(self) -> list[Any]:
        return self.orders
