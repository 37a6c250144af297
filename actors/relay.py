"""A node speaks for its workers: orders to them, and what they say and ask, pass through their node's keeper.

An order to a worker and its answer cost the coordinator's process 0.65 ms if each is a call of its own
(``tests/benchmarks/calls.py``), so there is one call for a node and not one for a worker.  What a keeper does
not pass on in time goes directly.  A message may therefore arrive twice, late, or after a later one; the
rules expect that of any message (``elastic/sim/network.py``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import Event
from elastic.threads import go_or_end
from storage.errors import Deposed

GATHER_S = 0.005
"""Seconds for which a keeper waits for the other workers of its node, once one has said something."""
PASSED_S = 2.0
"""Seconds within which the coordinator must take what a keeper passes on; after that, the keeper answers that
the coordinator may not have it.
"""
SPEAKING = 16
"""Number of a node's workers that the keeper serves at the same time; other workers wait until one of these
has its answer.
"""
HOPS = 10
"""A keeper has the part 1 / ``HOPS`` of ``fence_s`` to pass on an order, and twice that to pass on an answer:
both must arrive well within ``fence_s`` even if the keeper stands still.
"""
LOST_S, ORDERS = 60.0, 8
"""Largest age in seconds, and largest number, of the orders that are sent again when their keeper dies: it
may not have passed them on.
"""


class Outbox:
    """Sends what a worker says, in order.  Any thread puts events; a thread of its own sends them, one call
    at a time.
    """

    def __init__(self, coordinator: Any, fence_s: float) -> None:
        self._coordinator, self._in_time_s = coordinator, 2 * fence_s / HOPS
        self.keeper: Any = None
        """The keeper that passes on what this worker says and asks; None if there is none."""
        self._late: Any = None
        """The call that the keeper has not answered in time."""
        self._direct: Any = None
        """The last call that went to the coordinator directly."""
        self._waiting: queue.SimpleQueue[Event | threading.Event] = queue.SimpleQueue()
        go_or_end(self._run, "outbox")

    def put(self, event: Event) -> None:
        self._waiting.put(event)

    def through(self, keeper: Any) -> None:
        """Sends through ``keeper`` from now on."""
        self.keeper, self._late = keeper, None

    def flush(self) -> None:
        """Waits until all events that were put before have been sent, for ``4 * fence_s / HOPS`` seconds at
        most.
        """
        sent = threading.Event()
        self._waiting.put(sent)
        sent.wait(2 * self._in_time_s)

    def _run(self) -> None:
        while True:
            taken = _all_of(self._waiting)
            if events := tuple(each for each in taken if not isinstance(each, threading.Event)):
                self._send(events)
            for each in taken:
                if isinstance(each, threading.Event):
                    self._nothing_waits(self._in_time_s / 2)
                    each.set()

    def _send(self, events: tuple[Event, ...]) -> None:
        if not self._passed(events):
            self._direct = self._coordinator.post_all.remote(events)

    def _passed(self, events: tuple[Event, ...]) -> bool:
        """Returns whether the keeper has passed ``events`` on.  A keeper that was late is used again only
        after it has answered.
        """
        keeper = self.keeper
        if keeper is None or not self._nothing_waits() or not answered(self._late):
            return False
        call, self._late = keeper.pass_on.remote(events), None
        try:
            return bool(ray.get(call, timeout=self._in_time_s))
        except ray.exceptions.GetTimeoutError:
            self._late = call
        except ray.exceptions.RayError:  # the next keeper says when it follows the worker
            if self.keeper is keeper:
                self.keeper = None
        return False

    def _nothing_waits(self, timeout_s: float = 0.0) -> bool:
        """Returns whether the last direct call has arrived; otherwise, events through the keeper could
        overtake it.
        """
        return answered(self._direct, timeout_s)


class Gathering:
    """Sends on what the workers of a keeper's node say or ask.  While one call to the coordinator is under
    way, the next ones gather.
    """

    def __init__(self, call: Callable[[tuple[Any, ...]], Any]) -> None:
        """``call(parcels)`` asks the coordinator; its result is a sequence with an answer to each parcel, or
        None if none has an answer.
        """
        self._call = call
        self._waiting: queue.SimpleQueue[tuple[Any, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        go_or_end(self._run, "gather")

    def pass_on(self, parcel: Any) -> Any:
        """Returns the coordinator's answer to ``parcel``, or True if the coordinator answers nothing.
        Returns None if the parcel may not have arrived: then the worker turns to the coordinator directly.
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting.put((parcel, answer))
        with contextlib.suppress(queue.Empty):
            return answer.get(timeout=PASSED_S)
        return None

    def _run(self) -> None:
        while True:
            taken = _all_of(self._waiting, GATHER_S)
            try:
                found = ray.get(self._call(tuple(parcel for parcel, _ in taken)), timeout=PASSED_S)
                answers = [True] * len(taken) if found is None else found
            except ray.exceptions.RayError:
                answers = [None] * len(taken)
            for (_, answer), each in zip(taken, answers, strict=True):
                answer.put(each)


