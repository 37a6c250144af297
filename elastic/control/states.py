"""The states of a run, the edges between them, and everything the coordinator knows.

    Waiting ──► Forming ──► Running ──► Finishing ──► Finished
       ▲           │           │            │
       │           ▼           ▼            ▼
       └─────── Stopping ◄─────┴────────────┘ ──► Stopped, Failed

Failure, growth and a user's stop are all edges of this one table; a state that lives as a flag is a state that nobody
can list.  All values are immutable: dictionaries are replaced, never changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.control.liveness import Watch
from elastic.control.saving import Saves
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol import lineage
from elastic.protocol.actions import Settle
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Fenced
from elastic.protocol.lineage import Lineage
from elastic.protocol.plan import Plan
from storage.slices import Tensor

NEVER = float("inf")
LATE = 10
"""So many copies may be due before it is said that there is none."""


@dataclass(frozen=True)
class Waiting:
    """No world: too few workers for any layout."""

    since: float


@dataclass(frozen=True)
class Forming:
    """The plan is sent.  ``here``: it arrived; ``ready``: groups formed, state healed; ``here_at``: when the first was here."""

    plan: Plan
    deadline: float
    here: tuple[WorkerId, ...] = ()
    ready: tuple[WorkerId, ...] = ()
    here_at: float = NEVER


@dataclass(frozen=True)
class Running:
    """The world steps."""

    plan: Plan
    since: float


@dataclass(frozen=True)
class Stopping:
    """The world comes to an end; nothing is aborted before nobody is ``pending``.

    ``planned``: at a boundary that the members agree on in a commit; otherwise they were fenced.  ``answers``: who can apply
    nothing more, and what they hold.  ``lost``: members whose end is certain.  ``expelled``: killed, their word counts no more, yet
    perhaps still alive.  ``save``: the boundary is also saved.  ``job_error``: the user's traceback when the job is at fault.
    """

    plan: Plan
    cause: str
    planned: bool
    pending: tuple[WorkerId, ...]
    deadline: float
    answers: tuple[Fenced, ...] = ()
    lost: tuple[WorkerId, ...] = ()
    expelled: tuple[WorkerId, ...] = ()
    save: bool = False
    job_error: str = ""


@dataclass(frozen=True)
class Finishing:
    """The target step is committed, its checkpoint on the way."""

    plan: Plan
    deadline: float


@dataclass(frozen=True)
class Finished:
    """The target step is in the bucket."""


@dataclass(frozen=True)
class Stopped:
    """Somebody asked for it; the same command resumes."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A budget is spent, or (``job_error``: the user's traceback) the job itself is at fault."""

    reason: str
    job_error: str = ""


Ended = Finished | Stopped | Failed
State = Waiting | Forming | Running | Stopping | Finishing | Ended
TERMINAL = (Finished, Stopped, Failed)

ALLOWED: dict[type[State], frozenset[type[State]]] = {
    Waiting: frozenset({Forming, Stopped, Failed, Finished, Stopping}),  # Stopping: a world that the journal does not know of
    Forming: frozenset({Running, Stopping, Finishing}),  # Finishing: at the target, only its checkpoint is missing
    Running: frozenset({Stopping, Finishing}),
    Stopping: frozenset({Forming, Waiting, Stopped, Failed, Finishing, Finished}),  # Finishing: the target came before the boundary
    Finishing: frozenset({Stopping, Finished}),
    Finished: frozenset(),
    Stopped: frozenset(),
    Failed: frozenset(),
}
"""From each state the states that may follow it directly."""


@dataclass(frozen=True)
class Worker:
    """A process that joined and is not known to be gone.  ``unfit``: why it can take part no more; it is replaced."""

    node: NodeId
    kind: str
    joined_at: float
    holdings: tuple[Holding, ...] = ()
    unfit: str = ""
    host: str = ""


@dataclass(frozen=True)
class Home:
    """Of workers: the machine that a node is, and when the first of them joined."""

    host: str
    since: float


