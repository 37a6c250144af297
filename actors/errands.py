"""Works off what a run owes for its checkpoints (:mod:`elastic.runs.owed`) while it trains, and at its end.

A thread of the coordinator looks for debts and gives them, one by one, to an actor that needs no accelerator.  That actor is started only
if something is owed, on the approved node with the most free CPUs, and takes none of them: it runs at a low priority.  It dies with the
coordinator that started it, and the next coordinator finds what is still owed in the bucket.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import cluster
from actors.ends import NODE_DIED, UNREACHED, why_ended, why_not_made
from actors.processes import end_on_sigterm
from elastic.control.inbox import Inbox
from elastic.control.run import Running, RunState
from elastic.ids import Version, WorkerId
from elastic.job import Job
from elastic.protocol.events import Evaluated, Event, StopRequested
from elastic.runs import owed, retention
from elastic.runs.owed import Debt, Failure
from elastic.runs.retention import Retention
from elastic.runs.run import Run
from elastic.threads import keep_going
from storage.errors import StorageError, Unavailable
from storage.objects import ObjectStore

if TYPE_CHECKING:
    from actors.objects import UsersCode

POLL_S = 0.1
"""Seconds from one look at the actor, or at what is asked of the thread, to the next."""
LOOK_S = 0.5
"""Seconds from one look for the result of a spare worker, which is in the bucket, to the next."""
FIRST_S, LONGEST_S = 0.5, 60.0
"""Seconds from a failure to the next attempt: they double with each failure in a row."""
HANGS_S = 3600.0
"""Seconds after which one errand counts as hanging, and its process is ended."""
NICE = 10
"""Added to the niceness of the actor's process, so that it leaves the CPUs to workers."""


class Errand:
    """The actor.  It does one errand at a time."""

    def __init__(self, job: Job, code: UsersCode) -> None:
        end_on_sigterm()
        os.nice(NICE)
        sys.path[:0] = [entry for entry in code.search_path if entry not in sys.path]
        import torch

        self.job = code.restore(job)
        torch.set_num_threads(self.job.workers.threads)
        self.run = Run(self.job, ObjectStore.open(self.job.bucket))

    def pay(self, debt: Debt) -> tuple[str, bool]:
        """Performs what is owed.  Returns and raises as :func:`elastic.train.errands.pay`."""
        from elastic.train.errands import pay

        return pay(self.run, self.job, debt)


