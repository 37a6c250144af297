"""Events: everything that the coordinator can learn.  All are frozen; each says which process reports it and
in which generation.

An event is a fact about its sender, never an instruction.  ``advance`` refuses an event that carries an older
generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import Outcome, Validated
from elastic.protocol.plan import Plan
from elastic.protocol.reruns import Computed
from storage.slices import Tensor


@dataclass(frozen=True)
class Joined:
    """A worker's process is up, its imports are done, and it can be given a plan.

    ``kind`` names device, torch and threads: workers of different kinds do not give equal bits.  ``classes``
    has one tensor of the state for each class of tensors that the axes of the job cut alike; coverage depends
    on nothing else.  ``build`` must be the same everywhere.  ``class_bytes`` has the bytes of all tensors of
    each class; it is empty in journals of older releases.  ``least_shard`` is the smallest number of members
    of a replica at which one fits the worker's device.  ``states`` is the number of states of which the node
    has room for all copies, 0 if that is not known.  ``least_whole`` is the smallest such number at which the
    device also has room for the whole weights with which the model computes; 0 if there is none, if that is
    not known, or if the job has chosen its stage of ZeRO.  ``device`` is the UUID of the worker's accelerator;
    "" if it has none, or if that is not known.
    """

    worker: WorkerId
    node: NodeId
    kind: str
    classes: tuple[Tensor, ...]
    build: Build = field(default_factory=Build)
    class_bytes: tuple[int, ...] = ()
    least_shard: int = 1
    states: float = 0.0
    least_whole: int = 0
    device: str = ""


@dataclass(frozen=True)
class Lost:
    """The worker's process is gone for good, as Ray has seen: it can act no more.

    If it is not ``certain``, its node has seen that it dies, but the kernel has not let go of it yet.  Or the
    whole node is taken for dead because nothing is heard of it; if it is only cut off, the process may live
    on for a while.  ``node`` is known only of a worker that has not joined.
    """

    worker: WorkerId
    reason: str
    certain: bool = True
    node: NodeId | None = None


@dataclass(frozen=True)
class Starting:
    """A worker that was asked for has not joined yet, but has made progress since its last report.  ``doing``
    says in words what it does.
    """

    worker: WorkerId
    doing: str


@dataclass(frozen=True)
class StartFailed:
    """A worker that was asked for did not come up, so it never sent ``Joined``.

    ``misset`` is its node if its process was set up in a way that a new process may mend.  ``node`` is its
    node, as far as that is known, if the node may be to blame.
    """

    worker: WorkerId
    reason: str
    misset: NodeId | None = None
    node: NodeId | None = None


@dataclass(frozen=True)
class NodeFound:
    """The cluster has this node, and its keeper is being started: none of its workers is to be a member
    before the keeper is up.
    """

    node: NodeId


@dataclass(frozen=True)
class NodeRefused:
    """The node cannot run the job as the others do, now or later; ``why`` says the reason.

    ``shared`` means that the node does not see the bucket or the data as the one place that it must be for
    all nodes.  ``by_job`` means that the job asks for what the node lacks (``JobError``), so that trying
    again does not help.
    """

    node: NodeId
    why: str
    shared: bool = False
    by_job: bool = False


@dataclass(frozen=True)
class KeeperUp:
    """The keeper runs, and has found its bucket to be the same place as the coordinator's.

    ``address`` is the "host:port" at which it serves its copies.  ``zone`` is the node's zone, as its label
    says ("": none).
    """

    node: NodeId
    address: str = ""
    zone: str = ""


@dataclass(frozen=True)
class KeeperLost:
    """The keeper is gone; ``with_its_node`` means that its whole node is taken for dead, with its workers."""

    node: NodeId
    reason: str
    with_its_node: bool = False


@dataclass(frozen=True)
class NodeDraining:
    """The node's machine will be taken at ``deadline``, in seconds of the coordinator's clock (Unix time), as
    ``source`` has announced; ``text`` has the source's own words.
    """

    node: NodeId
    deadline: float
    source: str
    text: str = ""


@dataclass(frozen=True)
class NodeAdvised:
    """The node's machine may be taken before long, as ``source`` advises.  The advice expires at ``until``.
    Nobody leaves because of it.
    """

    node: NodeId
    until: float
    source: str
    text: str = ""


@dataclass(frozen=True)
class NodeStays:
    """``source`` no longer announces or advises that the node's machine will be taken."""

    node: NodeId
    source: str


