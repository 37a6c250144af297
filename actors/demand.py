"""Demand tells Ray's autoscaler for how many workers the run wants nodes.

Workers start only where there is room, so Ray sees nothing that waits, and a cluster that can grow would not.

``request_resources`` is used, and no placement group that stays pending.  Ray gives room to whatever has
waited longest for it: such a group would take the room of each worker that dies, and the worker that replaces
it would wait until the group is removed.  The price is that Ray keeps one request for a cluster: the last
call wins, and it stays when nobody is left who takes it back.

Ray's autoscaler adds no node at all if it cannot have as many as it was asked for, for example because of
``max_workers``.  Then it is asked for fewer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import ray

from actors import cluster
from elastic.control.membership import wanted
from elastic.control.rules import Rules
from elastic.control.run import RunState
from elastic.ids import NodeId
from elastic.job import Job
from elastic.threads import keep_going, later

LOOK_S = 2.0
"""Seconds between two looks at what the run wants and what the autoscaler refuses.  It looks every 5 s itself."""
AGAIN_S = 60.0
"""Seconds after which the autoscaler is told again: another run may have replaced the request, or a new head
has forgotten it, or nodes that were refused can be had by now.
"""


class Demand:
    """One coordinator's requests to the autoscaler.  Nobody waits for an answer."""

    def __init__(
        self, job: Job, rules: Rules, state: Callable[[], RunState], say: Callable[[str], None]
    ) -> None:
        self._workers, self._rules, self._state, self._say = job.workers, rules, state, say
        self._lock = threading.Lock()
        """Held while the autoscaler is told, so that nothing is told after the request was taken back."""
        self._over = threading.Event()
        self._wanted: tuple[int, tuple[NodeId, ...]] = 0, ()
        """The workers that the run wanted when the autoscaler was told, and the nodes that do not count."""
        self._number, self._told_at = 0, -AGAIN_S
        """The number of workers that the autoscaler was asked for, and when."""

    def begin(self) -> None:
        """Begins to tell the autoscaler, if the cluster has one."""
        keep_going(self._keep, "demand", self._say)

    def take_back(self) -> threading.Thread:
        """Takes the request back, on a thread that ends when this is done."""
        self._over.set()
        return later(0, self._take_back)

    def _take_back(self) -> None:
        with self._lock, suppress(ray.exceptions.RayError):
            if cluster.grows():
                cluster.request(self._workers, 0)

    def _keep(self) -> None:
        while not self._over.wait(LOOK_S):
            # the head does not answer: the next round tells it
            with self._lock, suppress(ray.exceptions.RayError):
                if not cluster.grows():
                    return
                self._look(time.monotonic())

    def _look(self, now: float) -> None:
        run = self._state()
        wants = wanted(run, self._rules), tuple(sorted(run.cluster.closed(few=False)))
        if self._over.is_set():
            return
        if wants != self._wanted or now - self._told_at >= AGAIN_S:
            self._ask(*wants)
            self._wanted, self._told_at = wants, now
        elif self._number > (there := len(run.workers)) and cluster.refused_request() == self._number:
            self._ask(there + (self._number - there) // 2, wants[1])

    def _ask(self, number: int, avoid: tuple[NodeId, ...]) -> None:
        cluster.request(self._workers, number, avoid)
        self._number = number
