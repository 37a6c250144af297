"""The apply fence: the lock between a worker's two threads, around the rules of its :class:`Member`.

The training thread holds the lock for as long as an update runs.  The control thread takes the same lock for a fence, which is
therefore before an update or after it and never within: its answer is at s-1; prepared s; or applied s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.ids import Version
from elastic.protocol.commit_record import Outcome
from elastic.protocol.member import Member


class ApplyFence:
    """``with apply_fence as member:`` holds the lock.  Nothing slow belongs inside, except an update."""

    def __init__(self, member: Member) -> None:
        self.member = member
        """Without the lock: only to read a single value, where nobody may wait for an update."""
        self._lock = threading.Lock()

    def __enter__(self) -> Member:
        self._lock.acquire()
        return self.member

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def applying(self, outcome: Outcome, *, settled: bool = False) -> Iterator[None]:
        """Holds the lock while the update of ``outcome`` runs.  Raises ``FencedOff`` instead if it must not (``Member.apply``)."""
        with self as member:
            shard = member.apply(outcome, time.monotonic(), settled=settled)
            try:
                yield
                shard.version = Version(outcome.step, outcome.generation)
                member.applied(outcome)
            finally:
                if member.applying:
                    member.failed()
