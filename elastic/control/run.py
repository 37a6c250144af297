"""The run: everything that the coordinator knows, as its state and one value for each subject.

    RunState ── state      Waiting, Forming, Running, Stopping, Finishing, or how the run ended
             ├─ members    workers and where they sit               ├─ copies    copies of the state in host memory
             ├─ cluster    nodes and keepers                        ├─ watch     liveness (``liveness.py``)
             ├─ history    what was committed, saved and given up   ├─ takeover  what coordinators before this one left open
             ├─ saves      checkpoints on their way to the bucket   ├─ health, skips  gradients, loss (``health.py``, ``skips.py``)
             └─ stragglers workers that hold up others              └─ stop, enough   why and where the run is to end

Values are immutable; dictionaries are replaced, and only the decision that made one changes it.  ``edges.py``
has the order of states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from elastic.control.evolve import Same, evolve
from elastic.control.health import Health
from elastic.control.liveness import Watch
from elastic.control.skips import Skips
from elastic.control.stragglers import Stragglers
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol import lineage
from elastic.protocol.actions import Save, Settle
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import Outcome, Score
from elastic.protocol.lineage import Lineage
from elastic.protocol.plan import Plan
from storage.slices import Tensor

NEVER = float("inf")
# ---- states


@dataclass(frozen=True)
class Waiting:
    """There is no world: the run waits for workers, or for what keepers hold."""

    since: float
    until: float = 0.0
    """The time until which workers that could form a world wait for others, since that costs less (``growth.py``).
    """


@dataclass(frozen=True)
class Forming:
    """The plan was sent, and the members prepare to step."""

    plan: Plan
    deadline: float
    there: dict[WorkerId, bool] = field(default_factory=dict)
    """The members that have the plan, and whether each has formed its groups and healed its state."""
    here_at: float = NEVER
    ready_at: float = NEVER
    since: float = NEVER
    """The times at which the first member had the plan, the first member was ready, and the plan was sent
    (``since``); older journals have only ``here_at``.
    """


@dataclass(frozen=True)
class Running:
    """The world steps."""

    plan: Plan
    since: float
    ahead: Plan | None = None
    """The plan of the next world, whose members connect it ahead; None if none does."""
    expected: tuple[WorkerId, ...] = ()
    """The workers for which it was last decided what is connected ahead."""
    connected: dict[WorkerId, bool] = field(default_factory=dict)
    """The members of ``ahead`` that have connected it."""
    connect_until: float = NEVER
    """The time until which newcomers, or a slow worker that leaves, wait for the members of ``ahead``."""
    attempts: int = 0
    """The number of worlds that members of this world were asked to connect ahead."""


@dataclass(frozen=True)
class Answer:
    """A member's answer to the fence: it will apply nothing more in its generation."""

    worker: WorkerId
    held: tuple[Holding, ...]
    prepared: int | None
    """The step whose gradients are complete at the member but not applied."""
    seen: Version | None = None
    """The newest commit that the member has seen; the commits themselves are in the history."""
    whole: bool = True
    """True if the answer brought the commits."""


@dataclass(frozen=True)
class Stopping:
    """The world comes to an end; nothing is aborted while an answer is ``pending``."""

    plan: Plan
    cause: str
    planned: bool
    """True if the members agree in a commit on the boundary to stop at; False if they are fenced."""
    pending: tuple[WorkerId, ...]
    """The members that have not answered yet."""
    deadline: float
    answers: tuple[Answer, ...] = ()
    lost: tuple[WorkerId, ...] = ()
    """The members that have certainly ended."""
    expelled: tuple[WorkerId, ...] = ()
    """The members that were killed or are taken for dead: they may still live, but nothing that they say
    counts any more.
    """
    save: bool = False
    """True if the state at the boundary is also saved."""
    hand_over: bool = False
    """True if each member's copy of the boundary is complete before the member stops."""
    job_error: str = ""
    """The user's traceback if the job is at fault."""
    ahead: Plan | None = None
    """The plan of the next world, if all its members have connected it ahead."""
    noticed: bool = False
    """True if the world ends before it steps only because a machine will be taken: that counts against
    nothing.
    """


