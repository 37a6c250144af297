"""The journal's replicas: drives the rules of ``elastic/protocol/authority.py`` with real calls to keepers
and bucket, waiting, and a clock.

The coordinator's loop appends records, sends them to the keepers, and waits if a record must not be lost.
Other threads ask the cluster's head and the bucket whether another coordinator has taken over, and whether
the lease still holds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from actors import cluster
from elastic.control.run import RunState
from elastic.ids import NodeId
from elastic.protocol.authority import Authority
from elastic.runs.run import Run
from storage.errors import Deposed, StorageError
from storage.journal import Journal

SHIP_S = 2.0
"""Seconds for which the bucket may take the journal before the keepers' answers are read again."""


class JournalReplicas:
    """The journal's copies on the keepers and in the bucket, and the coordinator's lease.

    Only the coordinator's loop may call ``note``, ``send`` and ``secure``.  Any thread may read or renew the
    lease.
    """

    def __init__(
        self, authority: Authority[RunState], run: Run, journal: Journal, keepers: Mapping[NodeId, Any]
    ) -> None:
        """``keepers`` maps nodes to keeper actors; the caller changes it as nodes come and go."""
        self.authority, self.run, self.journal, self.keepers = authority, run, journal, keepers
        self._calls: dict[Any, NodeId] = {}
        """The calls under way, at most one for each keeper."""

    @property
    def safe(self) -> RunState:
        """The state of the run after the newest record that the bucket or most of the keepers hold."""
        return self.authority.safe

    # ---- the lease

    @property
    def holds(self) -> bool:
        """True while the coordinator's lease holds."""
        return self.authority.holds(time.monotonic())

    def raise_if_deposed(self) -> None:
        """Raises :class:`Deposed` if another coordinator has taken over."""
        if self.authority.deposed:
            raise Deposed(f"the run ({self.authority.deposed})")

    def ask_head(self, coordinator: Any) -> None:
        """Asks the cluster's head whether ``coordinator``, the actor of this process, is still the run's
        coordinator.
        """
        asked_at = time.monotonic()
        if cluster.is_this_process(coordinator):
            self.authority.confirmed(asked_at)

    def ask_bucket(self) -> None:
        """Asks the bucket whether another coordinator has claimed the run, and notes an answer."""
        with contextlib.suppress(StorageError, OSError):
            self.authority.claimed(time.monotonic(), self.run.latest_claim())

    def keep_lease(self, over: threading.Event) -> None:
        """Asks the bucket while the head does not answer, until the run is ``over`` or this coordinator is
        deposed.
        """
        while not self.authority.deposed and not over.wait(self.authority.lease_s / 8):
            if self.authority.asks_bucket(time.monotonic()):
                self.ask_bucket()

    # ---- the copies

    def note(self, run: RunState) -> None:
        """Notes that a record was appended, after which the run is ``run``."""
        self.authority.note(self.journal.end, run.cluster.keepers, run)

    def send(self) -> None:
        """Sends each reachable keeper the part of the journal that it lacks, and takes the answers that have
        come.  Raises :class:`Deposed`.
        """
        self._request()
        self._listen(0.0)

    def secure(self, say: Callable[[str], None]) -> None:
        """Waits until everything in the journal may be acted on.  ``say`` is called with a sentence about
        what is missing.

        Raises :class:`Deposed`.
        """
        end, followed = self.journal.end, not self.authority.begun
        if not self._by_keepers(end):
            have, keepers = self.authority.holders(end)
            place = self._by_bucket(end, say)
            if not followed:
                say(
                    f"the newest decisions of the run are now {place}, since too few keepers ({have} of "
                    f"{keepers}) had stored them in time; the run goes on"
                )

    def _by_bucket(self, end: int, say: Callable[[str], None]) -> str:
        """Waits until the bucket, or a majority of the keepers after all, has the journal up to ``end``.
        Returns a text that names the place of the journal.
        """
        said = False
        while not self._ship(end):
            if self._by_keepers(end):
                return "on a majority of the keepers"
            if not said:
                say(
                    (
                        "the journal can be written neither to a majority of the keepers nor to the "
                        "bucket: the run carries out no decision until one of them works again"
                    )
                    if self.authority.begun
                    else (
                        "the journal cannot be written to the bucket: the run carries out no "
                        "decision until the bucket works again"
                    )
                )
            said = True
        return "in the bucket"

    def _ship(self, end: int) -> bool:
        """Writes the journal to the bucket, then asks for claims.  Returns whether the journal may be acted
        on.  Raises :class:`Deposed`.
        """
        if not self.journal.ship(SHIP_S):
            return False
        with contextlib.suppress(StorageError, OSError):
            self.authority.in_bucket(end, time.monotonic(), self.run.latest_claim())
        self.raise_if_deposed()
        return self.authority.secured(end, time.monotonic())

    def _by_keepers(self, end: int) -> bool:
        """Waits for the keepers' answers while that is worthwhile.  Returns whether the journal may be acted
        on.
        """
        self._listen(0.0)  # a keeper whose answer has come can be asked for the rest
        while not self.authority.secured(end, time.monotonic()):
            self._request()
            left_s = self.authority.waits_s(time.monotonic())
            if left_s <= 0:
                return False
            self._listen(left_s)
        return True

    def _request(self) -> None:
        keepers = dict(self.keepers)  # a copy, because other threads remove lost keepers
        for node, at in self.authority.requests(self.journal.end, keepers, time.monotonic()):
            self._calls[keepers[node].copy.remote(self.authority.incarnation, *self.journal.tail(at))] = node

    def _listen(self, timeout_s: float) -> None:
        """Takes the answers that have come; waits up to ``timeout_s`` for one."""
        for ref in ray.wait(list(self._calls), timeout=timeout_s)[0] if self._calls else []:
            node = self._calls.pop(ref)
            try:
                self.authority.answered(node, ray.get(ref))
            except ray.exceptions.RayError:
                self.authority.failed(node)
        self.raise_if_deposed()