@dataclass(frozen=True)
class _GivenOrder:
    """An order that was given at the time ``at``."""

    at: float
    workers: tuple[WorkerId, ...]
    order: str
    arguments: tuple[object, ...]


class Orders:
    """Sends the coordinator's orders to workers.  They arrive in the order in which they are given, as a
    rule.
    """

    def __init__(
        self,
        incarnation: int,
        workers: Mapping[WorkerId, Any],
        homes: Mapping[WorkerId, NodeId],
        keepers: Mapping[NodeId, Any],
        fence_s: float,
    ) -> None:
        """The mappings name the actors and the node of each worker that has joined; the caller changes them
        as workers come and go.
        """
        self._incarnation, self._workers, self._homes, self._keepers = incarnation, workers, homes, keepers
        self._in_time_s = fence_s / HOPS
        self._late: dict[NodeId, Any] = {}
        """The call to each keeper that did not answer in time."""
        self._relayed = defaultdict[NodeId, deque[_GivenOrder]](partial(deque, maxlen=ORDERS))
        """The newest orders that went through each keeper."""
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="orders")

    def send(self, workers: Sequence[WorkerId], order: str, *arguments: object) -> None:
        relayed: dict[Any, tuple[NodeId, tuple[WorkerId, ...]]] = {}
        for node, those in self._by_node(workers).items():
            keeper = self._keepers.get(node)
            if keeper is None or len(those) == 1 or self._is_late(node):
                self._directly(those, order, arguments)
            else:
                relayed[keeper.relay.remote(self._incarnation, those, order, arguments)] = node, those
                self._relayed[node].append(_GivenOrder(time.monotonic(), those, order, arguments))
        if relayed:
            with contextlib.suppress(RuntimeError):  # closed, since the run is over
                self._pool.submit(self._see_to, relayed, order, arguments)

    def lost(self, node: NodeId) -> None:
        """Sends again the orders that the dead keeper of ``node`` may not have passed on: a keeper answers
        when it has sent an order, not when the order has arrived.
        """
        since = time.monotonic() - LOST_S
        for each in tuple(self._relayed.pop(node, ())):
            if each.at >= since:
                self._directly(each.workers, each.order, each.arguments)

    def _by_node(self, workers: Sequence[WorkerId]) -> dict[NodeId, tuple[WorkerId, ...]]:
        found = defaultdict[NodeId, list[WorkerId]](list)
        for worker in workers:
            if worker in self._workers:
                found[self._homes.get(worker, NodeId(""))].append(worker)
        return {node: tuple(those) for node, those in found.items()}

    def _is_late(self, node: NodeId) -> bool:
        if answered(self._late.get(node)):
            self._late.pop(node, None)  # another thread may have seen it at the same time
        return node in self._late

    def _see_to(
        self,
        relayed: Mapping[Any, tuple[NodeId, tuple[WorkerId, ...]]],
        order: str,
        arguments: tuple[object, ...],
    ) -> None:
        """Sends an order directly to the workers that it has not reached through their keeper."""
        until = time.monotonic() + self._in_time_s
        for call, (node, those) in relayed.items():
            try:
                those = ray.get(call, timeout=max(until - time.monotonic(), 0.001))
            except Deposed:  # a later coordinator acts
                continue
            except ray.exceptions.GetTimeoutError:
                self._late[node] = call
            except ray.exceptions.RayError:
                pass
            self._directly(those, order, arguments)

    def _directly(self, workers: Sequence[WorkerId], order: str, arguments: tuple[object, ...]) -> None:
        for worker in workers:
            if (actor := self._workers.get(worker)) is not None:
                actor.obey.remote(self._incarnation, order, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def answered(call: Any, timeout_s: float = 0.0) -> bool:
    """Returns whether ``call`` has ended or ends in time, in whatever way; None is no call, and has ended."""
    return call is None or bool(ray.wait([call], timeout=timeout_s)[0])


def gone_for_good(error: BaseException) -> bool:
    """Returns whether a call failed because its actor will not come back.

    One that restarts is unavailable; but if its node was drained, Ray calls it dead for a while.
    """
    return isinstance(error, ray.exceptions.ActorDiedError) and not error.preempted


def _all_of(waiting: queue.SimpleQueue[Any], gather_s: float = 0.0) -> list[Any]:
    """Waits for something in the queue, then ``gather_s`` longer, and returns all that is there."""
    found = [waiting.get()]
    time.sleep(gather_s)
    while not waiting.empty():
        found.append(waiting.get())
    return found
