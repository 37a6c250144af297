"""Works off what a run owes for its checkpoints (:mod:`elastic.runs.owed`) while it trains, and at its end.

Each kind of debts has a thread of the coordinator of its own, which looks for them and has them paid one by one, so that a long export
holds up no validation.  Spare workers validate.  The other kinds have an actor each, which needs no accelerator.  It is started only if
something is owed, on the approved node with the most free CPUs, and takes none of them: it runs at a low priority.  It dies with the
coordinator that started it, and the next coordinator finds what is still owed in the bucket.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
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
from elastic.protocol.events import Evaluated, Event, StopRequested, parts
from elastic.runs import asked, owed
from elastic.runs.owed import Debt, Failure
from elastic.runs.retention import Retention
from elastic.runs.run import Run
from elastic.threads import keep_going
from storage.errors import Damaged, StorageError, Unavailable
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
"""Seconds without progress after which an errand counts as hanging, and its process is ended.  It may last as long as it makes progress."""
LOOKS = 10
"""Number of looks for progress in the time without any that is allowed."""
WAITING = 8
"""Largest number of validations that wait for a spare while their checkpoints are kept for them; the oldest ones beyond are given up."""
MANY = WAITING // 2
"""Number of waiting validations at which the run says, once, that spares do not keep up."""
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
    """Looks for debts and has them paid, for a coordinator.  For a run that was never asked for anything it does nothing.

    ``known`` returns what the coordinator knows of the run, ``tell`` adds a sentence to the run's story, ``post`` puts an event into the
    coordinator's inbox, and ``order`` orders a spare worker to validate a checkpoint.

    It first records what the job asks of the checkpoints to come.  Raises :class:`Unavailable` if the bucket does not answer.
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
        asked.begin(self.run, known().generation, claim)
        self.asked = asked.of(self.run)
        self.closing = threading.Event()
        self.turns: dict[str, Turn] = {kind: (BySpares if kind == owed.VALIDATION else ByProcess)(self, kind) for kind in self.asked.kinds}
        self._begun = False
        self._moving = set[Debt]()
        """The debts that are under way at the end of the run and have made progress, at the last look."""

    @property
    def owed(self) -> str:
        """A sentence about the debts that are open or were given up; "" if there are none."""
        return owed.sentence(sorted(debt for turn in self.turns.values() for debt in turn.found))

    @property
    def open(self) -> list[Debt]:
        """The debts that were not given up, oldest first, as each turn has found them last."""
        return sorted(debt for turn in self.turns.values() for debt in turn.open)

    def begin(self) -> None:
        """Begins to look for debts, first for those that earlier coordinators have left."""
        self._begun = True
        for turn in self.turns.values():
            turn.begin()

    def look(self) -> None:
        """Looks for debts soon: there is a new checkpoint."""
        for turn in self.turns.values():
            turn.wanted.set()

    def note(self, event: Event) -> None:
        """Takes note of what was recorded in the journal: it knows a validation now, or refuses it."""
        if isinstance(turn := self.turns.get(owed.VALIDATION), BySpares):
            for version in (each.version for each in parts(event) if isinstance(each, Evaluated)):
                turn.heard.put(version)

    def finish(self, finished: bool, inbox: Inbox) -> None:
        """Ends, when the run is over.

        If it has ``finished``, what is owed is done first, until no progress was made for ``deadlines.wait_s``, or until a stop is asked
        for in ``inbox``, which nobody else reads any more.
        """
        if not self._begun:
            return
        if finished:
            self._work_off(inbox)
        self.closing.set()
        for turn in self.turns.values():
            turn.end()
        if said := owed.left(self.open, finished):
            self.tell(said)
        if finished and any(turn.paid for turn in self.turns.values()) and self.job.keep().last:
            self._delete()

    def _work_off(self, inbox: Inbox) -> None:
        for turn in self.turns.values():
            turn.finish()
        if able := [debt for debt in self.open if debt.kind != owed.VALIDATION]:  # spares are gone by now
            self.tell(f"{owed.sentence(able)}; that is done now, and Ctrl-C leaves it for later")
        wait_s, said = self.job.deadlines.wait_s, set[Debt]()
        patience = Patience(self._stands, wait_s)
        while any(turn.alive for turn in self.turns.values()) and not _stops(inbox):
            time.sleep(POLL_S)
            if patience.is_over():
                self.tell(f"deadlines.wait_s = {wait_s:g}: nothing that is owed has made progress for so many seconds, so the run ends")
                return
            for debt in sorted(self._moving - said):
                self.tell(f"{debt} makes progress, and is waited for however long it takes")
            said |= self._moving

    def _stands(self) -> object:
        """Returns what changes whenever something was done, or something under way has made progress."""
        under_way = {debt: owed.progress(self.run, debt) for turn in self.turns.values() if (debt := turn.doing) is not None}
        self._moving = {debt for debt, (count, _) in under_way.items() if count}
        return [turn.paid for turn in self.turns.values()], under_way

    def _delete(self) -> None:
        """Deletes the checkpoints that were kept only for what was owed: no save follows after which that would happen."""
        rounds = Retention(self.run, self.claim, self.tell)
        for _ in range(2):
            rounds.round()
        rounds.close()


