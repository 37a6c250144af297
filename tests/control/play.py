"""A run told as a story: events in, reasons and actions out.  Each line of a test is one thing that happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from elastic.control.evolve import evolve
from elastic.control.machine import Transition, advance
from elastic.control.rules import Rules
from elastic.control.run import RunState, State, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from elastic.protocol.actions import Action, ConnectAhead, Upload
from elastic.protocol.commit_record import DUE, GO_ON, LAST, NO_SAVE, Outcome, is_saved
from elastic.protocol.copy_schedule import due
from elastic.protocol.plan import Plan
from tests.support.cells import cell, classes

RULES = Rules(
    min_workers=1,
    max_workers=2,
    layout=LayoutRule(dp_replicate=None, dp_shard=None, min_shard=1, use="all"),
    target_step=100,
    save_every=10,
    form_s=30.0,
    fence_s=5.0,
    stall_s=20.0,
    lease_s=60.0,
    wait_s=300.0,
    stop_s=15.0,
    max_fruitless=3,
    grow_debounce_s=2.0,
    reproducible=True,
)
CLASSES = classes((7, 3))
A = TypeVar("A", bound=Action)


def rules(**changes: Any) -> Rules:
    """Returns the usual rules with ``changes``."""
    return replace(RULES, **changes)


def but(run: RunState, part: str, **changes: Any) -> RunState:
    """Returns the run with other fields in its value ``part``: ``but(run, "history", saved=())``."""
    return evolve(run, **{part: evolve(getattr(run, part), **changes)})


def outcome(step: int, generation: int, boundary: int = GO_ON) -> Outcome:
    """Returns the record of a commit that begins no save."""
    return Outcome(step, generation, 1.5, (0.1 * step,), (4,), ((step,),), True, boundary, saves=False)


class Play:
    """A story: ``run`` is its present state, ``now`` the time in seconds, ``last`` the last decision, whose
    reason most methods return.
    """

    def __init__(self, rules: Rules = RULES, run: RunState | None = None) -> None:
        self.rules, self.now = rules, 0.0
        self.run = run or RunState.begin(1, 0.0)
        self.last = Transition(self.run, (), "")
        self.edges: list[tuple[type[State], type[State]]] = []
        self.connects = True
        """Members connect a world ahead as soon as they are asked."""

    def tell(self, event: ev.Event) -> str:
        before = type(self.run.state)
        self.last = advance(self.run, event, self.now, self.rules)
        self.run = self.last.run
        if type(self.run.state) is not before:
            self.edges.append((before, type(self.run.state)))
        asked = [action.plan for action in self.last.actions if isinstance(action, ConnectAhead)]
        return self._connect(*asked) if asked and self.connects else self.last.reason

    def _connect(self, ahead: Plan) -> str:
        """Lets all members of ``ahead`` connect it at once."""
        told, first, actions = [self.last.reason], self.last, list(self.last.actions)
        for worker in ahead.members:
            told.append(
                self.tell(ev.ConnectedAhead(worker, ahead.generation, ahead.ahead, ahead.incarnation))
            )
            actions += self.last.actions
        reason = "; ".join(filter(None, told))
        self.last = Transition(self.run, tuple(actions), reason, first.durable or self.last.durable)
        return reason

    def later(self, seconds: float) -> str:
        """Lets ``seconds`` go by, and tells a tick."""
        self.now += seconds
        return self.tell(ev.Tick())

    # ---- events

    def join(self, *workers: str, kind: str = "cpu") -> str:
        """Each worker joins on a node of its own (n1, n2, …), whose keeper is up first."""
        reason = ""
        for number, worker in enumerate(workers, 1):
            self.tell(ev.KeeperUp(NodeId(f"n{number}")))
            reason = self.tell(ev.Joined(WorkerId(worker), NodeId(f"n{number}"), kind, CLASSES))
        return reason

    def lose(self, worker: str, why: str = "its process died") -> str:
        return self.tell(ev.Lost(WorkerId(worker), why))

    def here(self, *workers: str) -> str:
        return [self.tell(ev.Here(WorkerId(worker), self.generation)) for worker in workers][-1]

    def ready(self, *workers: str) -> str:
        return [self.tell(ev.Ready(WorkerId(worker), self.generation)) for worker in workers][-1]

    def commit(self, step: int, boundary: int = GO_ON, behind: bool = False) -> Outcome:
        """Returns what the world concludes of ``step``; ``behind`` says that a member has no room for a save."""
        rules = self.rules
        asked = (
            LAST
            if step == rules.target_step
            else DUE
            if due(step, rules.save_every, rules.target_step)
            else NO_SAVE
        )
        return replace(
            outcome(step, self.generation, boundary), behind=behind, saves=is_saved(boundary, asked, behind)
        )

    def step(self, step: int, boundary: int = GO_ON, behind: bool = False) -> str:
        """World rank 0 reports that the world committed ``step``."""
        return self.tell(
            ev.StepDone(self.plan.members[0], self.generation, self.commit(step, boundary, behind))
        )

    def steps(self, first: int, last: int) -> str:
        return [self.step(step) for step in range(first, last + 1)][-1]

    def answer(
        self, worker: str, at: Version | None, prepared: int | None = None, saw: int | None = None
    ) -> str:
        """The worker is fenced, holds its shard ``at`` a version, and has seen the commit of step ``saw``."""
        seen = (self.commit(saw),) if saw else ()
        held = (self.shard(worker, at),) if at is not None else ()
        return self.tell(ev.Fenced(WorkerId(worker), self.generation, held, prepared, seen))

    def broken(
        self, worker: str, cause: str = "peer", detail: str = "connection closed", signature: str = ""
    ) -> str:
        step = self.run.step + 1
        return self.tell(ev.Broken(WorkerId(worker), self.generation, step, cause, detail, signature))

    def beat(self, node: str, *progress: tuple[str, int, int, int]) -> str:
        return self.tell(
            ev.Beat(
                NodeId(node), tuple(ev.Progress(WorkerId(w), self.generation, *done) for w, *done in progress)
            )
        )

    def save(self, version: Version, *workers: str, by: int = 0) -> str:
        """The parts of ``workers`` arrive, then the manifest; ``by`` is the generation whose members wrote
        them (0: the version's).
        """
        for worker in workers:
            self.tell(ev.ShardSaved(WorkerId(worker), version, by))
        return self.tell(ev.Saved(version, "digest"))

    # ---- the present state

    @property
    def plan(self) -> Plan:
        assert self.run.plan is not None
        return self.run.plan

    @property
    def pending(self) -> tuple[WorkerId, ...]:
        """The workers that have not answered the fence yet."""
        return self.run.state.pending if isinstance(self.run.state, Stopping) else ()

    @property
    def generation(self) -> int:
        return self.run.generation

    def shard(self, worker: str, version: Version) -> Holding:
        """Returns the shard of ``worker`` in the layout of the present generation."""
        index = self.plan.layout.coordinates(self.plan.world_rank(WorkerId(worker)))["dp_shard"]
        return Holding(WorkerId(worker), version, cell(self.plan.layout.dp_shard, index))

    def did(self, kind: type[A]) -> list[A]:
        """Actions of that kind that the last event brought."""
        return [action for action in self.last.actions if isinstance(action, kind)]

    @property
    def deeds(self) -> list[str]:
        """Names of all actions that the last event brought, in order, except ``Upload``, which every change
        of saves brings.
        """
        return [type(action).__name__ for action in self.last.actions if not isinstance(action, Upload)]


def started(workers: int = 2, **changes: Any) -> Play:
    """Returns a run that ``workers`` workers have just joined, while generation 1 is being formed."""
    play = Play(rules(max_workers=workers, **changes))
    play.tell(ev.Capacity(workers))
    play.join(*(f"w{number}" for number in range(1, workers + 1)))
    return play


def stepping(workers: int = 2, **changes: Any) -> Play:
    """Returns a run whose generation 1 of ``workers`` workers runs at step 0."""
    play = started(workers, **changes)
    members = [f"w{number}" for number in range(1, workers + 1)]
    play.here(*members)
    play.ready(*members)
    return play


def reformed(play: Play) -> Play:
    """All members of the generation that is being formed take the plan and get ready."""
    play.here(*play.plan.members)
    play.ready(*play.plan.members)
    return play
