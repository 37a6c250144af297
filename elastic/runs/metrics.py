"""The metrics of a run in its bucket: a row for each step, in files of JSON lines that anybody can read.

    <run>/metrics/000000000050-000003-000000001234.jsonl

A file has the rows (:mod:`elastic.report.metrics`) of the steps after the file before it, up to a save.  Its
name has the step and the generation of its last row, and the number of the journal record at which the next
rows begin, so that a process that continues the run reads no earlier record.  Object stores cannot append, so
each save adds at most one file.

Each step counts once, over all restarts: a row says which generation committed it, and a reader takes the
rows of the surviving lineage, each step once.  A validation also has an object of its own
(:mod:`elastic.runs.validations`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from heapq import merge
from itertools import islice
from typing import NamedTuple

from elastic.code.imports import failure
from elastic.config.values import without_secrets
from elastic.engine.optim.schedule import rate_for_readers
from elastic.ids import Version
from elastic.job import Job
from elastic.journal import codec
from elastic.protocol.lineage import Lineage, contains, cut, tip
from elastic.report.best import Loss
from elastic.report.metrics import VALIDATION, Row, Rows, json_line, row_from, version_of
from elastic.runs import validations as told
from elastic.runs.branches import flat
from elastic.runs.notes import abandoned
from elastic.runs.run import Run
from elastic.sinks.port import Sink, TrackedRun, make_sink
from elastic.threads import keep_going
from storage import journal
from storage.errors import Damaged, Exists, StorageError, Unavailable
from storage.objects import ObjectStore

ROWS = 10_000
"""Largest number of rows that a sink gets at a time."""
EVERY_S = 5.0
"""Seconds between two looks at the journal, which gets a new object about as often."""
CLOSE_S = 10.0
"""Seconds in which the bucket must take the last rows, and the sinks as many seconds after that."""
LOOK_S = 1.0
"""Seconds between two looks at a bucket that does not list the newest rows yet."""
RETRY_S = 30.0
"""Seconds after which a sink that failed is tried again, even without new rows."""


class FilePosition(NamedTuple):
    """The content of a file's name: the version of its last row, and the journal record at which the next
    rows begin (0: the first one).
    """

    step: int
    generation: int
    record: int

    @property
    def name(self) -> str:
        return f"{self.step:012d}-{self.generation:06d}-{self.record:012d}.jsonl"


def places(store: ObjectStore, run: str) -> list[FilePosition]:
    """Returns the files of a run, in order."""
    found = store.matching(f"{run}/metrics/", r"(\d{12,})-(\d{6,})-(\d{12,})[.]jsonl")
    return sorted(FilePosition(*map(int, each.groups())) for each in found)


def stored(store: ObjectStore, run: str, lineage: Lineage, after: int = 0) -> Iterator[Row]:
    """Yields the rows in the bucket of the steps after ``after``, in order, each step of ``lineage`` once."""
    for place in places(store, run):
        if place.step <= after:
            continue
        for row in _rows_in(store, run, place):
            if row["step"] > after and contains(lineage, version_of(row)):
                after = int(row["step"])
                yield row


def _rows_in(store: ObjectStore, run: str, place: FilePosition) -> list[Row]:
    return [row_from(line) for line in store.get(f"{run}/metrics/{place.name}").decode().splitlines()]


def last_row(store: ObjectStore, run: str) -> Row | None:
    """Returns the row that was stored last, or None."""
    newest = max(places(store, run), key=lambda place: (place.generation, place.step), default=None)
    return next(reversed(_rows_in(store, run, newest)), None) if newest is not None else None


def store_rows(store: ObjectStore, run: str, rows: Sequence[Row], record: int = 0) -> None:
    """Writes the validations of ``rows``, and then ``rows`` as one file.  ``record`` is the record in the
    name of the file.  Objects that are there already stay.
    """
    for row in rows:
        if "validation_loss" in row:
            told.store(store, run, row)
    if rows:
        version = version_of(rows[-1])
        key = f"{run}/metrics/{FilePosition(version.step, version.generation, record).name}"
        with suppress(Exists):
            store.put_if_absent(key, "".join(f"{json_line(row)}\n" for row in rows).encode())


def _with_late(store: ObjectStore, run: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the rows.  A row whose validation ended after the row was stored gets the numbers of the
    validation.
    """
    validated = told.stored(store, run)
    for row in rows:
        if "validation_loss" not in row and (late := validated.get(version_of(row))) is not None:
            with suppress(ValueError):  # the object is damaged
                found = row_from(store.get(late[0]).decode())
                row = {**row, **{name: found[name] for name in VALIDATION if name in found}}
        yield row


