"""Lists what a run owes for its checkpoints: exports, samples of text and validations, each made once, and
tried again until it is there.

What is owed is written nowhere.  It follows from what was asked of a checkpoint when it was saved
(:mod:`elastic.runs.asked`) and from the checkpoints in the bucket: the first good checkpoint at or after each
multiple of ``export.every`` steps owes an export, and so does the checkpoint of the run's last step, which is
the job's last step unless the run has ended before.  ``samples.every`` works likewise.  The result is a
document that only one of several processes can create, so each debt is settled once.  Every reader finds the
same debts: the next coordinator, another cluster, a command with any job file.

    <run>/owed/<kind>/<step>-<generation>/done.json              the result
    <run>/owed/<kind>/<step>-<generation>/failed/<number>.json   why an attempt failed
    <run>/owed/<kind>/<step>-<generation>/progress.json          that a long attempt makes progress
    <run>/owed/<kind>/<step>-<generation>/told.json              for a validation: the journal knows it

A process that dies in the middle of an attempt leaves no result.  Steps that a fall-back or a branch has
abandoned owe nothing, and checkpoints of a fork's origin owe nothing to the fork.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from elastic.ids import Version
from elastic.protocol.commit_record import Validated
from elastic.protocol.lineage import Lineage, contains
from elastic.runs import asked as recorded
from elastic.runs import validations
from elastic.runs.asked import EXPORT as EXPORT
from elastic.runs.asked import SAMPLES as SAMPLES
from elastic.runs.asked import SECTIONS, Asked
from elastic.runs.asked import VALIDATION as VALIDATION
from elastic.runs.run import Run
from storage.documents import seal, unseal
from storage.errors import Damaged, Exists, Missing, StorageError
from storage.numbered import Numbered

FORMAT = 1
ATTEMPTS = 3
"""Number of failed attempts after which a debt is given up."""
DEATHS = 10
"""Number of attempts, including those in which the process died, after which a debt is given up.  It is
larger than :data:`ATTEMPTS`, because the debt may not be the reason why a process dies.
"""
BEAT_S = 30.0
"""Seconds from one note in the bucket that an attempt makes progress to the next; fewer where
``deadlines.wait_s`` is short.
"""
SHOWN = 4
"""Largest number of debts that a sentence names."""
AGAIN = "`elastic owed --pay` tries again, as long as its checkpoint exists"


@dataclass(frozen=True)
class Failure:
    """An attempt that failed.  ``died`` is true if its process ended in the middle of it, and ``last`` if no
    further attempt follows unless a user asks for it.
    """

    why: str
    died: bool = False
    last: bool = False


@dataclass(frozen=True, order=True)
class Debt:
    """An export, samples of text or a validation owed for a checkpoint, and the attempts that have failed so
    far.
    """

    version: Version
    kind: str
    failures: tuple[Failure, ...] = field(default=(), compare=False)

    @property
    def given_up(self) -> bool:
        """True if it is not tried again unless a user asks: too many attempts failed, or one was noted as the
        last.
        """
        errors = sum(not each.died for each in self.failures)
        return len(self.failures) >= DEATHS or errors >= ATTEMPTS or any(each.last for each in self.failures)

    def __str__(self) -> str:
        return f"{self.kind} of step {self.version.step}"


def debts(
    run: Run,
    lineage: Lineage | None = None,
    asked: Asked | None = None,
    kinds: Iterable[str] = SECTIONS,
    end: int = 0,
) -> list[Debt]:
    """Returns the debts of these ``kinds``, oldest first.  A debt that was given up is listed as long as its
    checkpoint is there.

    ``lineage`` is the lineage of the run, ``asked`` is what the run has recorded, and ``end`` is its last
    step; what is not given is read from the bucket.
    """
    asked = recorded.of(run) if asked is None else asked
    if not (wanted := [kind for kind in asked.kinds if kind in kinds]):
        return []
    lineage = run.state().history.lineage if lineage is None else lineage
    good, found = _Good(run, lineage, end or run.last_step), list[Debt]()
    for kind in wanted:
        noted = _notes(run, kind, lineage)
        done = {version for version, names in noted.items() if "done" in names}
        if kind == VALIDATION:  # the members may have made the validation
            done.update(
                version
                for version in validations.stored(run.store, run.job.name)
                if contains(lineage, version)
            )
        failed = (version for version, names in noted.items() if "failed" in names and version not in done)
        tried = {version: _with_failures(run, Debt(version, kind)) for version in failed}
        given_up = [debt for debt in tried.values() if debt.given_up]
        settled = {version.step for version in done}.union(debt.version.step for debt in given_up)
        left = [tried.get(version, Debt(version, kind)) for version in good.owing(asked, kind, settled)]
        # a result may be too new to be listed
        found += [debt for debt in left if not run.store.exists(_key(run, debt, "done"))]
        found += [debt for debt in given_up if debt.version == good.at(debt.version.step)]
    return sorted(found)


def needed(found: Iterable[Debt]) -> frozenset[Version]:
    """Returns the checkpoints that must stay, because they have a debt that was not given up."""
    return frozenset(debt.version for debt in found if not debt.given_up)


def result(run: Run, debt: Debt, name: str = "done") -> dict[str, Any]:
    """Returns the document ``name`` of the debt, by default its result.  Raises
    :class:`~storage.errors.Missing` if there is none.
    """
    key = _key(run, debt, name)
    return unseal(run.store.get(key), run.store.full_name(key), FORMAT)


def note_done(run: Run, debt: Debt, about: Mapping[str, Any]) -> bool:
    """Notes that the debt is done, with its result ``about``.  Returns False if another process has noted it
    before.
    """
    if debt.kind == VALIDATION:  # stored before the debt counts as done
        validations.store_late(
            run.store, run.job.name, debt.version, about["mean"], about["count"], about["held_out"]
        )
    try:
        run.store.put_if_absent(_key(run, debt, "done"), seal({"format": FORMAT, **about}))
    except Exists:
        return False
    finally:
        with suppress(StorageError, OSError):
            run.store.delete(_key(run, debt, "progress"))
    return True


def note_told(run: Run, debt: Debt) -> None:
    """Notes that the run's journal knows the result of the validation."""
    with suppress(Exists):
        run.store.put_if_absent(_key(run, debt, "told"), seal({"format": FORMAT}))


