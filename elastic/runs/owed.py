"""Lists what a run owes for its checkpoints: exports, samples of text and validations, each made once, and tried again until it is there.

What is owed is written nowhere.  It follows from what was asked of a checkpoint when it was saved (:mod:`elastic.runs.asked`) and from the
checkpoints in the bucket: the first good checkpoint at or after each multiple of ``export.every`` steps owes an export, and so does that of
the last step, which is that of the job unless the run has ended before; for ``samples.every`` likewise.  What is done is a document that
only one of several processes can create, so each thing counts once.  Whoever looks finds the same debts: the next coordinator, another
cluster, a command with any job file.

    <run>/owed/<kind>/<step>-<generation>/done.json              the result
    <run>/owed/<kind>/<step>-<generation>/failed/<number>.json   why an attempt failed
    <run>/owed/<kind>/<step>-<generation>/progress.json          that a long attempt makes progress
    <run>/owed/<kind>/<step>-<generation>/told.json              that the run's journal knows the result, of a validation

The process that dies in the middle of its work leaves no document.  Steps that a fall-back or a branch has abandoned owe nothing, and
checkpoints of a fork's origin owe nothing to the fork.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elastic.ids import Version
from elastic.protocol.commit_record import Validated
from elastic.protocol.lineage import Lineage, contains
from elastic.report.metrics import numbers_of
from elastic.runs import asked as recorded
from elastic.runs import validations
from elastic.runs.asked import EXPORT as EXPORT
from elastic.runs.asked import SAMPLES as SAMPLES
from elastic.runs.asked import VALIDATION as VALIDATION
from elastic.runs.asked import Asked, Stretch
from elastic.runs.run import Run
from storage.documents import seal, unseal
from storage.errors import Damaged, Exists, Missing, StorageError
from storage.numbered import Numbered

FORMAT = 1
ATTEMPTS = 3
"""Number of failed attempts after which a debt is given up."""
DEATHS = 10
"""Number of attempts, those included in which the process died, after which a debt is given up: a process may die for other reasons."""
BEAT_S = 30.0
"""Seconds from one note in the bucket that an attempt makes progress to the next; fewer where ``deadlines.wait_s`` is short."""
SHOWN = 4
"""Largest number of debts that a sentence names."""
AGAIN = "`elastic owed` lists it as long as its checkpoint exists, and `elastic owed --pay` tries again"


@dataclass(frozen=True)
class Failure:
    """An attempt that failed.  ``died`` says that its process ended in the middle of it, ``last`` that no other one follows unasked."""

    why: str
    died: bool = False
    last: bool = False


@dataclass(frozen=True, order=True)
class Debt:
    """Something that is owed for a checkpoint, and the attempts that have failed so far."""

    version: Version
    kind: str
    failures: tuple[Failure, ...] = field(default=(), compare=False)

    @property
    def given_up(self) -> bool:
        """True if nobody tries it again unasked: it was tried so often in vain, or so much else waits."""
        errors = sum(not each.died for each in self.failures)
        return len(self.failures) >= DEATHS or errors >= ATTEMPTS or any(each.last for each in self.failures)

    def __str__(self) -> str:
        return f"{self.kind} of step {self.version.step}"


@dataclass(frozen=True)
class Kind:
    """Says what is special about a kind of debts."""

    at_end: bool = True
    """True if the checkpoint of the last step owes one in any case, and False if it owes none."""
    tells: Callable[[Run, Version, Mapping[str, Any]], None] | None = None
    """Stores what others are to find of a result, before it counts as done."""


def _tell_metrics(run: Run, version: Version, about: Mapping[str, Any]) -> None:
    numbers = numbers_of(about["mean"], about["count"], about["held_out"])
    row = {"step": version.step, "generation": version.generation, "time": time.time(), **numbers}
    validations.store(run.store, run.job.name, row)


KINDS = {EXPORT: Kind(), SAMPLES: Kind(), VALIDATION: Kind(at_end=False, tells=_tell_metrics)}
"""The kinds of debts.  The members validate the state after the last step themselves, and what they have stored is done."""


def debts(run: Run, lineage: Lineage | None = None, asked: Asked | None = None, kinds: Iterable[str] = KINDS, end: int = 0) -> list[Debt]:
    """Returns what the run owes of some ``kinds``, oldest first, with what was given up as long as its checkpoint is there.

    ``lineage`` is that of the run, ``asked`` is what it has recorded, and ``end`` is its last step; without them, they are read from the
    bucket.
    """
    asked = recorded.of(run) if asked is None else asked
    if not (wanted := [kind for kind in asked.kinds if kind in kinds]):
        return []
    lineage = run.standing(0, 0.0).history.lineage if lineage is None else lineage
    known, found, end = _Good(run, lineage), list[Debt](), end or run.last_step
    for kind in wanted:
        done, failed = _noted(run, kind, lineage)
        given_up = [debt for debt in failed.values() if debt.given_up]
        settled = {*done, *(debt.version for debt in given_up)}
        due = set[Version]()
        for stretch in asked.stretches(kind, lineage, known.since):
            due |= {*known.firsts(stretch, {version.step for version in settled})}
            if stretch.after < end <= stretch.last:
                last = {*known.at(end)} if stretch.every else set[Version]()
                due = due | last if KINDS[kind].at_end else due - last if end == run.job.steps else due
        left = [failed.get(version, Debt(version, kind)) for version in due - settled]
        found += [debt for debt in left if not run.store.exists(_done(run, debt))]  # it may be too new to be listed
        found += [debt for debt in given_up if debt.version in known.at(debt.version.step)]
    return sorted(found)


def needed(found: Iterable[Debt]) -> frozenset[Version]:
    """Returns the checkpoints that must stay, since something is owed for them that was not given up."""
    return frozenset(debt.version for debt in found if not debt.given_up)


def result(run: Run, debt: Debt) -> dict[str, Any]:
    """Returns the document of what is done.  Raises :class:`~storage.errors.Missing` if it is not done."""
    key = _done(run, debt)
    return unseal(run.store.get(key), run.store.full_name(key), FORMAT)


def note_done(run: Run, debt: Debt, about: Mapping[str, Any]) -> bool:
    """Notes that it is done, with its result.  Returns False if somebody else has noted it before."""
    if (tells := KINDS[debt.kind].tells) is not None:
        tells(run, debt.version, about)
    try:
        run.store.put_if_absent(_done(run, debt), seal({"format": FORMAT, **about}))
    except Exists:
        return False
    finally:
        with suppress(StorageError, OSError):
            run.store.delete(_progress(run, debt))
    return True


def note_told(run: Run, debt: Debt) -> None:
    """Notes that the journal knows the result."""
    with suppress(Exists):
        run.store.put_if_absent(f"{_folder(run, debt)}/told.json", seal({"format": FORMAT}))


class Progress:
    """Notes in the bucket, now and then, that an attempt makes progress: it is called after each small part of the work.

    Whoever waits for the attempt reads it with :func:`progress`.  If the bucket does not take a note, the next one may do.
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
                self._run.store.put(_progress(self._run, self._debt), seal(about))
            self._next = time.monotonic() + self._every_s