class Patience:
    """Decides when work counts as hanging: once what ``stands`` returns has not changed for ``most_s`` seconds.  It looks now and then."""

    def __init__(self, stands: Callable[[], object], most_s: float, clock: Callable[[], float] | None = None) -> None:
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


class Turn:
    """One kind of debts.  A thread has them paid, one after the other; ``perform`` says how."""

    def __init__(self, errands: Errands, kind: str) -> None:
        self.errands, self.kind = errands, kind
        self.run, self.tell, self.known, self.closing = errands.run, errands.tell, errands.known, errands.closing
        self.found: list[Debt] = []
        """The debts that are open or were given up, as they were found last."""
        self.doing: Debt | None = None
        """The debt that is being paid."""
        self.paid = 0
        self.wanted, self._last = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def open(self) -> list[Debt]:
        return [debt for debt in self.found if not debt.given_up]

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        if self._thread is None:
            self.wanted.set()
            self._thread = keep_going(self._work, f"errands: {self.kind}", self.tell)

    def finish(self) -> None:
        """Looks for the last time: the thread ends when nothing is owed that can be done."""
        with suppress(StorageError, OSError):
            self.look()
        self._last.set()
        self.wanted.set()

    def end(self) -> None:
        """Waits until the thread has ended, which looks at ``closing``, and looks what is left."""
        self.wanted.set()
        if self._thread is not None:
            self._thread.join()
        self.dismiss()
        with suppress(StorageError, OSError):
            self.look()

    def look(self) -> None:
        known = self.known()
        self.found = owed.debts(self.run, known.history.lineage, self.errands.asked, (self.kind,), known.enough or self.run.job.steps)

    def able(self) -> list[Debt]:
        """Returns the debts that can be paid now."""
        return self.open

    def perform(self, debt: Debt) -> tuple[str, bool]:
        """Pays a debt.  Returns the sentence for the story, and whether it is done."""
        raise NotImplementedError

    def dismiss(self) -> None:
        """Ends what was started to pay debts."""

    def _work(self) -> None:
        """Works off all that is owed whenever it is to look, and pauses after a failure."""
        self.wanted.set()
        while not self.closing.is_set():
            self.wanted.wait()
            self.wanted.clear()
            last, failed = self._last.is_set(), 0
            while (done := self._next()) is not None:
                failed = 0 if done else failed + 1
                if self.closing.wait(min(FIRST_S * 2 ** (failed - 1), LONGEST_S) if failed else 0.0):
                    return
            self.dismiss()
            if last:
                return

    def _next(self) -> bool | None:
        """Takes the oldest debt, of those that have failed the least.  Returns whether that succeeded, or None if there is none."""
        try:
            self.look()
            if not (able := self.able()):
                return None
            self.doing = min(able, key=lambda each: (len(each.failures), each))
            said, done = self.perform(self.doing)
        except (Unavailable, OSError):  # the bucket does not answer
            return False
        finally:
            self.doing = None
        if said:
            self.tell(said)
        self.paid += done
        return done

    def patience(self, debt: Debt) -> Patience:
        return Patience(lambda: owed.progress(self.run, debt), HANGS_S)

    def hangs(self, debt: Debt) -> tuple[str, bool]:
        """Notes that the attempt hangs.  Returns as :meth:`perform`."""
        return owed.failed(self.run, debt, Failure(f"it has made no progress for {HANGS_S:g} s", died=True)), False


