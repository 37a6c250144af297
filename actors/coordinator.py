"""The one actor that runs a run: inbox -> advance -> journal -> perform.  Nothing else.

It is named and detached, and holds no state that matters beyond ``RunState``: workers step on without it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

import elastic
from actors import cluster
from actors.audience import Audience
from actors.group import Group
from elastic.control import codec
from elastic.control.builds import Build
from elastic.control.events import Beat, Capacity, Event, Joined, NodeFound, Renewed, ShardSaved, StepDone, StopRequested, Tick
from elastic.control.machine import Transition, advance, must_be_durable
from elastic.control.states import TERMINAL, Failed, RunState
from elastic.engine.schedule import learning_rate_of
from elastic.ids import NodeId, WorkerId
from elastic.job import Job
from elastic.report.story import Line, Story
from elastic.runs import Run

TICK_S = 0.1
CLUSTER_S = 0.5
GRACE_S = 10.0


@dataclass(frozen=True)
class View:
    """What the coordinator tells whoever asks.  ``workers``: id -> (node, pid-bearing shared-memory segment is on that node)."""

    state: str
    reason: str
    token: str
    incarnation: int
    generation: int
    step: int
    steps: int
    workers: dict[WorkerId, str]
    lines: list[Line]
    stopping: str
    """Why it was asked to stop."""
    over: bool
    job_error: str
    """The user's traceback, where the job is at fault."""


@dataclass(frozen=True)
class Lease:
    """Answer to a renewal.  ``recorded_step``: every commit up to it is in the journal."""

    granted: bool
    recorded_step: int


def worth_recording(event: Event, before: RunState, transition: Transition) -> bool:
    """Heartbeats and the passing of time only count when something comes of them; what they changed goes with the next record."""
    if isinstance(event, Beat | Tick | Renewed | Capacity):
        return bool(transition.actions) or transition.run.state is not before.state
    return transition.run is not before or bool(transition.actions)


