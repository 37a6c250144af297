"""What to do: all that ``advance`` may ask for.  Performed in order by ``actors/perform.py``; each is safe to do twice."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.protocol.plan import Plan


@dataclass(frozen=True)
class StartWorkers:
    """Start ``workers``, new processes with ids never used before, on other nodes than those to ``avoid``."""

    workers: tuple[WorkerId, ...]
    avoid: tuple[NodeId, ...] = ()


@dataclass(frozen=True)
class Form:
    """Open a store for the generation on the plan's store node, then send the plan to every member."""

    plan: Plan


@dataclass(frozen=True)
class Go:
    """All are ready: begin stepping; what was held in older layouts may be dropped."""

    generation: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Pause:
    """Ask the members to agree, in their next commit, to stop at the boundary after it; ``save``: and to save there."""

    generation: int
    members: tuple[WorkerId, ...]
    save: bool


@dataclass(frozen=True)
class Fence:
    """Let nothing more be applied in ``generation``; each answers ``Fenced``.  Nothing is aborted yet."""

    generation: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Settle:
    """All are fenced or expelled: apply ``outcome`` where it is prepared (None: drop), then abort and leave the groups."""

    generation: int
    members: tuple[WorkerId, ...]
    outcome: Outcome | None


@dataclass(frozen=True)
class Kill:
    """End these processes.  A wish: only ``Lost`` says that it came true.

    ``examine``: they stand still, so it is found out where before they end.
    """

    workers: tuple[WorkerId, ...]
    reason: str
    examine: bool = False


@dataclass(frozen=True)
class Save:
    """A version on its way to the bucket: the copies that the members of generation ``by`` made of it.

    ``members[i]`` has world rank i of ``layout`` and runs on ``nodes[i]``, whose keeper uploads its part.
    """

    version: Version
    by: int
    layout: Layout
    members: tuple[WorkerId, ...]
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True)
class Upload:
    """Tell keepers which saves are on their way: each uploads the parts of its node's workers and reports ``ShardSaved`` or ``SaveFailed``.

    Every other save that began by ``version`` of ``generation`` is over: its upload stops, and its slots may be overwritten.
    """

    keepers: tuple[NodeId, ...]
    saves: tuple[Save, ...]
    generation: int
    version: Version


@dataclass(frozen=True)
class CommitManifest:
    """All shards of ``version`` are in: write its manifest, create-only, and report ``Saved`` or ``SaveFailed``."""

    version: Version
    lineage: tuple[tuple[int, int], ...]
    by: int = 0
    """The generation whose shards it is made of; 0: the one that committed the version."""


@dataclass(frozen=True)
class Quarantine:
    """Add DAMAGED.json to the checkpoint of ``version``."""

    version: Version
    reason: str


@dataclass(frozen=True)
class ListCopies:
    """Ask these keepers which copies they have complete; each answers ``Kept`` of ``generation``."""

    generation: int
    keepers: tuple[NodeId, ...]


@dataclass(frozen=True)
class Release:
    """Copies may be freed: of workers that are gone, those older than ``copied``; of other nodes' workers, those older than ``buddied``."""

    keepers: tuple[NodeId, ...]
    copied: Version
    buddied: Version


@dataclass(frozen=True)
class Pair:
    """``buddies``: a node, the node whose keeper is its buddy in ``generation``, and the "host:port" of that keeper; "" for none."""

    generation: int
    buddies: tuple[tuple[NodeId, NodeId, str], ...]


@dataclass(frozen=True)
class Exit:
    """The run is over for these workers: leave in good order."""

    workers: tuple[WorkerId, ...]


Action = (
    StartWorkers | Form | Go | Pause | Fence | Settle | Kill | Upload | CommitManifest | Quarantine | ListCopies | Release | Pair | Exit
)
