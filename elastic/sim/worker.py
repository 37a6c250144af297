"""A worker's side of the protocol: the same rules as the real one, with durations drawn instead of work done.

    idle -> forming -> healing -> ready -> (computing -> prepared -> applying)* -> left

The rules that make promise 2 hold, each one line below: nothing is contributed and nothing applied once fenced; an answer to a
fence waits until an update that has begun is over; nothing of a later generation is heard before the present one is left;
nothing is applied on a lease that ran out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol.actions import Settle
from elastic.protocol.commit_record import GO_ON, SAVE_AND_PAUSE, Outcome
from elastic.protocol.events import Attached, Broken, Fenced, Here, Joined, Progress, Ready, StepDone
from elastic.protocol.plan import Plan
from elastic.sim.faults import Point
from elastic.sim.memory import Memory
from elastic.sim.network import Way
from elastic.sim.process import Process
from elastic.sim.truth import check_plan, check_start
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation


class Phase(StrEnum):
    IDLE = "idle"
    FORMING = "forming"
    HEALING = "healing"
    READY = "ready"
    COMPUTING = "computing"
    PREPARED = "prepared"
    APPLYING = "applying"
    STANDING = "standing"
    """Cannot go on, says so, waits to be fenced."""
    DONE = "done"
    """Nothing left to do in this world: target step, or agreed boundary."""


class Worker(Process):
    """``held`` is the truth about what it holds: (version, cell)."""

    def __init__(self, sim: Simulation, name: WorkerId, node: NodeId) -> None:
        super().__init__(sim, name, node)
        self.joined = False
        self.phase = Phase.IDLE
        self.planned = self.fenced = 0  # highest generation it has begun / will apply nothing more of
        self.plan: Plan | None = None
        self.held: set[tuple[Version, Cell]] = set()
        self.cell = Cell("")
        self.prepared: int | None = None
        self.outcomes: tuple[Outcome, ...] = ()
        self.boundary = GO_ON
        self.garbage: set[tuple[Version, Cell]] = set()
        """Of ``held``: what came out of a collective that somebody had aborted."""
        self.answer_due = self._went = False
        self._planned_at = self._ready_at = 0.0
        self.progress: Progress | None = None
        self.memory = Memory(self)

    def end(self, why: str) -> None:
        self.sim.cluster.die(self, why)

    def passes(self, point: Point) -> None:
        self.sim.strikes.passes(self, point)

    # -- coming and going -----------------------------------------------------------------------------------------

    def join(self) -> None:
        self.joined = True
        self.report(self.introduction)
        self._keep_lease()

    @property
    def introduction(self) -> Joined:
        return Joined(self.name, self.node, "cpu torch-2.13 threads-1", self.sim.scenario.classes, self.sim.cluster.build_of(self.node))

    def attached(self) -> None:
        """A coordinator has taken over: where this worker stands, and all that may have been told to nobody."""
        stepping = self.phase not in (Phase.IDLE, Phase.FORMING, Phase.HEALING, Phase.READY)
        if not self.joined:
            return
        self.report(self.introduction)
        self.report(Attached(self.name, self.plan, stepping and self._went))
        if self.plan is not None:
            self._say_again(self.plan)

    def _say_again(self, plan: Plan) -> None:
        """What it has said in the present world, or in the last one: its answer to the fence."""
        if self.phase not in (Phase.IDLE, Phase.FORMING):
            self.report(Here(self.name, self.planned))
        if self.phase is Phase.READY:
            self.report(Ready(self.name, self.planned))
        if plan.members[0] == self.name:
            for outcome in self.outcomes:
                self.report(StepDone(self.name, outcome.generation, outcome))
        if self.fenced >= self.planned and not self.answer_due and self.phase is not Phase.APPLYING:
            self._answer(self.planned)

    # -- forming and healing --------------------------------------------------------------------------------------

    def form(self, plan: Plan) -> None:
        if plan.generation <= max(self.planned, self.fenced):
            return
        if self.world is not None:
            self._deferred.append((self.form, (plan,)))
            return
        check_plan(self, plan)
        self.planned, self.plan, self.world, self.phase = plan.generation, plan, self.sim.world(plan), Phase.FORMING
        self._planned_at, self._went = self.sim.clock.now, False
        self.cell = cell_of(plan.layout, plan.world_rank(self.name))
        self.boundary, self.prepared = GO_ON, None
        self._count(plan.version.step + 1, 0, 0)
        self.work(0.05 * self.sim.rng.random(), Point.FORMING, self._arrive, plan.generation)

    def _arrive(self, generation: int) -> None:
        self.post(Here(self.name, generation))
        assert self.world is not None
        if self.phase is Phase.FORMING:
            self.world.arrive(self)

    def formed(self) -> None:
        if self._stopped(Phase.FORMING):
            return
        self.phase = Phase.HEALING
        self.work(0.2 + 0.6 * self.sim.rng.random(), Point.HEALING, self._healed)

    def _healed(self) -> None:
        if self._stopped(Phase.HEALING):
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

    def _whole(self) -> None:
        """It has its shard of the plan's version, in the plan's layout."""
        assert self.world is not None
        plan = self.world.plan
        self.held.add((plan.version, self.cell))
        self.phase = Phase.READY
        self._ready_at = self.sim.clock.now
        self.post(Ready(self.name, plan.generation))

    def garbled(self) -> None:
        """Somebody aborted the groups, and the collective it waits for looks complete; what it brought is garbage.

        Commit records carry a checksum; slices that come while healing do not: only a fence that came before tells.
        """
        if self._stopped(self.phase):
            return
        self.sim.oracle.occasions["a collective completes with garbage"] += 1
        if self.phase is Phase.HEALING:
            assert self.world is not None
            self.garbage.add((self.world.plan.version, self.cell))
            self._whole()
        else:
            self.peer_lost()

    def go(self, generation: int) -> None:
        if self.phase is not Phase.READY or self._generation() != generation or self.fenced >= generation:
            return
        assert self.world is not None
        version = self.world.plan.version
        self.held, self._went = {(version, self.cell)}, True
        check_start(self)
        self.leased_at = max(self.leased_at, self._ready_at)  # from its own word, not from the answer to it
        self._renew()  # at once: its Ready, from which the lease counts, may be long ago
        self.memory.enter(self.world.plan)
        self._start_step()

    # -- one step -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The newest version it holds whole in the layout of its world."""
        return max((version for version, cell in self.held if cell == self.cell), default=None)

    def _start_step(self) -> None:
        version = self.version
        assert version is not None
        if version.step >= self.sim.rules.target_step:
            self.phase = Phase.DONE
            return
        self.phase = Phase.COMPUTING
        self._count(version.step + 1, 0, 0)
        point = Point.FORWARD if self.sim.rng.random() < 0.5 else Point.BACKWARD
        if version.step + 1 != self.sim.scenario.dry_step:
            self.work(0.4 + 0.4 * self.sim.rng.random(), point, self._computed, version.step + 1)

    def _computed(self, step: int) -> None:
        if self._stopped(Phase.COMPUTING):
            return
        self._count(step, 1, 0)
        if self.sim.cluster.user_error(self, step):
            self._break("job", "ValueError: bad sample", signature="ValueError at user.py:7")
            return
        self.work(0.02, Point.BEFORE_COMMIT, self._contribute, step)

    def _contribute(self, step: int) -> None:
        if self._stopped(Phase.COMPUTING):
            return
        assert self.world is not None
        self.phase, self.prepared = Phase.PREPARED, step
        self.world.contribute(self, step, self.boundary, self.memory.through())

    def commit_seen(self, outcome: Outcome) -> None:
        if self._stopped(Phase.PREPARED):
            return
        self.outcomes = (*self.outcomes, outcome)
        self._count(outcome.step, 1, 1)
        self.work(0.02, Point.BEFORE_UPDATE, self._apply, outcome)

    def _apply(self, outcome: Outcome) -> None:
        if self._stopped(Phase.PREPARED):
            return
        if self.sim.clock.now > self.lease_until:  # it counts by its own clock
            self._break("lease", "lease ran out")
            return
        self._begin_update(outcome, self._applied)

    def _begin_update(self, outcome: Outcome, then: Callable[[Outcome], None]) -> None:
        self.sim.oracle.applying(self, outcome)
        self.phase = Phase.APPLYING
        self.work(0.02 + 0.1 * self.sim.rng.random(), Point.IN_UPDATE, then, outcome)

    def _update_done(self, outcome: Outcome, *, fenced: bool) -> None:
        version = Version(outcome.step, outcome.generation)
        self.held, self.prepared = {(version, self.cell)}, None
        self.memory.committed(outcome, fenced=fenced)
        self._count(outcome.step + 1, 0, 0)

    def _applied(self, outcome: Outcome) -> None:
        if self.phase is not Phase.APPLYING:
            return
        self._update_done(outcome, fenced=self.fenced >= outcome.generation or (outcome.boundary != GO_ON and not outcome.saves))
        self.phase = Phase.DONE
        assert self.world is not None
        if self.world.plan.members[0] == self.name:
            self.report(StepDone(self.name, outcome.generation, outcome))
        if self.answer_due:
            self._answer(outcome.generation)
        elif outcome.boundary:
            self.fenced = outcome.generation
            self._answer(outcome.generation)
        else:
            self._start_step()

    # -- control --------------------------------------------------------------------------------------------------

    def pause(self, generation: int, save: bool) -> None:
        if self._generation() == generation:
            self.boundary = max(self.boundary, SAVE_AND_PAUSE if save else 1)

    def fence(self, generation: int) -> None:
        if self.world is not None and self.world.generation < generation:
            self._deferred.append((self.fence, (generation,)))
            return
        if generation < self.planned:
            return
        newly, self.fenced = self.fenced < generation, max(self.fenced, generation)
        if self.phase is not Phase.APPLYING:
            self._answer(generation)
        elif newly:
            self.answer_due = True

    def _answer(self, generation: int) -> None:
        self.answer_due = False
        held = tuple(Holding(self.name, *slot) for slot in sorted(self.held))
        self.post(Fenced(self.name, generation, held, self.prepared, self.outcomes))

    def settle(self, generation: int, outcome: Outcome | None) -> None:
        if self.world is not None and self.world.generation < generation:
            self._deferred.append((self.settle, (generation, outcome)))
            return
        if self._generation() != generation or self.phase is Phase.APPLYING:
            return
        if self.fenced < generation:
            raise Violation(f"{self.name} is told to leave generation {generation}, and was never fenced")
        if outcome is not None and self.prepared == outcome.step:
            self._begin_update(outcome, self._settled)
        else:
            self._leave()

    def _settled(self, outcome: Outcome) -> None:
        self.outcomes = (*(each for each in self.outcomes if each != outcome), outcome)
        self._update_done(outcome, fenced=True)
        self._leave()

    def _leave(self) -> None:
        world, self.world, self.phase, self.prepared = self.world, None, Phase.IDLE, None
        assert world is not None
        world.gone(self, aborts=True)
        deferred, self._deferred = self._deferred, []
        for call, args in deferred:
            call(*args)

    def _renew(self) -> None:
        generation = self._generation()
        self.sim.network.send(Way.FROM, self.node, self.sim.coordinators.renew, self, generation, self.sim.clock.now)

    def answered(self, generation: int, asked_at: float, granted: bool, recorded_step: int) -> None:
        """The coordinator's answer to a renewal.  What it has in its journal need not be kept, but for the newest."""
        kept = (each for each in self.outcomes[:-1] if each.step > recorded_step or each.generation > generation)
        self.outcomes = (*kept, *self.outcomes[-1:])
        self.heard_at = max(self.heard_at, asked_at)
        if granted and self._generation() == generation:
            self.leased_at = max(self.leased_at, asked_at)

    # -- going wrong ----------------------------------------------------------------------------------------------

    def peer_lost(self) -> None:
        """A collective failed under it."""
        if self.phase in (Phase.FORMING, Phase.HEALING, Phase.PREPARED):
            self._break("peer", "connection closed by peer")

    def raises(self, point: Point | None, cause: str = "job") -> None:
        """Something raised: in a save only its part is missing; in the midst of an update, or without its device, it holds nothing."""
        if self.world is None or self.phase is Phase.STANDING or (point is Point.SAVE and cause == "job"):
            return
        if point is Point.IN_UPDATE or self.phase is Phase.APPLYING:
            cause = "device" if self.sim.rng.random() < 0.5 else cause
        elif cause == "job":
            return self._break(cause, "ValueError: flaky", signature=f"Flaky {self.sim.cluster.number()}")
        if self.fenced >= self.planned and not self.answer_due:
            return self.sim.cluster.die(self, "exit")  # the coordinator counts on what it said, so it may not live without it
        self.held, self.prepared = set(), None
        self._break(cause, "update failed", signature=f"Sticky {self.sim.cluster.number()}")
        if self.answer_due:
            self._answer(self.planned)

    def _break(self, cause: str, detail: str, signature: str = "", version: Version | None = None) -> None:
        self.phase, step = Phase.STANDING, 0 if self.progress is None else self.progress.step
        self._complain(Broken(self.name, self.planned, step, cause, detail, signature, version))

    def _complain(self, broken: Broken) -> None:
        """Again and again, for one message may be lost."""
        if self.fenced < broken.generation:
            self.post(broken)
            self.later(4.0, self._complain, broken)

    def held_after(self, settle: Settle | None) -> set[tuple[Version, Cell]]:
        """What it will hold once ``settle`` has reached it."""
        told = settle is not None and self.name in settle.members and self._generation() == settle.generation
        if settle is None or settle.outcome is None or not told or self.prepared != settle.outcome.step:
            return self.held
        return {(Version(settle.outcome.step, settle.generation), self.cell)}

    def _generation(self) -> int:
        return 0 if self.world is None else self.world.generation

    def _stopped(self, expected: Phase) -> bool:
        """It is fenced, or no longer doing what this was the end of."""
        return self.phase is not expected or self.fenced >= self.planned

    def _count(self, step: int, microbatch: int, collective: int) -> None:
        self.progress = Progress(self.name, self.planned, step, microbatch, collective)
