"""Lists what a run owes for its checkpoints: exports and samples of text, each made once, and tried again until it is there.

What is owed is written nowhere.  It follows from the job and from the checkpoints in the bucket: the first good checkpoint at or after each
multiple of ``export.every`` steps owes an export, and so does that of the last step; for ``samples.every`` likewise.  What is done is a
document that only one of several processes can create, so each thing counts once.  Whoever looks finds the same debts: the next
coordinator, another cluster, a command.

    <run>/owed/<kind>/<step>-<generation>/done.json              the result
    <run>/owed/<kind>/<step>-<generation>/failed/<number>.json   why an attempt failed

The process that dies in the middle of its work leaves no document.  Steps that a fall-back or a branch has abandoned owe nothing, and
checkpoints of a fork's origin owe nothing to the fork.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic.ids import Version
from elastic.protocol.commit_record import Validated
from elastic.protocol.lineage import Lineage, contains
from elastic.runs import metrics
from storage.documents import seal, unseal
from storage.errors import Exists
from storage.numbered import Numbered

if TYPE_CHECKING:
    from elastic.job import Job
    from elastic.runs.run import Run

EXPORT, SAMPLES, VALIDATION = "export", "samples", "validation"
"""The kinds of debts.  Each is also the section of the job that says how often it is due."""
FORMAT = 1
ATTEMPTS = 3
"""Number of failed attempts after which a debt is given up."""
DEATHS = 10
"""Number of attempts, those included in which the process died, after which a debt is given up: a process may die for other reasons."""
SHOWN = 4
"""Largest number of debts that a sentence names."""


@dataclass(frozen=True)
class Failure:
    """An attempt that failed.  ``died`` says that its process ended in the middle of it."""

    why: str
    died: bool = False


@dataclass(frozen=True, order=True)
class Debt:
    """Something that is owed for a checkpoint, and the attempts that have failed so far."""

    version: Version
    kind: str
    failures: tuple[Failure, ...] = field(default=(), compare=False)

    @property
    def given_up(self) -> bool:
        """True if it was tried so often in vain that nobody tries it again unasked."""
        return len(self.failures) >= DEATHS or sum(not each.died for each in self.failures) >= ATTEMPTS

    def __str__(self) -> str:
        return f"{self.kind} of step {self.version.step}"


def kinds(job: Job) -> dict[str, int]:
    """Returns the kinds that the job asks for, each with the number of steps from one to the next."""
    by_spares = job.validation.every if job.validation.by == "spares" else 0
    asked = {EXPORT: job.export.every, SAMPLES: job.samples.every, VALIDATION: by_spares}
    return {kind: every for kind, every in asked.items() if every}


def debts(run: Run, job: Job, lineage: Lineage | None = None) -> list[Debt]:
    """Returns what the run owes, oldest first, with what was given up.  Of a job that asks for nothing it reads nothing.

    ``lineage`` is that of the run; without it, it is read from the bucket.
    """
    asked = kinds(job)
    if not asked:
        return []
    lineage = run.standing(0, 0.0).history.lineage if lineage is None else lineage
    known, found = _Good(run, lineage), list[Debt]()
    for kind, every in asked.items():
        done, failed = _noted(run, kind, lineage)
        given_up = [debt for debt in failed.values() if debt.given_up]
        settled = {*done, *(debt.version for debt in given_up)}
        due, last = {*known.firsts(every, {version.step for version in settled})}, {*known.at(job.steps)}
        due = due - last if kind == VALIDATION else due | last  # the members validate the last one
        found += [failed.get(version, Debt(version, kind)) for version in due - settled] + given_up
    return sorted(found)


def needed(run: Run, job: Job, lineage: Lineage) -> frozenset[Version]:
    """Returns the checkpoints that must stay, since something is owed for them that was not given up."""
    return frozenset(debt.version for debt in debts(run, job, lineage) if not debt.given_up)


def result(run: Run, debt: Debt) -> dict[str, Any]:
    """Returns the document of what is done.  Raises :class:`~storage.errors.Missing` if it is not done."""
    key = _done(run, debt)
    return unseal(run.store.get(key), run.store.full_name(key), FORMAT)


def note_done(run: Run, debt: Debt, about: Mapping[str, Any]) -> bool:
    """Notes that it is done, with its result.  Returns False if somebody else has noted it before."""
    if debt.kind == VALIDATION:
        numbers = {"validation_loss": about["mean"], "validation_terms": about["count"], "time": time.time()}
        metrics.store_validation(run.store, run.job.name, {"step": debt.version.step, "generation": debt.version.generation, **numbers})
    try:
        run.store.put_if_absent(_done(run, debt), seal({"format": FORMAT, **about}))
    except Exists:
        return False
    return True


def failed(run: Run, debt: Debt, failure: Failure) -> str:
    """Notes that an attempt has failed, and returns the sentence that says so."""
    debt = _note_failure(run, debt, failure)
    tries = f"given up after {len(debt.failures)} attempts; `elastic owed` with the job file lists it, and --pay tries again"
    return f"{debt} failed: {failure.why}; {tries if debt.given_up else 'again soon'}"


def _note_failure(run: Run, debt: Debt, failure: Failure) -> Debt:
    """Notes that an attempt has failed, and returns the debt with all that have."""
    noted = _failures(run, debt)
    about = {"format": FORMAT, "why": failure.why, "died": failure.died}
    while True:
        try:
            noted.add(noted.newest() + 1, about)
        except Exists:  # of another process, which tries it too
            continue
        return _with_failures(run, debt)


def validated(found: Validated) -> dict[str, Any]:
    """Returns the document of a validation, from which :func:`found` has its bits."""
    return {"loss": float(found.loss).hex(), "count": found.count, "mean": found.mean}


def found(about: Mapping[str, Any]) -> Validated:
    """Returns the validation of a document."""
    return Validated(float.fromhex(about["loss"]), about["count"])


def stands(run: Run, debt: Debt) -> tuple[bool, int]:
    """Returns whether it is done, and how many attempts have failed."""
    keys = run.store.list(f"{_folder(run, debt)}/")
    return any(key.endswith("done.json") for key in keys), sum("/failed/" in key for key in keys)


def done(run: Run, kind: str, lineage: Lineage) -> list[Debt]:
    """Returns what is done of a kind, oldest first."""
    return sorted(Debt(version, kind) for version in _noted(run, kind, lineage)[0])


def sentence(owed: Iterable[Debt]) -> str:
    """Returns what is owed and what was given up, in words; "" if it is nothing."""
    owed = list(owed)
    open_, given_up = ([debt for debt in owed if debt.given_up is wanted] for wanted in (False, True))
    parts = [f"owed: {_listed(map(str, open_))}"] if open_ else []
    why = (f"{debt} ({debt.failures[-1].why})" for debt in given_up)
    return "; ".join([*parts, f"given up: {_listed(why)}"] if given_up else parts)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


class _Good:
    """The good checkpoints of a run itself that are on its lineage; each step is looked at once, and only if it is asked for."""

    def __init__(self, run: Run, lineage: Lineage) -> None:
        self._checkpoints, self._lineage = run.checkpoints, lineage
        inherited = run.checkpoints.inherited
        self._since = max((version.step for version in inherited), default=0)
        self._steps = [step for step in run.checkpoints.steps() if step > self._since]
        self._known: dict[int, list[Version]] = {}

    def at(self, step: int) -> list[Version]:
        """Returns the good checkpoint of a step, if there is one."""
        if step not in self._steps:
            return []
        if step not in self._known:
            listed = self._checkpoints.at(step)
            self._known[step] = [each.version for each in listed if each.good and contains(self._lineage, each.version)]
        return self._known[step]

    def firsts(self, every: int, settled: set[int]) -> list[Version]:
        """Returns the first good checkpoint at or after each multiple of ``every``, but for those after a step that is ``settled``.

        Later checkpoints do not take the place of one that was settled and is deleted by now.  The last step settles none before it.
        """
        periods: dict[int, list[int]] = {}
        for step in self._steps:
            if step // every * every > self._since:
                periods.setdefault(step // every, []).append(step)
        first: dict[int, int] = {}
        for step in sorted(settled):
            first.setdefault(step // every, step)
        before = ([step for step in steps if step < first.get(number, step + 1)] for number, steps in periods.items())
        found = (next((v for step in steps for v in self.at(step)), None) for steps in before)
        return [version for version in found if version is not None]


def _noted(run: Run, kind: str, lineage: Lineage) -> tuple[set[Version], dict[Version, Debt]]:
    """Returns what is done of a kind, and the debts of which an attempt has failed; both of the surviving lineage."""
    prefix = f"{run.job.name}/owed/{kind}/"
    done, failed = set[Version](), set[Version]()
    for key in run.store.list(prefix):
        place, _, name = key.removeprefix(prefix).partition("/")
        step, generation = map(int, place.split("-"))
        (done if name == "done.json" else failed).add(Version(step, generation))
    survive = [version for version in failed - done if contains(lineage, version)]
    return {version for version in done if contains(lineage, version)}, {
        version: _with_failures(run, Debt(version, kind)) for version in survive
    }


def _with_failures(run: Run, debt: Debt) -> Debt:
    return Debt(debt.version, debt.kind, tuple(Failure(each["why"], each["died"]) for each in _failures(run, debt).every()))


def _folder(run: Run, debt: Debt) -> str:
    return f"{run.job.name}/owed/{debt.kind}/{debt.version.step:012d}-{debt.version.generation:06d}"


def _done(run: Run, debt: Debt) -> str:
    return f"{_folder(run, debt)}/done.json"


def _failures(run: Run, debt: Debt) -> Numbered:
    return Numbered(run.store, f"{_folder(run, debt)}/failed", FORMAT)