@dataclass(frozen=True)
class Kept:
    """A keeper lists the copies that it has complete, as its answer to ``ListCopies`` of ``generation``.
    Torn copies are not among them.

    The copies are those of its own node's workers, dead or alive, and of the workers whose buddy it is; each
    names this keeper.
    """

    node: NodeId
    generation: int
    held: tuple[Holding, ...]


@dataclass(frozen=True)
class Capacity:
    """The cluster had room for ``slots`` more workers when it was looked at.

    ``placed`` names the workers being started that had taken their room by then; the room of the others is
    still counted in ``slots``. None means that all had taken it.
    """

    slots: int
    placed: tuple[WorkerId, ...] | None = None


@dataclass(frozen=True)
class Here:
    """The plan of ``generation`` arrived at the worker; it has not begun a collective yet."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True)
class Ready:
    """The worker has formed its groups and healed its state: it holds its shard of the plan's version in the
    plan's layout.

    ``form_s`` and ``heal_s`` are the seconds that the two took here.  ``heal_bytes`` is the number of bytes
    that came from other nodes and members, over ``interface``.  These fields are for the report and decide
    nothing.
    """

    worker: WorkerId
    generation: int
    form_s: float = 0.0
    heal_s: float = 0.0
    heal_bytes: int = 0
    interface: str = ""


@dataclass(frozen=True)
class ConnectedAhead:
    """The worker has connected its groups of a later world, in this ``attempt`` of coordinator
    ``incarnation``; or ``why`` it will not.
    """

    worker: WorkerId
    generation: int
    attempt: int
    incarnation: int
    why: str = ""


@dataclass(frozen=True)
class Work:
    """The floating-point operations of a step's forward and backward passes, however they were computed.

    ``flops`` counts attention over whole sequences, ``causal_flops`` the half of it that a causal mask
    leaves; they are equal if the model does not say what its attention costs.  ``devices`` were there, each
    of which can do ``peak_flops`` a second (0: not known).
    """

    flops: float
    causal_flops: float
    devices: int
    peak_flops: float


@dataclass(frozen=True)
class StepDone:
    """The world committed a step.  World rank 0 sends this once it has applied the step."""

    worker: WorkerId
    generation: int
    outcome: Outcome
    work: Work | None = None
    """None in older journals, and if the step is told again."""
    validated: Validated | None = None
    """The loss on held-out samples after the last step of the run; that of any other step is told by the next
    commit.
    """
    metrics: tuple[tuple[str, float], ...] = ()
    """Numbers that the user's own loop reports for the step, by name.  Empty if the step is reported once
    more.
    """
    quarantined: tuple[tuple[int, int], ...] = ()
    """All samples in quarantine after the step, each with the step that put it there.  They are sent with the
    first step that a member reports in a world, or to a coordinator, which may not know the samples that an
    earlier coordinator knew; empty with later steps.
    """
    quarantined_by: tuple[int, ...] = ()
    """The steps in ``quarantined`` that were applied, without the microbatches of these samples."""


@dataclass(frozen=True)
class Ends:
    """A member's loop ends the run before the job's last step.  ``step`` is the last step that the loop has
    made; the member takes part in no later step.

    With ``patience`` the validations end the run, with ``asked`` a commit that says ENDS; with neither, the
    loop was left.  A loop that only asks for the end tells ``why`` with step 0; its next commit then ends the
    run for all members.
    """

    worker: WorkerId
    generation: int
    step: int
    why: str = ""
    patience: bool = False
    asked: bool = False


@dataclass(frozen=True)
class Renewed:
    """A member asked to prolong its lease on ``generation``, and the lease was granted."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True)
