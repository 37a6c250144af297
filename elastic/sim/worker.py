"""Models one worker: the product's own :class:`Member`, with drawn durations instead of work.

    idle -> forming -> healing -> ready -> (computing -> prepared -> applying)* -> left

``Member`` decides.  This file determines how long things take, what reaches the worker, what breaks, and what
its memory really holds.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any

from elastic.errors import FencedOff
from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol.actions import Settle
from elastic.protocol.commit_record import ENDS, HAND_OVER, Outcome
from elastic.protocol.events import (
    Broken,
    ConnectedAhead,
    Ends,
    Fenced,
    Here,
    Joined,
    Progress,
    Ready,
    Starting,
    StepDone,
)
from elastic.protocol.faults import Point
from elastic.protocol.member import Member
from elastic.protocol.plan import Plan
from elastic.protocol.reruns import Computed, Differ
from elastic.sim.memory import Memory
from elastic.sim.network import Way
from elastic.sim.process import Process
from elastic.sim.truth import check_answer, check_plan, check_start
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation


class Phase(StrEnum):
    """The phase of a worker's work."""

    IDLE = "idle"
    FORMING = "forming"
    HEALING = "healing"
    READY = "ready"
    COMPUTING = "computing"
    PREPARED = "prepared"
    APPLYING = "applying"
    STANDING = "standing"
    """The worker cannot go on, reports this, and waits for a fence."""
    DONE = "done"
    """The worker has nothing left to do in this world: the target step or an agreed boundary is reached."""


