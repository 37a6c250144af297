"""A run in its bucket: its job, its owner, its state, and the record of each checkpoint."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import elastic
from elastic.code.imports import version_of
from elastic.control.evolve import evolve
from elastic.control.run import TERMINAL, Ended, Finished, RunState
from elastic.control.takeover import UNREAD
from elastic.errors import JobError
from elastic.ids import NodeId, Version
from elastic.job import Job
from elastic.journal import codec
from elastic.plan.layout import Layout
from elastic.protocol.authority import JournalCopy, furthest
from elastic.protocol.lineage import Lineage, contains
from elastic.runs import alone, branches, forks
from elastic.runs.branches import Branch, Branches, Origin
from elastic.runs.notes import abandoned
from storage import journal
from storage.checkpoints import Checkpoints, Listed, ShardReceipt
from storage.errors import Deposed, Exists
from storage.journal import Journal, claim_owner, latest_claim, newest_owner, owner_of, owners, replicas
from storage.journal.replicas import Written
from storage.objects import ObjectStore

LOCAL = alone.ADDRESS
"""Address in the claim of a run that one process trains by itself (``--local``)."""
LISTED = 8
"""Largest number of steps that an error lists one by one."""


class LocalProcess(NamedTuple):
    """A process of this machine that has claimed a run for itself."""

    pid: int
    trains: bool
    """True if it trains the run with ``--local``, False if it rolls the run back."""


class Run:
    """The folder of a job's run.  ``open`` begins the run; ``look`` writes nothing.  Both refuse a folder
    that holds the run of another job.  ``find`` accepts the run of any job, and an empty folder; ``begun``
    refuses an empty folder.
    """

    def __init__(self, job: Job, store: ObjectStore) -> None:
        self.job, self.store, self.branches = job, store, Branches(store, job.name)
        self.there: Branch | None = None
        """The newest branch when :meth:`find` looked; None if it has not looked, or there is no run."""
        self._newest = journal.Newest(store, job.name)
        self._tails: dict[Written, list[journal.Segment]] = {}
        """The parsed segments of each journal copy that :meth:`_left` got in its last call."""

    @cached_property
    def origin(self) -> Origin | None:
        """The checkpoint from which the run was forked, or None."""
        return self.branches.origin()

    @property
    def before(self) -> Job:
        """The job of the newest branch when :meth:`find` looked; the given job if there was no run."""
        return self.there.of_run(self.job) if self.there is not None else self.job

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run.  In a fork, the first one is the checkpoint from which it was
        forked.
        """
        return self.branches.checkpoints()

    @classmethod
    def open(cls, job: Job) -> Self:
        """Returns the run in order to train it.  The folder belongs to the job from now on.  Raises as
        :meth:`look` does.

        The caller has called :meth:`look` before, because ``open`` writes a missing ``job.json`` before it
        checks anything.
        """
        store = ObjectStore.open(job.bucket)
        key, document = f"{job.name}/job.json", branches.document(job)
        try:
            store.put_if_absent(key, document)
        except Exists:
            there = Branches(store, job.name)
            if there.last() is None and not there.lost():
                store.put(key, document)  # job.json was cut off, and the run has nothing else
        run = cls.look(job)
        forks.make_sure(store, run.job, run.origin)
        return run

    @classmethod
    def look(cls, job: Job, *, branch: bool | None = False) -> Self:
        """Returns the run in order to read it, begun or not, after it has taken ``job`` (:meth:`agree`)."""
        return cls.find(job).agree(job, branch=branch)

    def agree(self, job: Job, *, branch: bool | None = False) -> Self:
        """Gives the run ``job``, and returns the run.  Settings that ``job`` leaves open are taken from the
        run's newest branch (:meth:`Job.going_on`).

        Raises :class:`JobError` if the folder holds a run with another trajectory, or a run whose
        ``job.json`` is lost.  With ``branch``, ``job`` may differ from the run in settings that a branch may
        change.  With ``branch=None`` it may do so only if the run has no good checkpoint: such a run begins
        at step 0 in any case, so nothing is lost.
        """
        if self.there is None or self.there.number > 1:
            self.branches.check_lost()
        if self.there is not None:
            self.job = self.there.before(job.going_on(self.there.job))
            if self.before.digest != self.job.digest:
                branches.check(
                    self.job, self.before, asked=self.newest() is None if branch is None else branch
                )
        return self

    @classmethod
    def find(cls, job: Job) -> Self:
        """Returns the run in order to read it, with the job of its newest branch, whatever trajectory ``job``
        has.
        """
        run = cls(job, ObjectStore.open(job.bucket))
        run.there = run.branches.last()
        run.job = run.before
        return run

    @classmethod
    def begun(cls, job: Job, of_the_file: bool = True) -> Self:
        """Returns the run like :meth:`find`.  Raises :class:`JobError` if there is no such run in the bucket
        (:func:`branches.no_run`).
        """
        if (run := cls.find(job)).there is None:
            run.branches.check_lost()
            raise branches.no_run(job, of_the_file)
        return run

    def branches_at(self, at: Version | None = None) -> Version | None:
        """Returns the version from which a branch with this job goes on: ``at``, which must be a good
        checkpoint, or by default the newest good checkpoint.

        Returns None if a branch would change nothing: the run has this job already, ``at`` is None or the
        newest checkpoint, and no training loop has ended the run there.  Raises :class:`JobError` if the
        version is past the last step of the job.
        """
        differs = self.before.digest != self.job.digest
        if self.there is None or (at is None and not differs):
            return None
        newest = self.newest() or Version(0, 0)
        version = newest if at is None else at
        if (
            not differs
            and version == newest
            and not (isinstance(end := self.end(), Finished) and 0 < end.step == newest.step)
        ):
            return None  # the loop has not ended the run there
        if version.step > self.job.steps:
            raise JobError(
                f"steps = {self.job.steps}: the run {self.job.name!r} is at step {version.step} "
                "already; raise steps"
            )
        return version

    def branch(self, now: float, at: Version | None = None, incarnation: int = 0, word: str = "") -> str:
        """Begins a branch at the version ``at``, which :meth:`branches_at` has returned before, or at the
        version that it returns now.  From there on the run has this job.  ``word`` is the word by which a
        command named ``at``.

        A caller that goes on at once looks at the run, claims it as ``incarnation``, and then begins the
        branch.  So a coordinator of the old job that still lives, and notices the claim late, trains only
        worlds that the branch abandons.

        Returns the sentence about the branch; "" if there is nothing to change.  Raises as
        :meth:`branches_at` does, and :class:`Exists` if another command has begun a branch since the run was
        looked at: its claim may be newer than this one.
        """
        version = at or self.branches_at()
        if self.there is None or version is None:
            return ""
        state, last = self.state(incarnation, 0.0), self.last_recorded()
        made = [*state.history.saved[-1:], *([last.version] if last is not None else [])]
        claim = incarnation - 1 if incarnation else self.latest_claim()
        about, number = (self.branches, self.job, self.before, version, now), self.there.number + 1
        return branches.begin(
            *about, number=number, until=state.generation, claim=claim, made=made, word=word
        )

    def job_of(self, step: int) -> Job:
        """Returns the job of the branch that committed ``step`` of the surviving lineage; the run's job if no
        checkpoint knows the step.
        """
        made = self.made(step)
        if not contains(self.lineage, made):
            return self.job
        return self.job_at(made)

    def job_at(self, version: Version) -> Job:
        """Returns the job of the branch that committed ``version``, which a later branch may have
        abandoned.
        """
        return self.branches.at(version).of_run(self.job)

    def made(self, step: int) -> Version:
        """Returns the version of ``step`` on the surviving lineage.  If no checkpoint knows the step, the
        version has the last known generation.
        """
        known = self.state()
        return Version(
            step, next((each for each, last in known.history.lineage if step <= last), known.generation)
        )

    def home(self) -> str:
        """Returns the address and the host of the newest claim, in words."""
        owner = self.owner() or {"address": "an unknown address", "host": ""}
        return f"{owner['address']} ({owner['host']})"

    def follows(self, seen: int) -> int:
        """Returns the incarnation of the newest claim.  Raises :class:`Exists` if another life has claimed
        the run since incarnation ``seen``.

        A newer claim of the same life is no error: that coordinator only took over.  Claims without a life
        count as claims of different lives.
        """
        latest = self.latest_claim()
        if latest > seen:
            newest, before = (owner_of(self.store, self.job.name, each) or {} for each in (latest, seen))
            if not newest.get("life") or newest["life"] != before.get("life"):
                raise Exists(f"{self.store.url}/{self.job.name}/owner/{latest:06d}.json")
        return latest

    def claim(
        self, address: str, life: str = "", node: str = "", after: int | None = None, **more: Any
    ) -> int:
        """Claims the next incarnation by a create-only write, before the coordinator's first action, and
        returns it.

        ``life`` is common to the coordinators that follow one another on one cluster, where workers survive
        them.  ``node`` is this coordinator's node.  With ``after``, claims exactly the incarnation ``after``
        + 1, and raises :class:`Exists` if another process has claimed it.  ``more`` holds further entries of
        the claim (``elastic/runs/restarts.py``).
        """
        about = {"address": address, "host": platform.node(), "life": life, "node": node, **more}
        return claim_owner(self.store, self.job.name, about, after)

    def claim_here(self, after: int | None = None, *, trains: bool = True) -> int:
        """Claims the next incarnation, or the incarnation ``after`` + 1, for this process.  With ``trains``
        the process trains the run by itself; otherwise it only changes the run.

        Raises :class:`JobError` if another process of this machine trains or changes the run already, and
        :class:`Exists` as :meth:`claim` does.
        """
        self.check_local()
        return self.claim(LOCAL, after=after, **alone.claim(trains))

    def local_process(self) -> LocalProcess | None:
        """Returns another process of this machine that trains the run with ``--local``, or rolls it back;
        None if there is none.

        A process that has rolled the run back has begun a branch, and then it may live on without the run.
        """
        owner = self.owner()
        if owner is None or not (pid := alone.process(owner)):
            return None
        incarnation, trains = owner["incarnation"], owner.get("trains", True)
        if alone.ended(self.store, self.job.name, incarnation) is not None:
            return None
        if not trains and any(each.claim == incarnation - 1 for each in self.branches.every()):
            return None
        return LocalProcess(pid, trains)

    @property
    def trained_alone(self) -> bool:
        """True if the process that claimed the run last in order to train it did so with ``--local``."""
        for number in range(self.latest_claim(), 0, -1):
            owner = owner_of(self.store, self.job.name, number)
            if owner is not None and owner.get("trains", True):
                return bool(owner["address"] == LOCAL)
        return False

    def local_elsewhere(self) -> str:
        """Returns the words for the other machine on which, and the time at which, a process began to train
        the run with ``--local``, if that process may still train it; else "".
        """
        owner = self.owner()
        if owner is None or not alone.elsewhere(self.store, self.job.name, owner["incarnation"], owner):
            return ""
        return alone.begun_at(owner)

    def check_local(self) -> None:
        """Raises :class:`JobError` if another process of this machine trains the run with ``--local``, or
        rolls it back: two would both write its steps.
        """
        if (there := self.local_process()) is None:
            return
        its = f"name = {self.job.name!r}: process {there.pid} of this machine"
        if not there.trains:
            raise JobError(f"{its} rolls this run back; wait for its end, or choose another name")
        raise JobError(
            f"{its} trains this run (--local); wait for its end, stop it with Ctrl-C in its terminal (or "
            f"`kill -INT {there.pid}`), or choose another name"
        )

    def claims(self, life: str, seen: int = 0) -> dict[int, NodeId]:
        """Returns the incarnations later than ``seen`` that ``life`` has claimed, oldest first, each with its
        node.

        Raises :class:`Deposed` if another life has claimed the run.
        """
        # somebody has deleted the run's folder, and claims are counted from 1 again
        begun_anew = self.latest_claim() < seen
        claims = owners(self.store, self.job.name, after=0 if begun_anew else seen)
        ours = {
            number: NodeId(claim.get("node", ""))
            for number, claim in sorted(claims.items())
            if claim.get("life") == life
        }
        if ours and (latest := self.latest_claim()) > max(ours):
            raise Deposed(f"{self.store.url}/{self.job.name}/owner/{latest:06d}.json")
        return ours

    def lives(self) -> set[str]:
        """Returns the lives that have claimed the run; see :meth:`claim`."""
        return {life for claim in owners(self.store, self.job.name).values() if (life := claim.get("life"))}

    def latest_claim(self) -> int:
        """Returns the highest incarnation that has claimed the run."""
        return latest_claim(self.store, self.job.name)

    def owner(self) -> dict[str, Any] | None:
        """Returns the newest claim of the run, or None."""
        claim = newest_owner(self.store, self.job.name)
        return dict(claim) if claim is not None else None

    def state(self, incarnation: int = 0, now: float = 0.0, step: int | None = None) -> RunState:
        """Returns the run's state as the bucket knows it: ``Waiting``, with the good checkpoints of the
        newest lineage.

        Only the newest checkpoints, the last one that the journal knows, and those of ``step`` are looked at.
        The newest manifest says which generation committed which steps; checkpoints off that lineage were
        abandoned.  Of the others, the newest one and the one of ``step`` are checked to have a good index,
        too.

        The bucket may not know the newest generations: if its journal does not reach the end of the run, or
        if a process of another machine may still train the run with ``--local``, which writes no journal.  So
        an ``incarnation`` that begins anew skips numbers of generations; 0 stands for a reader, which skips
        none.
        """
        return self._state(self.last_recorded(), incarnation, now, step)

    def begins(self, incarnation: int, now: float) -> tuple[RunState, str]:
        """Returns :meth:`state` for a start, and the sentence about damaged checkpoints and about where
        the run goes on; "" if there is nothing to say.
        """
        last = self.last_recorded()
        state = self._state(last, incarnation, now)
        before = f"{self.job.name} ran before, and {_goes_on(state, last)}" if last is not None else ""
        return state, "; ".join(filter(None, (self.passed_over(state, put_away=True), before)))

    def passed_over(self, state: RunState, *, put_away: bool = False) -> str:
        """Returns the sentence about the damaged checkpoints after the newest good checkpoint of ``state``,
        which takes their place; "" if there are none.

        With ``put_away`` the damaged checkpoints are quarantined, so that nobody opens them again.
        """
        newest = max(state.history.saved, default=None)
        least = (newest.generation, newest.step) if newest is not None else (0, 0)
        branched = self.branches.every()
        there = self.checkpoints.recent(lambda recent: any(each.good for each in recent))
        found = [
            each
            for each in there
            if each.damaged and not each.deleted and not abandoned(branched, each.version)
        ]
        found = [each for each in found if (each.version.generation, each.version.step) > least]
        for each in found if put_away else ():
            self.checkpoints.quarantine(each.version, each.damaged)
        before = (
            f"the checkpoint of {newest} is used instead"
            if newest is not None
            else "there is no earlier checkpoint"
        )
        told = ", ".join(f"the checkpoint of {each.version} is damaged ({each.damaged})" for each in found)
        return f"{told}: {before}" if told else ""

    def _state(
        self, last: RunState | None, incarnation: int, now: float, step: int | None = None
    ) -> RunState:
        generation, next_worker = (
            (last.next_generation - 1, last.members.next_worker) if last is not None else (0, 1)
        )
        if incarnation and last is not None and not last.over:
            generation += UNREAD * incarnation
        recorded = last.incarnation if last is not None else 0
        skips = incarnation and alone.unseen(self.store, self.job.name, incarnation, recorded)
        unseen = incarnation if skips else 0  # each claim has one generation
        branched = self.branches.every()
        until = max((each.until for each in branched), default=0)

        def after(known: int) -> int:
            return max(generation, known, until) + unseen

        saved = last.history.saved[-1:] if last is not None else ()
        self.checkpoints.expect(saved)
        steps = {each.step for each in saved}
        known = [
            listed
            for at in sorted(steps | ({step} if step is not None else set()))
            for listed in self.checkpoints.at(at)
        ]

        def state(recent: Sequence[Listed]) -> RunState:
            there = [each for each in (*known, *recent) if not abandoned(branched, each.version)]
            whole = [(each.version, each.manifest) for each in there if each.manifest is not None]
            used = max(
                (each.version.generation for each in there if each.manifest is not None or each.damaged),
                default=0,
            )
            if not whole:
                return RunState.begin(incarnation, now, generation=after(used), next_worker=next_worker)
            _, manifest = max(whole, key=lambda each: (each[0].generation, each[0].step))
            good = sorted(
                {each.version for each in there if each.good and contains(manifest.lineage, each.version)}
            )
            good = [each for each in good if each.step != step or not self.checkpoints.damage(each)]
            while good and self.checkpoints.damage(good[-1]):
                good.pop()
            begun = RunState.begin(incarnation, now, tuple(good), manifest.lineage, after(used), next_worker)
            if not self.job.keep().younger_s:
                return begun
            times = {
                version: each.written_at
                for version, each in whole
                if version in good and each.written_at is not None
            }
            return evolve(begun, history=evolve(begun.history, written=tuple(sorted(times.items()))))

        found = state(self.checkpoints.recent(lambda recent: bool(state(recent).history.saved)))
        if self.checkpoints.inherited and not found.history.saved:  # a fork has no beginning of its own
            (version, origin) = next(iter(self.checkpoints.inherited.items()))
            raise JobError(
                f"{self.job.name!r} was forked from {version} of run {origin!r}, whose checkpoint is "
                f"damaged or gone, and {self.job.name!r} has no good checkpoint of its own; fork "
                "again, under another name, from another step"
            )
        found = evolve(found, **self._ended_early(last, incarnation, branched, found.step))
        if last is None:
            return found
        scores = {"validated": last.history.validated, "best": last.history.best}
        kept = {
            name: each
            for name, each in scores.items()
            if each is not None and found.history.contains(each.version)
        }
        # health and skips belong to the run, whoever owns it
        health = last.health
        if abandoned(branched, last.version):  # the next steps are not those that were abandoned
            health = evolve(health, step=min(health.step, found.step))
        return evolve(
            found,
            history=evolve(found.history, **kept),
            health=health,
            skips=last.skips.resume(found.step, forgets=self.job.spikes.off),
        )

    def _ended_early(
        self, last: RunState | None, incarnation: int, branched: Sequence[Branch], step: int
    ) -> dict[str, Any]:
        """Returns the fields ``enough`` and ``why`` of a state if a training loop has ended this branch
        before the job's last step; else no fields.  ``step`` is the newest saved step.
        """
        since = max((each.claim for each in branched), default=0)
        if last is not None and last.why and last.incarnation > since and last.enough >= step:
            return {"enough": last.enough, "why": last.why}
        if (last.incarnation if last is not None else 0) < incarnation - 1:
            number = alone.ends(self.store, self.job.name).newest()
            end = alone.ended(self.store, self.job.name, number)
            if number > since and isinstance(end, Finished) and end.step == step > 0:
                return {"enough": step, "why": end.why}
        return {}

    def last_recorded(self) -> RunState | None:
        """Returns the state that the last coordinator recorded in the bucket's journal; None if there is
        none.  A start reads it so that no number is used twice.
        """
        segment = self._newest.segment()
        return codec.fold(*segment) if segment is not None else None

    def end(self) -> Ended | None:
        """Returns how the run ended, or None if the bucket does not say.

        The end is known from a checkpoint of the last step, from the journal of the last owner, or, with
        ``--local``, from the object that the last owner has left (:mod:`elastic.runs.alone`).
        """
        last, newest = self.last_recorded(), self.newest()
        if newest is not None and newest.step >= self.job.steps:
            return Finished()
        if self.branched:
            return None
        claim = self.latest_claim()
        if last is None or last.incarnation < claim:
            end = alone.ended(self.store, self.job.name, claim)
            # the loop has ended the run, but its last save has failed
            early = isinstance(end, Finished) and end.step and (newest is None or newest.step != end.step)
            return None if early else end
        return last.state if isinstance(last.state, TERMINAL) else None

    @property
    def last_step(self) -> int:
        """The last step of the run: that of its job, or the newest saved step if the run has finished
        before.
        """
        newest = self.newest()
        return (
            min(newest.step, self.job.steps)
            if newest is not None and isinstance(self.end(), Finished)
            else self.job.steps
        )

    @property
    def branched(self) -> bool:
        """True if the run has not gone on since its newest branch was begun."""
        claim = self.latest_claim()
        return any(claim <= each.claim for each in self.branches.every())

    def journal(self, local: Path, snapshot: Mapping[str, Any]) -> Journal:
        """Returns the journal, ready to be continued.  ``snapshot`` is the state before its next record, and
        ``local`` is its local folder.
        """
        written = self._newest.segment()
        return Journal(self.store, self.job.name, local, written[1][-1]["n"] + 1 if written else 0, snapshot)

    def read(self, first: int, ends: Iterable[Written]) -> RunState | None:
        """Returns the state that :meth:`recover` would find, but begins no journal."""
        _, segments = self._left(ends)
        run = codec.fold(*segments[-1]) if segments else None
        return run if run is not None and run.incarnation >= first else None

    def _left(self, ends: Iterable[Written]) -> tuple[int, list[codec.Segment]]:
        """Returns the number of the first record that the bucket lacks, and the last segments of the journal.

        The segments come from the bucket or from ``ends``, the copies of the journal's end, whichever reach
        further.
        """
        written = self._newest.segment()
        end, by = (written[1][-1]["n"] + 1, codec.incarnation_after(written)) if written else (0, 0)
        ends = [each for each in ends if each[0] >= by]  # older copies are of no use
        self._tails = {each: self._tails.get(each) or replicas.segments_of(each[1]) for each in ends}
        parsed = [(incarnation, segments) for (incarnation, _), segments in self._tails.items()]
        copies = [
            JournalCopy(incarnation, replicas.first_of(each), replicas.last_of(each), each)
            for incarnation, each in parsed
            if each
        ]
        found = furthest(end, by, copies)
        left = self._newest.rejoined(found.records) if found is not None else [written] if written else []
        return end, [*map(codec.checked, left)]

    def recover(self, first: int, local: Path, ends: Iterable[Written]) -> tuple[RunState, Journal] | None:
        """Returns what a dead coordinator has left: the state according to its journal, and the journal to
        continue.

        Returns None if no coordinator of this life has recorded anything.  ``first`` is the first incarnation
        of this life.  ``ends`` are copies of the journal's end, which the bucket may not have yet
        (:mod:`storage.journal.replicas`).
        """
        end, segments = self._left(ends)
        if not segments or codec.incarnation_after(segments[-1]) < first:
            return None
        known, ahead = segments[0][0], []
        for record in (record for _, records in segments for record in records):
            if record["n"] < end:
                known = codec.after(known, record)
            else:
                ahead.append(record)
        kept = Journal(self.store, self.job.name, local, end, known)
        for record in ahead:
            known = codec.after(known, record)
            kept.append(record, lambda known=known: known, durable=False)  # type: ignore[misc]
        return codec.fold(known, ()), kept

    def segments(self) -> list[codec.Segment]:
        """Returns the part of the journal that is in the bucket."""
        return [*map(codec.checked, journal.read(self.store, self.job.name))]

    def records(self) -> list[Mapping[str, Any]]:
        """Returns all records of the journal that are in the bucket."""
        return [record for _, records in self.segments() for record in records]

    @property
    def lineage(self) -> Lineage:
        """The surviving lineage."""
        return self.state().history.lineage

    def newest(self) -> Version | None:
        """Returns the newest good checkpoint, or None."""
        return max(self.state().history.saved, default=None)

    def version_at(self, step: int | None) -> Version:
        """Returns the good checkpoint at ``step``, or the newest if ``step`` is None.  Raises
        :class:`JobError` if there is none.
        """
        saved = self.state(step=step).history.saved
        found = [version for version in saved if step in (None, version.step)]
        if not found:
            have = _listed([version.step for version in saved])
            at = "" if step is None else f" at step {step}"
            why = "".join(
                f"; {each.damaged}"
                for each in (self.checkpoints.at(step) if step is not None else ())
                if each.damaged
            )
            raise JobError(
                f"no good checkpoint{at} in {self.store.url}/{self.job.name}; steps with a good "
                f"checkpoint: {have}{why}"
            )
        return max(found)

    def commit(
        self,
        version: Version,
        receipts: Sequence[ShardReceipt],
        lineage: Lineage,
        layout: Layout,
        now: float | None = None,
    ) -> str:
        """Writes the manifest of ``version``, and returns its digest.  ``now`` is the wall-clock time, by
        default this machine's.

        An earlier coordinator may have written a manifest of the same version in the layout of another world,
        and died before it could say so.  Then that manifest counts.  Any other manifest of this version
        raises :class:`Exists`.
        """
        about = {**self._about(lineage, layout), "written_at": round(time.time() if now is None else now, 3)}
        try:
            return self.checkpoints.commit(version, receipts, about)
        except Exists:
            there = self.checkpoints.manifest(version)
            if there.lineage != lineage or there.layout == about["layout"]:
                raise
            return there.digest

    def _about(self, lineage: Lineage, layout: Layout) -> dict[str, Any]:
        job = self.job
        return {
            "job": job.digest,
            "lineage": [list(entry) for entry in lineage],
            "layout": dict(layout.degrees),
            "cursor": {"seed": job.seed, "sampling": job.data.sampling, "global_batch": job.global_batch},
            "versions": {name: version_of(name) for name in ("torch", "ray", "safetensors")}
            | {"elastic": elastic.__version__},
        }


def _listed(steps: Sequence[int]) -> str:
    """Returns the steps in words: each of a few; else the first, the last and how many there are."""
    if len(steps) <= LISTED:
        return ", ".join(map(str, steps)) or "none"
    return f"{steps[0]} to {steps[-1]}, {len(steps)} in all (`elastic checkpoint ls` lists them)"


def _goes_on(state: RunState, last: RunState) -> str:
    """Returns the words for where a start goes on.  It stands at ``state``; ``last`` is the state that was
    recorded last.
    """
    # not state.step: a damaged checkpoint may have committed more
    step = max(state.history.saved, default=Version(0, 0)).step
    where = (
        f"goes on from step {step}" if step else "begins again at step 0, since it has no complete checkpoint"
    )
    again = f"; the steps after it are done again, at least up to {last.step}" if last.step > step else ""
    jump = f"; the next generation is {state.next_generation}, since the last used number is not known"
    return f"{where}{again}{jump if state.generation > last.generation else ''}"