def progress(run: Run, debt: Debt) -> tuple[int, float]:
    """Returns what :class:`Progress` has noted last: the number of parts that were done, and the time; zeros if it has noted nothing."""
    key = _progress(run, debt)
    try:
        about = unseal(run.store.get(key), run.store.full_name(key), FORMAT)
    except (Missing, Damaged):
        return 0, 0.0
    return about["count"], about["at"]


def failed(run: Run, debt: Debt, failure: Failure) -> str:
    """Notes that an attempt has failed, and returns the sentence that says so."""
    debt = _note_failure(run, debt, failure)
    tries = f"given up after {len(debt.failures)} attempts; {AGAIN}"
    return f"{debt} failed: {failure.why}; {tries if debt.given_up else 'again soon'}"


def give_up(run: Run, debt: Debt, why: str) -> str:
    """Notes that nobody tries it again unasked, and returns the sentence that says so."""
    return f"{_note_failure(run, debt, Failure(why, last=True))} is given up: {why}; {AGAIN}"


def _note_failure(run: Run, debt: Debt, failure: Failure) -> Debt:
    """Notes that an attempt has failed, and returns the debt with all that have."""
    noted = _failures(run, debt)
    about = {"format": FORMAT, "why": failure.why, "died": failure.died, **({"last": True} if failure.last else {})}
    while True:
        try:
            noted.add(noted.newest() + 1, about)
        except Exists:  # of another process, which tries it too
            continue
        return _with_failures(run, debt)


def validated(found: Validated, held_out: str) -> dict[str, Any]:
    """Returns the document of a validation on the samples that ``held_out`` tells from others.  :func:`found` has its bits from there."""
    return {"loss": float(found.loss).hex(), "count": found.count, "mean": found.mean, "held_out": held_out}


def found(about: Mapping[str, Any]) -> Validated:
    """Returns the validation of a document."""
    return Validated(float.fromhex(about["loss"]), about["count"])


def stands(run: Run, debt: Debt) -> tuple[bool, int]:
    """Returns whether it is done, and how many attempts have failed."""
    return run.store.exists(_done(run, debt)), len(_failures(run, debt).numbers())


