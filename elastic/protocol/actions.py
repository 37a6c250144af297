"""Actions: everything that ``advance`` may ask for.  ``actors/perform.py`` performs them in order; performing
one twice does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.protocol.plan import Plan


@dataclass(frozen=True)
class StartWorkers:
    """Starts ``workers`` as new processes whose ids were never used before, on nodes other than those in
    ``avoid``.
    """

    workers: tuple[WorkerId, ...]
    avoid: tuple[NodeId, ...] = ()


@dataclass(frozen=True)
class Form:
    """Opens a store for the generation on the plan's store node, then sends the plan to every member."""

    plan: Plan


@dataclass(frozen=True)
class ConnectAhead:
    """Opens a store for the generation on the plan's store node, then asks every member to make and connect
    the groups of this later world beside the steps.
    """

    plan: Plan


@dataclass(frozen=True)
class Go:
    """Lets the members begin to step, because all are ready; they may drop the state that they hold in older
    layouts.
    """

    generation: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Pause:
    """Asks the members to agree, in their next commit, to stop at the boundary after it.  With ``save`` the
    state is saved there, and with ``hand_over`` each member's copy of it is complete before the member stops.
    """

    generation: int
    members: tuple[WorkerId, ...]
    save: bool
    hand_over: bool = False


@dataclass(frozen=True)
class Fence:
    """Tells the members to apply nothing more in ``generation``; each answers ``Fenced``.  Nothing is aborted
    yet.
    """

    generation: int
    members: tuple[WorkerId, ...]
    whole: bool = False
    """True if the answers bring all commits that are not acknowledged; otherwise only the answers of some
    members bring them, since all members have seen the same commits.
    """


@dataclass(frozen=True)
class Settle:
    """Settles a generation once all its members are fenced or expelled.

    A member applies ``outcome`` if it has prepared that step; if ``outcome`` is None, it drops the step.
    Then it aborts and leaves its groups.
    """

    generation: int
    members: tuple[WorkerId, ...]
    outcome: Outcome | None


@dataclass(frozen=True)
class Kill:
    """Ends these processes.  An order to kill proves nothing: only the event ``Lost`` says that a process is
    gone.

    ``examine`` says that the processes stand still; where they stand is found out before they are killed.
    """

    workers: tuple[WorkerId, ...]
    reason: str
    examine: bool = False


@dataclass(frozen=True)
class Save:
    """A version on its way to the bucket, as copied by the members of generation ``by``.

    ``members[i]`` has world rank i of ``layout`` and runs on ``nodes[i]``; the keeper of that node uploads
    the member's part.
    """

    version: Version
    by: int
    layout: Layout
    members: tuple[WorkerId, ...]
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True)
class Upload:
    """Tells keepers which saves are on their way to the bucket.

    Each keeper uploads the parts of the workers on its node and reports ``ShardSaved`` or ``SaveFailed``.
    Any other save that began no later than ``version`` of ``generation`` is over: its upload stops, and its
    slots may be overwritten.
    """

    keepers: tuple[NodeId, ...]
    saves: tuple[Save, ...]
    generation: int
    version: Version


@dataclass(frozen=True)
class CommitManifest:
    """Writes the manifest of ``version``, whose shards are all in the bucket, create-only, and reports
    ``Saved`` or ``SaveFailed``.
    """

    version: Version
    lineage: tuple[tuple[int, int], ...]
    by: int = 0
    """The generation whose shards the checkpoint is made of; 0 means the generation that committed the
    version.
    """


@dataclass(frozen=True)
class Quarantine:
    """Adds DAMAGED.json to the checkpoint of ``version``."""

    version: Version
    reason: str


@dataclass(frozen=True)
class Retain:
    """Deletes the checkpoints that no rule of the job keeps.

    ``saved`` are the checkpoints that the run counts on, ``lineage`` says which others are on the lineage,
    and ``best`` is the best validated version, if one is known.  ``spared`` are those that are on their way,
    or from which the world reads its state. ``at_once`` says that a save finds no room, so checkpoints that
    are marked are deleted now and not in the next round.
    """

    saved: tuple[Version, ...]
    lineage: tuple[tuple[int, int], ...]
    best: Version | None
    spared: tuple[Version, ...]
    at_once: bool = False


@dataclass(frozen=True)
class ListCopies:
    """Asks these keepers which copies they have complete; each answers ``Kept`` of ``generation``."""

    generation: int
    keepers: tuple[NodeId, ...]


@dataclass(frozen=True)
class Release:
    """Lets keepers free old copies.

    A keeper may free copies of workers that are gone if they are older than ``copied``.  It may free copies
    of workers on other nodes if they are older than ``buddied``.
    """

    keepers: tuple[NodeId, ...]
    copied: Version
    buddied: Version


@dataclass(frozen=True)
class Pair:
    """Tells keepers their buddies in ``generation``.

    Each entry of ``buddies`` is a node, the node whose keeper is its buddy, and the "host:port" of that
    keeper; both are "" for none.
    """

    generation: int
    buddies: tuple[tuple[NodeId, NodeId, str], ...]


@dataclass(frozen=True)
class LetGo:
    """Tells the keepers of ``nodes``, whose machines will be taken, that the run needs nothing there any more:
    they may acknowledge the notice.
    """

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True)
class Exit:
    """Tells these workers that the run is over, so that they leave in good order."""

    workers: tuple[WorkerId, ...]


Action = (
    StartWorkers
    | Form
    | ConnectAhead
    | Go
    | Pause
    | Fence
    | Settle
    | Kill
    | Upload
    | CommitManifest
    | Quarantine
    | Retain
    | ListCopies
    | Release
    | Pair
    | LetGo
    | Exit
)