@dataclass(frozen=True)
class Finishing:
    """The target step is committed and its checkpoint is on the way."""

    plan: Plan
    deadline: float


@dataclass(frozen=True)
class Finished:
    """The last step is in the bucket: the target step, or ``step`` if the loop ended the run before, for the
    reason ``why``.
    """

    step: int = 0
    why: str = ""


@dataclass(frozen=True)
class Stopped:
    """Somebody asked for a stop; the same command resumes the run."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A budget is spent, or the job itself is at fault."""

    reason: str
    job_error: str = ""
    """The user's traceback, or what nodes lack that the job asks for, if the job is at fault."""


Ended = Finished | Stopped | Failed
State = Waiting | Forming | Running | Stopping | Finishing | Ended
TERMINAL = (Finished, Stopped, Failed)


# ---- members and the cluster


@dataclass(frozen=True)
class Worker:
    """A process that joined and is not known to be gone."""

    node: NodeId
    kind: str
    joined_at: float
    holdings: tuple[Holding, ...] = ()
    unfit: str = ""  # the reason why the worker cannot take part any more and is replaced; "" while it is fit
    host: str = ""
    least_shard: int = 1  # the smallest number of members of a replica at which one fits its device
    states: float = 0.0
    """The number of whole states for whose copies and saves its node has room; 0 if that is not known."""
    least_whole: int = 0
    """The smallest number of members of a replica at which its device also has room for whole weights to
    compute with; 0 if it must not hold whole weights.
    """
    device: str = ""  # the UUID of its accelerator; "" if that is not known


@dataclass(frozen=True)
class Members:
    """The workers, and the conditions for being a member."""

    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    """The workers in the order in which they joined."""
    starting: dict[WorkerId, float] = field(default_factory=dict)
    """Workers that were asked for and have not joined yet, and when each was asked for."""
    next_worker: int = 1  # the number of the next worker; no number is used twice
    start_after: float = 0.0  # no worker is asked for before this time
    reference: Build = field(default_factory=Build)
    """The build that the job was checked with; every worker must have the same."""
    classes: tuple[Tensor, ...] = ()
    class_bytes: tuple[int, ...] = ()
    """One tensor of the state for each class of tensors that all axes cut alike, and the bytes of the class;
    empty if not known.
    """
    kind: str = ""
    """The first member's kind.  It never changes: with ``reproducible`` only workers of this kind may be
    members.
    """
    mixed: tuple[int, ...] = ()
    """The generations whose members were of several kinds; their steps are marked."""
    seats: tuple[WorkerId, ...] = ()
    """The members of the latest plan, in the order in which they sit next time."""
    declined: tuple[WorkerId, ...] = ()
    """Newcomers that would cost more than they bring; they wait as spares."""

    def without(self, workers: Iterable[WorkerId]) -> Members:
        """Returns the members without ``workers``, which are no longer part of the run."""
        gone = frozenset(workers)
        return evolve(
            self, workers={worker: known for worker, known in self.workers.items() if worker not in gone}
        )


@dataclass(frozen=True)
class Home:
    """The machine behind a node with workers, and the time at which the first of them joined."""

    host: str
    since: float


@dataclass(frozen=True)
class Refusal:
    """No worker is started on the refused node any more."""

    why: str
    at: float
    shared: bool
    by_job: bool = False
    """``shared`` means that the node sees another bucket or other data than the other nodes; ``by_job`` means
    that the job is at fault, for example because it asks for what the node lacks.
    """


@dataclass(frozen=True)
class Announced:
    """The machine behind a node will be taken at the time ``at``, as ``source`` has announced.  If it is only
    an ``advice``, it may be taken, and the advice expires then.
    """

    source: str
    at: float
    advice: bool = False