class Errands:
    """Looks for debts and has them paid, for a coordinator.  For a job that asks for nothing it does nothing.

    ``known`` returns what the coordinator knows of the run, ``tell`` adds a sentence to the run's story, ``post`` puts an event into the
    coordinator's inbox, and ``order`` orders a spare worker to validate a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        claim: int,
        code: UsersCode,
        known: Callable[[], RunState],
        tell: Callable[[str], None],
        post: Callable[[Event], None],
        order: Callable[[WorkerId, Version], None],
    ) -> None:
        self.job, self.code, self.known, self.tell = job, code, known, tell
        self.run, self.claim = Run(job, run.store), claim
        self.post, self.order = post, order
        self.owed = ""
        """A sentence about the debts that are open or were given up; "" if there are none."""
        self._open: list[Debt] = []
        self._paid = 0
        self._told: set[Version] | None = None
        """The validations that the journal knows, or is told of; None before the first look."""
        self._actor: Any = None
        self._wanted, self._last, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begins to look for debts, first for those that earlier coordinators have left."""
        if owed.kinds(self.job) and self._thread is None:
            self._wanted.set()
            self._thread = keep_going(self._work, "errands", self.tell)

    def look(self) -> None:
        """Looks for debts soon: there is a new checkpoint."""
        self._wanted.set()

    def finish(self, finished: bool, inbox: Inbox) -> None:
        """Ends, when the run is over.

        If it has ``finished``, what is owed is done first, until nothing was done for ``deadlines.wait_s``, or until a stop is asked for in
        ``inbox``, which nobody else reads any more.
        """
        if self._thread is None:
            return
        if finished:
            self._work_off(inbox)
        self._closing.set()
        self._wanted.set()
        self._thread.join()
        self._dismiss()
        with suppress(StorageError, OSError):
            self._look()
        if self._open:
            rest = "`elastic owed` with the job file and --pay does it" if finished else "it is done when the run goes on"
            self.tell(f"{owed.sentence(self._open)}; {rest}")
        if finished and self._paid and self.job.keep().last:
            self._delete()

    def _work_off(self, inbox: Inbox) -> None:
        assert self._thread is not None
        self._last.set()
        self._wanted.set()
        with suppress(StorageError, OSError):
            self._look()
        if able := [debt for debt in self._open if debt.kind != owed.VALIDATION]:  # spares are gone by now
            self.tell(f"{owed.sentence(able)}; that is done now, and Ctrl-C leaves it for later")
        paid, until = self._paid, time.monotonic() + self.job.deadlines.wait_s
        while self._thread.is_alive() and time.monotonic() < until and not _stops(inbox):
            if self._paid > paid:
                paid, until = self._paid, time.monotonic() + self.job.deadlines.wait_s
            self._thread.join(POLL_S)

    def _delete(self) -> None:
        """Deletes the checkpoints that were kept only for what was owed: no save follows after which that would happen."""
        rounds = Retention(self.run, self.claim, self.tell)
        for _ in range(2):
            rounds.round(retention.as_it_stands(self.run))
        rounds.close()

    # ---- the thread

    def _work(self) -> None:
        """Works off all that is owed whenever it is to look, and pauses after a failure."""
        self._wanted.set()
        while not self._closing.is_set():
            self._wanted.wait()
            self._wanted.clear()
            last, failed = self._last.is_set(), 0
            while (done := self._next()) is not None:
                failed = 0 if done else failed + 1
                if self._closing.wait(min(FIRST_S * 2 ** (failed - 1), LONGEST_S) if failed else 0.0):
                    return
            self._dismiss()
            if last:
                return

    def _next(self) -> bool | None:
        """Takes the oldest debt, of those that have failed the least.  Returns whether that succeeded, or None if nothing is owed."""
        try:
            self._tell_validations()
            self._look()
            spare = self._spare()
            if not (able := [debt for debt in self._open if spare is not None or debt.kind != owed.VALIDATION]):
                return None
            debt = min(able, key=lambda each: (len(each.failures), each))
            said, done = self._validate(debt, spare) if debt.kind == owed.VALIDATION and spare is not None else self._pay(debt)
        except (Unavailable, OSError):  # the bucket does not answer
            return False
        if said:
            self.tell(said)
        self._paid += done
        return done

    def _look(self) -> None:
        found = owed.debts(self.run, self.job, self.known().history.lineage)
        self._open, self.owed = [debt for debt in found if not debt.given_up], owed.sentence(found)

    def _pay(self, debt: Debt) -> tuple[str, bool]:
        """Lets the actor do it.  Returns the sentence for the story, and whether it is done."""
        self._actor = self._actor or self._start()
        call, until = self._actor.pay.remote(debt), time.monotonic() + HANGS_S
        while not ray.wait([call], timeout=POLL_S)[0]:
            if self._closing.is_set():
                return "", False
            if time.monotonic() > until:
                self._dismiss()
                return owed.failed(self.run, debt, Failure(f"it was not done in {HANGS_S:g} s", died=True)), False
        try:
            said, done = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Unavailable | OSError):
                raise error.cause from error
            return owed.failed(self.run, debt, Failure(why_ended(error))), False
        except ray.exceptions.RayError as error:
            self._dismiss()
            if getattr(error, "actor_init_failed", False):
                return owed.failed(self.run, debt, Failure(why_not_made(error))), False
            if (why := why_ended(error)) in (NODE_DIED, UNREACHED) or isinstance(error, ray.exceptions.ActorUnschedulableError):
                return "", False
            return owed.failed(self.run, debt, Failure(why, died=True)), False
        return said, done

    def _spare(self) -> WorkerId | None:
        """Returns a worker of the members' kind that is none itself, while a world steps; None without one."""
        known = self.known()
        if not isinstance(known.state, Running):
            return None
        members = known.state.plan.ranks
        kinds = {worker.kind for name, worker in known.workers.items() if name in members}
        fits = (name for name, worker in known.workers.items() if name not in members and not worker.unfit and worker.kind in kinds)
        return next(fits, None)

    def _validate(self, debt: Debt, spare: WorkerId) -> tuple[str, bool]:
        """Lets a spare worker validate the checkpoint.  If it gets a seat meanwhile, or is lost, or the run ends, the debt stays."""
        failures, until = len(debt.failures), time.monotonic() + HANGS_S
        self.order(spare, debt.version)
        while not self._closing.wait(LOOK_S) and self._is_free(spare):
            done, failed = owed.stands(self.run, debt)
            if done:
                return "", True
            if failed > failures:
                return f"{debt} failed on {spare}; its log says why", False
            if time.monotonic() > until:
                return owed.failed(self.run, debt, Failure(f"it was not done in {HANGS_S:g} s", died=True)), False
        return "", False

    def _is_free(self, worker: WorkerId) -> bool:
        """Returns whether the worker is there, and no member of a world, of a run that is not over."""
        known = self.known()
        return not known.over and worker in known.workers and (known.plan is None or worker not in known.plan.ranks)

    def _tell_validations(self) -> None:
        """Posts the validations that no journal may know: also of a spare that got a seat or was lost before anybody looked, and those
        that an earlier coordinator has not heard of before it died.
        """
        if owed.VALIDATION not in owed.kinds(self.job):
            return
        history = self.known().history
        done = owed.done(self.run, owed.VALIDATION, history.lineage)
        if self._told is None:
            known = history.validated
            self._told = {debt.version for debt in done if known is not None and debt.version <= known.version}
        for debt in done:
            if debt.version not in self._told:
                self.post(Evaluated(debt.version, owed.found(owed.result(self.run, debt))))
                self._told.add(debt.version)

    def _start(self) -> Any:
        node = cluster.freest(self.known().cluster.keepers)
        return (
            ray.remote(cluster.titled(Errand, f"{self.job.name}/errand"))
            .options(num_cpus=0, max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(self.job, self.code)
        )

    def _dismiss(self) -> None:
        """Ends the actor, if there is one."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor, no_restart=True)


def _stops(inbox: Inbox) -> bool:
    """Takes all that has come, and returns whether somebody asks for a stop."""
    return any([isinstance(event, StopRequested) for event, _ in iter(lambda: inbox.take(0.0), None)])
