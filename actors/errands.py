"""Pays what a run owes for its checkpoints (:mod:`elastic.runs.owed`) while it trains, and at its end.

One thread of the coordinator lists the debts after each save, and has at most one of each kind paid at a
time, so that a long export holds up no validation.  Spare workers pay validations.  Each other kind has an
actor, which needs no accelerator.  The actor is started only if something is owed, on the approved node with
the most free CPUs, and reserves no CPU: it runs at a low priority.  It dies with the coordinator that started
it; the next coordinator finds in the bucket what is still owed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from actors import cluster
from actors.ends import NODE_DIED, UNREACHED, why_ended, why_not_made
from actors.processes import end_on_sigterm
from elastic.control.inbox import Inbox
from elastic.control.run import Running, RunState
from elastic.ids import Version, WorkerId
from elastic.job import Job
from elastic.protocol.events import Evaluated, Event, StopRequested, parts
from elastic.runs import asked, owed
from elastic.runs.owed import Debt, Failure
from elastic.runs.retention import Retention
from elastic.runs.run import Run
from elastic.threads import keep_going
from storage.errors import Damaged, StorageError, Unavailable
from storage.objects import ObjectStore

if TYPE_CHECKING:
    from actors.users_code import UsersCode

POLL_S = 0.5
"""Seconds between two looks at the result of an attempt, each of which asks the bucket while a spare
validates, or at requests to stop the run.
"""
AGAIN_S = 5.0
"""Seconds until the bucket, or Ray, is asked again after it did not answer."""
FIRST_S, LONGEST_S = 0.5, 60.0
"""Shortest and longest pause in seconds between a failure and the next attempt of the same kind; it doubles
with each failure of the debt.
"""
HANGS_S = 3600.0
"""Seconds without progress after which an errand counts as hanging, and its process is ended.  While it makes
progress, its time has no limit.
"""
LOOKS = 10
"""Number of looks for progress within the time that is allowed without progress."""
WAITING = 8
"""Largest number of validations that wait for a spare while their checkpoints are kept for them.  If more
wait, the oldest are given up.
"""
MANY = WAITING // 2
"""Number of waiting validations at which the run says, once, that spares do not keep up."""
NICE = 10
"""Added to the niceness of the actor's process, so that it leaves the CPUs to workers."""

Outcome = tuple[str, bool]
"""The result of an attempt: a sentence for the run's story, or "", and whether the debt is paid."""
DROPPED: Outcome = ("", False)
"""The outcome of an attempt that was broken off for a reason outside it; it does not count as a failure."""


@dataclass(frozen=True)
class Attempt:
    """An attempt to pay a debt.  ``outcome`` returns its result, or None while it goes on."""

    debt: Debt
    outcome: Callable[[], Outcome | None]
    patience: Patience


class Errand:
    """The actor that pays debts, one at a time."""

    def __init__(self, job: Job, code: UsersCode) -> None:
        end_on_sigterm()
        os.nice(NICE)
        sys.path[:0] = [entry for entry in code.search_path if entry not in sys.path]
        import torch

        self.job = code.restore(job)
        torch.set_num_threads(self.job.workers.threads)
        self.run = Run(self.job, ObjectStore.open(self.job.bucket))

    def pay(self, debt: Debt) -> Outcome:
        """Pays ``debt``.  Returns and raises as :func:`elastic.train.errands.pay`."""
        from elastic.train.errands import pay

        return pay(self.run, self.job, debt)


