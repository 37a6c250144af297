"""What happened: everything the coordinator can learn.  Frozen; each says who says so and in which generation.

An event is a fact about its sender, never an instruction.  One that carries an older generation is refused by ``advance``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import Outcome
from elastic.protocol.plan import Plan
from storage.slices import Tensor


@dataclass(frozen=True)
class Joined:
    """A worker's process is up, its imports are done, and it can be given a plan.

    ``kind`` names device, torch and threads: workers of different kinds do not give equal bits.  ``classes``: one tensor of the state
    for each class that all axes cut alike, which is all that coverage depends on.  ``build``: what must be the same everywhere.
    """

    worker: WorkerId
    node: NodeId
    kind: str
    classes: tuple[Tensor, ...]
    build: Build = field(default_factory=Build)


@dataclass(frozen=True)
class Lost:
    """The worker's process is gone for good, seen by its node or by Ray: it can act no more.

    Not ``certain``: its whole node is taken for dead because nothing is heard of it; behind a cut it may live on for a while.
    """

    worker: WorkerId
    reason: str
    certain: bool = True


@dataclass(frozen=True)
class StartFailed:
    """A worker that was asked for did not come up (never ``Joined``)."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True)
class NodeFound:
    """The cluster has this node, and its keeper is being started: none of its workers is to be a member before the keeper is up."""

    node: NodeId


@dataclass(frozen=True)
class NodeRefused:
    """The node cannot run the job as the others do, now or later: ``why`` names it.

    ``shared``: what must be one place for all nodes, the bucket or the data, is not.
    """

    node: NodeId
    why: str
    shared: bool = False


@dataclass(frozen=True)
class KeeperUp:
    """The keeper runs, and has found the bucket to be the same place as the coordinator's.

    ``address``: "host:port" at which it serves its copies; ``zone``: of the node, as its label says ("": none).
    """

    node: NodeId
    address: str = ""
    zone: str = ""


@dataclass(frozen=True)
class KeeperLost:
    """``with_its_node``: the whole node is taken for dead."""

    node: NodeId
    reason: str
    with_its_node: bool = False


@dataclass(frozen=True)
class Kept:
    """The copies that a keeper has complete: answer to ``ListCopies`` of ``generation``.  A torn one is not among them.

    Of its own node's workers, dead or alive, and of those whose buddy it is; each names this keeper.
    """

    node: NodeId
    generation: int
    held: tuple[Holding, ...]


@dataclass(frozen=True)
class Capacity:
    """So many more workers the cluster could start when it was looked at.

    ``placed``: of those being started, who had taken its room by then; that of the others is still among ``slots``.  None: all had.
    """

    slots: int
    placed: tuple[WorkerId, ...] | None = None


@dataclass(frozen=True)
class Here:
    """The plan of ``generation`` arrived; no collective was begun yet."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True)
class Ready:
    """Groups formed, state healed: the worker holds its shard of the plan's version in the plan's layout.

    ``form_s``, ``heal_s``: how long the two took here; ``heal_bytes``: so many came from other nodes and members, over ``interface``.
    For the report; they decide nothing.
    """

    worker: WorkerId
    generation: int
    form_s: float = 0.0
    heal_s: float = 0.0
    heal_bytes: int = 0
    interface: str = ""


@dataclass(frozen=True)
class StepDone:
    """The world committed a step.  Sent by world rank 0 once it applied it."""

    worker: WorkerId
    generation: int
    outcome: Outcome


@dataclass(frozen=True)
class Renewed:
    """A member asked for its lease on ``generation`` to be prolonged, and was granted it."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True)
class Progress:
    """A member's counters as its keeper reads them in shared memory: the last *completed* microbatch and collective of ``step``.

    ``operation``: what it is at, in words; :data:`STOPPED` where the kernel says that its process stands still.
    """

    worker: WorkerId
    generation: int
    step: int
    microbatch: int
    collective: int
    operation: str = ""


STOPPED = "is stopped"


