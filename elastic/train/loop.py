"""The life of a worker: it waits for a plan, forms the world, heals, steps until the world ends, and waits
for the next plan.

There are two threads.  The training thread is in ``run``; the control thread brings the orders
(``train/orders.py``).  Neither thread leaves a process group before the coordinator settles the generation:
leaving breaks the commit that the group is making, and a member that is not fenced yet could still apply that
commit.  The member (``protocol/member.py``) decides, under the lock of the apply fence, which orders count
and how they are answered.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from elastic.code.imports import less_memory
from elastic.engine.parallelize import scheme_of
from elastic.engine.parameters.split import tell_of_reads
from elastic.engine.stores import join_store
from elastic.engine.world import World
from elastic.errors import AbortStuck, FencedOff
from elastic.ids import Version
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import (
    ENDS,
    GO_ON,
    HAND_OVER,
    CommitShape,
    Outcome,
    Score,
    Validated,
    better_of,
)
from elastic.protocol.events import Broken, ConnectedAhead, Ends, Evaluated, Event, Here, Ready, StepDone
from elastic.protocol.plan import Plan
from elastic.protocol.reruns import Differ
from elastic.threads import later
from elastic.train.apply_fence import ApplyFence
from elastic.train.blame import classify, in_its_words, plainly, tell_where_all_stand, touch
from elastic.train.context import Context
from elastic.train.effects import Effects
from elastic.train.errands import validate_by_spare
from elastic.train.gauges.inventory import decay_line, memory_line
from elastic.train.gauges.own_metrics import Metrics
from elastic.train.gauges.profiler import Profiler
from elastic.train.heal import Healing, home_of, nothing
from elastic.train.machine.interface import interface
from elastic.train.model import State
from elastic.train.next_world import NextWorld
from elastic.train.orders import Controlled, Leave, Settled, Went
from elastic.train.own_faults import Seat
from elastic.train.step import Session, Step, update
from elastic.train.validation import validate
from storage.checkpoints import Checkpoints

SLOW_S = 5.0
"""Seconds after the settlement of a generation at which the stacks of all threads are written to the log,
unless the generation was left by then.
"""
WITNESS_S = 0.05
"""Longest time in seconds for which an abort waits until the collectives in flight are written to the log."""
SHOWN = 8
"""Number of collectives in flight that are written to the log: the newest ones."""
ABORT_S = 15.0
"""Seconds that the abort of the previous world may take.  It takes one or two on a busy device; a longer one
is stuck.
"""
LOOKS = 6
"""Number of times in ``deadlines.stall_s`` that a member checks whether the world stands still because
members run unlike blocks.