class Errands:
    """Looks for debts and has them paid, for a coordinator.  It does nothing for a run whose jobs have never
    asked for anything that can be owed.

    ``known`` returns what the coordinator knows of the run, ``tell`` adds a sentence to the run's story,
    ``post`` puts an event into the coordinator's inbox, and ``order`` orders a spare worker to validate a
    checkpoint.

    The constructor records what the job asks of future checkpoints.  Raises :class:`Unavailable` if the
    bucket does not answer.
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
        self.asked = asked.begin(self.run, known().generation, claim)
        self.found: list[Debt] = []
        """The debts that are open or were given up, oldest first, as of the newest look."""
        self.makers: dict[str, PayingProcess | Spares] = {
            kind: (Spares if kind == owed.VALIDATION else PayingProcess)(self) for kind in self.asked.kinds
        }
        self.attempts = dict[str, Attempt]()
        """The attempt that is under way of each kind."""
        self._again_at = dict[str, float]()
        """The time of the next attempt of each kind that has failed."""
        self.paid = 0
        self.heard = set[Version]()
        """The versions whose validation the coordinator has recorded or refused."""
        self.wanted, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._moving = set[Debt]()
        """The debts whose progress the run's story has told, at the end of the run."""

    @property
    def owed(self) -> str:
        """A sentence about the debts that are open or were given up; "" if there are none."""
        return owed.sentence(self.found)

    @property
    def open(self) -> list[Debt]:
        """The debts that were not given up, oldest first."""
        return [debt for debt in self.found if not debt.given_up]

    @property
    def _able(self) -> list[Debt]:
        """The open debts that can be paid at the end of the run: spares are gone by then."""
        return [debt for debt in self.open if debt.kind != owed.VALIDATION]

    def begin(self) -> None:
        """Begins to look for debts, first for those that earlier coordinators have left."""
        if self.makers:
            self._thread = keep_going(self._work, "errands", self.tell)

    def look(self) -> None:
        """Looks for debts soon: there is a new checkpoint."""
        self.wanted.set()

    def note(self, event: Event) -> None:
        """Notes the validations in ``event``, which the coordinator has recorded or refused."""
        self.heard.update(each.version for each in parts(event) if isinstance(each, Evaluated))

    def finish(self, finished: bool, inbox: Inbox) -> None:
        """Ends, when the run is over.

        If the run has ``finished``, debts are paid first, until none has made progress for
        ``deadlines.wait_s`` seconds, or until a stop is requested in ``inbox``, which no other code reads any
        more.
        """
        if self._thread is None:
            return
        self._closing.set()
        self.wanted.set()
        self._thread.join()
        if finished:
            self._work_off(inbox)
        for maker in self.makers.values():
            maker.dismiss()
        with suppress(StorageError, OSError):
            self.find()
        if said := owed.left(self.open, finished):
            self.tell(said)
        if finished and self.paid and self.job.keep().last:
            rounds = Retention(self.run, self.claim, self.tell)
            # no later save deletes the checkpoints that were kept only for debts
            for _ in range(2):
                rounds.round()

    def find(self) -> None:
        """Finds the debts, and tells the spares which validations are open."""
        known = self.known()
        self.found = owed.debts(
            self.run, known.history.lineage, self.asked, end=known.enough or self.run.job.steps
        )
        if isinstance(spares := self.makers.get(owed.VALIDATION), Spares):
            spares.look([debt for debt in self.open if debt.kind == owed.VALIDATION])

    def _work(self) -> None:
        self.wanted.set()
        while not self._closing.is_set():
            self.wanted.wait(POLL_S if self.open or self.attempts else None)
            self._go_on()

    def _go_on(self) -> None:
        """Finds the debts if that is wanted, looks at the attempts under way, and begins new ones."""
        try:
            if self.wanted.is_set():
                self.wanted.clear()
                self.find()
            for kind in self.makers:
                self._pay(kind)
        except (Unavailable, OSError, ray.exceptions.RayError):
            self.wanted.set()
            self._closing.wait(AGAIN_S)

    def _pay(self, kind: str) -> None:
        """Looks at the attempt of this kind that is under way; without one, begins an attempt at the debt
        that has failed the least, the oldest of several.
        """
        if (attempt := self.attempts.get(kind)) is not None:
            self._look_after(attempt)
        elif not (left := [debt for debt in self.open if debt.kind == kind]):
            self.makers[kind].dismiss()
        elif time.monotonic() >= self._again_at.get(kind, 0.0):
            debt = min(left, key=lambda each: (len(each.failures), each))
            if (outcome := self.makers[kind].begin(debt)) is not None:
                self.attempts[kind] = Attempt(
                    debt, outcome, Patience(lambda: owed.progress(self.run, debt), HANGS_S)
                )

    def _look_after(self, attempt: Attempt) -> None:
        debt, outcome = attempt.debt, attempt.outcome()
        if outcome is None and attempt.patience.is_over():
            self.makers[debt.kind].dismiss()
            outcome = (
                owed.failed(self.run, debt, Failure(f"it has made no progress for {HANGS_S:g} s", died=True)),
                False,
            )
        if outcome is not None:
            said, done = outcome
            self._again_at[debt.kind] = time.monotonic() + (
                0.0 if done else min(FIRST_S * 2 ** len(debt.failures), LONGEST_S)
            )
            del self.attempts[debt.kind]
            self.paid += done
            self.wanted.set()
            if said:
                self.tell(said)

    def _work_off(self, inbox: Inbox) -> None:
        """Pays the debts that can be paid, until none makes progress any more or a stop is asked for."""
        self._go_on()
        if said := owed.sentence(self._able):
            self.tell(f"{said}; this command does them now, and Ctrl-C leaves them for later")
        wait_s = self.job.deadlines.wait_s
        patience = Patience(self._stands, wait_s)
        while (self.wanted.is_set() or self.attempts or self._able) and not _stops(inbox):
            time.sleep(POLL_S)
            self._go_on()
            if patience.is_over():
                self.tell(
                    f"deadlines.wait_s = {wait_s:g}: none of the owed exports, samples and validations "
                    "has made progress for this time, so the run ends"
                )
                return

    def _stands(self) -> object:
        """Returns a value that changes when a debt is paid or an attempt makes progress.  Says once of each
        debt that it makes progress.
        """
        under_way = {each.debt: owed.progress(self.run, each.debt) for each in self.attempts.values()}
        for debt in sorted({debt for debt, (count, _) in under_way.items() if count} - self._moving):
            self._moving.add(debt)
            self.tell(f"{debt} makes progress, so the run waits until it is done")
        return self.paid, under_way