def validations(run: Run, lineage: Lineage) -> dict[Version, Loss]:
    """Returns the loss of each stored validation of ``lineage``."""
    return {
        version: loss
        for version, (_, loss) in told.stored(run.store, run.job.name).items()
        if contains(lineage, version)
    }


def jobs(run: Run) -> Callable[[Version], Job]:
    """Returns a function that gives the job of a version: the job of the branch that committed the
    version.
    """
    later = [(each.generation, run.job.begun_as(each.job)) for each in reversed(run.branches.every())]
    first = run.job.begun_as(run.branches.begun.job) if later else run.job
    return lambda version: next((job for since, job in later if version.generation > since), first)


def rates(job: Callable[[Version], Job]) -> Callable[[Version, float | None], float]:
    """Returns a function that gives the learning rate of a version, from its job (:func:`jobs`) and from the
    rate that its commit told, if it told one (:func:`rate_for_readers`).
    """
    return lambda version, told: rate_for_readers(job(version), version.step, told)


def keep_until(run: Run, version: Version) -> None:
    """Stores the rows up to ``version`` in a file of their own, if they share one with later steps, which are
    about to be abandoned.

    Rows that only the journal has are stored first, also those of the later steps, because a fork may have
    begun there.
    """
    lineage = run.lineage
    with suppress(Damaged):  # nobody can read these rows any more, and going back is a way out
        store_journaled(run, lineage)
    kept = cut(lineage, version)
    whole = [
        place.step
        for place in places(run.store, run.job.name)
        if contains(kept, Version(place.step, place.generation))
    ]
    store_rows(run.store, run.job.name, list(stored(run.store, run.job.name, kept, max(whole, default=0))))


def store_journaled(run: Run, lineage: Lineage) -> None:
    """Stores the rows of ``lineage`` that only the journal has.  A process that goes on from the end of
    ``lineage`` without a journal calls this first, because readers would not look into the old journal any
    more.  Raises :class:`~storage.errors.StorageError`.
    """
    following = Following(run)
    following.read()
    there = following.stored_of(lineage)
    store_rows(run.store, run.job.name, [row for row in following.rows_of(lineage) if row["step"] > there])


class Following:
    """Reads the journal of a run in the bucket as it grows, from where the stored rows end, and stores the
    rows that are final.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.store, self.name = run, run.store, run.job.name
        job = jobs(run)
        self.rows = Rows(rates(job), lambda version: job(version).spikes.leaves_out)
        self._places = places(self.store, self.name)
        self._next = max((place.record for place in self._places), default=0)
        self._begun: list[tuple[int, int]] = []
        """The segments with rows that are not stored: the step at which each began, and the number of its
        first record.
        """

    def read(self) -> None:
        """Reads the records that the journal has got since the last call."""
        for head, records in journal.since(self.store, self.name, self._next):
            self._next = records[-1]["n"] + 1
            if "continues" not in head:
                self.rows.read(*codec.checked((head, records)))
                self._begun.append(
                    (max((step for _, step in head["run"]["history"]["lineage"]), default=0), records[0]["n"])
                )
            elif self._begun:
                self.rows.read(None, records)

    @property
    def stored(self) -> int:
        """The step up to which the rows of the surviving lineage are stored."""
        return self.stored_of(self.rows.lineage)

    def stored_of(self, lineage: Lineage) -> int:
        """Returns the step up to which the rows of ``lineage`` are stored."""
        return max(
            (
                place.step
                for place in self._places
                if contains(lineage, Version(place.step, place.generation))
            ),
            default=0,
        )

    def rows_of(self, lineage: Lineage) -> list[Row]:
        """Returns the rows of ``lineage`` that were read from the journal, in order, also if the journal has
        left that lineage since.
        """
        newest = self.rows.lineage
        found = self.rows.surviving(newest if contains(newest, tip(lineage)) else lineage)
        return [row for row in found if contains(lineage, version_of(row))]

    def store_final(self, *, closing: bool = False) -> None:
        """Stores the rows that no fall-back can take back: up to the newest good checkpoint.

        A row waits for its validation, and for commits before it that are still to be told.  When the run is
        ``closing``, no row waits for the validation of a spare worker.
        """
        stored = self.stored
        until = min(self.rows.saved, self.rows.told)
        if until <= stored:
            return
        rows = [row for row in self.rows.surviving() if row["step"] > stored]
        if rows and rows[-1]["step"] <= until and self._owes(rows[-1]):
            until = int(rows[-1]["step"]) - 1
        if self.run.job.validation.by == "spares" and not closing:
            until = min([until, *(int(row["step"]) - 1 for row in rows if self._awaits_a_spare(row))])
        final = [row for row in rows if row["step"] <= until]
        if not final:
            return
        last = version_of(final[-1])
        record = max((first for step, first in self._begun if step <= last.step), default=0)
        store_rows(self.store, self.name, final, record)
        self._places.append(FilePosition(last.step, last.generation, record))
        self.rows.forget(last.step)
        self._begun = [each for each in self._begun if each[1] >= record]

    def _owes(self, row: Row) -> bool:
        """Returns whether the commit of the next step may still tell a validation of the row's step."""
        return self.run.job.validates(int(row["step"])) and "validation_loss" not in row

    def _awaits_a_spare(self, row: Row) -> bool:
        """Returns whether a spare worker may still validate the row's step.  The row waits until the next two
        validations are due.
        """
        every, step = self.run.job.validation.every, int(row["step"])
        return (
            every > 0
            and not step % every
            and "validation_loss" not in row
            and step > self.rows.saved - 2 * every
        )