class Worker(Process):
    """A worker.  ``held`` has the (version, cell) pairs that its memory really holds."""

    def __init__(self, sim: Simulation, name: WorkerId, node: NodeId) -> None:
        super().__init__(sim, name, node)
        self.member = Member(name, sim.rules.lease_s)
        self.joined = False
        self.phase = Phase.IDLE
        self.held: set[tuple[Version, Cell]] = set()
        self.garbage: set[tuple[Version, Cell]] = set()
        """The part of ``held`` that is the result of an aborted collective."""
        self.cell = Cell("")
        self.answered = 0
        """The generation of the last fence that it has answered."""
        self.newest: tuple[int, int] | None = None
        """The (step, generation) that it has applied last."""
        self.ended = 0
        """The last generation in which the worker's loop has ended the run."""
        self.left: Version | None = None
        """The version after whose step the worker's loop was left."""
        self._planned_at = 0.0
        self.progress: Progress | None = None
        self.ahead: tuple[int, int, int] | None = None
        """The incarnation, generation and attempt of the world that it has connected ahead."""
        self.memory = Memory(self)

    def end(self, why: str) -> None:
        self.sim.cluster.die(self, why)

    def passes(self, point: Point) -> None:
        self.sim.strikes.passes(self, point)

    # -- coming and going
    # -----------------------------------------------------------------------------------------

    def begin(self, parts: int) -> None:
        """Joins after ``parts`` parts of its start, each shorter than ``form_s``.  Reports the beginning of
        each part.
        """
        if not parts:
            return self.join()
        self.report(Starting(self.name, f"has {parts} parts of its start before it"))
        self.sim.clock.after(0.7 * self.sim.rules.form_s, self.receive, self._went_on, parts - 1)

    def _went_on(self, parts: int) -> None:
        self.sim.oracle.occasions["a start takes longer than form_s"] += not parts
        self.begin(parts)

    def join(self) -> None:
        self.joined = True
        self.report(self.introduction)
        self.member.heard(self.now)
        self._keep_lease()

    @property
    def introduction(self) -> Joined:
        scenario, build = self.sim.scenario, self.sim.cluster.build_of(self.node)
        kind = "cpu torch-2.13 threads-1"
        least, states = scenario.least_shard, scenario.room_of(self.node)
        return Joined(self.name, self.node, kind, scenario.classes, build, least_shard=least, states=states)

    def order(self, incarnation: int, call: Callable[..., object], *args: Any) -> None:
        """Obeys an order or an answer of a coordinator, or refuses it if the coordinator's incarnation is too
        old.
        """
        if self.member.heed(incarnation):
            call(*args)
        else:
            self.sim.oracle.occasions["an order of an older incarnation is refused"] += 1

    def attached(self) -> None:
        """Reports to a new coordinator the state of this worker, and all events that perhaps no coordinator
        has heard.
        """
        if not self.joined:
            return
        self.report(self.introduction)
        for event in self.member.attached():
            self._answer(event) if isinstance(event, Fenced) else self.report(event)

    # -- forming and healing
    # --------------------------------------------------------------------------------------

    def form(self, plan: Plan) -> None:
        if self.member.form(plan):
            self._enter()

    def connect_ahead(self, plan: Plan) -> None:
        """Connects the world of ``plan`` beside the steps, or finds no room for it."""
        if not self.member.connect_ahead(plan):
            return
        self.ahead = None
        # its own numbers: so what else a seed draws does not depend on it
        drawn = Random(f"{self.name} {plan.generation} {plan.ahead}")
        room = drawn.random() > 0.1
        self.sim.clock.after(0.3 * drawn.random(), self.receive, self._connected_ahead, plan, room)

    def _connected_ahead(self, plan: Plan, room: bool) -> None:
        if self.member.connecting != (plan.incarnation, plan.generation, plan.ahead):
            return  # it was dropped for a later one
        if not room:
            self.sim.oracle.occasions["a member connects no world ahead"] += 1
            return self.report(
                ConnectedAhead(self.name, plan.generation, plan.ahead, plan.incarnation, "there is no room")
            )
        self.ahead = plan.incarnation, plan.generation, plan.ahead
        self.report(ConnectedAhead(self.name, plan.generation, plan.ahead, plan.incarnation))

    def _enter(self) -> None:
        """Enters the world of the waiting plan, if the member allows this now."""
        plan = self.member.waiting
        if plan is None or not self.member.enter(plan):
            return
        if self.world is not None:
            raise Violation(
                f"{self.name} enters generation {plan.generation} and has not left generation "
                f"{self.world.generation}"
            )
        check_plan(self, plan)
        if plan.ahead:
            self.sim.oracle.occasions["a world has connected ahead"] += 1
            if self.ahead != (plan.incarnation, plan.generation, plan.ahead):
                raise Violation(
                    f"{self.name} is to take groups that it has not connected for generation {plan.generation}"
                )
        self.ahead = None
        self.world, self.phase = self.sim.world(plan), Phase.FORMING
        self._planned_at = self.sim.clock.now
        self.cell = cell_of(plan.layout, plan.world_rank(self.name))
        self._count(plan.version.step + 1, 0, 0)
        self.work(0.05 * self.sim.rng.random(), Point.FORMING, self._arrive, plan.generation)

    def _arrive(self, generation: int) -> None:
        self.post(self.member.say(Here(self.name, generation)))
        assert self.world is not None
        if self.left == self.world.plan.version and not self.world.plan.ends:
            self.report(self.member.say(Ends(self.name, generation, self.left.step)))
        if self.phase is Phase.FORMING:
            self.world.arrive(self)

    def formed(self) -> None:
        if self.phase is Phase.FORMING and self._may(self.member.go_on, "formed"):
            self.phase = Phase.HEALING
            self.work(0.2 + 0.6 * self.sim.rng.random(), Point.HEALING, self._healed)

    def refused(self) -> None:
        """Handles the refusal of the communication library to form the world."""
        if self.phase is Phase.FORMING:
            self._break("setup", "no such interface", signature="the library refuses")

    def _healed(self) -> None:
        if self.phase is not Phase.HEALING or not self._may(self.member.go_on, "healed"):
            return
        assert self.world is not None
        plan = self.world.plan
        match self.sim.cluster.supply(self, plan):
            case "damaged":
                self._break("damaged", "digest differs", version=plan.version)
            case "gone":
                self.peer_lost()
            case "down" if self.sim.clock.now < self._planned_at + self.sim.rules.form_s / 2:
                self.later(1.0, self._healed)
            case "down":
                self._break("peer", "the bucket does not answer")
            case _:
                self._whole()

    def _whole(self, *, garbage: bool = False) -> None:
        """Notes that the worker's shard of the plan's version is in its memory.  With ``garbage`` the shard
        only looks complete.
        """
        assert self.world is not None
        slot = (self.world.plan.version, self.cell)
        if not self._may(self.member.healed, self.now, Holding(self.name, *slot)):
            return
        self.sim.flips.healed(self, self.world.plan)
        self.held.add(slot)
        self.garbage |= {slot} if garbage else set()
        self.phase = Phase.READY
        self.sim.oracle.granted(self, self.now)  # a ``Ready`` is also the first request for a lease
        self.post(self.member.say(Ready(self.name, self.world.generation)))

    def garbled(self) -> None:
        """Handles a collective that looks complete because a member aborted the groups, and whose result is
        garbage.

        A commit record has a checksum, so the worker notices.  A slice that arrives during healing has none:
        only an earlier fence prevents its use.
        """
        self.sim.oracle.occasions["a collective completes with garbage"] += 1
        if self.phase is Phase.HEALING:
            self._whole(garbage=True)
        else:
            self.peer_lost()

    def go(self, generation: int) -> None:
        if not self.member.go(generation):
            return
        assert self.world is not None
        version = self.world.plan.version
        self.held = {(version, self.cell)}
        check_start(self)
        self._renew()  # at once: the lease counts from ``Ready``, which may be long ago
        self.memory.enter(self.world.plan)
        self._start_step()

    # -- one step
    # -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The newest version of which the worker holds its shard in the layout of its world."""
        return max((version for version, cell in self.held if cell == self.cell), default=None)

    def _start_step(self) -> None:
        version = self.version
        assert version is not None
        assert self.world is not None
        if version.step >= min(
            self.world.plan.ends or self.sim.rules.target_step, self.sim.rules.target_step
        ):
            self.phase = Phase.DONE
            return
        self.phase = Phase.COMPUTING
        self._count(version.step + 1, 0, 0)
        point = Point.FORWARD if self.sim.rng.random() < 0.5 else Point.BACKWARD
        if version.step + 1 != self.sim.scenario.dry_step:
            self.work(0.4 + 0.4 * self.sim.rng.random(), point, self._computed, version.step + 1)

    def _computed(self, step: int) -> None:
        if self.phase is not Phase.COMPUTING:
            return
        self._count(step, 1, 0)
        if not self.member.barred and self.sim.cluster.user_error(self, step):
            self._break("job", "ValueError: bad sample", signature="ValueError at user.py:7")
            return
        self.work(0.02, Point.BEFORE_COMMIT, self._contribute, step)

    def _contribute(self, step: int) -> None:
        if self.phase is not Phase.COMPUTING or not self._may(self.member.prepare, step):
            return
        assert self.world is not None
        self.sim.oracle.contributes(self, step)
        self.sim.flips.contributes(self, step)
        self.phase = Phase.PREPARED
        if (
            step == self.sim.scenario.ends_at
            and self.sim.scenario.asks
            and self.world.plan.members[-1] == self.name
        ):
            self.member.end()
            self.report(Ends(self.name, self.world.generation, 0, "it asks"))
        self.world.contribute(self, step, self.member.boundary, self.memory.through())

    def commit_seen(self, outcome: Outcome) -> None:
        if self.phase is Phase.PREPARED:
            self._count(outcome.step, 1, 1)
            self.work(0.02, Point.BEFORE_UPDATE, self._apply, outcome)

    def differs(self, differ: Differ) -> None:
        """Handles gradients of members that differ: nobody applies the step."""
        if self.phase is Phase.PREPARED and not self.member.leaving:
            self._break("differs", str(differ), computed=differ.computed)

    def _apply(self, outcome: Outcome) -> None:
        if self.phase is Phase.PREPARED:
            self._begin_update(outcome, self._applied)

    def _begin_update(
        self, outcome: Outcome, then: Callable[[Outcome], None], *, settled: bool = False
    ) -> None:
        if self._may(self.member.apply, outcome, self.now, settled=settled):
            self.sim.oracle.applying(self, outcome, settled)
            self.phase = Phase.APPLYING
            self.work(0.02 + 0.1 * self.sim.rng.random(), Point.IN_UPDATE, then, outcome)

    def _update_done(self, outcome: Outcome, *, settled: bool) -> None:
        version, base = Version(outcome.step, outcome.generation), self.version
        assert base is not None
        self.sim.flips.updated(self, base, version)
        self.member.applied(outcome)
        self.newest = (outcome.step, outcome.generation)
        self.held = {(version, self.cell)}
        self.phase = Phase.DONE
        self.memory.committed(outcome, settled=settled)
        self._count(outcome.step + 1, 0, 0)

    def _applied(self, outcome: Outcome) -> None:
        if self.phase is not Phase.APPLYING:
            return
        self._update_done(outcome, settled=False)
        assert self.world is not None
        if self.world.plan.members[0] == self.name:
            listed = self.sim.spikes.listed(outcome, self.member)
            self.report(StepDone(self.name, outcome.generation, outcome, None, None, (), *listed))
        self._answer(self.member.answer())
        if self.member.leaving:
            self._follow_settlement()
        elif outcome.boundary == ENDS or (
            outcome.step == self.sim.scenario.ends_at and not self.sim.scenario.asks
        ):
            self._ends(outcome.step)
        elif outcome.boundary == HAND_OVER:
            self._hand_over(outcome.generation)
        elif outcome.boundary:
            self.fence(outcome.generation)
        elif not self.member.barred:
            self._start_step()

    def _hand_over(self, generation: int) -> None:
        """Stops at the boundary once the copy of the newest version is complete."""
        if self.member.generation != generation or self.member.barred:
            return
        if self.memory.copies_newest:
            self.later(0.05, self._hand_over, generation)
        else:
            self.fence(generation)

    def _ends(self, step: int) -> None:
        """Leaves the loop after ``step``, and reports this as the end of the run if the target step is not
        reached.
        """
        self.left = self.version
        if step < self.sim.rules.target_step and not self.member.barred:
            self.ended = self.member.generation
            self.memory.ended()
            self.report(
                self.member.say(Ends(self.name, self.member.generation, step, asked=self.sim.scenario.asks))
            )

    # -- control
    # --------------------------------------------------------------------------------------------------

    def pause(self, generation: int, save: bool, hand_over: bool = False) -> None:
        self.member.pause(generation, save, hand_over)

    def fence(self, generation: int, whole: bool = False) -> None:
        self._answer(self.member.fence(generation, whole))

    def _answer(self, answer: Fenced | None) -> None:
        if answer is not None:
            check_answer(self, answer)
            self.answered = answer.generation
            self.post(answer)

    def settle(self, generation: int, outcome: Outcome | None) -> None:
        if self._generation() == generation and self.member.fenced < generation:
            raise Violation(f"{self.name} is told to leave generation {generation}, and was never fenced")
        if self.member.settle(generation, outcome) and self.phase is not Phase.APPLYING:
            abort_s = 0.05 if self.sim.rng.random() < 0.8 else 1.0
            self.later(abort_s * self.sim.rng.random(), self._follow_settlement)

    def _follow_settlement(self) -> None:
        outcome = self.member.settles()
        if outcome is not None:
            self._begin_update(outcome, self._settled, settled=True)
        else:
            self._leave()

    def _settled(self, outcome: Outcome) -> None:
        self._update_done(outcome, settled=True)
        self._leave()

    def _leave(self) -> None:
        world, self.world, self.phase = self.world, None, Phase.IDLE
        assert world is not None
        world.gone(self, aborts=True)
        self._answer(self.member.leave())
        self._enter()

    def _keep_lease(self) -> None:
        """Asks for the lease regularly.  A worker that gets no answer for the time of two leases ends
        itself.
        """
        if self.member.forsaken(self.now):
            return self.end("no coordinator answers")
        self._renew()
        self.sim.clock.after(self.sim.rules.lease_s / self.clock_rate / 4, self.receive, self._keep_lease)

    def _renew(self) -> None:
        self.sim.network.send(
            Way.FROM, self.node, self.sim.coordinators.renew, self, self.member.generation, self.now
        )

    def renewed(
        self, generation: int, asked_at: float, granted: bool, recorded_step: int, dismissed: bool
    ) -> None:
        """Handles the coordinator's answer to a request for the lease."""
        if dismissed:
            return self.end("the run goes on without it")
        before = tuple(self.member.outcomes)
        self.member.renewed(generation, asked_at, granted, recorded_step)
        self.sim.oracle.forgets(self, before[: len(before) - len(self.member.outcomes)])

    # -- going wrong
    # ----------------------------------------------------------------------------------------------

    def peer_lost(self) -> None:
        """Handles the failure of a collective."""
        if self.phase in (Phase.FORMING, Phase.HEALING, Phase.PREPARED) and not self.member.leaving:
            self._break("peer", "connection closed by peer")

    def raises(self, point: Point | None, cause: str = "job") -> None:
        """Handles an error that was raised at ``point``.

        After an error in a save, only the worker's part of the save is missing.  After an error in an update,
        or of the device, the worker holds nothing.
        """
        if self.world is None or self.phase is Phase.STANDING or (point is Point.SAVE and cause == "job"):
            return
        if point is Point.IN_UPDATE or self.phase is Phase.APPLYING:
            cause = "device" if self.sim.rng.random() < 0.5 else cause
        elif cause == "job":
            return self._break(cause, "ValueError: flaky", signature=f"Flaky {self.sim.cluster.number()}")
        self.held = set()
        if not self.member.lose():
            return self.sim.cluster.die(self, "exit")
        self._break(cause, "update failed", signature=f"Sticky {self.sim.cluster.number()}")
        self._answer(self.member.answer())
        if self.member.leaving:
            self._follow_settlement()

    def _may(self, decide: Callable[..., object], *args: Any, **named: Any) -> bool:
        """Returns whether ``decide``, a method of the member, lets the worker go on."""
        try:
            decide(*args, **named)
        except FencedOff as off:
            if off.lease:
                self._break("lease", str(off))
            return False
        return True

    def _break(
        self,
        cause: str,
        detail: str,
        signature: str = "",
        version: Version | None = None,
        computed: tuple[Computed, ...] = (),
    ) -> None:
        self.phase, step = Phase.STANDING, 0 if self.progress is None else self.progress.step
        broken = Broken(self.name, self.member.generation, step, cause, detail, signature, version, computed)
        self.member.say(broken)
        self._complain(broken)

    def _complain(self, broken: Broken) -> None:
        """Reports ``broken`` again and again until the worker is fenced, because a message may be lost."""
        if not self.member.barred:
            self.post(broken)
            self.later(4.0, self._complain, broken)

    def held_after(self, settle: Settle | None) -> set[tuple[Version, Cell]]:
        """Returns what the worker will hold after it has received ``settle``."""
        told = settle is not None and self.name in settle.members and self._generation() == settle.generation
        if (
            settle is None
            or settle.outcome is None
            or not told
            or self.member.prepared != settle.outcome.step
        ):
            return self.held
        return {(Version(settle.outcome.step, settle.generation), self.cell)}

    def _generation(self) -> int:
        return 0 if self.world is None else self.world.generation

    def _count(self, step: int, microbatch: int, collective: int) -> None:
        self.progress = Progress(self.name, self.member.generation, step, microbatch, collective)
