"""Records in a run what its job asks to be made of checkpoints: exports, samples of text, validations by
spares.

These settings may change whenever a run is started again, and a checkpoint owes what was asked by the job
with which it was saved.  So each start of a run records what its job asks, unless the run has recorded that
already.

    <run>/job.json, branches/<number>.json   the whole job with which the run, or a branch, began
    <run>/asked/<number>.json                what the job asked from some generation on: only the sections, and the generation before

Generations only grow, so the generation of a checkpoint says which of these documents counts for it.

An older release did not record changes of these settings: it made for all checkpoints what the job of its
last start asked.  So if an older release began a run, the first job with which this release starts it counts
for all checkpoints since the newest document.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.config.sections import Export, Samples, Section, Validation
from elastic.ids import Version
from elastic.job import Job
from elastic.runs.notes import Note
from elastic.runs.run import Run
from storage.errors import Damaged, Exists, Missing
from storage.numbered import Numbered

EXPORT, SAMPLES, VALIDATION = "export", "samples", "validation"
"""The kinds of work that can be asked of a checkpoint.  Each is also the name of the section of the job that
says how often the work is due.
"""
SECTIONS: dict[str, type[Section]] = {EXPORT: Export, SAMPLES: Samples, VALIDATION: Validation}

Sections = Mapping[str, Mapping[str, Any]]
"""The sections of a job that ask for work, by kind.  A section that asks for nothing is left out."""


@dataclass(frozen=True)
class Asked:
    """Holds what was asked of the checkpoints of a run.

    ``since`` has (generation, sections), oldest first: the sections hold for checkpoints of generations after
    this one.
    """

    since: tuple[tuple[int, Sections], ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that were ever asked, in the order of :data:`SECTIONS`."""
        return tuple(kind for kind in SECTIONS if any(kind in sections for _, sections in self.since))

    def of(self, generation: int) -> Sections:
        """Returns what is asked of the checkpoints of a generation."""
        return next((sections for before, sections in reversed(self.since) if before < generation), {})

    def every(self, kind: str, generation: int) -> int:
        """Returns the number of steps after which a kind is due again in a generation; 0 if the kind is not
        asked.
        """
        return int(self.of(generation).get(kind, {}).get("every", 0))

    def job(self, job: Job, version: Version) -> Job:
        """Returns ``job`` with the sections that are asked of ``version``.  Code that ``job`` gives as an
        object stays an object.
        """
        there = self.of(version.generation)
        return job.model_copy(
            update={
                kind: _like(getattr(job, kind), SECTIONS[kind](**section)) for kind, section in there.items()
            }
        )


def _like(here: Section, there: Section) -> Section:
    """Returns ``there``, with the values of ``here`` where both are equal: ``here`` may give code as an
    object, which is equal to its name.
    """
    pairs = ((name, getattr(here, name), getattr(there, name)) for name in type(there).model_fields)
    return there.model_copy(update={name: ours for name, ours, theirs in pairs if ours == theirs})


@dataclass(frozen=True, kw_only=True)
class Recorded(Note):
    """The note of what the job asked of the checkpoints of generations after ``generation``; the owner with
    this ``claim`` wrote it.
    """

    generation: int
    claim: int
    sections: Sections


def of(run: Run) -> Asked:
    """Returns what was asked of the run's checkpoints, as the run has recorded it."""
    found = list[tuple[tuple[int, int, int], Sections]]()
    with suppress(Missing, Damaged):  # the run has not begun, or the document is lost
        found.append(((0, 0, 0), sections_of(run.branches.begun.job)))
    found += [((each.last_before, each.claim, 0), sections_of(each.job)) for each in run.branches.every()]
    found += [((each.generation, each.claim, 1), each.sections) for each in _notes(run).intact()]
    return Asked(tuple((key[0], sections) for key, sections in sorted(found, key=lambda pair: pair[0])))


def sections_of(job: Mapping[str, Any]) -> Sections:
    """Returns the sections of a stored job that ask for work on checkpoints."""
    found = {kind: job.get(kind, {}) for kind in SECTIONS}
    by_members = found[VALIDATION].get("by", "members") != "spares"
    return {
        kind: each
        for kind, each in found.items()
        if each.get("every", 0) and not (kind == VALIDATION and by_members)
    }


def begin(run: Run, generation: int, claim: int) -> Asked:
    """Records what the run's job asks of the checkpoints of generations after ``generation``, unless the
    run's notes say that already.

    Returns all that the run has recorded then.

    If an older release began the run, the first record counts for all checkpoints since the newest branch.
    The owner with this ``claim`` calls it before its first checkpoint.
    """
    now = sections_of(run.job.model_dump(mode="json"))
    while True:
        newest, recorded = (notes := _notes(run)).newest(), of(run)
        # an older release did not record all that the run asked
        is_known = newest > 0 or run.branches.begun.asked
        if is_known and recorded.of(generation + 1) == now:
            return recorded
        since = generation if is_known else recorded.since[-1][0]
        with suppress(Exists):  # a replaced coordinator has noted something: the newer claim counts
            notes.add(newest + 1, vars(Recorded(generation=since, claim=claim, sections=now)))
            return of(run)


def _notes(run: Run) -> Numbered[Recorded]:
    return Numbered(run.store, f"{run.job.name}/asked", 1, of=Recorded.of)