@dataclass(frozen=True)
class Lemon:
    """The incidents of a node on which workers have failed: see ``lemons.py``."""

    failures: tuple[float, ...] = ()
    """The times of the incidents."""
    times: int = 0
    """Number of times that the node was closed."""
    since: float = 0.0
    until: float = 0.0
    """The node gets no worker between these times; it may have some again if both are equal."""

    @property
    def closed(self) -> bool:
        return self.since < self.until


@dataclass(frozen=True)
class Cluster:
    """The nodes and their keepers."""

    nodes: dict[NodeId, bool] = field(default_factory=dict)
    """The nodes that were found and are not gone, and whether the keeper of each has come up; before that, no
    worker of the node is a member.
    """
    refused: dict[NodeId, Refusal] = field(default_factory=dict)
    keepers: tuple[NodeId, ...] = ()
    """The nodes whose keepers are up."""
    slots: int = 0  # the workers that the cluster could still start, on nodes neither refused nor taken
    blamed: tuple[NodeId, ...] = ()
    """The nodes whose stores were blamed since the last world was formed: all members were there, and the
    next world still did not form.
    """
    replaced: tuple[tuple[NodeId, int], ...] = ()
    """The nodes on which a process was replaced because of its setup, each with the occasion (see
    ``admission.replaced``).
    """
    homes: dict[NodeId, Home] = field(default_factory=dict)  # the nodes from which workers have joined
    stays: dict[str, float] = field(default_factory=dict)
    """Expected stay in seconds of each host that has left before: see ``growth.py``."""
    notices: dict[NodeId, tuple[Announced, ...]] = field(default_factory=dict)
    """The notices for each node, one of each source: see ``draining.py``."""
    leaving: tuple[NodeId, ...] = ()
    """The nodes that will be taken and whose workers are in no later world."""
    let_go: tuple[NodeId, ...] = ()
    """The nodes that will be taken and on which the run needs nothing any more."""
    lemons: dict[NodeId, Lemon] = field(default_factory=dict)
    """The nodes on which workers have failed."""

    def deadline(self, node: NodeId) -> float | None:
        """Returns the time at which the node's machine will be taken; None if nothing is announced."""
        return min((each.at for each in self.notices.get(node, ()) if not each.advice), default=None)

    @property
    def deadlines(self) -> dict[NodeId, float]:
        """The times at which machines will be taken, by node.

        Every event asks for them while a notice is open, so they are worked out once for the same cluster.
        """
        return _deadlines(Same(self))

    def closed(self, *, few: bool) -> tuple[NodeId, ...]:
        """Returns the nodes that get no new worker because they will be taken, or may be, or because workers fail
        there.  If workers are ``few``, a node that may be taken is better than none.
        """
        taken = (node for node in self.notices if not few or self.deadline(node) is not None)
        failing = (node for node, known in self.lemons.items() if known.closed)
        return tuple(dict.fromkeys((*taken, *failing)))


@lru_cache(maxsize=8)
def _deadlines(known: Same) -> dict[NodeId, float]:
    cluster: Cluster = known.value
    return {node: at for node in cluster.notices if (at := cluster.deadline(node)) is not None}


# ---- history


@dataclass(frozen=True)
class JobFailure:
    """The user's code raised ``signature`` (exception type and frame) while ``step`` was computed."""

    signature: str
    step: int
    worker: WorkerId
    generation: int


@dataclass(frozen=True)
class Vote:
    """The digest of one worker's copy of a cell, at a version that was to be saved, or of the gradients that it
    has computed from a microbatch.
    """

    worker: WorkerId
    node: NodeId
    about: str
    """The cell, or the microbatch and the place in a model group."""
    digest: str