@dataclass(frozen=True)
class Refusal:
    """Of a node: no worker is started there any more.  ``shared``: it does not see the bucket or the data as the same place."""

    why: str
    at: float
    shared: bool


@dataclass(frozen=True)
class Host:
    """A keeper as a place of copies.  ``kept``: what it said to hold, when it was ``asked`` about that generation."""

    address: str = ""
    zone: str = ""
    kept: tuple[Holding, ...] = ()
    asked: int = 0


@dataclass(frozen=True)
class JobFailure:
    """The user's code raised ``signature`` (exception type and frame) while ``step`` was computed."""

    signature: str
    step: int
    worker: WorkerId
    generation: int


@dataclass(frozen=True)
class RunState:
    """The coordinator's whole knowledge of a run, replaced at each event."""

    incarnation: int
    generation: int
    """The highest begun."""
    state: State
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    """In the order in which they joined."""
    starting: dict[WorkerId, float] = field(default_factory=dict)
    """Asked for, not joined yet; when it was asked."""
    reference: Build = field(default_factory=Build)
    """What the job was checked with, and every worker must be made of."""
    nodes: dict[NodeId, bool] = field(default_factory=dict)
    """Those that were found, and whether their keepers came up: none of a node's workers is a member before."""
    refused: dict[NodeId, Refusal] = field(default_factory=dict)
    keepers: tuple[NodeId, ...] = ()
    hosts: dict[NodeId, Host] = field(default_factory=dict)
    """What is known of the keepers' copies."""
    stock: int = 0
    """The generation after which keepers were asked what they hold ..."""
    stock_until: float = 0.0
    """... and until when an answer is waited for."""
    unreadable: tuple[NodeId, ...] = ()
    """Keepers from whose copies a member could not take what it was to, since the last commit."""
    silent: int = 0
    """The generation before, if none of its members is left that said what it had seen: its copies may know more."""
    buddies: dict[NodeId, NodeId] = field(default_factory=dict)
    """By node: the one whose keeper holds its copies."""
    copied: Version | None = None
    """The newest that is complete in all members' host memory since the generation began ..."""
    buddied: Version | None = None
    """... and at all their buddies."""
    protected: tuple[Version | None, Version | None] = (None, None)
    """The same of generations before."""
    slots: int = 0
    """Workers the cluster could still start, on nodes that are not refused."""
    start_after: float = 0.0
    next_worker: int = 1
    classes: tuple[Tensor, ...] = ()
    """One tensor of the state for each class that all axes cut alike: all that coverage depends on."""
    kind: str = ""
    """The first member's; with ``reproducible`` only workers of it may be members, so it never changes."""
    mixed: tuple[int, ...] = ()
    """Generations whose members were of several kinds: the mark on their steps."""
    seats: tuple[WorkerId, ...] = ()
    """The latest plan's members, in the order in which they shall sit next."""
    blamed: tuple[NodeId, ...] = ()
    """Store nodes with which forming failed though every member was there, since the last world that formed."""
    lineage: Lineage = ()
    saved: tuple[Version, ...] = ()
    """Durable versions on the lineage, oldest first."""
    saves: Saves = ()
    last: Outcome | None = None
    """The newest commit."""
    blind_until: float = 0.0
    """Until then a world may commit of which no journal says anything that could be read."""
    unread: int = 0
    """The next generation is later than this one: so many may have been begun by coordinators whose journal could not be read."""
    untold: tuple[int, ...] = ()
    """Steps that the present generation committed and nobody has said what they consumed: they were told to a coordinator that died."""
    watch: Watch = field(default_factory=Watch)
    lease_until: float = 0.0
    """When the last lease on the generation has run out: silent members have stopped of their own accord."""
    furthest: Version = field(default_factory=lambda: Version(0, 0))
    """The greatest step ever committed, also if it was given up since, and by whom first."""
    fruitless: int = 0
    """Generations in a row that ended without a commit, or where one has ended before."""
    homes: dict[NodeId, Home] = field(default_factory=dict)
    """Nodes that workers have joined from."""
    stays: dict[str, float] = field(default_factory=dict)
    """How long a host is expected to stay, of those that have gone: see ``growing.py``."""
    reform_s: float = 0.0
    """Recent time from a plan to ``Go``: half of it the last one's."""
    declined: tuple[WorkerId, ...] = ()
    """Newcomers of whom it was said that they would cost more than they bring; they wait as spares."""
    failures: tuple[JobFailure, ...] = ()
    stop: str = ""
    """Why a stop is asked for."""
    settled: Settle | None = None
    """The latest settlement: said again to members who may not have heard it, when a coordinator has died."""
    startups: int = 0
    """Coordinators in a row that recorded nothing but their own beginning."""
    stumbles: tuple[str, ...] = ()
    """What coordinators have died of, as :class:`~elastic.protocol.events.Stumbled` names it."""
    gave_up: str = ""
    """Why the run is to end as failed once it has stopped."""

    @staticmethod
    def begin(
        incarnation: int,
        now: float,
        saved: tuple[Version, ...] = (),
        lineage: Lineage = (),
        generation: int = 0,
        next_worker: int = 1,
    ) -> RunState:
        """From nothing, or from what the bucket says.  The next generation is later than ``generation`` and all of ``lineage``."""
        generation = max(generation, *(each for each, _ in lineage), 0)
        known = tuple(sorted(version for version in saved if on(lineage, version)))
        return RunState(incarnation, generation, Waiting(now), lineage=lineage, saved=known, next_worker=next_worker)

    @property
    def version(self) -> Version:
        """Where the lineage stands: the newest committed version."""
        return lineage.tip(self.lineage)

    @property
    def step(self) -> int:
        """The newest committed."""
        return self.version.step

    @property
    def recorded_step(self) -> int:
        """Every commit up to it has been told, and need not be kept by those who have seen it."""
        return min(self.untold) - 1 if self.untold else self.step

    @property
    def unprotected_since(self) -> int | None:
        """The step of which, or of none later, the members' copies in host memory are complete, though later ones are to be."""
        plan = self.plan
        if plan is None or not plan.copy_every:
            return None
        return plan.version.step if self.copied is None else self.copied.step if self.late else None

    @property
    def unbuddied_since(self) -> int | None:
        """The step of which, or of none later, all members' copies are at their buddies too, though later ones should long have been."""
        plan = self.plan
        return (self.buddied or plan.version).step if plan is not None and self.late_at_buddies else None

    @property
    def late(self) -> bool:
        """Have so many copies been due that there would be a later one if all were well?"""
        plan = self.plan
        return plan is not None and bool(plan.copy_every) and self._is_late(self.copied, self.paces[0])

    @property
    def late_at_buddies(self) -> bool:
        """The same of those that are to be brought to other nodes."""
        plan = self.plan
        return plan is not None and bool(plan.buddy_every) and self._is_late(self.buddied, self.paces[1])

    def _is_late(self, version: Version | None, pace: int) -> bool:
        assert self.plan is not None
        return self.step - (version or self.plan.version).step >= LATE * pace

    @property
    def paces(self) -> tuple[int, int]:
        """Steps from one copy of the present world in host memory to the next, and at the buddies (0: none), as its members agreed."""
        plan, last = self.plan, self.last
        if plan is None:
            return 0, 0
        agreed = (last.copy_every, last.buddy_every) if last is not None and last.generation == plan.generation else (0, 0)
        copies, buddies = (
            max(planned, each) if planned else 0 for planned, each in zip((plan.copy_every, plan.buddy_every), agreed, strict=True)
        )
        return copies, buddies

    @property
    def plan(self) -> Plan | None:
        """Of the present generation, while it is not settled."""
        return self.state.plan if isinstance(self.state, Forming | Running | Stopping | Finishing) else None

    @property
    def over(self) -> bool:
        return isinstance(self.state, TERMINAL)

    def grants_lease(self, generation: int) -> bool:
        """May a member's lease on ``generation`` be prolonged?  Not once it is fenced."""
        state = self.state
        stepping = isinstance(state, Running | Finishing) or (isinstance(state, Stopping) and state.planned)
        return stepping and generation == self.generation


on = lineage.contains