class ByProcess(Turn):
    """Debts that an actor pays."""

    _actor: Any = None

    def perform(self, debt: Debt) -> tuple[str, bool]:
        self._actor = self._actor or self._start()
        call, patience = self._actor.pay.remote(debt), self.patience(debt)
        while not ray.wait([call], timeout=POLL_S)[0]:
            if self.closing.is_set():
                return "", False
            if patience.is_over():
                self.dismiss()
                return self.hangs(debt)
        try:
            said, done = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Unavailable | OSError):
                raise error.cause from error
            return owed.failed(self.run, debt, Failure(why_ended(error))), False
        except ray.exceptions.RayError as error:
            self.dismiss()
            if getattr(error, "actor_init_failed", False):
                return owed.failed(self.run, debt, Failure(why_not_made(error))), False
            if (why := why_ended(error)) in (NODE_DIED, UNREACHED) or isinstance(error, ray.exceptions.ActorUnschedulableError):
                return "", False
            return owed.failed(self.run, debt, Failure(why, died=True)), False
        return said, done

    def _start(self) -> Any:
        node = cluster.freest(self.known().cluster.keepers)
        return (
            ray.remote(cluster.titled(Errand, f"{self.run.job.name}/errand"))
            .options(num_cpus=0, max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(self.run.job, self.errands.code)
        )

    def dismiss(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor, no_restart=True)


class BySpares(Turn):
    """Validations, which spare workers make while the members train."""

    def __init__(self, errands: Errands, kind: str) -> None:
        super().__init__(errands, kind)
        self.heard: SimpleQueue[Version] = SimpleQueue()
        """The validations that the journal knows and that are not noted as told."""
        self._posted = set[Version]()
        self._warned = False
        rule = errands.job.validation
        self._by_spares = rule.every > 0 and rule.by == "spares"
        """False if only checkpoints from before owe a validation: workers have no samples for it, or other things to do."""

    def able(self) -> list[Debt]:
        self._tell_validations()
        self._limit()
        return self.open if self._by_spares and self._spare() is not None else []

    def perform(self, debt: Debt) -> tuple[str, bool]:
        """Lets a spare worker validate the checkpoint.  If it gets a seat meanwhile, or is lost, or the run ends, the debt stays."""
        if (spare := self._spare()) is None:
            return "", False
        failures, patience = len(debt.failures), self.patience(debt)
        self.errands.order(spare, debt.version)
        while not self.closing.wait(LOOK_S) and self._is_free(spare):
            done, failed = owed.stands(self.run, debt)
            if done:
                return "", True
            if failed > failures:
                return f"{debt} failed on {spare}; its log says why", False
            if patience.is_over():
                return self.hangs(debt)
            if self.wanted.is_set():  # there is a new checkpoint
                self.wanted.clear()
                self.look()
                self._limit()
        return "", False

    def _limit(self) -> None:
        """Gives the oldest validations up if so many wait that the checkpoints that are kept for them pile up, and warns before."""
        rule, waiting = self.run.job.validation, [debt for debt in self.open if debt != self.doing]
        if not self.run.job.keep().last:  # all checkpoints are kept in any case
            return
        if self._by_spares and len(waiting) >= MANY and not self._warned:
            self._warned = True
            kept = [each for debt in waiting for each in self.run.checkpoints.at(debt.version.step) if each.version == debt.version]
            held = sum(file.size for each in kept if each.manifest is not None for file in each.manifest.files)
            self.tell(
                f"{len(waiting)} validations wait for a spare worker, and {held / 1e9:.3g} GB of checkpoints are kept for them: a "
                f"validation takes longer than validation.every = {rule.every} steps, or no spare is free; name a larger validation.every, "
                f"fewer validation.samples, or validation.by = 'members'.  If more than {WAITING} wait, the oldest is given up"
            )
        why = (
            f"more than {WAITING} wait for a spare worker" if self._by_spares else "no spare validates any more, by validation.by or .every"
        )
        if surplus := waiting[: max(len(waiting) - (WAITING if self._by_spares else 0), 0)]:
            for debt in surplus:
                self.tell(owed.failed(self.run, debt, Failure(why, last=True)))
            self.look()

    def _spare(self) -> WorkerId | None:
        """Returns a worker of the members' kind that is none itself, while a world steps; None without one."""
        known = self.known()
        if not isinstance(known.state, Running):
            return None
        members = known.state.plan.ranks
        kinds = {worker.kind for name, worker in known.workers.items() if name in members}
        fits = (name for name, worker in known.workers.items() if name not in members and not worker.unfit and worker.kind in kinds)
        return next(fits, None)

    def _is_free(self, worker: WorkerId) -> bool:
        """Returns whether the worker is there, and no member of a world, of a run that is not over."""
        known = self.known()
        return not known.over and worker in known.workers and (known.plan is None or worker not in known.plan.ranks)

    def _tell_validations(self) -> None:
        """Posts the validations that no journal may know: also of a spare that got a seat or was lost before anybody looked, and those
        that an earlier coordinator has not heard of before it died.  A validation on other samples than those of now is not posted.
        """
        while not self.heard.empty():
            owed.note_told(self.run, Debt(self.heard.get(), self.kind))
        known = self.known()
        for debt in owed.untold(self.run, known.history.lineage):
            if debt.version not in self._posted:
                held_out = known.members.reference.held_out
                with suppress(Damaged):  # its numbers are in the metrics all the same
                    about = owed.result(self.run, debt)
                    if about.get("held_out", held_out) == held_out:  # older releases did not say it
                        self.errands.post(Evaluated(debt.version, owed.found(about)))
                self._posted.add(debt.version)


def _stops(inbox: Inbox) -> bool:
    """Takes all that has come, and returns whether somebody asks for a stop."""
    return any([isinstance(event, StopRequested) for event, _ in iter(lambda: inbox.take(0.0), None)])