@dataclass(frozen=True)
class Beat:
    """A keeper is alive, and this is how far the workers of its node are."""

    node: NodeId
    progress: tuple[Progress, ...]


@dataclass(frozen=True)
class Broken:
    """A member cannot go on in ``generation`` and stands still, not fenced, groups not left.

    cause "peer": a collective failed; "job": the user's code raised (``signature``: exception type and user frame);
    "device": its process cannot use its device any more and is to be replaced (``signature``: what the device says); "damaged":
    ``version`` in the bucket cannot be read; "copy": nor can a keeper's copy (``signature``: its node); "lease": its lease ran out.
    """

    worker: WorkerId
    generation: int
    step: int
    cause: str
    detail: str
    signature: str = ""
    version: Version | None = None


@dataclass(frozen=True)
class Fenced:
    """The worker will apply nothing more in ``generation``.  Answer to ``Fence``, and sent unasked at an agreed boundary.

    ``held``: what it holds complete and unharmed (old and new layout while healing).  ``prepared``: the step whose gradients are
    complete here but not applied.  ``outcomes``: the last commits it has seen, oldest first: evidence, and the ledger of a dead rank 0.
    A worker that failed while applying holds nothing.
    """

    worker: WorkerId
    generation: int
    held: tuple[Holding, ...]
    prepared: int | None
    outcomes: tuple[Outcome, ...] = ()
    seen: Version | None = None
    """The newest commit among ``outcomes``, as the journal keeps it where it leaves out those that were known."""

    @property
    def newest_seen(self) -> Version | None:
        """The newest commit of its generation that the worker has seen."""
        steps = [each.step for each in self.outcomes if each.generation == self.generation]
        return self.seen or (Version(max(steps), self.generation) if steps else None)


@dataclass(frozen=True)
class ShardSaved:
    """The worker's part of the checkpoint of ``version`` is in the bucket, digests taken."""

    worker: WorkerId
    version: Version
    by: int = 0
    """As a member of which generation; 0: of the one that committed the version."""


@dataclass(frozen=True)
class Saved:
    """The manifest of ``version`` is durable; ``digest`` is its own."""

    version: Version
    digest: str


@dataclass(frozen=True)
class SaveFailed:
    version: Version
    reason: str
    by: int = 0
    """Of which generation's parts, as above."""


@dataclass(frozen=True)
class StopRequested:
    """The user, or a driver that went away, wants a clean stop with a save."""

    reason: str


@dataclass(frozen=True)
class Recovered:
    """A coordinator has taken over what the one before it left.  Its first event; the run before it was folded from the journal.

    ``workers``, ``keepers``: whose actors it has found.  Each worker will say where it stands: ``Attached``, and again all that it has
    said before and that may be lost.  Not ``whole``: earlier coordinators may have begun what no journal says that could be read.
    """

    incarnation: int
    workers: tuple[WorkerId, ...]
    keepers: tuple[NodeId, ...]
    whole: bool = True


@dataclass(frozen=True)
class Attached:
    """A worker has heard the new coordinator.

    ``plan``: of the generation it is in, or was in last; ``stepping``: it is in it and was told to go, so all were ready.
    """

    worker: WorkerId
    plan: Plan | None = None
    stepping: bool = False


@dataclass(frozen=True)
class Stumbled:
    """The coordinator could not handle an event.  ``what``: the event's name, the exception and its place, the same each time."""

    what: str
    detail: str = ""


@dataclass(frozen=True)
class Tick:
    """Time went by.  ``stood_s``: for so long the last decision was not performed, since its record lay where nobody else would find it."""

    stood_s: float = 0.0


Event = (
    Joined
    | Lost
    | StartFailed
    | NodeFound
    | NodeRefused
    | KeeperUp
    | KeeperLost
    | Kept
    | Capacity
    | Here
    | Ready
    | StepDone
    | Renewed
    | Beat
    | Broken
    | Fenced
    | ShardSaved
    | Saved
    | SaveFailed
    | StopRequested
    | Recovered
    | Attached
    | Stumbled
    | Tick
)