class Progress:
    """A member's counters as its keeper reads them in shared memory: the last *completed* microbatch and
    collective of ``step``.

    ``operation`` says in words what the member is doing; it is :data:`STOPPED` if the kernel says that its
    process stands still.
    """

    worker: WorkerId
    generation: int
    step: int
    microbatch: int
    collective: int
    operation: str = ""


ASKED_EARLY = (
    "most probably an import initialised CUDA before Ray had set CUDA_VISIBLE_DEVICES, so the process "
    "saw all GPUs; remove this import (look in sitecustomize.py and RAY_preload_python_modules), and "
    "unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
)
"""The advice about a worker that computes on a GPU that Ray has not given it."""
STOPPED = "is stopped"
"""Operation of a process that a signal has stopped."""
INITIALISES = "initialises"
"""Operation of a member that runs the model's initialisation.  Its counters then count single operations of
the user's code.
"""
HEALS = "heals"
"""Operation of a member that fills its shard.  Its counters then count single pieces of the state."""


@dataclass(frozen=True)
class Beat:
    """A keeper is alive, and this is how far the workers of its node are."""

    node: NodeId
    progress: tuple[Progress, ...]
    uploading: tuple[Version, ...] = ()
    """The saves of which this keeper is writing a part now, unless the bucket has just refused that part."""


@dataclass(frozen=True)
class Broken:
    """A member cannot go on in ``generation`` and stands still; it is not fenced and has not left its groups.

    cause "peer":    a collective failed (``signature``: the communication library's own words, if the world was being formed);
    cause "job":     the user's code raised an error (``signature``: exception type and user frame);
    cause "device":  its process cannot use its device, or its state in files, and is to be replaced
    (``signature``: the error);
    cause "setup":   the communication library refuses to form a world as this process is set up, so the process is to be replaced
                     (``signature``: the library's name of the error; the last line of ``detail`` is in its
                     own words);
    cause "damaged": ``version`` in the bucket cannot be read;
    cause "copy":    a keeper's copy cannot be read (``signature``: the keeper's node);
    cause "lease":   its lease ran out;
    cause "differs": members have computed different gradients from the same microbatch (``computed``).
    """

    worker: WorkerId
    generation: int
    step: int
    cause: str
    detail: str
    signature: str = ""
    version: Version | None = None
    computed: tuple[Computed, ...] = ()


@dataclass(frozen=True)
class Fenced:
    """The worker will apply nothing more in ``generation``.  It answers ``Fence`` with this, and sends it
    unasked at an agreed boundary.

    ``held`` lists the state that it holds complete and unharmed, in the old and the new layout while it
    heals; a worker that failed while it applied a step holds nothing.  ``prepared`` is the step whose
    gradients are complete here but not applied.  ``outcomes`` are the last commits that it has seen, oldest
    first: they are evidence, and the ledger of a dead rank 0.  In a large world only some members bring them;
    an answer that is not ``whole`` only names the newest one in ``seen``.  ``heeds`` is the incarnation of
    the latest coordinator that the worker had heard: to a later one this is no answer.
    """

    worker: WorkerId
    generation: int
    held: tuple[Holding, ...]
    prepared: int | None
    outcomes: tuple[Outcome, ...] = ()
    seen: Version | None = None
    """The newest commit of its generation that the worker has seen.  The journal always has it, because the
    journal leaves out known commits.
    """
    whole: bool = True
    heeds: int | None = None
    """None in older journals."""

    @property
    def newest_seen(self) -> Version | None:
        """The newest commit of its generation that the worker has seen."""
        steps = [each.step for each in self.outcomes if each.generation == self.generation]
        return self.seen or (Version(max(steps), self.generation) if steps else None)


@dataclass(frozen=True)
class ShardSaved:
    """The worker's part of the checkpoint of ``version`` is in the bucket, and its digests are taken."""

    worker: WorkerId
    version: Version
    by: int = 0
    """The generation as whose member the worker wrote the part; 0 means the generation that committed the
    version.
    """
    digest: str = ""
    """The digest of the worker's whole copy, of which the part is a piece: workers with equal cells must have
    the same.  "" if no other worker has the cell, or if it is not known.
    """