def untold(run: Run, kind: str, lineage: Lineage) -> list[Debt]:
    """Returns what is done of a kind and may be unknown to the journal, oldest first."""
    noted = _notes(run, kind)
    return sorted(
        Debt(version, kind)
        for version, names in noted.items()
        if "done.json" in names and "told.json" not in names and contains(lineage, version)
    )


def sentence(owed: Iterable[Debt]) -> str:
    """Returns what is owed and what was given up, in words; "" if it is nothing."""
    owed = list(owed)
    open_, given_up = ([debt for debt in owed if debt.given_up is wanted] for wanted in (False, True))
    parts = [f"owed: {_listed(map(str, open_))}"] if open_ else []
    why = (f"{debt} ({debt.failures[-1].why})" for debt in given_up)
    return "; ".join([*parts, f"given up: {_listed(why)}"] if given_up else parts)


def left(owed: Iterable[Debt], finished: bool) -> str:
    """Returns the sentence of a run that ends, having ``finished`` or not, and leaves debts that nobody has given up; "" without any."""
    if not (said := sentence(debt for debt in owed if not debt.given_up)):
        return ""
    before = "" if finished else "it is done when the run goes on; before that, "
    return f"{said}; {before}`elastic owed --pay` does it"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


class _Good:
    """The good checkpoints of a run itself that are on its lineage; each step is looked at once, and only if it is asked for."""

    def __init__(self, run: Run, lineage: Lineage) -> None:
        self._checkpoints, self._lineage = run.checkpoints, lineage
        inherited = run.checkpoints.inherited
        self.since = max((version.step for version in inherited), default=0)
        """The step up to which all is of the run that this one was forked from."""
        self._steps = [step for step in run.checkpoints.steps() if step > self.since]
        self._known: dict[int, list[Version]] = {}

    def at(self, step: int) -> list[Version]:
        """Returns the good checkpoint of a step, if there is one."""
        if step not in self._steps:
            return []
        if step not in self._known:
            listed = self._checkpoints.at(step)
            self._known[step] = [each.version for each in listed if each.good and contains(self._lineage, each.version)]
        return self._known[step]

    def firsts(self, stretch: Stretch, settled: Iterable[int]) -> list[Version]:
        """Returns the first good checkpoint at or after each multiple in a stretch, but for those after a step that is ``settled``.

        Later checkpoints do not take the place of one that was settled and is deleted by now.  The last step settles none before it.
        """
        every, periods, first = stretch.every, dict[int, list[int]](), dict[int, int]()
        for step in self._steps if every else ():
            if stretch.after < step // every * every and step <= stretch.last:
                periods.setdefault(step // every, []).append(step)
        for step in sorted(settled) if every else ():
            if stretch.after < step <= stretch.last:
                first.setdefault(step // every, step)
        before = ([step for step in steps if step < first.get(number, step + 1)] for number, steps in periods.items())
        found = (next((v for step in steps for v in self.at(step)), None) for steps in before)
        return [version for version in found if version is not None]


def _noted(run: Run, kind: str, lineage: Lineage) -> tuple[set[Version], dict[Version, Debt]]:
    """Returns what is done of a kind, and the debts of which an attempt has failed; both of the surviving lineage."""
    noted = {version: names for version, names in _notes(run, kind).items() if contains(lineage, version)}
    done = {version for version, names in noted.items() if "done.json" in names}
    if kind == VALIDATION:
        done |= {version for version in validations.stored(run.store, run.job.name) if contains(lineage, version)}
    failed = (version for version, names in noted.items() if version not in done and any(name.startswith("failed/") for name in names))
    return done, {version: _with_failures(run, Debt(version, kind)) for version in failed}


def _notes(run: Run, kind: str) -> dict[Version, set[str]]:
    """Returns the names of the documents of each debt of a kind."""
    found = dict[Version, set[str]]()
    for each in run.store.matching(f"{run.job.name}/owed/{kind}/", r"(\d+)-(\d+)/(\w+[.]json|failed/\d+[.]json)"):
        found.setdefault(Version(int(each[1]), int(each[2])), set()).add(each[3])
    return found


def _with_failures(run: Run, debt: Debt) -> Debt:
    noted = _failures(run, debt).intact()
    return Debt(debt.version, debt.kind, tuple(Failure(each["why"], each["died"], each.get("last", False)) for each in noted))


def _folder(run: Run, debt: Debt) -> str:
    return f"{run.job.name}/owed/{debt.kind}/{debt.version.step:012d}-{debt.version.generation:06d}"


def _done(run: Run, debt: Debt) -> str:
    return f"{_folder(run, debt)}/done.json"


def _progress(run: Run, debt: Debt) -> str:
    return f"{_folder(run, debt)}/progress.json"


def _failures(run: Run, debt: Debt) -> Numbered:
    return Numbered(run.store, f"{_folder(run, debt)}/failed", FORMAT)
