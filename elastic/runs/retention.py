"""Deletes the checkpoints of a run that no rule keeps, and checkpoints that were begun and never completed.

A deletion has two phases (``storage/checkpoints``), in two rounds of the coordinator, which performs a round
after each save.  A round first removes what an earlier round has marked, and then marks what is due now.
Before each change it looks at the newest claim of the run, so that a coordinator that was replaced deletes
nothing that the next one counts on.  If a save finds no room, its round removes at once what it marks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from elastic.control import saves
from elastic.ids import Version
from elastic.plan.retention import Keep, StoredCheckpoint, reasons, victims, young
from elastic.protocol import lineage
from elastic.protocol.actions import Retain
from elastic.report.best import best, comparable
from elastic.runs import forks, metrics, owed
from elastic.runs.forks import Reference
from elastic.runs.owed import Debt
from elastic.runs.resume import best_of
from elastic.runs.run import Run
from storage.checkpoints import Known, Listed
from storage.errors import Exists, StorageError

MOST = 32
"""Largest number of checkpoints that a round marks, and largest number that it removes: a run whose first
round comes late may have thousands.
"""
STAYS = {"newest", "branch"}
"""The rules against which no command deletes a checkpoint."""
BY_NUMBER = {"newest", "last", "all"}
"""The rules that keep fewer checkpoints if ``keep_last`` is smaller."""


@dataclass(frozen=True)
class Verdict:
    """The checkpoints that are kept and why, those that are marked and can be removed, and those that are to
    be marked.
    """

    kept: dict[Version, tuple[str, ...]]
    marked: tuple[Version, ...] = ()
    due: tuple[Version, ...] = ()


def judge(
    run: Run, keep: Keep, asked: Retain, listed: Iterable[Listed], now: float, owing: Collection[Version] = ()
) -> Verdict:
    """Returns what is kept and deleted of ``listed``, the checkpoints in the bucket, at the wall-clock time
    ``now``.

    Only dead checkpoints are deleted unless the newest checkpoint of ``asked`` is there and good.  ``owing``
    are the checkpoints for which something is owed.
    """
    listed, branched = list(listed), needed(run)
    good = {each.version for each in listed if each.good and lineage.contains(asked.lineage, each.version)}
    newest = max(asked.saved, default=None)
    there = [version for version in good if newest is None or version <= newest]
    # the coordinator may not know the best one yet
    found = metrics.validations(run, asked.lineage) if keep.best else {}
    told, other = best(found), found.keys() - comparable(found).keys()
    kept_best = asked.best if told is None or asked.best not in other else told.version
    kept = reasons(there, keep, kept_best, branched, young(there, written(listed), keep, now))
    first = min((version for version in there if told is not None and version >= told.version), default=None)
    if first is not None and "best" not in kept.get(first, ()):
        kept[first] = (*kept.get(first, ()), "best")
    kept |= {version: (*kept.get(version, ()), "owed") for version in good.intersection(owing)}
    spared = {*asked.spared, *branched}
    own = [
        (each, _found(each, asked)) for each in listed if run.checkpoints.holder(each.version) == run.job.name
    ]
    past = [
        (each, part)
        for each, part in own
        if part.dead or (newest is not None and newest in kept and each.version < newest)
    ]
    marked = sorted(each.version for each, _ in past if each.deleted and each.version not in spared)
    return Verdict(
        kept,
        tuple(marked),
        victims((part for each, part in past if not each.deleted), {*kept, *asked.saved}, keep, spared),
    )


def _found(each: Listed, asked: Retain) -> StoredCheckpoint:
    begun, last = (
        each.manifest is None and not each.damaged,
        max((generation for generation, _ in asked.lineage), default=0),
    )
    return StoredCheckpoint(
        each.version,
        begun,
        begun and each.version.generation < last and not lineage.contains(asked.lineage, each.version),
    )


def written(listed: Iterable[Listed]) -> dict[Version, float]:
    """Returns when the checkpoints were written, as far as their manifests say so."""
    times = {each.version: each.manifest.written_at for each in listed if each.manifest is not None}
    return {version: at for version, at in times.items() if at is not None}


def needed(run: Run) -> dict[Version, str]:
    """Returns the versions from which branches and forks go on, each with the name of the last branch or fork
    that does.
    """
    name = run.job.name
    branched = {each.version: f"branch {each.number} of {name}" for each in run.branches.every()}
    return branched | {
        version: f"run {others[-1]!r}" for version, others in forks.references(run.store, name).items()
    }


@dataclass(frozen=True)
class Look:
    """Holds what a look has found: the checkpoints of a run, what is owed for them, and which are kept and
    why.
    """

    listed: list[Listed]
    newest: Version | None
    """The checkpoint from which the run goes on."""
    debts: list[Debt]
    verdict: Verdict


def look(
    run: Run, keep: Keep, asked: Retain | None = None, now: float | None = None, known: Known | None = None
) -> Look:
    """Looks at the checkpoints of a run by the rules of ``keep`` and by what the run has recorded that is
    owed for them.

    ``known`` has the checkpoints of the last look; with it, only checkpoints that have changed are read.

    ``asked`` is what the run's coordinator knows, by default what a coordinator that begins now would know.
    ``now`` is the wall-clock time, by default this machine's.
    """
    # a coordinator that begins counts on the newest checkpoint only, and takes the best one from the stored
    # validations where no journal tells it
    if asked is None:
        asked, found = saves.retained(run.state()), best_of(run) if keep.best else None
        asked = replace(asked, saved=asked.saved[-1:], best=found and found.version)
    # listed after the newest was looked for, so that damage found by that is known here
    listed = run.checkpoints.versions() if known is None else run.checkpoints.changed(known)
    # if the run has ended earlier, its last checkpoint is the newest one, which stays
    debts = owed.debts(run, asked.lineage, end=run.job.steps)
    verdict = judge(run, keep, asked, listed, time.time() if now is None else now, owed.needed(debts))
    return Look(listed, max(asked.saved, default=None), debts, verdict)


def state_of(listed: Listed, newest: Version | None) -> str:
    """Returns the state of a checkpoint in a word or two, ``newest`` being the one from which the run goes
    on.  No digest is checked.
    """
    if listed.deleted:
        return "being deleted"
    if listed.damaged or listed.manifest is None:
        return "damaged" if listed.damaged else "incomplete"
    return "newest complete" if listed.version == newest else "complete"


def collect(
    run: Run,
    keep: Keep,
    asked: Retain | None,
    claim: int,
    now: float | None = None,
    known: Known | None = None,
) -> Verdict:
    """Performs a round for the owner whose claim is ``claim``.  Returns the checkpoints that the round keeps,
    has removed (``marked``) and has marked (``due``).

    Raises :class:`Exists` if the newest claim is another one.  :func:`look` explains ``asked``, ``now`` and
    ``known``.
    """
    at_once, gone, marked = asked is not None and asked.at_once, list[Version](), list[Version]()
    # A full bucket first removes what is known, since a look at all checkpoints takes long.  The second, full
    # look also finds generations without an object.
    for seen in (known, None) if at_once and known else (None if at_once else known,):
        looked = look(run, keep, asked, now, seen)
        found, complete = (
            looked.verdict,
            {each.version for each in looked.listed if each.manifest is not None or each.damaged},
        )
        gone += [
            version for version in found.marked[: None if at_once else MOST] if remove(run, version, claim)
        ]
        # Incomplete checkpoints go first: they need no room for a mark, and make room for the marks of
        # others.
        for version in sorted(found.due[: None if at_once else MOST], key=lambda each: each in complete):
            marked += [version] if mark(run, version, "no rule keeps it", claim) else []
            gone += [version] if at_once and remove(run, version, claim) else []
    return Verdict(found.kept, tuple(gone), tuple(marked))


def mark(run: Run, version: Version, why: str, claim: int) -> bool:
    """Marks ``version``, unless a fork needs it, and returns whether it has marked it.

    Raises :class:`Exists` if the newest claim of the run is another one.

    A command that begins a branch claims the run, and then looks at the checkpoint from which the branch is
    to go on.  If the mark is written after that look, the claim is seen here, and the mark is taken back.
    """
    if not _may_go(run, version, claim):
        return False
    run.checkpoints.mark(version, why)
    try:
        _check(run, claim)
    except Exists:
        run.checkpoints.unmark(version)
        raise
    return True


def remove(run: Run, version: Version, claim: int) -> bool:
    """Removes ``version``, which is marked, unless a fork needs it, and returns whether it is gone.  Raises
    as :func:`mark` does.
    """
    if may := _may_go(run, version, claim):
        run.checkpoints.remove(version)
    return may


def _may_go(run: Run, version: Version, claim: int) -> bool:
    _check(run, claim)
    return version not in forks.references(run.store, run.job.name)


def release(run: Run, claim: int) -> list[tuple[Reference, bool]]:
    """Performs a round on the references that nobody needs: removes what an earlier round has marked, and
    marks the others.

    Returns each of these references, and whether it is gone.  Raises as :func:`mark` does.
    """
    done = list[tuple[Reference, bool]]()
    _check(run, claim)
    for each in forks.unmark(run.store, run.job.name):
        _check(run, claim)
        done.append((each, forks.collect(run.store, run.job.name, each)))
    return done


def _check(run: Run, claim: int) -> None:
    if (latest := run.latest_claim()) != claim:
        raise Exists(f"{run.job.name}/owner/{latest:06d}.json", run.store.url)


class Retention:
    """Performs the rounds of an owner of the run: :meth:`ask` on a thread of its own, for a coordinator, and
    :meth:`round` at once.  ``tell`` adds a sentence to the run's story.
    """

    def __init__(self, run: Run, claim: int, tell: Callable[[str], None]) -> None:
        self.run, self.claim, self.tell = run, claim, tell
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._waiting = 0
        self._known: Known = {}
        self._failed = self._full = False
        """True if the last round failed, or found nothing to delete in a full bucket: that is said once."""

    def ask(self, asked: Retain | None) -> None:
        """Performs a round for ``asked``, unless a newer round is asked for before this one begins."""
        self._waiting += 1
        self._pool.submit(self._newest, asked, self._waiting)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _newest(self, asked: Retain | None, number: int) -> None:
        if number == self._waiting:
            self.round(asked)

    def round(self, asked: Retain | None = None) -> bool:
        """Performs a round for ``asked``, with the default of :func:`look`.  Returns whether a checkpoint is
        gone, and tells a failure once.

        The next round goes on with what this round has left.
        """
        try:
            found = collect(self.run, self.run.job.keep(), asked, self.claim, known=self._known)
        except Exists:
            return False  # another coordinator acts for the run, and deletes
        except (StorageError, OSError) as error:
            if not self._failed:
                self.tell(
                    f"old checkpoints could not be deleted: {error}; the run tries again after each save"
                )
            self._failed = True
            return False
        before, self._full, self._failed = (
            self._full,
            asked is not None and asked.at_once and not found.marked,
            False,
        )
        if self._full and not before:
            self.tell(no_room(self.run, found.kept))
        return bool(found.marked)


def no_room(run: Run, kept: Mapping[Version, Collection[str]]) -> str:
    """Returns the sentence about a full bucket in which nothing may be deleted, because the rules keep the
    checkpoints ``kept``.
    """
    may_go = [
        version
        for version, names in kept.items()
        if version not in run.checkpoints.inherited and not STAYS.intersection(names)
    ]
    fix = f"rm --step {min(may_go).step}` deletes the oldest" if may_go else "ls` lists the checkpoints"
    if sum(BY_NUMBER.issuperset(names) for names in kept.values()) > 2:
        fix = "gc --checkpoint.keep-last 2` deletes all but the newest 2"
    rules = f"checkpoint.keep_last = {run.job.keep().last} and the other rules keep {len(kept)} checkpoints"
    space = f"free space there, or, once the run has ended, `elastic checkpoint {fix}"
    return f"the bucket is full, and no rule permits to delete more: {rules}; {space}"