class Patience:
    """Decides when work counts as hanging: once what ``stands`` returns has not changed for ``most_s``
    seconds.  It calls ``stands`` ``LOOKS`` times in that time.
    """

    def __init__(
        self, stands: Callable[[], object], most_s: float, clock: Callable[[], float] | None = None
    ) -> None:
        self._stands, self._most_s, self._clock = stands, most_s, clock or time.monotonic
        self._seen: object = None
        self._next, self._until = self._clock() + most_s / LOOKS, self._clock() + most_s

    def is_over(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._most_s / LOOKS
        with suppress(StorageError, OSError):  # a bucket that does not answer shows no progress
            if (seen := self._stands()) != self._seen:
                self._seen, self._until = seen, now + self._most_s
        return now > self._until


class PayingProcess:
    """Lets an actor pay debts, one after the other."""

    def __init__(self, errands: Errands) -> None:
        self.errands = errands
        self._actor: Any = None

    def begin(self, debt: Debt) -> Callable[[], Outcome | None]:
        """Begins an attempt."""
        if self._actor is None:
            node = cluster.freest(self.errands.known().cluster.keepers)
            options = {
                "num_cpus": 0,
                "max_restarts": 0,
                "scheduling_strategy": cluster.only_on(node),
            }
            actor = ray.remote(cluster.titled(Errand, f"{self.errands.job.name}/errand"))
            self._actor = actor.options(**options).remote(self.errands.job, self.errands.code)
        return partial(self._outcome, debt, self._actor.pay.remote(debt))

    def _outcome(self, debt: Debt, call: Any) -> Outcome | None:
        if not ray.wait([call], timeout=0)[0]:
            return None
        try:
            outcome: Outcome = ray.get(call)
            return outcome
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Unavailable | OSError):
                return DROPPED
            failure = Failure(why_ended(error))
        except ray.exceptions.RayError as error:
            self.dismiss()
            unmade, why = getattr(error, "actor_init_failed", False), why_ended(error)
            if not unmade and (
                why in (NODE_DIED, UNREACHED) or isinstance(error, ray.exceptions.ActorUnschedulableError)
            ):
                return DROPPED
            failure = Failure(why_not_made(error)) if unmade else Failure(why, died=True)
        return owed.failed(self.errands.run, debt, failure), False

    def dismiss(self) -> None:
        """Ends the actor."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor, no_restart=True)


class Spares:
    """Lets spare workers make validations while the members train."""

    def __init__(self, errands: Errands) -> None:
        self.errands, self.run = errands, errands.run
        self._posted = set[Version]()
        self._warned = False
        rule = errands.job.validation
        self._by_spares = rule.every > 0 and rule.by == "spares"
        """False if only checkpoints of earlier jobs owe a validation: with the present job, spares do not
        validate.
        """

    def look(self, left: list[Debt]) -> None:
        """Posts the validations that are done, and limits ``left``, those that still wait."""
        self._tell_validations()
        attempt = self.errands.attempts.get(owed.VALIDATION)
        self._limit([debt for debt in left if attempt is None or debt != attempt.debt])

    def begin(self, debt: Debt) -> Callable[[], Outcome | None] | None:
        """Orders a spare worker of the members' kind to validate the checkpoint.  Returns None if there is no
        such worker, or no world steps.
        """
        known = self.errands.known()
        if not self._by_spares or not isinstance(known.state, Running):
            return None
        members = known.state.plan.ranks
        kinds = {worker.kind for name, worker in known.workers.items() if name in members}
        for name, worker in known.workers.items():
            if name not in members and not worker.unfit and worker.kind in kinds:
                self.errands.order(name, debt.version)
                return partial(self._outcome, debt, name)
        return None

    def dismiss(self) -> None:
        """Leaves the spare alone: it drops its validation once it gets another order."""

    def _outcome(self, debt: Debt, spare: WorkerId) -> Outcome | None:
        """Returns the result of an attempt.  The debt stays open if the spare has become a member or was
        lost, or if the run ends.
        """
        known = self.errands.known()
        if known.over or spare not in known.workers or (known.plan is not None and spare in known.plan.ranks):
            return DROPPED
        done, failures = owed.stands(self.run, debt)
        if failures > len(debt.failures) and not done:
            return f"{debt} failed on {spare}; its log says why", False
        return ("", True) if done else None

    def _limit(self, waiting: list[Debt]) -> None:
        """Gives up the oldest validations if more than ``WAITING`` wait, since a checkpoint is kept for each.
        Warns once when ``MANY`` wait.
        """
        rule = self.run.job.validation
        if not self.run.job.keep().last:  # all checkpoints are kept in any case
            return
        if self._by_spares and len(waiting) >= MANY and not self._warned:
            self._warned = True
            kept = [
                each
                for debt in waiting
                for each in self.run.checkpoints.at(debt.version.step)
                if each.version == debt.version
            ]
            held = sum(
                file.size for each in kept if each.manifest is not None for file in each.manifest.files
            )
            self.errands.tell(
                f"{len(waiting)} validations wait for a spare worker, and {held / 1e9:.3g} GB of "
                "checkpoints are kept for them: a validation takes longer than validation.every = "
                f"{rule.every} steps, or no spare is free; name a larger validation.every, fewer "
                f"validation.samples, or validation.by = 'members'.  If more than {WAITING} wait, the "
                "oldest is given up"
            )
        most, why = 0, "spares no longer validate, because validation.by or validation.every was changed"
        if self._by_spares:
            most, why = WAITING, f"more than {WAITING} validations wait for a spare worker"
        for debt in waiting[: max(len(waiting) - most, 0)]:
            self.errands.tell(owed.failed(self.run, debt, Failure(why, last=True)))
            self.errands.wanted.set()

    def _tell_validations(self) -> None:
        """Posts the validations that may be missing in the journal: that of a spare that became a member or
        was lost before its result was read, and those whose coordinator died too early.  A validation on
        other samples than those of the present job is not posted.
        """
        known = self.errands.known()
        for debt in owed.untold(self.run, known.history.lineage):
            if debt.version in self.errands.heard:
                owed.note_told(self.run, debt)
            elif debt.version not in self._posted:
                held_out = known.members.reference.held_out
                with suppress(Damaged):  # its numbers are in the metrics all the same
                    about = owed.result(self.run, debt)
                    if about.get("held_out", held_out) == held_out:  # older releases did not say it
                        self.errands.post(Evaluated(debt.version, owed.found(about)))
                self._posted.add(debt.version)


def _stops(inbox: Inbox) -> bool:
    """Takes all events from ``inbox``.  Returns whether one of them asks for a stop."""
    return any([isinstance(event, StopRequested) for event, _ in iter(lambda: inbox.take(0.0), None)])