class Sinks:
    """Hands the stored rows on to the sinks of a job, each on a thread of its own.

    A sink that fails or hangs disturbs neither the run nor another sink.  A sink that failed is tried again
    after :data:`RETRY_S`.  Rows that wait for a sink are in the bucket, and at most :data:`ROWS` of them are
    in memory.

    ``say`` receives a sentence when a sink fails, once for each sink until it works again.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._say, self._each = say, list[_Handing]()
        if not run.job.metrics.sinks:
            return  # what follows reads all branches, and lists all rows
        settings = flat(run.job.model_dump(mode="json"))
        shown = {name: without_secrets(name, value) for name, value in settings.items()}
        tracked = TrackedRun(run.job.name, shown, run.store, _abandoned_by(run))
        for name, args in run.job.metrics.sinks.items():
            self._each.append(_Handing(run, name, partial(make_sink, tracked, name, args), say))

    def hand_on(self, lineage: Lineage, until: int = 0) -> None:
        """Begins to write the stored rows of ``lineage`` to each sink that does not have them, and does not
        wait for the end.

        Rows up to the step ``until`` are stored.  A bucket that lists new objects late is looked at again
        until it shows them.
        """
        for each in self._each:
            each.begin(lineage, until)

    def close(self) -> None:
        """Ends the threads when every sink has got its rows or has failed, at the latest after
        :data:`CLOSE_S`.
        """
        until = time.monotonic() + CLOSE_S
        for each in self._each:
            each.closing.set()
            each.wanted.set()
        for each in self._each:
            each.thread.join(max(until - time.monotonic(), 0.0))
            if each.thread.is_alive():
                self._say(
                    f"metrics.sinks: {each.name} did not take all rows within {CLOSE_S:g} s; it gets "
                    "the rest when the run is started again"
                )


def _abandoned_by(run: Run) -> int:
    """Returns the number of the newest branch that has abandoned steps whose rows were stored; 0 if there is
    none.
    """
    stored = [Version(place.step, place.generation) for place in places(run.store, run.job.name)]
    return max((each.number for each in run.branches.every() if any(map(each.abandons, stored))), default=0)


class _Handing:
    """The thread that hands the rows of a run on to one sink."""

    def __init__(self, run: Run, name: str, make: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self.name, self._run, self._make, self._say = name, run, make, say
        self._lineage: Lineage | None = None
        self._until = 0
        self._lacks = False
        """True if the bucket does not list the newest rows yet."""
        self._sink: Sink | None = None
        self._failed = False
        self.wanted, self.closing = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self.thread.start()

    def begin(self, lineage: Lineage, until: int) -> None:
        self._lineage, self._until = lineage, until
        self.wanted.set()

    def _work(self) -> None:
        closing = False
        while not closing:
            self.wanted.wait(RETRY_S if self._failed else LOOK_S if self._lacks else None)
            self.wanted.clear()
            closing = self.closing.is_set()
            if self._lineage is not None:
                self._hand_on(self._lineage, self._until)
            closing = closing and not self._lacks

    def _hand_on(self, lineage: Lineage, until: int) -> None:
        self._lacks = False
        try:
            self._sink = self._sink or self._make()
            last = self._sink.last()
            for rows in batched(stored(self._run.store, self._run.job.name, lineage, last), ROWS):
                self._sink.write(rows)
                last = int(rows[-1]["step"])
            self._failed, self._lacks = False, last < until
        except Exception as error:  # the boundary to the user's code, and to other libraries
            self._sink = None  # a new one may work
            if not self._failed:
                self._say(f"metrics.sinks: {self.name} failed, and gets the rows later: {failure(error)}")
            self._failed = True


def batched(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    """Yields the rows in lists of at most ``most``."""
    left = iter(rows)
    while batch := list(islice(left, most)):
        yield batch


class Recorder:
    """Stores the rows of a run while it trains, on a thread of its own.  A bucket that is down delays
    nothing: the rows are in the journal.

    ``say`` receives a sentence if the rows cannot be stored, or a sink fails.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say, self._closing = run, say, threading.Event()
        self._sinks = Sinks(run, say)
        self._thread = keep_going(self._record, "metrics", say)

    def close(self) -> None:
        """Stores what is left, if the bucket takes it in time, and ends.  Call it when the journal is
        closed.
        """
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._sinks.close()

    def _record(self) -> None:
        following: Following | None = None
        closing, handed_on = False, -1
        while not closing:
            closing = self._closing.wait(EVERY_S)
            try:
                following = following or Following(self._run)
                following.read()
                following.store_final(closing=closing)
                if following.stored != handed_on:  # also once in the beginning
                    handed_on = following.stored
                    self._sinks.hand_on(following.rows.lineage, handed_on)
            except (Unavailable, OSError):
                continue
            except StorageError as error:
                self._say(
                    "the metrics of this run are not stored any more, but `elastic metrics` prints them "
                    f"from the journal: {error}"
                )
                return


