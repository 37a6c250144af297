"""The turns of what a run owes, without processes: which debts wait for which, for how long, and what the run
is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from actors import errands as module
from actors.errands import LOOKS, MANY, WAITING, Attempt, Errands, Outcome, Patience, PayingProcess
from actors.users_code import UsersCode
from elastic.control.inbox import Inbox
from elastic.control.run import Finished
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Validated
from elastic.protocol.events import Capacity, Evaluated, Event, Joined, KeeperUp
from elastic.runs import owed
from elastic.runs.owed import Debt
from elastic.runs.run import Run
from tests.control.play import CLASSES, reformed, stepping
from tests.storage.states import TENSORS, state_of, write
from tests.support.patience import until
from tests.support.toys import toy_job

HELD_OUT = {
    "every": 10,
    "by": "spares",
    "samples": 21,
    "dataset": "tests.support.toys:Sums",
    "args": {"samples": 50, "seq_len": 16},
}


class Ordered:
    """A world of two members and a spare, w3, that is ordered to validate step 10.  No process is behind
    them; ``play`` is the run.
    """

    def __init__(self, steps: int = 20, **settings: Any) -> None:
        name, keep = str(uuid4()), settings.pop("keep_last", 0)
        self.job = toy_job(
            "memory://ordered",
            name=name,
            steps=steps,
            checkpoint={"save_every": 10, "keep_last": keep},
            workers={"max": 2, "spares": 1},
            validation=HELD_OUT,
            **settings,
        )
        self.run, self.play = Run.open(self.job), stepping(2, save_every=10, target_step=steps, spares=1)
        self.play.tell(Capacity(1))
        self.play.tell(KeeperUp(NodeId("n3")))
        self.play.tell(Joined(WorkerId("w3"), NodeId("n3"), "cpu", CLASSES))
        self.orders, self.posted, self.said = list[tuple[WorkerId, Version]](), list[Event](), list[str]()
        self.errands = self.coordinator()
        self.save(10)

    def begun(self) -> Ordered:
        self.errands.begin()
        until(lambda: self.orders, what="no spare was ordered to validate")
        return self

    def coordinator(self) -> Errands:
        return Errands(
            self.job,
            self.run,
            1,
            UsersCode([]),
            lambda: self.play.run,
            self.said.append,
            self.posted.append,
            self.order,
        )

    def order(self, *order: Any) -> None:
        self.orders.append(order)

    def save(self, step: int) -> Version:
        version = Version(step, 1)
        self.play.steps(step - 9, step)
        self.run.commit(
            version,
            write(self.run.checkpoints, version, state_of(TENSORS[:1], seed=1), 1),
            ((1, step),),
            Layout(),
        )
        self.play.save(version, "w1", "w2")
        return version

    def validate(self, step: int, loss: float, **about: str) -> Debt:
        """Notes the result of a spare."""
        debt = Debt(Version(step, 1), owed.VALIDATION)
        found = owed.validated(Validated(loss, 1), self.play.run.members.reference.held_out)
        assert owed.note_done(self.run, debt, {**found, **about})
        return debt

    def end(self) -> None:
        """Ends the run, while the spare still works."""
        self.save(20)
        assert isinstance(self.play.run.state, Finished) and WorkerId("w3") in self.play.run.workers

    def open(self) -> list[str]:
        """Looks once more what is owed and not given up."""
        self.errands.find()
        return [str(debt) for debt in self.errands.open]


def test_a_run_that_ends_while_a_spare_validates_does_not_wait_for_it() -> None:
    """Nobody would validate any more."""
    ordered = Ordered().begun()
    assert ordered.orders == [(WorkerId("w3"), Version(10, 1))]
    ordered.end()
    ordered.errands.finish(True, Inbox(time.monotonic))
    assert ordered.posted == [] and len(ordered.orders) == 1
    assert [str(debt) for debt in owed.debts(ordered.run)] == ["validation of step 10"], "it stays owed"
    assert ordered.said == ["owed: validation of step 10; to do it now: `elastic owed --pay`"]


def test_a_validation_is_told_though_its_spare_gets_a_seat_at_once() -> None:
    """The result is in the bucket, and nobody has looked for it when the spare takes a dead member's seat."""
    ordered = Ordered().begun()
    play = ordered.play
    play.lose("w2")
    play.answer("w1", Version(10, 1))
    assert play.plan.members == ("w1", "w3")
    ordered.validate(10, 1.5)
    reformed(play)
    ordered.errands.look()  # as after each save
    until(lambda: ordered.posted, what="nobody was told of it")
    assert ordered.posted == [Evaluated(Version(10, 1), Validated(1.5, 1))], "once"
    ordered.errands.finish(False, Inbox(time.monotonic))


