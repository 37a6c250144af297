"""The coordinator is the one actor that runs a run: inbox -> advance -> journal -> perform.  It does nothing
else.

It is named and detached, and its only state that must survive is ``RunState``.  When its process dies,
workers step on and their messages wait until Ray has started it again.  The new process goes on where the
journal ends (``elastic/control/takeover.py``).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray

import elastic
from actors import cluster
from actors.demand import Demand
from actors.ends import NODE_DIED, signature
from actors.errands import Errands
from actors.journal_replicas import JournalReplicas
from actors.notices.known_sources import open_cluster_sources
from actors.notices.teller import Teller
from actors.notices.watch import ClusterWatch
from actors.perform import ActorGroup
from actors.processes import end_on_sigterm, make_log_folder
from actors.prometheus import Exported
from actors.survivors import Left, look_back
from actors.users_code import UsersCode
from actors.view import View, best_of
from elastic.control import copy_inventory
from elastic.control.inbox import Inbox
from elastic.control.machine import Transition, advance
from elastic.control.run import TERMINAL, Failed, Finished, RunState
from elastic.control.takeover import STOOD_S
from elastic.engine.optim.schedule import rate_for_readers
from elastic.errors import Refused
from elastic.ids import NodeId, WorkerId
from elastic.job import Job
from elastic.journal import codec
from elastic.protocol.authority import Audience, Authority
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import Score, Validated
from elastic.protocol.events import (
    Capacity,
    Event,
    Joined,
    KeeperLost,
    Lost,
    NodeAdvised,
    NodeDraining,
    NodeFound,
    Recovered,
    Renewed,
    ShardSaved,
    StartFailed,
    StepDone,
    StopRequested,
    Stumbled,
    Tick,
    parts,
)
from elastic.protocol.member import Lease
from elastic.report.best import best, comparable, enough, newest_improvement
from elastic.report.story import Story
from elastic.runs import restarts
from elastic.runs.deleted import put_back
from elastic.runs.metrics import Recorder
from elastic.runs.resume import measured, over_fits
from elastic.runs.run import Run
from elastic.threads import go_or_end, keep_going
from storage.errors import Deposed, Exists, Unavailable
from storage.journal import replicas

TICK_S = 0.1
"""Seconds without an event after which the loop handles a ``Tick``."""
CLUSTER_S = 0.5
"""Seconds between two looks at the nodes and their free room."""
GRACE_S = 10.0
"""Seconds that the keepers, and then the killed actors, may take to end when the run is over."""
RETRY_S = 1.0
"""Seconds between two attempts to take over while the bucket does not answer."""
RARELY = 100_000
"""Number of new objects (Python's default: 700) after which Python looks for cycles among all objects: values
that never change have no cycles, and there are many of them.
"""
DEPOSED, STUMBLED = 4, 5
"""Exit codes of the coordinator's process: 4 means that another coordinator acts for the run, 5 that this one
could not handle an event, which the next coordinator tries again.
"""


def steady_clock(
    wall: Callable[[], float] = time.time, pace: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Returns a clock that starts at the time of the wall clock and runs at the pace of the monotonic one, so
    that setting the machine's time moves no deadline.
    """
    ahead = wall() - pace()
    return lambda: pace() + ahead


class Coordinator:
    """The actor.  Its concurrency groups are ``inbox`` (events) and ``view`` (questions); the loop has its
    own thread.
    """

    def __init__(
        self,
        job: Job,
        reference: Build,
        search_path: list[str],
        driver: str,
        seen: int,
        life: str,
        secret: bytes,
        *objects: bytes,
    ) -> None:
        """``seen`` is the newest incarnation that ``driver`` has seen.  ``life`` is a random text that names
        this actor.  ``secret`` lets the processes of the run recognise each other on direct sockets.
        ``objects`` are for workers (:mod:`actors.users_code`).

        Ray starts the actor again with the same arguments whenever its process dies.  Raises :class:`Refused`
        if a command on another cluster has begun the run since.
        """
        end_on_sigterm()
        gc.set_threshold(RARELY)
        self.secret = secret
        self.job, self.rules, self.code = job, job.rules(), UsersCode(search_path, b"".join(objects))
        if job.metrics.sinks:  # no other code of the user runs in this process
            sys.path[:0] = [entry for entry in search_path if entry not in sys.path]
        self.clock = steady_clock()
        self.inbox = Inbox(self.clock)
        self.story = Story(job.steps, job.loss)
        self.reason = ""
        self.exported = Exported(job.name)
        self.audience = Audience(driver, job.on_driver_exit, job.deadlines.driver_s, time.monotonic())
        self.over = threading.Event()
        deadline = time.monotonic() + 2 * job.deadlines.lease_s  # by then the workers have ended themselves
        while not self._stands(reference, seen, life, deadline):
            time.sleep(RETRY_S)
        go_or_end(self._run, "loop")

    def _stands(self, reference: Build, seen: int, life: str, deadline: float) -> bool:
        """Claims the run and reads where it stands.

        Returns False if the bucket does not answer and this coordinator takes over: workers may wait for it,
        so the caller tries again.
        """
        context = ray.get_runtime_context()
        try:
            self.run = Run.open(self.job)
            self.job = self.run.job
            before, asked_at = self._claim(seen, life), time.monotonic()
            self._find_out(reference, before, life)
            self.group = ActorGroup(
                self.job,
                self.run,
                self.token,
                self.incarnation,
                context.current_actor,
                self.code,
                self.secret,
                self.post_local,
            )
            self.group.tell = self._say
            said, order = (self._say, self.post_local), self.group.evaluate
            self.errands = Errands(
                self.job, self.run, self.incarnation, self.code, lambda: self.state, *said, order
            )
            self.group.saved = self.errands.look
        except (Unavailable, OSError):
            if not context.was_current_actor_reconstructed or time.monotonic() > deadline:
                raise
            return False
        rules = Authority(
            self.incarnation,
            self.rules.coordinator_lease_s,
            asked_at,
            self.state.cluster.keepers,
            self.state,
            follows=self.again,
        )
        self.demand = Demand(self.job, self.rules, lambda: self.state, self._say)
        self.replicas = JournalReplicas(rules, self.run, self.journal, self.group.keepers)
        self.group.ship = self._ship
        return True

    def _claim(self, seen: int, life: str) -> dict[int, NodeId]:
        """Claims the run.  Returns the incarnation and node of each earlier coordinator of this life."""
        address, node = ray.get_runtime_context().gcs_address, cluster.here()
        try:
            before = self.run.claims(life, seen)
            after = None if before else self.run.follows(seen)
            more = restarts.goes_on(self.run) if before else restarts.begins(self.run)
            self.incarnation = self.run.claim(address, life, node, after, **more)
            again = partial(self.run.claim, address, life, node, self.incarnation - 1, **more)
            self._put_back = partial(put_back, self.run, self.incarnation, life, again)
        except Deposed:
            what = f"was taken over by a command on the cluster at {self.run.home()}"
        except Exists:
            what = f"was started on the cluster at {self.run.home()} while this command was starting"
        else:
            return before
        raise Refused(f"{self.job.name} {what}; `elastic status` shows it")

    def _find_out(self, reference: Build, before: Mapping[int, NodeId], life: str) -> None:
        """Finds out where the run stands: from what earlier coordinators of this life have left, or, without
        any, from the bucket.
        """
        first = min([*before, self.incarnation])
        self.again = first < self.incarnation
        self.token = f"{self.job.name}-{first:04d}-{life}"
        folder = make_log_folder(self.token)
        local = replicas.folder_of(folder, self.incarnation)
        local.mkdir(mode=0o700, exist_ok=True)  # it must exist, because a later coordinator may look for it
        self.left = Left(whole=True)
        if self.again:
            self.left = look_back(
                self.run, self.token, self.incarnation, before, self.rules.coordinator_lease_over_s
            )
        found = self.run.recover(first, local, self.left.ends) if self.again else None
        if found is None:
            state = self._begun(reference)
            found = state, self.run.journal(local, codec.snapshot(state, elastic.__version__, self.rules))
        self.state, self.journal = found
        self.recorded = self.state

    def _begun(self, reference: Build) -> RunState:
        """Returns the run as the bucket knows it; the job was checked with the build ``reference``."""
        state, goes_on = self.run.begins(self.incarnation, self.clock())
        self._say("" if self.again else goes_on)
        # a coordinator that takes over says so by its first event
        incarnation = 0 if self.again else self.incarnation
        found = measured(self.run, state.history.lineage, reference.held_out)
        if top := best(found):
            score = Score(top.version, Validated(top.loss, 1), reference.held_out)
            state = replace(state, history=replace(state.history, best=score))
        if self.rules.patience and (last := newest_improvement(found, self.rules.min_delta)):
            worse = tuple(sorted(each for each in comparable(found) if each > last.version)) or None
            state = replace(
                state, mark=Score(last.version, Validated(last.loss, 1), reference.held_out), worse=worse
            )
        if over := enough(found, self.rules.patience, self.rules.min_delta):
            state = replace(state, enough=over)
        return replace(state, incarnation=incarnation, members=replace(state.members, reference=reference))

    def _ship(self, timeout_s: float) -> bool:
        """Restores what somebody has deleted in the bucket, then writes the whole journal there.  Returns
        whether the journal was written.
        """
        try:
            told = self._put_back()
        except Deposed as error:
            self.journal.deposed = error.object  # the loop leaves
            raise
        if told:
            self.journal.begin_anew()
            self._say(told)
        return self.journal.ship(timeout_s)

    # ---- inbox

    def post_local(self, event: Event) -> None:
        self.inbox.put(event)

    @ray.method(concurrency_group="inbox")  # type: ignore[untyped-decorator]
    def post(self, event: Event, shard: Any = None) -> None:
        """Puts an event into the inbox; any process of the run may call it."""
        self.inbox.put(event, shard)

    @ray.method(concurrency_group="inbox")  # type: ignore[untyped-decorator]
    def post_all(self, said: tuple[Event, ...]) -> None:
        """Puts what workers of one node say into the inbox."""
        self.inbox.put_all(said)

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def renew_all(self, asked: tuple[tuple[WorkerId, int], ...]) -> list[Lease]:
        """Returns the answers to several members of one node, each given as (worker, generation)."""
        return [self.renew(worker, generation) for worker, generation in asked]

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def renew(self, worker: WorkerId, generation: int) -> Lease:
        """Returns the answer to a member that asks for its lease on ``generation``."""
        state = self.recorded
        granted = worker in state.workers and state.grants_lease(generation) and self.replicas.holds
        if granted:
            self.inbox.put(Renewed(worker, generation))
        safe, dismissed = self.replicas.safe, not state.knows(worker) and self.replicas.holds
        return Lease(
            granted,
            safe.history.recorded_step if safe.generation == generation else 0,
            self.incarnation,
            dismissed,
        )

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def now(self) -> float:
        """Returns the time by which this coordinator decides, for those who tell it a deadline."""
        return self.clock()

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def tell(self, sentence: str) -> None:
        """Adds a sentence of a keeper to the run's story.  The sentence decides nothing."""
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        self.story.say(self.clock(), sentence)

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def stop(self, reason: str) -> None:
        """Asks for a clean stop with a save."""
        self.inbox.put(StopRequested(reason))

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def leave(self, driver: str, reason: str = "", only: bool = False) -> bool:
        """Notes that a driver was told to go or has seen the end.  Returns True if the run stops because of
        it.

        ``only`` means that the driver merely watched, so that the run does not stop.
        """
        if not only and not self.over.is_set() and self.audience.stops_with(driver, time.monotonic()):
            self.stop(reason)
            return True
        self.audience.leave(driver)
        return False

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def settings(self) -> dict[str, Any]:
        """Returns the settings with which the run lives."""
        return self.job.model_dump(mode="json")

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def view(self, seen: int = 0, driver: str = "", incarnation: int = 0, only: bool = False) -> View:
        """Returns where the run stands, and the lines of the story of ``incarnation`` after the first
        ``seen``, as far as they are kept.

        ``driver`` names the driver that asks and waits for the run.  ``only`` means that the driver merely
        watches, and is no reason for the run to go on.
        """
        if driver:
            self.audience.hear(driver, time.monotonic(), only=only)
        told, lines = self.story.since(seen if incarnation in (0, self.incarnation) else 0)
        state = self.state  # after the lines: with the last of them the run has ended
        return View(
            state=type(state.state).__name__,
            reason=self.reason,
            token=self.token,
            pid=os.getpid(),
            incarnation=self.incarnation,
            generation=state.generation,
            step=state.history.saved[-1].step if isinstance(state.state, Finished) else state.version.step,
            steps=self.job.steps,
            workers={
                worker: node for worker, node in list(self.group.joined.items()) if worker in state.workers
            },
            told=told,
            lines=lines,
            stopping=state.stop,
            over=self.over.is_set(),
            job_error=state.state.job_error if isinstance(state.state, Failed) else "",
            unprotected_since=copy_inventory.unprotected_since(state),
            unbuddied_since=copy_inventory.unbuddied_since(state),
            paces=copy_inventory.paces(state),
            speed=str(self.story.speed),
            best=best_of(state.history.best),
            warned=state.health.said,
            skipped=state.skips.summary,
            owed=self.errands.owed,
        )

    # ---- the loop

    def _run(self) -> None:
        """Runs until the run is over and nothing of it is left; then this actor ends too."""
        keep_going(partial(self.replicas.keep_lease, self.over), "lease", self._say)
        metrics = Recorder(self.run, self._say)
        self.exported.begins(self.clock(), self.recorded)
        try:
            if self.again:
                self._take_over()
            self._begin_to_watch()
            while not isinstance(self.state.state, TERMINAL):
                self._take()
        except Deposed as error:  # another coordinator acts for the run, so this one changes nothing
            print(f"coordinator {self.incarnation} ends: {error}", flush=True)
            self.demand.take_back().join(GRACE_S)  # a coordinator on this cluster soon tells its own
            os._exit(DEPOSED)
        except Exception:  # the process boundary: a decision that failed ends the run, never silently
            if self.journal.deposed or self.replicas.authority.deposed:
                os._exit(DEPOSED)
            self.story.say(
                time.time(),
                "the coordinator failed; give the same command again to resume the run\n"
                + traceback.format_exc(),
            )
            self.reason = "the coordinator failed"
        self.story.say(time.time(), self.story.speed.summary)
        taken_back = self.demand.take_back()
        try:
            # before the keepers close: they delete their and this node's part of the journal
            self.journal.close()
            if self.journal.behind:
                self.story.say(
                    time.time(),
                    f"the end of the run could not be written to the bucket: {self.journal.behind}",
                )
            self.group.reap(GRACE_S)
            self.errands.finish(isinstance(self.state.state, Finished), self.inbox)
            metrics.close()
            self.story.say(time.time(), over_fits(self.run))
        except Exception:  # the process boundary: drivers wait for the end
            self.story.say(
                time.time(),
                (
                    "the run has left something on its nodes; `elastic clean` removes "
                    f"it\n{traceback.format_exc()}"
                ),
            )
        taken_back.join(GRACE_S)
        self.over.set()
        while self.audience.present(time.monotonic()):
            time.sleep(TICK_S)
        # the actor is detached, and no other process would end it
        ray.kill(self.group.coordinator, no_restart=True)

    def _take_over(self) -> None:
        """Continues the run of a dead coordinator: recorded actions are performed once more, then the workers
        say where they stand.
        """
        self.group.adopt(self.left, self.state)
        if isinstance(self.state.state, TERMINAL):
            self.reason = getattr(self.state.state, "reason", f"finished at step {self.state.step}")
        self._handle(
            Recovered(self.incarnation, tuple(self.left.workers), tuple(self.left.keepers), self.left.whole),
            None,
        )
        self.group.attach(tuple(each.version for each in self.state.saves.pending if each.asked))

    def _take(self) -> None:
        self.replicas.raise_if_deposed()
        event, shard = self.inbox.take(TICK_S) or (Tick(), None)
        self._handle(event, shard)
        if self.inbox.empty():
            self.replicas.send()

    def _handle(self, event: Event, shard: Any) -> None:
        try:
            if isinstance(event, ShardSaved) and shard is not None:
                self.group.parts.add(event.version, event.worker, shard)
            for each in parts(event):
                if (
                    isinstance(each, Joined | NodeDraining | NodeAdvised)
                    and each.node not in self.state.cluster.nodes  # it is new and was not checked yet
                ):
                    self._advance(NodeFound(each.node))
                if isinstance(each, Joined):
                    self.group.welcome(each.worker, each.node)
            self._advance(event)
            for each in parts(event):
                if isinstance(each, Joined | Lost | StartFailed) and not self.state.knows(each.worker):
                    self.group.forget(each.worker)
        except Deposed:
            raise
        # the process boundary: the next coordinator may know better; the third one gives up
        except Exception as error:
            if isinstance(event, Stumbled) or self.state.gave_up:
                raise
            traceback.print_exc()
            self._advance(Stumbled(signature(event, error), traceback.format_exc()))
            if not self.state.gave_up:
                os._exit(STUMBLED)

    def _advance(self, event: Event) -> None:
        now, heard_until = self.inbox.heard_until()
        before = self.state
        transition = advance(before, event, now, self.rules, heard_until)
        if codec.worth_recording(event, before, transition):
            self._record(now, event, before, transition, heard_until)
        self.state = transition.run  # only now: no view may show what is not recorded yet
        stood_s = self.clock() - now
        for action in transition.actions:
            self.group.perform(action)
        self._tell(now, event, before, transition)
        if stood_s > STOOD_S:
            self._advance(Tick(stood_s))

    def _record(
        self, now: float, event: Event, before: RunState, transition: Transition, heard_until: float
    ) -> None:
        run, durable = transition.run, transition.durable
        heard = heard_until if heard_until < now else None
        record = codec.record(self.journal.next, now, event, before, transition, self.recorded, heard)
        last, known = self.recorded, codec.known_after(event, before, run)
        self.recorded = known
        try:
            self.journal.append(
                record, lambda: codec.snapshot(known, elastic.__version__, self.rules), durable=durable
            )
        except Exception:
            # the journal has no such record, so the next one tells what changed since the last
            self.recorded = last
            raise
        self.replicas.note(run)
        if durable:
            self.replicas.secure(lambda why: self.story.say(now, why))
        self.exported.record(record)

    def _tell(self, now: float, event: Event, before: RunState, transition: Transition) -> None:
        reason = transition.reason
        self.exported.event(event)
        self.errands.note(event)
        for each in parts(event):
            if (
                isinstance(each, StepDone)
                and before.version.step < each.outcome.step <= self.state.version.step
            ):
                lr = rate_for_readers(self.job, each.outcome.step, each.outcome.lr)
                members = before.plan.members if before.plan else ()
                self.exported.step(
                    self.story.step(now, each.outcome, members, lr, each.work, queued=not self.inbox.empty())
                )
        if reason and transition.taken and reason != self.reason:
            self.reason, score = reason, self.state.history.validated
            self.story.say(now, reason, score if score != before.history.validated else None)

    # ---- what nobody reports by itself

    def _begin_to_watch(self) -> None:
        keep_going(self._watch_cluster, "cluster", self._say)
        self.errands.begin()
        self.demand.begin()
        teller = Teller(self.clock, self.post_local)
        for name, source in open_cluster_sources(self.job.notices).items():
            watch = ClusterWatch(name, source, lambda: self.state.cluster, teller.tell, self._say)
            keep_going(partial(watch.run, self.over), f"notices {name}", self._say)

    def _watch_cluster(self) -> None:
        placed: frozenset[WorkerId] = frozenset()
        while not self.over.wait(CLUSTER_S):
            self.exported.run(self.state, self.job.steps, self.clock())
            # Ray's head does not answer: the next round asks again
            with contextlib.suppress(ray.exceptions.RayError):
                self.replicas.ask_head(self.group.coordinator)
                known = self.state  # before the look: whatever is found later may not be in it
                self._keep(there := cluster.nodes())
                self._miss(known, there)
                # Ray lowers the free room a moment later
                before, placed = placed, cluster.placed(self.group.on_their_way(self.state))
                few = len(self.state.workers) < self.rules.min_workers
                no_room_on = {*self.state.cluster.refused, *self.state.cluster.closed(few=few)}
                self.post_local(
                    Capacity(
                        cluster.slots(self.job.workers, no_room_on),
                        tuple(sorted(before & placed)),
                    )
                )
            if not self.state.stop and self.audience.left_alone(time.monotonic()):
                self.post_local(
                    StopRequested(
                        "the command that started the run has not been heard for deadlines.driver_s = "
                        f"{self.job.deadlines.driver_s:g} s"
                    )
                )

    def _miss(self, known: RunState, nodes: tuple[NodeId, ...]) -> None:
        """Says which nodes of the run are not among the living ``nodes``, if no process can tell: no worker is
        there, and no keeper is up.
        """
        homes = {each.node for each in known.workers.values()}
        gone = known.cluster.nodes.keys() - {*nodes, *known.cluster.keepers, *homes}
        for node in sorted(gone) if nodes else ():  # a head that has just started knows none
            self.post_local(KeeperLost(node, NODE_DIED, with_its_node=True))

    def _keep(self, nodes: tuple[NodeId, ...]) -> None:
        """Starts a keeper on every node that has none; the free room on a new node is reported only after
        that.
        """
        for node in nodes:
            if node not in self.group.keepers:
                self.post_local(NodeFound(node))
                # the earlier keeper is not gone yet: the next round tries again
                with contextlib.suppress(ray.exceptions.ActorAlreadyExistsError):
                    self.group.keep(node)
