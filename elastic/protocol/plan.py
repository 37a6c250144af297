"""The plan of one generation: everything a member must know before it forms the world."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding


@dataclass(frozen=True)
class Plan:
    """``members[i]`` has world rank i.  The world begins at ``version``, taken from ``tier``.

    tier "init":   version is (0, 0): world rank 0 initialises and broadcasts;
    tier "live":   ``holders`` (all of them members) hold every slice of it;
    tier "host":   ``holders`` hold every slice of it, some only as copies in keepers' memory, which ``hosts`` serve;
    tier "bucket": members without it read the manifest of ``version``; ``holders`` may still supply part.
    """

    incarnation: int
    generation: int
    layout: Layout
    members: tuple[WorkerId, ...]
    version: Version
    tier: str
    holders: tuple[Holding, ...]
    store_node: NodeId
    nodes: tuple[NodeId, ...] = ()
    """Where ``members[i]`` runs."""
    hosts: tuple[tuple[NodeId, str], ...] = ()
    """The keepers that ``holders`` name, and the "host:port" at which each serves its copies."""
    copy_every: int = 0
    """Every so many steps the state is copied to host memory (0: never) ..."""
    buddy_every: int = 0
    """... and every so many the copy goes on to a buddy keeper."""
    protected: Version | None = None
    """The newest version that keepers' copies alone have complete, as far as is known: not to be overwritten before there is another ..."""
    buddied: Version | None = None
    """... and the newest one that was complete at all buddies."""
    lineage: tuple[tuple[int, int], ...] = ()
    """Which generations committed the steps up to ``version``: nobody else may be left who knows."""

    def world_rank(self, worker: WorkerId) -> int:
        return self.members.index(worker)