@dataclass(frozen=True)
class Dispute:
    """Replicas had different bits of ``step``, which was to be saved (``corruption.py``), or members computed
    different gradients in it (``wrong_gradients.py``).
    """

    step: int
    votes: tuple[Vote, ...] = ()
    """The votes about what is in dispute; () if it is known who was wrong."""
    times: int = 1
    """The number of disputes since the last time at which all agreed; of those about gradients, since somebody was
    found wrong, too.
    """
    generation: int = 0
    """The world whose members computed different gradients; 0 for a save."""


@dataclass(frozen=True)
class History:
    """The history of the run: the steps that were committed, saved and given up."""

    lineage: Lineage = ()
    saved: tuple[Version, ...] = ()
    """The versions on the lineage that are in the bucket, oldest first."""
    # when each was written, as far as known; empty unless a rule asks for the age of checkpoints
    written: tuple[tuple[Version, float], ...] = ()
    last: Outcome | None = None
    """The newest commit."""
    untold: tuple[int, ...] = ()
    """Steps that the present generation committed but whose outcome is unknown here: only a coordinator that
    died was told.
    """
    furthest: Version = field(default_factory=lambda: Version(0, 0))
    """The greatest step ever committed, even if it was given up since, with the generation that committed it
    first.
    """
    fruitless: int = 0
    """The number of generations in a row that ended without a commit, or got no further than an earlier one.
    """
    settled: Settle | None = None
    """The latest settlement; it is repeated to members that may not have heard it from a coordinator that
    died.
    """
    failures: tuple[JobFailure, ...] = ()
    """Errors of the user's code at steps that are not committed yet."""
    validated: Score | None = None
    """The newest validation."""
    best: Score | None = None
    """The validation with the smallest loss."""
    trusted: int | None = None
    """The last step whose state the next world may begin with, because replicas of a later one differ; None
    if it may be any.
    """
    dispute: Dispute | None = None
    """The latest dispute about a save, until replicas agree at that step or later."""
    rerun: Dispute | None = None
    """The latest dispute about gradients, until members agree in that step or a later one."""

    @property
    def version(self) -> Version:
        """The newest committed version: the tip of the lineage."""
        return lineage.tip(self.lineage)

    @property
    def recorded_step(self) -> int:
        """The step up to which the outcome of every commit is known, so that members need not keep those
        commits.
        """
        return min(self.untold) - 1 if self.untold else self.version.step

    def contains(self, version: Version) -> bool:
        """Returns whether ``version`` is on the lineage, which means that it was committed and not given up."""
        return lineage.contains(self.lineage, version)

    def may_begin(self, version: Version) -> bool:
        """Returns whether the next world may begin with ``version``, if it is held completely."""
        return self.contains(version) and (self.trusted is None or version.step <= self.trusted)

    def is_news(self, outcome: Outcome) -> bool:
        """Returns whether this commit of the present generation tells anything new; most commits are reported
        by several members.
        """
        return outcome.step > self.version.step or outcome.step in self.untold


