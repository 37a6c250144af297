"""The product's outbox, orders and keeper methods in real processes, with no run around them."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from actors.keeper import Keeper
from actors.relay import Gathering, Outbox
from elastic.ids import NodeId, WorkerId
from elastic.protocol.authority import Replica
from elastic.protocol.events import Here


class Desk:
    """Stands in for the coordinator: notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Here, ...]] = []
        self.takes_s = 0.0

    def take(self, seconds: float) -> None:
        """Takes so many seconds for each call from now on."""
        self.takes_s = seconds

    def post_all(self, events: tuple[Here, ...]) -> None:
        time.sleep(self.takes_s)
        self.calls.append(events)

    def read(self) -> list[tuple[Here, ...]]:
        return self.calls


class Gatherer(Keeper):
    """A keeper that does nothing but pass on."""

    def __init__(self, node: NodeId, desk: Any) -> None:
        self.node, self.replica, self._hearing = node, Replica(), threading.Lock()
        self.actors, self.gathering = {}, Gathering(desk)

    def follow(self, worker: WorkerId, actor: Any) -> None:
        self.actors[worker] = actor

    def pid(self) -> int:
        return os.getpid()


class Speaker:
    """Stands in for a worker: it says what it is told to say, and notes its orders."""

    def __init__(self, worker: WorkerId, desk: Any) -> None:
        self.worker, self.outbox = worker, Outbox(desk)
        self.orders: list[Any] = []

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
