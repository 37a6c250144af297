"""What a worker's two threads agree on, under one lock: what it holds, and whether it may still apply.

The training thread turns "the commit is here" into "applied" inside ``applying``; the control thread's ``fence`` takes the same lock,
so its answer is one of three: at s-1; prepared s; applied s.  After it, nothing is applied in that generation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.errors import FencedOff
from elastic.ids import Version, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Fenced
from elastic.state.shard import Shard


class Gate:
    def __init__(self, worker: WorkerId) -> None:
        self.worker = worker
        self.generation = 0
        self.fenced = 0
        """Highest generation in which nothing may be applied any more."""
        self.lease_until = float("inf")
        """By ``time.monotonic``; a worker that has heard no coordinator since may not apply."""
        self.shards: list[Shard] = []
        """What is held complete and unharmed; more than one only between healing and the first step of a generation."""
        self.prepared: int | None = None
        self.outcomes: deque[Outcome] = deque()
        """Commits that the coordinator has not acknowledged: evidence, and the ledger of a dead world rank 0."""
        self._lock = threading.Lock()

    def enter(self, generation: int) -> None:
        """Take part in ``generation`` from now on.  Raises :class:`FencedOff` if that is over already."""
        with self._lock:
            if generation <= self.fenced:
                raise FencedOff(f"generation {generation} was fenced before it was entered")
            self.generation, self.prepared = generation, None

    def hold(self, shards: list[Shard]) -> None:
        with self._lock:
            self.shards = shards

    def prepare(self, step: int) -> None:
        """The gradients of ``step`` are complete here.  Whoever is fenced contributes nothing to a commit any more."""
        with self._lock:
            if self.generation <= self.fenced:
                raise FencedOff(f"step {step} of generation {self.generation} was fenced before it was prepared")
            self.prepared = step

    @contextmanager
    def applying(self, outcome: Outcome, *, settled: bool = False) -> Iterator[None]:
        """Hold the lock while the update of ``outcome`` runs; whoever fails inside holds nothing afterwards.

        ``settled``: the coordinator decided this outcome after the fence, which therefore does not bar it.
        """
        with self._lock:
            if not settled and self.generation <= self.fenced:
                raise FencedOff(f"step {outcome.step} of generation {self.generation} was fenced before it was applied")
            if not settled and time.monotonic() > self.lease_until:
                raise FencedOff(f"no coordinator was heard; the lease on generation {self.generation} ran out", lease=True)
            shard, self.shards = self.shards[-1], []
            yield
            shard.version = Version(outcome.step, outcome.generation)
            self.shards, self.prepared = [shard], None
            self.outcomes.append(outcome)

    def acknowledge(self, generation: int, step: int) -> None:
        """The coordinator had every commit up to ``step`` in its journal when it was at ``generation``: of a later one it says nothing.

        The newest is kept: a journal may end earlier than it did.
        """
        with self._lock:
            while len(self.outcomes) > 1 and self.outcomes[0].step <= step and self.outcomes[0].generation <= generation:
                self.outcomes.popleft()

    def seen(self) -> tuple[Outcome, ...]:
        """The commits that the coordinator has not acknowledged, oldest first."""
        with self._lock:
            return tuple(self.outcomes)

    def drop(self) -> None:
        """The generation is over; what was prepared and not applied is void."""
        with self._lock:
            self.prepared = None

    def fence(self, generation: int) -> Fenced:
        """Bar ``generation`` and every older one, and say what is held."""
        with self._lock:
            self.fenced = max(self.fenced, generation)
            held = tuple(Holding(self.worker, shard.version, shard.cell) for shard in self.shards)
            return Fenced(self.worker, generation, held, self.prepared, tuple(self.outcomes))
