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

    def world_rank(self, worker: WorkerId) -> int:
        return self.members.index(worker)