class ProgressNote:
    """Notes in the bucket, now and then, that an attempt makes progress.  The attempt calls it after each
    small part of the work.

    A process that waits for the attempt reads the note with :func:`progress`.  A note that the bucket does
    not take is left out.
    """

    def __init__(self, run: Run, debt: Debt) -> None:
        self._run, self._debt, self._count = run, debt, 0
        self._every_s = min(BEAT_S, run.job.deadlines.wait_s / 20)
        self._next = time.monotonic() + self._every_s

    def __call__(self) -> None:
        self._count += 1
        if time.monotonic() >= self._next:
            with suppress(StorageError, OSError):
                about = {"format": FORMAT, "count": self._count, "at": time.time()}
                self._run.store.put(_key(self._run, self._debt, "progress"), seal(about))
            self._next = time.monotonic() + self._every_s


def progress(run: Run, debt: Debt) -> tuple[int, float]:
    """Returns the newest note of :class:`ProgressNote`: the number of parts that were done, and the
    wall-clock time; zeros if there is no note.
    """
    try:
        about = result(run, debt, "progress")
    except (Missing, Damaged):
        return 0, 0.0
    return about["count"], about["at"]


def failed(run: Run, debt: Debt, failure: Failure) -> str:
    """Notes the failure of an attempt, and returns the sentence about it."""
    noted = _failures(run, debt)
    about = {
        "format": FORMAT,
        "why": failure.why,
        "died": failure.died,
        **({"last": True} if failure.last else {}),
    }
    while True:
        with suppress(Exists):  # another process has noted a failure, too
            noted.add(noted.newest() + 1, about)
            break
    debt = _with_failures(run, debt)
    if failure.last:
        return f"{debt} is given up: {failure.why}; {AGAIN}"
    tries = f"given up after {len(debt.failures)} attempts; {AGAIN}"
    return f"{debt} failed: {failure.why}; {tries if debt.given_up else 'the run tries again soon'}"


def validated(found: Validated, held_out: str) -> dict[str, Any]:
    """Returns the document of a validation; ``held_out`` identifies its samples.  :func:`found` reads the
    loss from there, bit by bit the same.
    """
    return {"loss": float(found.loss).hex(), "count": found.count, "mean": found.mean, "held_out": held_out}


def found(about: Mapping[str, Any]) -> Validated:
    """Returns the validation that is stored in a document of :func:`validated`."""
    return Validated(float.fromhex(about["loss"]), about["count"])


def stands(run: Run, debt: Debt) -> tuple[bool, int]:
    """Returns whether the debt is done, and how many attempts have failed."""
    return run.store.exists(_key(run, debt, "done")), len(_failures(run, debt).numbers())