def rows_of(run: Run) -> Iterator[Row]:
    """Yields a row for each step of the surviving lineage, with "final": 1 if the step will not be done
    again, else 0.
    """
    following = Following(run)
    following.read()
    lineage, saved = following.rows.lineage, run.lineage
    left = abandoned(run.branches.every(), tip(lineage))
    # if not, the run went on without a journal since, or has not gone on from its newest branch yet
    journaled = contains(lineage, tip(saved)) and not left
    yield from (
        _known(following, lineage, following.rows.saved)
        if journaled
        else _known(following, saved, tip(saved).step)
    )


def with_origin(run: Run) -> Iterator[Row]:
    """Yields the rows of :func:`rows_of`.  In a fork, the rows of the steps that it has from its origin come
    first, each step once.
    """
    yield from origin_rows(run)
    yield from rows_of(run)


def origin_rows(run: Run) -> Iterator[Row]:
    """Yields the rows of the steps that a fork has from its origin, and from the origin of its origin; none
    for a run that is no fork.
    """
    # the fork itself validates the step from which it goes on
    yield from _with_late(run.store, run.job.name, _of_origin(run, run.lineage))


def _of_origin(fork: Run, lineage: Lineage) -> Iterator[Row]:
    """Yields the rows of the origin of ``fork``, if it has one; ``lineage`` is that of the fork."""
    if (origin := fork.origin) is None:
        return
    run, lineage = Run.find(fork.job.replace(name=origin.run)), cut(lineage, origin.version)
    following = Following(run)
    with suppress(Damaged):  # the origin's journal is damaged; its stored rows are enough
        following.read()
    yield from _each_once(_of_origin(run, lineage), _known(following, lineage, origin.version.step))


def _known(following: Following, lineage: Lineage, final: int) -> Iterator[Row]:
    """Yields the rows of ``lineage``, including those that only the journal has.  Stored rows are final, and
    so are the rows up to the step ``final``.
    """
    store, name = following.store, following.name
    journaled = ({**row, "final": int(row["step"] <= final)} for row in following.rows_of(lineage))
    yield from _with_late(
        store, name, _each_once(({**row, "final": 1} for row in stored(store, name, lineage)), journaled)
    )


def _each_once(*sources: Iterable[Row]) -> Iterator[Row]:
    """Yields rows in the order of their steps, each step once: from the first of the ``sources`` that has it.
    Each source is in that order.
    """
    last = 0
    for row in merge(*sources, key=lambda row: int(row["step"])):
        if row["step"] > last:
            last = int(row["step"])
            yield row