# ---- checkpoints on their way


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way to the bucket."""

    version: Version
    members: tuple[WorkerId, ...]
    """The workers whose parts make up the checkpoint."""
    nodes: tuple[NodeId, ...]
    """The node of each member, whose keeper uploads the part."""
    layout: Layout
    """The layout of the members."""
    heard_at: float
    """The time at which the save began or the last part was reported."""
    reported: tuple[WorkerId, ...] = ()
    """The workers whose parts are in the bucket."""
    ask_at: float = 0.0
    """The time at which the manifest is asked for, first or again, once all parts are in the bucket."""
    asked: bool = False
    """True once the manifest was asked for."""
    by: int = 0
    """The generation of the world that writes the checkpoint; 0 means the generation that committed the
    version.
    """
    failed: str = ""
    """The reason why the checkpoint can never be complete, if it was reported before the commit of its
    version.
    """
    refused_at: float | None = None
    """The time since which the bucket refuses what it is given of the checkpoint; None if it does not."""
    refused: tuple[WorkerId, ...] = ()
    """The workers whose parts the bucket has refused and does not have yet.  Their keepers say so once."""
    digests: dict[WorkerId, str] = field(default_factory=dict)
    """The digest of the whole copy of each worker in ``reported``, if others have copies of the same cell."""

    @property
    def complete(self) -> bool:
        return not self.failed and len(self.reported) >= len(self.members)

    def is_of(self, generation: int) -> bool:
        """Returns whether a part written in ``generation`` belongs to this checkpoint; 0 is the generation
        that committed the version.
        """
        return (generation or self.version.generation) == (self.by or self.version.generation)

    def report(self, worker: WorkerId, now: float, digest: str = "") -> Saving:
        """Returns the saving after the part of ``worker`` has reached the bucket; ``digest`` is that of its
        copy.
        """
        reported, refused = {*self.reported, worker}, tuple(each for each in self.refused if each != worker)
        return evolve(
            self,
            reported=tuple(each for each in self.members if each in reported),
            refused=refused,
            digests={**self.digests, worker: digest} if digest else self.digests,
        ).heard(now)

    def heard(self, now: float) -> Saving:
        """Returns the saving after something was heard of it, so that its silence and its refusal count from
        ``now`` on.
        """
        return evolve(self, heard_at=now, refused_at=now if self.refused else None)

    @property
    def needed(self) -> frozenset[NodeId]:
        """The nodes whose keepers have still to report a part."""
        reported = frozenset(self.reported)
        parts = zip(self.members, self.nodes, strict=False)
        return frozenset(node for member, node in parts if member not in reported)


@dataclass(frozen=True)
class Saves:
    """The checkpoints on their way."""

    pending: tuple[Saving, ...] = ()
    """One saving for each version, in order of version."""

    def find(self, version: Version) -> Saving | None:
        return next((saving for saving in self.pending if saving.version == version), None)

    def put(self, saving: Saving) -> Saves:
        """Returns the saves with ``saving`` instead of the present one of its version."""
        return Saves(
            tuple(sorted((*self.without(saving.version).pending, saving), key=lambda each: each.version))
        )

    def without(self, version: Version) -> Saves:
        return Saves(tuple(saving for saving in self.pending if saving.version != version))

    @property
    def orders(self) -> tuple[Save, ...]:
        """The saves that the keepers are to upload."""
        return tuple(
            Save(each.version, each.by or each.version.generation, each.layout, each.members, each.nodes)
            for each in self.pending
            if not each.failed
        )


# ---- copies in host memory, and takeover


@dataclass(frozen=True)
class Host:
    """A keeper, as a place where copies are."""

    address: str = ""
    zone: str = ""
    kept: tuple[Holding, ...] = ()
    """The copies that the keeper listed."""
    asked: int = 0
    """The generation after which the keeper listed them."""


@dataclass(frozen=True)
class CopyInventory:
    """The copies in host memory, as far as they are known."""

    hosts: dict[NodeId, Host] = field(default_factory=dict)
    asked: int = 0
    """The generation after which the keepers were asked to list their copies."""
    answers_until: float = 0.0
    """The time until which answers to that question are awaited."""
    unreadable: tuple[NodeId, ...] = ()
    """The keepers whose copies a member could not read since the last commit."""
    unreported: int = 0
    """The previous generation, if no member is left to report its commits, so that only copies may prove
    them; 0 otherwise.
    """
    buddies: dict[NodeId, NodeId] = field(default_factory=dict)
    """Maps each node to its buddy, the node whose keeper also holds its copies."""
    alone: tuple[NodeId, ...] = ()
    """The nodes of the present world without a buddy, as last reported."""
    copied: Version | None = None
    """The newest version since the generation began that is complete in the host memory of all members."""
    buddied: Version | None = None  # the newest such version at all buddies
    protected: tuple[Version | None, Version | None] = (None, None)
    """The values of ``copied`` and ``buddied`` from earlier generations."""


@dataclass(frozen=True)
class Takeover:
    """The matters that earlier coordinators have left open, and the events that they could not handle."""

    startups: int = 0
    """The number of coordinators in a row that recorded nothing but their own start."""
    stumbles: tuple[str, ...] = ()
    """The events that coordinators could not handle, as :class:`~elastic.protocol.events.Stumbled` names
    them.
    """
    blind_until: float = 0.0
    """The time until which a world that no readable journal mentions may still commit."""
    unread: int = 0
    """A number that the next generation exceeds, since coordinators with unreadable journals may have used
    numbers up to it.
    """


# ---- the run


@dataclass(frozen=True)
class RunState:
    """The coordinator's whole knowledge of a run; each event replaces it."""

    incarnation: int
    generation: int  # the highest generation that was begun
    state: State
    members: Members = field(default_factory=Members)
    cluster: Cluster = field(default_factory=Cluster)
    history: History = field(default_factory=History)
    saves: Saves = field(default_factory=Saves)
    copies: CopyInventory = field(default_factory=CopyInventory)
    watch: Watch = field(default_factory=Watch)
    takeover: Takeover = field(default_factory=Takeover)
    stop: str = ""  # the reason why the run is to stop; "" if nobody asked for it
    gave_up: str = ""  # the reason why the run ends as failed once it has stopped; "" if it does not
    health: Health = field(default_factory=Health)
    skips: Skips = field(default_factory=Skips)
    stragglers: Stragglers = field(default_factory=Stragglers)
    # the last step of a run that ends before the target step, since its loop or its patience is over; 0: it
    # does not
    enough: int = 0
    # the validation by which the patience is measured: the last one that was better by ``min_delta``
    mark: Score | None = None
    worse: tuple[Version, ...] | None = None  # the versions validated after ``mark``
    why: str = ""  # the reason why the loop ended the run; "" if it has not
    # the reason for which a loop of this generation asks for the end; it counts once a commit says so
    asked: str = ""
    # the members whose loops have left that step behind, if any: they make no later one
    left: tuple[WorkerId, ...] | None = None

    @staticmethod
    def begin(
        incarnation: int,
        now: float,
        saved: tuple[Version, ...] = (),
        lineage: Lineage = (),
        generation: int = 0,
        next_worker: int = 1,
    ) -> RunState:
        """Returns a new run, or the run that the bucket describes.

        The next generation is greater than ``generation`` and than all of ``lineage``.  Versions in ``saved``
        off the lineage are left out.
        """
        known, used = History(lineage), max(generation, *(each for each, _ in lineage), 0)
        history = evolve(known, saved=tuple(sorted(filter(known.contains, saved))))
        return RunState(incarnation, used, Waiting(now), Members(next_worker=next_worker), history=history)

    @property
    def version(self) -> Version:
        """The newest committed version."""
        return self.history.version

    @property
    def step(self) -> int:
        """The newest committed step."""
        return self.history.version.step

    @property
    def workers(self) -> dict[WorkerId, Worker]:
        """The workers that joined and are not known to be gone."""
        return self.members.workers

    @property
    def plan(self) -> Plan | None:
        """The plan of the present generation; None if the generation is settled."""
        return self.state.plan if isinstance(self.state, Forming | Running | Stopping | Finishing) else None

    @property
    def over(self) -> bool:
        """True if the run has ended."""
        return isinstance(self.state, TERMINAL)

    @property
    def next_generation(self) -> int:
        """The number of the next generation, which no coordinator has used."""
        return max(self.generation, self.takeover.unread) + 1

    def knows(self, worker: WorkerId) -> bool:
        """Returns whether ``worker`` is part of the run or on its way to it.  Any other worker that asks is
        told to leave.
        """
        return worker in self.members.workers or worker in self.members.starting

    def grants_lease(self, generation: int) -> bool:
        """Returns whether a member's lease on ``generation`` may be prolonged: only the present world's,
        until it is fenced.
        """
        planned = isinstance(self.state, Stopping) and self.state.planned
        return generation == self.generation and (planned or isinstance(self.state, Running | Finishing))