@dataclass(frozen=True)
class Saved:
    """The manifest of ``version`` is durable; ``digest`` is the manifest's."""

    version: Version
    digest: str


@dataclass(frozen=True)
class SaveFailed:
    """A part or the manifest of the checkpoint of ``version`` was not written; ``reason`` says why."""

    version: Version
    reason: str
    by: int = 0
    """The generation whose parts failed, as in :class:`ShardSaved`."""
    again: bool = False
    """True if only the bucket was at fault: a keeper tries its part again by itself, and a manifest is asked
    for again.
    """
    manifest: bool = False
    """True if it is the manifest that was not written."""
    worker: WorkerId | None = None
    """The worker whose part was not written; None for a manifest."""
    full: bool = False
    """True if the bucket has no room for it."""


@dataclass(frozen=True)
class Evaluated:
    """A process that is no member has measured the loss of ``version`` on the held-out samples."""

    version: Version
    found: Validated


@dataclass(frozen=True)
class StopRequested:
    """The user, or a driver that went away, wants a clean stop with a save."""

    reason: str


@dataclass(frozen=True)
class Recovered:
    """A coordinator has taken over the run from an earlier one.  This is its first event; it has read the
    state of the run from the journal.

    ``workers`` and ``keepers`` are those whose actors it has found.  Each worker will send ``Attached``, and
    repeat everything it has said that may be lost.  If the run is not ``whole``, earlier coordinators may
    have begun worlds that no readable journal mentions.
    """

    incarnation: int
    workers: tuple[WorkerId, ...]
    keepers: tuple[NodeId, ...]
    whole: bool = True


@dataclass(frozen=True)
class Attached:
    """A worker has heard the new coordinator.

    ``plan`` is the plan of the generation that the worker is in, or was in last.  ``stepping`` means that the
    worker is still in that generation and was told to go, so all its members were ready.
    """

    worker: WorkerId
    plan: Plan | None = None
    stepping: bool = False


Said = Joined | Here | Ready | ConnectedAhead | Fenced | Attached
"""Every worker says these once, and all workers say them at about the same time."""
OfNodes = NodeFound | KeeperUp | KeeperLost | Kept | NodeDraining | NodeAdvised | NodeStays
"""These come from many nodes at about the same time: machines come and go by the hundred."""
Crowded = Said | OfNodes
"""Many of these are decided together if they wait in line."""


@dataclass(frozen=True)
class Stumbled:
    """The coordinator could not handle an event.  ``what`` is the event's name, the exception and its place,
    the same each time.
    """

    what: str
    detail: str = ""


@dataclass(frozen=True)
class Tick:
    """Time went by.  For ``stood_s`` seconds no decision was performed, because no other coordinator could
    have found its record.
    """

    stood_s: float = 0.0


Fact = (
    Joined
    | Lost
    | Starting
    | StartFailed
    | NodeFound
    | NodeRefused
    | KeeperUp
    | KeeperLost
    | NodeDraining
    | NodeAdvised
    | NodeStays
    | Kept
    | Capacity
    | Here
    | Ready
    | ConnectedAhead
    | StepDone
    | Ends
    | Renewed
    | Beat
    | Broken
    | Fenced
    | ShardSaved
    | Saved
    | SaveFailed
    | Evaluated
    | StopRequested
    | Recovered
    | Attached
    | Stumbled
    | Tick
)


@dataclass(frozen=True)
class Together:
    """Several workers and nodes said these, or several keepers sent these beats, while the coordinator was busy.

    They are decided together, in their order, at the cost of one.
    """

    events: tuple[Crowded | Beat, ...]


Event = Fact | Together


def parts(event: Event) -> tuple[Fact, ...]:
    """Returns the facts that ``event`` tells: several only if it is a :class:`Together`."""
    return event.events if isinstance(event, Together) else (event,)
