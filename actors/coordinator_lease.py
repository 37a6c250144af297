"""A coordinator's lease: it knows, or knew a moment ago, that no other has followed it.

Who makes the next one is the cluster's head, so its word that this process is the run's coordinator is enough; where the head does not
answer, the claims in the bucket are.  Cut off from both, a coordinator goes on for ``Rules.mandate_s`` with what its keepers hold; after
that it grants no lease, and stands still where it would have to begin or to settle something.  The next one waits for that, unless it
can see that there is no such coordinator.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from actors import cluster
from elastic.runs import Run
from storage.errors import Deposed, StorageError


class CoordinatorLease:
    """Of coordinator ``incarnation``, which claimed the run at ``asked_at`` of the monotonic clock."""

    def __init__(self, run: Run, incarnation: int, mandate_s: float, asked_at: float) -> None:
        self.run, self.incarnation, self.mandate_s = run, incarnation, mandate_s
        self.deposed = ""
        """The claim that came after this one's, once one is found."""
        self._until = asked_at + mandate_s

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    @property
    def holds(self) -> bool:
        return self.left_s > 0 and not self.deposed

    def ask_head(self, coordinator: Any) -> None:
        """``coordinator``: this process's own actor."""
        asked_at = time.monotonic()
        if cluster.is_this_process(coordinator):
            self._until = max(self._until, asked_at + self.mandate_s)

    def ask_bucket(self) -> bool:
        """Whether it answers that this is the latest claim.  Raises :class:`Deposed` where it is not."""
        asked_at = time.monotonic()
        try:
            self.run.is_latest(self.incarnation)
        except Deposed as error:
            self.deposed = error.object
            raise
        except (StorageError, OSError):
            return False
        self._until = max(self._until, asked_at + self.mandate_s)
        return True

    def keep(self, over: threading.Event) -> None:
        """Ask the bucket while the head does not answer."""
        while not self.deposed and not over.wait(self.mandate_s / 8):
            if self.left_s < self.mandate_s / 2:
                with contextlib.suppress(Deposed):  # the coordinator's loop will find it noted
                    self.ask_bucket()
