"""where the records of a coordinator lie, and what it may do because of it

The rules of ``actors/journal_replicas.py`` and ``actors/coordinator_lease.py`` again, each a line.
What may not be forgotten is acted on once a majority of the keepers holds it, of every list of keepers since the last time, and while
the coordinator knows that no other has followed it; or once the bucket has it, and nobody has claimed the run since.  Who takes over is
heeded by the keepers that it reaches: half of them are enough, and the one before finds no majority any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic.control.run import RunState
from elastic.ids import NodeId

if TYPE_CHECKING:
    from elastic.sim.cluster import Node
    from elastic.sim.coordinators import Coordinator
    from elastic.sim.simulation import Simulation

SHIP_S = 5.0
"""How old a record gets before the bucket has it."""
ASKS_S = 1.0
"""How often it asks whether another has followed it."""
Copy = tuple[int, int, RunState]
"""Whose record is the last, how many of its own it is, and what it says."""


class Journal:
    """Of one incarnation.  ``run``: as its last record says, which is on its own disk; ``safe``: as of the last that others hold too."""

    def __init__(self, sim: Simulation, coordinator: Coordinator, run: RunState) -> None:
        self.sim, self.coordinator = sim, coordinator
        self.run = self.safe = run
        self.records = 0
        self._lists = [run.cluster.keepers]
        """Every list of keepers since ``safe``."""
        self._known_at = sim.clock.now
        """When it last knew that no other had followed it, where it cannot know now."""
        self._bucket_cut_until = self._asks_at = 0.0
        sim.clock.after(SHIP_S, self._ship_again)

    def append(self, run: RunState) -> None:
        self.run, self.records = run, self.records + 1
        if run.cluster.keepers != self._lists[-1]:
            self._lists.append(run.cluster.keepers)
        self._send(lossy=True)
        self._by_keepers()

    def secured(self) -> bool:
        """May it be acted on?  Where that is because of the bucket, it is deposed if somebody else has written there or claimed the run."""
        self._send(lossy=False)
        return (self.mandated() and self._by_keepers()) or self.ship()

    # -- the keepers ------------------------------------------------------------------------------------------------

    def _send(self, *, lossy: bool) -> None:
        for node in self.run.cluster.keepers:
            keeper = self._answering(node)
            if keeper is not None and keeper.heeds <= self.coordinator.incarnation and not (lossy and self.sim.rng.random() < 0.3):
                keeper.tail = (self.coordinator.incarnation, self.records, self.run)

    def _answering(self, name: NodeId) -> Node | None:
        node = self.sim.cluster.nodes.get(name)
        well = node is not None and node.keeper and node.frozen_until <= self.sim.clock.now
        return node if well and self.coordinator.reaches(name) else None

    def _by_keepers(self) -> bool:
        """Does a majority hold it all, of every list since the last time that one did?"""
        holds = {node for node, keeper in self.sim.cluster.nodes.items() if self._holds_all(keeper)}
        if not all(2 * len(holds.intersection(keepers)) > len(keepers) for keepers in self._lists if keepers):
            return False
        self._all_safe()
        return True

    def _holds_all(self, keeper: Node) -> bool:
        mine = keeper.tail is not None and keeper.tail[:2] == (self.coordinator.incarnation, self.records)
        return mine and self._answering(keeper.name) is not None and keeper.heeds <= self.coordinator.incarnation

    def _all_safe(self) -> None:
        self.safe, self._lists = self.run, [self.run.cluster.keepers]

    # -- the bucket, and the mandate ----------------------------------------------------------------------------------

    @property
    def reaches_bucket(self) -> bool:
        return self._bucket_cut_until <= self.sim.clock.now

    def cut_off(self, until: float, bucket: bool) -> None:
        self.mandated()
        self._bucket_cut_until = until if bucket else 0.0

    def thaw(self) -> None:
        """What it knew counts until it asks again."""
        self._asks_at = self.sim.clock.now + ASKS_S * self.sim.rng.random()

    def mandated(self) -> bool:
        """Does it know, or did it a moment ago, that no other has followed it?  From the cluster's head, or by the claims in the bucket."""
        coordinator, now = self.coordinator, self.sim.clock.now
        answered = not coordinator.cut or (self.reaches_bucket and not self.sim.cluster.bucket_fails())
        if answered and now >= self._asks_at:
            if self.sim.coordinators.claimed > coordinator.incarnation:
                coordinator.depose()
                return False
            self._known_at = now
        return now < self._known_at + self.sim.rules.mandate_s

    def ship(self) -> bool:
        """Everything to the bucket; False when it cannot be, or another coordinator has been there."""
        if not self.reaches_bucket or self.sim.cluster.bucket_fails():
            return False
        coordinators, own = self.sim.coordinators, self.coordinator.incarnation
        if coordinators.written[0] > own or coordinators.claimed > own:
            self.coordinator.depose()
            return False
        coordinators.written = (own, self.records, self.run)
        self._known_at = self.sim.clock.now
        self._all_safe()
        return True

    def _ship_again(self) -> None:
        if self.coordinator.acts:
            self.ship()
        if self.coordinator.alive:
            self.sim.clock.after(SHIP_S, self._ship_again)

    # -- for whoever comes after ------------------------------------------------------------------------------------

    def left(self, incarnation: int, disk: bool) -> tuple[RunState, bool]:
        """What the coordinator of ``incarnation`` can read, and whether that is all that was acted on.  From now on its keepers heed it."""
        cut = {node for each in self.sim.coordinators.all if each.cut for node in each.side}
        now = self.sim.clock.now
        there = (node for node in self.sim.cluster.nodes.values() if node.keeper and not node.declared_dead)
        nodes = [node for node in there if node.frozen_until <= now and node.name not in cut]
        for node in nodes:
            node.heed(incarnation)
        copies: list[Copy] = [self.sim.coordinators.written, *(node.tail for node in nodes if node.tail is not None)]
        if disk:
            copies.append((self.coordinator.incarnation, self.records, self.run))
        run = max(copies, key=lambda copy: copy[:2])[2]
        attached = {node.name for node in nodes if node.tail is not None}
        return run, disk or _half(attached, run.cluster.keepers)


def _half(attached: Iterable[NodeId], keepers: tuple[NodeId, ...]) -> bool:
    there = len(set(attached).intersection(keepers))
    return there > 0 and 2 * there >= len(keepers)