class Coordinator:
    """Concurrency groups: ``inbox`` (events in) and ``view`` (questions); the loop itself is ``run_loop``."""

    def __init__(self, job: Job, reference: Build, search_path: list[str], driver: str) -> None:
        self.job, self.rules = job, job.rules()
        self.inbox: queue.SimpleQueue[tuple[Event, Any]] = queue.SimpleQueue()
        self.run = Run.open(job)
        context = ray.get_runtime_context()
        incarnation = self.run.claim(context.gcs_address)
        self.token = f"{job.name}-{incarnation:04d}-{uuid.uuid4().hex[:6]}"
        self.state: RunState = replace(self.run.standing(incarnation, time.time()), reference=reference)
        folder = Path(tempfile.gettempdir()) / "elastic" / self.token
        self.recorded = self.state
        self.journal = self.run.journal(folder / "journal.jsonl", codec.snapshot(self.state, elastic.__version__))
        self.story = Story(job.steps)
        self.group = Group(job, self.run, self.token, context.current_actor, search_path, self.post_local)
        self.reason = ""
        self.audience = Audience(driver, job.on_driver_exit, job.deadlines.driver_s, time.monotonic())
        self.over = threading.Event()

    # ---- inbox

    def post_local(self, event: Event) -> None:
        self.inbox.put((event, None))

    @ray.method(concurrency_group="inbox")  # type: ignore[untyped-decorator]
    def post(self, event: Event, shard: Any = None) -> None:
        """Anyone tells what happened."""
        self.inbox.put((event, shard))

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def renew(self, worker: WorkerId, generation: int) -> Lease:
        """A member asks for its lease on ``generation``."""
        state = self.recorded
        granted = worker in state.workers and state.grants_lease(generation)
        if granted:
            self.inbox.put((Renewed(worker, generation), None))
        return Lease(granted, state.recorded_step)

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def stop(self, reason: str) -> None:
        """A clean stop, with a save."""
        self.inbox.put((StopRequested(reason), None))

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def leave(self, driver: str, reason: str = "") -> bool:
        """A driver is told to go, or has seen the end.  True: the run stops because of it."""
        if not self.over.is_set() and self.audience.stops_with(driver, time.monotonic()):
            self.stop(reason)
            return True
        self.audience.leave(driver)
        return False

    @ray.method(concurrency_group="view")  # type: ignore[untyped-decorator]
    def view(self, seen: int = 0, driver: str = "") -> View:
        """Where the run stands, and the lines of its story after the first ``seen``.  ``driver``: the asker is one who waits."""
        if driver:
            self.audience.hear(driver, time.monotonic())
        state = self.state
        return View(
            state=type(state.state).__name__,
            reason=self.reason,
            token=self.token,
            incarnation=state.incarnation,
            generation=state.generation,
            step=state.version.step,
            steps=self.job.steps,
            workers={worker: node for worker, node in self.group.joined.items() if worker in state.workers},
            lines=self.story.since(seen),
            stopping=state.stop,
            over=self.over.is_set(),
            job_error=state.state.job_error if isinstance(state.state, Failed) else "",
        )

    # ---- the loop

    def run_loop(self) -> None:
        """Until the run is over and nothing of it is left but this actor."""
        threading.Thread(target=self._watch_cluster, name="cluster", daemon=True).start()
        try:
            while not isinstance(self.state.state, TERMINAL):
                self._take()
        except Exception:  # the process boundary: a decision that failed ends the run, never silently
            self.story.say(time.time(), "the coordinator failed; the run can be resumed\n" + traceback.format_exc())
            self.reason = "the coordinator failed"
        self.group.reap(GRACE_S)
        self.journal.close()
        self.over.set()
        while self.audience.present(time.monotonic()):
            time.sleep(TICK_S)
        os._exit(0)  # detached, and nobody is there any more to end it

    def _take(self) -> None:
        try:
            event, shard = self.inbox.get(timeout=TICK_S)
        except queue.Empty:
            event, shard = Tick(), None
        if isinstance(event, ShardSaved) and shard is not None:
            self.group.receive(event.version, event.worker, shard)
        if isinstance(event, Joined):
            if event.node not in self.state.nodes:  # it is new, and was not looked at yet
                self._advance(NodeFound(event.node))
            self.group.welcome(event.worker, event.node)
        self._advance(event)

    def _advance(self, event: Event) -> None:
        now = time.time()
        before = self.state
        transition = advance(before, event, now, self.rules)
        self.state = transition.run
        if worth_recording(event, before, transition):
            record = codec.record(self.journal.next, now, event, self.recorded, transition)
            self.recorded = transition.run
            self.journal.append(record, codec.snapshot(transition.run, elastic.__version__), durable=must_be_durable(transition))
        for action in transition.actions:
            self.group.perform(action)
        self._tell(now, event, before, transition.reason)

    def _tell(self, now: float, event: Event, before: RunState, reason: str) -> None:
        if isinstance(event, StepDone) and self.state.version.step == event.outcome.step:
            lr = learning_rate_of(self.job, event.outcome.step)
            self.story.step(now, event.outcome, before.plan.layout.world if before.plan else 0, lr)
        if reason and not reason.startswith("refused") and reason != self.reason:
            self.reason = reason
            self.story.say(now, reason)

    # ---- what nobody reports by itself

    def _watch_cluster(self) -> None:
        while not self.over.wait(CLUSTER_S):
            with contextlib.suppress(ray.exceptions.RayError):  # Ray's head does not answer: the world steps on, ask again
                self._keep(cluster.nodes())
                self.post_local(Capacity(cluster.slots(self.job.workers, self.state.refused)))
            if not self.state.stop and self.audience.left_alone(time.monotonic()):
                self.post_local(StopRequested(f"its driver has not been heard for {self.job.deadlines.driver_s:g} s"))

    def _keep(self, nodes: tuple[NodeId, ...]) -> None:
        """Every node has a keeper; the room on those that are new is spoken of after they are."""
        for node in nodes:
            if node not in self.group.keepers:
                self.post_local(NodeFound(node))
                self.group.keep(node)
