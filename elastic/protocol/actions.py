"""Actions: all that ``advance`` may ask for.  ``actors/perform.py`` performs them in order; each is safe to do twice."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.protocol.plan import Plan


@dataclass(frozen=True)
class StartWorkers:
    """Starts ``workers``, new processes with ids never used before, on other nodes than those to ``avoid``."""

    workers: tuple[WorkerId, ...]
    avoid: tuple[NodeId, ...] = ()


@dataclass(frozen=True)
class Form:
    """Opens a store for the generation on the plan's store node, then sends the plan to every member."""

    plan: Plan


@dataclass(frozen=True)
class Go:
    """Lets the members begin to step, because all are ready; they may drop the state that they hold in older layouts."""

    generation: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Pause:
    """Asks the members to agree, in their next commit, to stop at the boundary after it, and with ``save`` to save there."""

    generation: int
    members: tuple[WorkerId, ...]
    save: bool


@dataclass(frozen=True)
class Fence:
    """Tells the members to apply nothing more in ``generation``; each answers ``Fenced``.  Nothing is aborted yet."""

    generation: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Settle:
    """Settles a generation once all members are fenced or expelled.

    Each applies ``outcome`` if it has prepared that step (None: it drops the step), then aborts and leaves its groups.
    """

    generation: int
    members: tuple[WorkerId, ...]
    outcome: Outcome | None


@dataclass(frozen=True)
class Kill:
    """Ends these processes.  This is a wish: only ``Lost`` says that it came true.

    With ``examine`` the processes stand still, so it is first found out where they do.
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
    """Tells keepers which saves are on their way.

    Each uploads the parts of its node's workers and reports ``ShardSaved`` or ``SaveFailed``.
    Every other save that began by ``version`` of ``generation`` is over: its upload stops, and its slots may be overwritten.
    """

    keepers: tuple[NodeId, ...]
    saves: tuple[Save, ...]
    generation: int
    version: Version


@dataclass(frozen=True)
class CommitManifest:
    """Writes the manifest of ``version``, whose shards are all in the bucket, create-only, and reports ``Saved`` or ``SaveFailed``."""

    version: Version
    lineage: tuple[tuple[int, int], ...]
    by: int = 0
    """The generation whose shards the checkpoint is made of; 0 means the generation that committed the version."""


@dataclass(frozen=True)
class Quarantine:
    """Adds DAMAGED.json to the checkpoint of ``version``."""

    version: Version
    reason: str


@dataclass(frozen=True)
class ListCopies:
    """Asks these keepers which copies they have complete; each answers ``Kept`` of ``generation``."""

    generation: int
    keepers: tuple[NodeId, ...]


@dataclass(frozen=True)
class Release:
    """Lets keepers free old copies.

    Copies of workers that are gone may be freed if they are older than ``copied``, those of other nodes' workers if older than ``buddied``.
    """

    keepers: tuple[NodeId, ...]
    copied: Version
    buddied: Version


@dataclass(frozen=True)
class Pair:
    """Tells keepers their buddies in ``generation``.

    Each entry of ``buddies`` is a node, the node whose keeper is its buddy, and the "host:port" of that keeper; both are "" for none.
    """

    generation: int
    buddies: tuple[tuple[NodeId, NodeId, str], ...]


@dataclass(frozen=True)
class Exit:
    """Tells these workers that the run is over, so that they leave in good order."""

    workers: tuple[WorkerId, ...]


Action = (
    StartWorkers | Form | Go | Pause | Fence | Settle | Kill | Upload | CommitManifest | Quarantine | ListCopies | Release | Pair | Exit
)