A finding takes up to three checks, and the coordinator begins to count ``stall_s`` earlier than the member.
"""
UNLIKE = "ModelError: members ran unlike blocks"
"""Signature of the error that makes a world stand still because its members gather and sum blocks in
different orders.
"""
RUN_TIMEOUT_S = 24 * 3600.0
"""Seconds after which a collective times out: so many that the loss of a member is always noticed earlier."""


class Trainer(Controlled):
    """Runs one worker."""

    def __init__(
        self,
        session: Session,
        fence: ApplyFence,
        device: torch.device,
        checkpoints: Checkpoints,
        report: Callable[[Event], None],
    ) -> None:
        super().__init__(fence, report)
        self.session, self.device, self.checkpoints = session, device, checkpoints
        self.interface = interface()
        """The network interface of this process's sockets, which no world changes."""
        self.profiler = Profiler(session.job, checkpoints.store, partial(print, flush=True))
        self.world: World | None = None
        self.next_world = NextWorld(device, self._meet, self._connect, self._tell_of_next)
        self._abort: threading.Thread | None = None
        """The thread that aborts the previous world; no collective of the next world begins until it has
        ended.
        """
        self._slow = threading.Timer(0, nothing)
        self._newest: Outcome | None = None
        """The newest commit of the present world."""
        self._best: Score | None = None
        """The best validation so far, from which the patience counts."""
        self._worse = 0
        """The number of validations since the best one."""
        self._left: Version | None = None
        """The last version of the run, if the user's loop was left: the version at that moment.  If its world
        was over by then, the coordinator is told of it in the next world.
        """

    # ---- control thread

    def _end_world(self, generation: int) -> None:
        """Aborts the world of ``generation``."""
        self._slow = later(SLOW_S, tell_where_all_stand)  # unless the generation is left by then
        world = self.world
        if world is not None and world.generation == generation:
            self._abort = threading.Thread(target=self._aborts, args=(world, self._abort), daemon=True)
            self._abort.start()

    def _connect_ahead(self, plan: Plan, store: tuple[str, int]) -> None:
        self.next_world.begin(plan, store)

    def _tell_of_next(self, plan: Plan, why: str) -> None:
        self.report(ConnectedAhead(self.worker, plan.generation, plan.ahead, plan.incarnation, why))

    def _connect(self, world: World) -> None:
        world.connect(self._form_s, RUN_TIMEOUT_S)

    def _aborts(self, world: World, before: threading.Thread | None) -> None:
        """Aborts ``world``, and then waits for the end of the abort ``before``.

        It runs on a thread of its own: meanwhile the control thread must hear the next plan, and the training
        thread must build the next world.
        """
        witness = threading.Thread(target=self._tell_what_hangs, args=(world,), daemon=True)
        witness.start()
        witness.join(WITNESS_S)
        began = time.monotonic()
        world.abort()
        print(
            f"{self.worker}: generation {world.generation} aborted in {time.monotonic() - began:.3f} s",
            flush=True,
        )
        if before is not None:
            before.join()

    def _tell_what_hangs(self, world: World) -> None:
        """Writes to the log which collectives are in flight.  It has a thread of its own, so that the abort
        does not depend on it.
        """
        if hanging := world.in_flight():
            print(f"{self.worker}: in flight: {'; '.join(hanging[-SHOWN:])}", flush=True)

    # ---- training thread

    def run(self) -> None:
        """Lives through one generation after the other until ``exit`` is called."""
        try:
            while True:
                order = self._next_plan()
                self._live(order.plan, order.store)
                # a wrapped model is full of cycles; what it holds must be free before the next one takes
                # memory
                gc.collect()
        except Leave:
            return
        finally:
            self._slow.cancel()
            self._close()
            self.next_world.close()
            self.profiler.close()

    def _evaluate(self, version: Version) -> None:
        """Validates a checkpoint and notes the result, or the failure, in the bucket.  An order that comes
        meanwhile ends the validation.
        """
        validate_by_spare(
            self.session, self.device, self.checkpoints, version, lambda: not self.orders.empty()
        )

    def _live(self, plan: Plan, store: tuple[str, int]) -> None:
        """Lives through one generation, from its plan to its settlement."""
        with self.apply_fence as member:
            if not member.enter(plan):
                return
        state: State | None = None
        order: Went | Settled | None = None
        try:
            state = self._form(plan, store)
            order = self._await(plan.generation, Went, Settled)
            if isinstance(order, Went):
                self._train(plan, state)
        except Leave:
            raise
        except Exception as error:  # a boundary: the coordinator is told, and decides
            self._tell(plan, error, forming=state is None)
        while not isinstance(order, Settled):
            order = self._await(plan.generation, Settled)
        if state is not None:
            self._apply_the_settled(state)
        self._close()
        self._slow.cancel()
        with self.apply_fence as member:
            answer = member.leave()
        self._answer(answer)

    def _apply_the_settled(self, state: State) -> None:
        """Applies the outcome that the settlement demands.  The coordinator relies on it, so a failure here
        ends the process.
        """
        with self.apply_fence as member:
            outcome = member.settles()
        if outcome is None:
            return
        if self.session.snapshots is not None:
            self.session.snapshots.settle()
        with self.apply_fence.applying(outcome, settled=True):
            update(self.session, state, outcome)
        if self.session.snapshots is not None:
            self.session.snapshots.committed(outcome, None)

    def _form(self, plan: Plan, store: tuple[str, int]) -> State:
        """Forms the plan's world, heals this worker's shard to the plan's version, and returns the state."""
        self.session.counters["stepping_since_ns"], self.session.counters["generation"] = 0, plan.generation
        self.session.counters.at("forms")
        self._say(Here(self.worker, plan.generation))
        if self._left == plan.version and not plan.ends:
            self._say(Ends(self.worker, plan.generation, plan.version.step))
        if not plan.ahead:
            self.next_world.drop()
        began = time.monotonic()
        self.world = world = self._taken(plan) if plan.ahead else self._meet(plan, store)
        with self.apply_fence as member:  # the settlement may have come before there was a world to abort
            member.go_on("formed")
        met = time.monotonic()
        session = self.session
        with self.apply_fence as member:
            held = list(member.held.values())
        home = home_of(session, plan, self.worker, held)
        state = State(
            session.job.in_stage(plan.zero), session.builder, session.rule, world, plan.version, home
        )
        built = time.monotonic()
        if (abort := self._abort) is not None:
            abort.join(ABORT_S)
            if abort.is_alive():
                # the text names the worker, so no two workers report the same error, and it does not count as
                # the job's own
                where = f"the abort before generation {plan.generation} has not ended in {self.worker}"
                raise AbortStuck(f"{where} within {ABORT_S:g} s")
        alone = time.monotonic()
        healing = Healing(state, plan, self.worker, self.session, self._leave_if_fenced)
        if not plan.ahead:
            self._connect(world)
        formed, before = time.monotonic(), self._received
        healing.finish(held, self.checkpoints, partial(self._half_way, plan, world))
        world.finish()
        now, shard = time.monotonic(), state.shard
        with self.apply_fence as member:
            member.healed(now, Holding(self.worker, shard.version, shard.cell), shard)
        healing.settle()
        self.session.counters["step"] = plan.version.step
        print(
            f"{self.worker}: generation {plan.generation}: rendezvous took {met - began:.3f} s, model "
            f"{built - met:.3f} s, the abort before {alone - built:.3f} s, connecting {formed - alone:.3f} "
            f"s, receiving state {now - formed:.3f} s",
            flush=True,
        )
        self._say(
            Ready(
                self.worker,
                plan.generation,
                formed - began,
                now - formed,
                self._received - before,
                self.interface,
            )
        )
        return state

    @property
    def _received(self) -> int:
        """Returns the bytes of state that this process has received from members and keepers."""
        return self.session.counters["healed_live_bytes"] + self.session.counters["healed_host_bytes"]

    def _leave_if_fenced(self) -> None:
        """Raises ``FencedOff`` once the generation is fenced; an abort alone does not stop reads from the
        bucket or a keeper.
        """
        with self.apply_fence as member:
            member.go_on("healed")

    def _half_way(self, plan: Plan, world: World) -> None:
        """Checks the fence between two slices; faults at the point "healing" happen here."""
        self._leave_if_fenced()
        self.session.faults.strike("healing", plan.version.step + 1, world)

    @property
    def _form_s(self) -> float:
        """Returns half of the forming deadline in seconds: a worker that waits in vain for a member is back
        in time for new orders.
        """
        return self.session.job.deadlines.form_s / 2

    def _taken(self, plan: Plan) -> World:
        """Returns the world of ``plan``, which this worker has connected ahead."""
        world = self.next_world.take(plan)
        world.enter()
        self.session.faults.strike("forming", plan.version.step + 1, world)
        return world

    def _meet(self, plan: Plan, store: tuple[str, int]) -> World:
        client = join_store(*store, self.session.secret, self._form_s)
        seat = Seat(plan.generation, plan.world_rank(self.worker))
        return World.form(
            client,
            generation=plan.generation,
            layout=plan.layout,
            rank=seat.rank,
            device=self.device,
            form_s=self._form_s,
            nodes=tuple(plan.nodes),
            replicas=scheme_of(self.session.job).needs_replicate_group,
            met=partial(self.session.faults.strike, "forming", plan.version.step + 1, seat)
            if not plan.ahead
            else nothing,
            ahead=f"{plan.incarnation}.{plan.ahead}" if plan.ahead else "",
        )

    def _train(self, plan: Plan, state: State) -> None:
        """Steps until the last step of the job or an agreed boundary."""
        job = self.session.job
        shape = CommitShape(
            plan.incarnation,
            plan.generation,
            job.microbatches,
            job.microbatch_size,
            plan.layout,
            job.reduction.block,
            plan.nodes,
            job.workers.rerun_every,
        )
        self.profiler.finish()  # the profile of a world that broke
        snapshots = self.session.snapshots
        if snapshots is not None:
            snapshots.enter(plan, self.worker, state.shard)
        print(f"{self.worker}: {decay_line(state)}", flush=True)
        effects = Effects(self.checkpoints.store, job.name, tells=state.world.rank == 0)
        assert self.session.loop is not None
        with self._looking_at_the_order(plan, state):
            steps, leave = (
                partial(self._steps, plan, state, shape, effects),
                partial(self._leave, plan, state),
            )
            Context(job, state, steps, effects, partial(self._stop, plan), leave).run(self.session.loop)
        self.profiler.finish()
        if snapshots is not None:
            snapshots.make_room(lambda: not self.orders.empty())

    def _looking_at_the_order(self, plan: Plan, state: State) -> AbstractContextManager[None]:
        """Returns a context in which the coordinator is told if the world stands still because members run
        unlike blocks: before the coordinator itself stops the world and can name no cause.
        """

        def tell(sentence: str) -> None:
            print(sentence, flush=True)
            self._say(
                Broken(
                    self.worker, plan.generation, self.session.counters["step"] + 1, "job", sentence, UNLIKE
                )
            )

        order = state.parameters.order
        return (
            order.watched(self.session.job.deadlines.stall_s / LOOKS, tell)
            if order is not None
            else nullcontext()
        )

    def _stop(self, plan: Plan, why: str) -> None:
        """Asks all members to end the run with the next commit."""
        with self.apply_fence as member:
            member.end()
        self._say(Ends(self.worker, plan.generation, 0, why))

    def _loses_patience(self, state: State, found: Validated) -> bool:
        """Counts ``found``, the validation of the present state, and returns whether the run has no patience
        left.
        """
        version, rule = state.shard.version, self.session.job.validation
        self._best = better_of(self._best, score := Score(version, found), rule.min_delta)
        self._worse = 0 if self._best is score else self._worse + (version > self._best.version)
        return 0 < rule.patience <= self._worse

    def _leave(self, plan: Plan, state: State) -> None:
        """Ends the run with the newest step, after which the loop was left.

        The state is validated only if all members know that this step is the last one: otherwise some of them
        may be in the next step by now.
        """
        self._left, outcome = state.shard.version, self._newest
        if self._left.step >= self._last(plan) or (outcome is not None and outcome.boundary == ENDS):
            self._ends(plan, state)
        else:
            self._save_last(plan, state)

    def _last(self, plan: Plan) -> int:
        return min(plan.ends or self.session.job.steps, self.session.job.steps)

    def _save_last(self, plan: Plan, state: State, *, patience: bool = False) -> None:
        """Tells the coordinator that the newest step is the last one of the run, and begins its save unless
        its commit did.  After the job's own last step it does nothing.
        """
        if (step := state.shard.version.step) < self.session.job.steps:
            with self.apply_fence as member:
                member.go_on("ended")  # a loop may hide that its world is over
            if self.session.snapshots is not None:
                self.session.snapshots.ended(state.shard)
            asked = self._newest is not None and self._newest.boundary == ENDS
            self._say(Ends(self.worker, plan.generation, step, patience=patience, asked=asked))

    def _ends(self, plan: Plan, state: State, found: Validated | None = None) -> None:
        """Ends the run with the newest step, on all members: saves the state, and validates it if this world
        has made a step.

        ``found`` is the validation with which the run lost its patience, if that is why it ends.
        """
        job, step, outcome = self.session.job, state.shard.version.step, self._newest
        self._save_last(plan, state, patience=found is not None)
        if found is None and outcome is not None and job.validates(job.steps):
            found = validate(self.session, state, self.apply_fence, step)
        if found is not None and state.world.rank == 0:
            told = (
                StepDone(self.worker, plan.generation, outcome, validated=found)
                if outcome
                else Evaluated(state.shard.version, found)
            )
            self.report(told)

    def _steps(
        self, plan: Plan, state: State, shape: CommitShape, effects: Effects
    ) -> Generator[Step, None, bool]:
        """Yields the steps of this world; the loop commits each step before it takes the next one.  Returns
        whether the run ends with the last of them.
        """
        job, world, step = self.session.job, state.world, plan.version.step
        last = self._last(plan)

        def done(outcome: Outcome, metrics: Metrics) -> None:
            if self.session.meter.first:
                print(
                    f"{self.worker}: generation {plan.generation}: {memory_line(self.session.meter.held)}",
                    flush=True,
                )
            if world.rank == 0:
                with self.apply_fence as member:
                    lists = member.lists()
                work, listed = state.arithmetic.of(outcome), state.spikes.listed() if lists else ((), ())
                self.report(StepDone(self.worker, plan.generation, outcome, work, None, metrics, *listed))
            if self.session.snapshots is not None:
                self.session.snapshots.committed(outcome, state.shard)
            self._newest = outcome
            effects.committed(outcome.step)

        self._newest, self._best, self._worse = None, plan.best, plan.worse
        while step < last:
            validated = validate(self.session, state, self.apply_fence, step) if job.validates(step) else None
            if validated is not None and self._loses_patience(state, validated):
                self._ends(plan, state, validated)
                return True
            step += 1
            with self.profiler.watch(step, world):
                doing = Step(self.session, state, self.apply_fence, shape, step, self._asked, validated, done)
                yield doing
            outcome = doing.outcome
            assert outcome is not None, "the context sees to it"
            if step == last or outcome.boundary == ENDS:
                self._ends(plan, state)
            if outcome.boundary == HAND_OVER and self.session.snapshots is not None:
                self.session.snapshots.handed_over()
            if outcome.boundary not in (GO_ON, ENDS):
                self.fence(plan.generation)
            if outcome.boundary != GO_ON:
                return outcome.boundary == ENDS
        return True

    def _asked(self) -> int:
        """Returns what this member asks for at the boundary after the step."""
        with self.apply_fence as member:
            return member.boundary

    def _tell(self, plan: Plan, error: Exception, *, forming: bool) -> None:
        """Tells the coordinator of the error that stopped the generation here, unless it is only the fence.

        Raises ``error`` itself if the device is lost and this process must end (``Member.lose``).
        """
        if isinstance(error, FencedOff) and not error.lease:
            return
        if plan.layout.shards > 1:
            tell_of_reads(error)
        cause, signature = classify(error, partial(touch, self.device), forming=forming)
        if forming and self.world is not None and self.world.aborted.is_set() and cause in ("peer", "setup"):
            cause, signature = "peer", ""  # a library may say anything of a group that was aborted
        trace = "".join(traceback.format_exception(error))
        at = f"{self.session.computing}\n" if self.session.computing else ""
        self.session.computing = ""
        print(f"{at}{trace}", flush=True)
        detail = f"{at}{trace}" if cause in ("job", "device", "setup") else plainly(error, words=signature)
        if cause in ("job", "device") and (less := less_memory(error)):
            detail += f"{less}\n"
        if cause == "setup":
            detail += in_its_words(error)
        version = plan.version if cause == "damaged" else None
        computed = error.computed if isinstance(error, Differ) else ()
        step = max(self.session.counters["step"], plan.version.step) + 1
        self._say(Broken(self.worker, plan.generation, step, cause, detail, signature, version, computed))
        if cause == "device":
            with self.apply_fence as member:
                lives = member.lose()
            if not lives:
                raise error

    def _close(self) -> None:
        if self.world is not None:
            self.world.close()
            self.world = None
