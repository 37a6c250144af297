"""The apply fence: the lock between a worker's two threads, around the rules of its :class:`Member`.

The training thread holds the lock for as long as an update runs.  The control thread takes the same lock for
a fence.  So a fence comes before the update of a step s or after it, never within.  Its answer is one of
three: the state is that of s-1; s-1 with s prepared; s.
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
    """Guards a member: ``with apply_fence as member:`` holds the lock.  Nothing slow belongs inside, except
    an update.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        """The guarded member.  Code that must not wait for an update may read single values of it without the
        lock.
        """
        self._lock = threading.Lock()

    def __enter__(self) -> Member:
        self._lock.acquire()
        return self.member

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def applying(self, outcome: Outcome, *, settled: bool = False) -> Iterator[None]:
        """Holds the lock while the update of ``outcome`` runs.  Raises ``FencedOff`` instead if it may not
        run (``Member.apply``).
        """
        with self as member:
            shard = member.apply(outcome, time.monotonic(), settled=settled)
            try:
                yield
                shard.version = Version(outcome.step, outcome.generation)
                member.applied(outcome)
            finally:
                if member.applying:
                    member.failed()