def untold(run: Run, lineage: Lineage) -> list[Debt]:
    """Returns the validations that are done but may be unknown to the run's journal, oldest first."""
    noted = _notes(run, VALIDATION, lineage)
    return sorted(
        Debt(version, VALIDATION)
        for version, names in noted.items()
        if "done" in names and "told" not in names
    )


def sentence(owed: Collection[Debt]) -> str:
    """Returns what is owed and what was given up, in words; "" if there is no debt."""
    given_up = [f"{debt} ({debt.failures[-1].why})" for debt in owed if debt.given_up]
    parts = {"owed": [str(debt) for debt in owed if not debt.given_up], "given up": given_up}
    return "; ".join(f"{words}: {_listed(names)}" for words, names in parts.items() if names)


def left(owed: Iterable[Debt], finished: bool) -> str:
    """Returns the sentence about the debts that a run leaves when it ends, except those given up; "" if there
    are none.  ``finished`` says whether the run has done its last step.
    """
    if not (said := sentence([debt for debt in owed if not debt.given_up])):
        return ""
    before = "" if finished else "the run does this when it goes on; "
    return f"{said}; {before}to do it now: `elastic owed --pay`"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


class _Good:
    """The good checkpoints on the lineage of a run, without those of its origin.  Each step is read once,
    when it is needed.
    """

    def __init__(self, run: Run, lineage: Lineage, end: int) -> None:
        self._run, self._lineage, self._end = run, lineage, end
        self._since = max((version.step for version in run.checkpoints.inherited), default=0)
        """The step at which the run was forked, up to which all checkpoints are the origin's; 0 without an
        origin.
        """
        self._steps = {step for step in run.checkpoints.steps() if step > self._since}
        self.at = cache(self._at)
        """Returns the good checkpoint of a step, or None."""

    def _at(self, step: int) -> Version | None:
        listed = self._run.checkpoints.at(step) if step in self._steps else []
        return next(
            (each.version for each in listed if each.good and contains(self._lineage, each.version)), None
        )

    def owing(self, asked: Asked, kind: str, settled: set[int]) -> Iterator[Version]:
        """Yields the first good checkpoint at or after each multiple of ``every`` steps, and the checkpoint
        of the last step, except for steps that are ``settled``.

        The multiples count from the step at which the setting began.  A later checkpoint does not take the
        place of a settled one that is deleted by now.  A settled last step leaves earlier debts as they are.
        """
        steps, before, after = sorted(self._steps | settled), self._since, self._since
        every, answered = 0, set[int]()
        for generation, last in self._lineage:
            if (now := asked.every(kind, generation)) != every:
                every, after = now, before
            for step in steps[bisect(steps, before) : bisect(steps, last)] if every else ():
                multiple = step // every * every
                due = after < multiple and multiple not in answered
                # the members validate the state after the last step of the job themselves
                if step == self._end:
                    due = kind != VALIDATION or (due and step != self._run.job.steps)
                there = self.at(step) if due and step not in settled else None
                if there is not None:
                    yield there
                if there is not None or step in settled:
                    answered.add(multiple)
            before = max(before, last)


def _notes(run: Run, kind: str, lineage: Lineage) -> dict[Version, set[str]]:
    """Returns the names of the documents of each debt of a kind, by the version on the lineage that
    owes it.
    """
    found = dict[Version, set[str]]()
    for each in run.store.matching(f"{run.job.name}/owed/{kind}/", r"(\d+)-(\d+)/(\w+)(/\d+)?[.]json"):
        if contains(lineage, version := Version(int(each[1]), int(each[2]))):
            found.setdefault(version, set()).add(each[3])
    return found


def _with_failures(run: Run, debt: Debt) -> Debt:
    noted = _failures(run, debt).intact()
    return Debt(
        debt.version,
        debt.kind,
        tuple(Failure(each["why"], each["died"], each.get("last", False)) for each in noted),
    )


def _key(run: Run, debt: Debt, name: str) -> str:
    return f"{_folder(run, debt)}/{name}.json"


def _folder(run: Run, debt: Debt) -> str:
    return f"{run.job.name}/owed/{debt.kind}/{debt.version.step:012d}-{debt.version.generation:06d}"


def _failures(run: Run, debt: Debt) -> Numbered[dict[str, Any]]:
    return Numbered(run.store, f"{_folder(run, debt)}/failed", FORMAT)