def test_a_later_coordinator_tells_the_validations_that_the_journal_does_not_know() -> None:
    """The validation of step 10 comes after that of step 20, which the journal knows, and its coordinator
    dies before it hears of it.

    The controls: what the journal knows is not told again, and neither is a validation on other samples.
    """
    ordered = Ordered(60)
    for step in (20, 30, 40):
        ordered.save(step)
    ordered.validate(20, 2.0)
    ordered.errands.find()
    assert ordered.posted == [Evaluated(Version(20, 1), Validated(2.0, 1))]
    ordered.play.tell(ordered.posted[0])
    ordered.errands.note(ordered.posted[0])
    ordered.errands.find()
    ordered.validate(10, 1.0)
    ordered.validate(30, 0.5, held_out="other samples")
    assert ordered.play.run.history.validated.version == Version(20, 1)  # type: ignore[union-attr]
    ordered.posted.clear()
    ordered.coordinator().find()
    assert ordered.posted == [Evaluated(Version(10, 1), Validated(1.0, 1))]
    ordered.posted.clear()
    ordered.coordinator().find()
    assert ordered.posted == [Evaluated(Version(10, 1), Validated(1.0, 1))], (
        "again, as long as the journal does not say that it knows it"
    )


def made(process: PayingProcess, debt: Debt) -> Outcome:
    """Notes that an export is made, in place of the process that makes it."""
    return f"{debt}: done", owed.note_done(process.errands.run, debt, {})


