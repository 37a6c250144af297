"""Follows the worker processes of a run that are on this machine, from outside: the operating system says how
they end, and their counters in shared memory say what they have done.

Nothing is asked of the run, so nothing that it says of itself is believed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from actors.processes import Process, describe, life_of, segments
from elastic.train.gauges.counters import BYTES, Counters

LOOK_S = 0.02
"""Seconds between two looks.  A worker that lives for a shorter time is not seen."""
TIERS = ("live", "host", "bucket")


@dataclass
class Followed:
    """A worker: its process is held by a pidfd, and its counters stay mapped after its death."""

    process: Process
    counters: Counters
    others: list[int] = field(default_factory=list)
    """Pids that the worker had later; there are none unless a rule was broken."""


class Onlooker(threading.Thread):
    """Follows the workers of all lives of the run ``name`` from :meth:`start` to :meth:`end`."""

    def __init__(self, name: str) -> None:
        super().__init__(name="onlooker", daemon=True)
        self.run_name, self.workers = name, dict[str, Followed]()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def end(self) -> None:
        self._over.set()
        self.join()

    def _look(self) -> None:
        for path in segments(f"{self.run_name}-*"):
            token, _, worker = path.name.removeprefix("elastic-").rpartition("-")
            if not life_of(self.run_name, token):
                continue
            if (known := self.workers.get(worker)) is not None:
                pid = known.counters["pid"]
                if pid not in (known.process.pid, *known.others):
                    known.others.append(pid)
                continue
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):  # it has gone meanwhile
                if path.stat().st_size < BYTES:
                    continue
                counters = Counters(path, create=False)
                if counters["started"]:
                    process = Process(counters["pid"], counters["started"])
                    self.workers[worker] = Followed(process, counters)

    # ---- what was seen

    def ended(self, worker: str) -> str | None:
        """Returns in words how the process of a worker ended; None if it lives."""
        process = self.workers[worker].process
        return describe(process.status()) if process.ended() else None

    def total(self, name: str) -> int:
        """Returns a counter, summed over all workers, dead ones too."""
        return sum(each.counters[name] for each in self.workers.values())

    @property
    def healed(self) -> Mapping[str, int]:
        """The bytes of state that workers have received, by tier."""
        return {tier: self.total(f"healed_{tier}_bytes") for tier in TIERS}

    @property
    def changed(self) -> list[str]:
        """The workers that have not been one process from first to last."""
        return [worker for worker, each in self.workers.items() if each.others]
