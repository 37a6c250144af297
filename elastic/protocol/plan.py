"""The plan of one generation holds everything a member must know before it forms the world."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import Score


@dataclass(frozen=True)
class Plan:
    """The plan of a generation: ``members[i]`` has world rank i, and the world begins at ``version``, taken
    from ``tier``.

    tier "init":   ``version`` is (0, 0): every member initialises its part of the state by itself;
    tier "live":   ``holders``, all of them members, hold every slice of the version;
    tier "host":   ``holders`` hold every slice of the version, some only as copies in keepers' memory, which ``hosts`` serve;
    tier "bucket": members without the version read its manifest; ``holders`` may still supply part of it.
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
    """``nodes[i]`` is the node on which ``members[i]`` runs."""
    hosts: tuple[tuple[NodeId, str], ...] = ()
    """The keepers that ``holders`` name, and the "host:port" at which each serves its copies."""
    copy_every: int = 0
    """Number of steps from one copy of the state in host memory to the next (0: never)."""
    buddy_every: int = 0
    """Number of steps from one copy that goes on to a buddy keeper to the next (0: never)."""
    protected: Version | None = None
    """The newest version that is known to be complete in keepers' copies alone; it must not be overwritten
    before a newer one is.
    """
    buddied: Version | None = None
    """The newest version that was complete at all buddies; it must not be overwritten before a newer one is
    either.
    """
    zero: int | None = None
    """The stage of ZeRO, if devices have room for another stage than the job's; None means the job's stage.
    """
    lineage: tuple[tuple[int, int], ...] = ()
    """The generations that committed the steps up to ``version``.  The plan carries it because every other
    process that knew them may be gone.
    """
    ahead: int = 0
    """The number of the attempt with which the members have connected this world ahead; 0 if it connects in
    its pause.
    """
    ends: int = 0
    """The last step of the run, if that ends before the job's last step; 0 if it does not."""
    best: Score | None = None
    """The validation by which patience is measured; None if the rules have no patience, or before a
    validation.
    """

    worse: int = 0
    """The number of validations after ``best`` and before ``version``; the members repeat the validation of
    ``version``.
    """

    @cached_property
    def ranks(self) -> dict[WorkerId, int]:
        """The world rank of each member."""
        return {member: rank for rank, member in enumerate(self.members)}

    def __getstate__(self) -> dict[str, Any]:
        # a message has no place for what can be computed
        return {name: value for name, value in self.__dict__.items() if name != "ranks"}

    def world_rank(self, worker: WorkerId) -> int:
        return self.ranks[worker]