def test_a_long_export_holds_up_no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the export is under way until the validation was ordered and noted."""
    over = threading.Event()
    monkeypatch.setattr(
        PayingProcess, "begin", lambda process, debt: lambda: made(process, debt) if over.is_set() else None
    )
    ordered = Ordered(export={"every": 10})
    ordered.errands.begin()
    until(
        lambda: ordered.orders and owed.EXPORT in ordered.errands.attempts,
        what="no spare was ordered to validate",
    )
    ordered.validate(10, 1.0)
    until(
        lambda: [str(debt) for debt in ordered.errands.open] == ["export of step 10"],
        what="the validation was not seen",
    )
    over.set()
    until(lambda: not ordered.errands.open, what="the export was not made")
    ordered.errands.finish(False, Inbox(time.monotonic))
    assert ordered.said == ["export of step 10: done"]


@pytest.mark.parametrize("busy", [True, False])
def test_slow_spares_are_told_of_and_the_oldest_of_too_many_validations_is_given_up_aloud(busy: bool) -> None:
    """The warning comes once, with numbers.  The one that a spare is making stays.  The control: a run that
    keeps all its checkpoints.
    """
    last = 10 * (WAITING + 4)
    for keep in (2, 0):
        ordered = Ordered(last + 10, keep_last=keep)
        if busy:
            doing = Debt(Version(10, 1), owed.VALIDATION)
            ordered.errands.attempts[owed.VALIDATION] = Attempt(doing, lambda: None, Patience(lambda: 0, 1.0))
        many = 10 * (MANY + busy)
        for step in range(20, last + 10, 10):
            ordered.save(step)
            ordered.errands.find()
            if keep and step == many - 10:
                assert ordered.said == []
            if keep and step == many:
                (said,) = ordered.said
                size = sum(file.size for file in ordered.run.checkpoints.manifest(Version(10, 1)).files)
                assert (
                    f"{MANY} validations wait for a spare worker, and {MANY * size / 1e9:.3g} GB of "
                    "checkpoints"
                ) in said
                assert (
                    "takes longer than validation.every = 10 steps" in said
                    and "name a larger validation.every" in said
                )
        gone = [10 * number for number in range(1 + busy, 5)] if keep else []
        given_up = [
            (
                f"validation of step {step} is given up: more than {WAITING} validations wait for a "
                "spare worker; "
            )
            for step in gone
        ]
        assert [
            text[: len(start)] for text, start in zip(ordered.said[bool(keep) :], given_up, strict=True)
        ] == given_up
        assert all("`elastic owed --pay` tries again" in text for text in ordered.said[1:])
        found = owed.debts(ordered.run)
        assert [debt.version.step for debt in found if debt.given_up] == gone and len(found) == WAITING + 4
        assert len(owed.needed(found)) == (WAITING + busy if keep else WAITING + 4)


def test_validations_of_which_nobody_is_in_charge_any_more_are_given_up_aloud() -> None:
    """The job lets the members validate by now.  The control: without rules the checkpoints stay, and so do
    the debts.
    """
    for keep in (2, 0):
        ordered = Ordered(keep_last=keep)
        ordered.job = ordered.job.replace(validation={**HELD_OUT, "by": "members"})
        now, before = ordered.coordinator(), ordered.errands
        debt = Debt(Version(10, 1), owed.VALIDATION)
        assert before.makers[owed.VALIDATION].begin(debt) is not None and ordered.open() == [
            "validation of step 10"
        ], "the control"
        now.find()
        assert now.makers[owed.VALIDATION].begin(debt) is None, (
            "no worker is ordered to do what the job does not ask of it"
        )
        assert [text.partition(";")[0] for text in ordered.said] == (
            [
                (
                    "validation of step 10 is given up: spares no longer validate, because validation.by "
                    "or validation.every was changed"
                )
            ]
            if keep
            else []
        )
        assert ordered.open() == ([] if keep else ["validation of step 10"])


def test_patience_ends_only_when_there_was_no_progress_for_the_whole_time() -> None:
    """The judge is the list of times at which progress was made, on a virtual clock.  The control: no
    progress at all.
    """
    for made_at in ((), (99.0,), tuple(90.0 * number for number in range(1, 20))):
        now, looks = [0.0], list[float]()

        def stands(
            now: list[float] = now, looks: list[float] = looks, made_at: tuple[float, ...] = made_at
        ) -> int:
            looks.append(now[0])
            return sum(at <= now[0] for at in made_at)

        patience = Patience(stands, 100.0, lambda now=now: now[0])
        while not patience.is_over():
            now[0] += 1.0
        last = max(made_at, default=0.0)
        assert last + 100 < now[0] <= last + 100 * (1 + 3 / LOOKS)
        assert len(looks) <= now[0] / (100 / LOOKS) + 1, "a look costs a request"


class Clock:
    """The time of the coordinator at the end of the run: each of its pauses lasts a while, in which
    ``meanwhile`` happens.
    """

    def __init__(self, meanwhile: Callable[[int], None]) -> None:
        self.now, self.pauses, self.meanwhile = 0.0, 0, meanwhile

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now, self.pauses = self.now + 1.0, self.pauses + 1
        self.meanwhile(self.pauses)


@pytest.mark.parametrize("progresses", [True, False])
def test_the_end_of_a_run_waits_for_an_export_as_long_as_it_makes_progress(
    progresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export lasts a hundred times ``wait_s``.  The control makes no progress: it is left, and the run
    says what makes it.
    """
    over = threading.Event()

    def meanwhile(pauses: int) -> None:
        if progresses and pauses < 100:
            time.sleep(0.001)  # as long as the note before counts
            progress[0]()
        elif progresses:
            over.set()

    monkeypatch.setattr(
        PayingProcess, "begin", lambda process, debt: lambda: made(process, debt) if over.is_set() else None
    )
    ordered = Ordered(10, export={"every": 10}, deadlines={"wait_s": 1.0})
    errands, noting = (
        ordered.errands,
        ordered.job.model_copy(update={"deadlines": SimpleNamespace(wait_s=0.0)}),
    )
    progress = [owed.ProgressNote(Run(noting, ordered.run.store), Debt(Version(10, 1), owed.EXPORT))]
    errands.begin()
    until(lambda: errands.attempts, what="no export was begun")
    clock = Clock(meanwhile)
    monkeypatch.setattr(module, "time", clock)
    errands.finish(True, Inbox(time.monotonic))
    told = ["owed: export of step 10; this command does them now, and Ctrl-C leaves them for later"]
    if progresses:
        told += [
            "export of step 10 makes progress, so the run waits until it is done",
            "export of step 10: done",
        ]
        assert 100 <= clock.pauses <= 101 and owed.debts(ordered.run) == []
    else:
        told += [
            (
                "deadlines.wait_s = 1: none of the owed exports, samples and validations has made "
                "progress for this time, so the run ends"
            )
        ]
        told += ["owed: export of step 10; to do it now: `elastic owed --pay`"]
        assert clock.pauses < 5
    assert ordered.said == told


def test_a_run_that_was_never_asked_for_anything_has_no_process_and_no_thread() -> None:
    """The control: the threads of another run."""
    job = toy_job("memory://nothing", name=str(uuid4()))
    run = Run.open(job)
    idle = Errands(job, run, 1, UsersCode([]), lambda: run.state(), print, print, print)
    idle.begin()
    idle.look()

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("errands")]

    assert threads() == [] == run.store.list(f"{job.name}/asked/")
    idle.finish(True, Inbox(time.monotonic))
    assert idle.owed == ""
    other = Ordered().begun()
    assert threads() == ["errands"]
    other.errands.finish(False, Inbox(time.monotonic))
    assert threads() == []
