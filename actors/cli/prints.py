"""Shows what workers print, on request: the user's own prints reach the terminal of a driver.

A driver reads the workers' logs where they are, by one task on each node, and never waits for one: the next
look takes what has come.  A look shows a bounded number of lines of each worker, so a print in every
microbatch neither drowns the terminal nor holds up the driver.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray

from actors.cluster import only_on
from actors.logs import read_each
from actors.terminal import say
from elastic.report.story import Line

if TYPE_CHECKING:
    from actors.screen import Screen
    from actors.view import View

LOOK_S = 1.0
"""Seconds from one look at the logs to the next."""
MOST = 50
"""Largest number of lines that one look shows, about a page; each worker has its share, and at least one."""
FIRST, ALL = "first", "all"
"""The words that ask for one living worker, the same until it ends, and for every worker."""
Told = dict[str, tuple[int, str]]
"""Maps each worker to where its log ends now, and to what it has printed since the look before."""


class LogReading:
    """One look at the logs of the living workers ``asked``, which maps each to its node.

    ``ends`` says where the look before ended; a worker that is not in ``ends`` begins with the last lines of
    its log.
    """

    def __init__(self, run: str, asked: Mapping[Any, str], ends: Mapping[str, int]) -> None:
        nodes = defaultdict[str, dict[str, int]](dict)
        for worker, node in asked.items():
            nodes[node][worker] = ends.get(worker, -1)
        self.tasks = [
            ray.remote(num_cpus=0, scheduling_strategy=only_on(node))(read_each).remote(run, offsets)
            for node, offsets in nodes.items()
        ]

    def wait(self, timeout_s: float) -> Told:
        """Returns what has come after ``timeout_s`` at most.  A node that is gone, or does not answer, tells
        nothing.
        """
        done, self.tasks = (
            ray.wait(self.tasks, num_returns=len(self.tasks), timeout=timeout_s) if self.tasks else ([], [])
        )
        found: Told = {}
        for each in done:
            try:
                found |= ray.get(each)
            except ray.exceptions.RayError:  # its node is gone
                continue
        return found


class Prints:
    """A screen that also shows what workers print.

    ``asked`` names the workers, with commas between them: or it is "first" or "all", or None for none.
    """

    def __init__(
        self, screen: Screen, asked: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.screen, self.asked, self._clock = screen, (asked or "").split(","), clock
        self._ends: dict[str, int] = {}
        self._reading: LogReading | None = None
        self._run, self._looked_at, self._number = "", 0.0, 0

    def show(self, line: Line) -> None:
        self.screen.show(line)

    def look(self, view: View) -> None:
        if self.asked != [""]:
            self._look(view)
        self.screen.look(view)

    def _look(self, view: View) -> None:
        if self._reading is not None:
            for worker, (end, text) in self._reading.wait(0.0).items():
                self._ends[worker] = end
                self.tell(worker, text)
            if self._reading.tasks and self._clock() - self._looked_at < 10 * LOOK_S:
                return
        if self._clock() - self._looked_at < LOOK_S or view.over:
            return
        self._looked_at = self._clock()
        if view.token != self._run:
            self._run = view.token
            self._ends.clear()
        chosen = self._chosen(view)
        self._number = len(chosen)
        self._reading = LogReading(
            view.token, {worker: view.workers[worker] for worker in chosen}, self._ends
        )

    def _chosen(self, view: View) -> list[Any]:
        there = sorted(view.workers, key=lambda worker: (len(worker), worker))
        if FIRST in self.asked:
            # as long as it lives, it stays the same one
            known = [worker for worker in there if worker in self._ends]
            return known[:1] or there[:1]
        return there if ALL in self.asked else [worker for worker in there if worker in self.asked]

    def tell(self, worker: str, text: str) -> None:
        """Shows ``text``, which a worker has printed, with its name before each line; of many lines only the
        newest.
        """
        lines = text.splitlines()
        most = max(MOST // max(self._number, 1), 1)
        if len(lines) > most:
            say(
                f"{len(lines) - most} lines are left out here; `elastic logs` has the newest",
                f"{worker} ",
                "cyan",
            )
        for line in lines[-most:]:
            say(line, f"{worker} ", "cyan")
