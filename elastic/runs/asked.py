"""Records in a run what its job asks to be made of checkpoints: exports, samples of text, validations by
spares.

These settings are free: they may change whenever a run is started again, and a checkpoint owes what the job
asked under which it was saved. So a run that is started writes down what its job asks, if that is not what is
written there already.

    <run>/job.json, branches/<number>.json   the whole job with which the run, or a branch, began
    <run>/asked/<number>.json                what the job asked from some generation on: only the sections, and the generation before

Generations only grow, so the generation of a checkpoint says which of these documents counts for it.

An older release recorded nothing when these settings were changed, and made for all checkpoints what the job
said with which it was started last.  So a run that it began owes by the first job with which this release
starts it: for all checkpoints since the newest document.
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
"""The kinds of what can be asked.  Each is also the section of the job that says how often it is due."""
SECTIONS: dict[str, type[Section]] = {EXPORT: Export, SAMPLES: Samples, VALIDATION: Validation}

Sections = Mapping[str, Mapping[str, Any]]
"""The sections of what is asked, by kind.  A section that asks for nothing is left out."""


@dataclass(frozen=True)
class Asked:
    """Holds what was asked of the checkpoints of a run.

    ``since`` has (generation, sections), oldest first: these sections are asked of checkpoints of later
    generations.
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
        """Returns the number of steps from one multiple to the next at which a kind is asked of a generation;
        0 if it is not asked.
        """
        return int(self.of(generation).get(kind, {}).get("every", 0))

    def job(self, job: Job, version: Version) -> Job:
        """Returns ``job`` with the sections that are asked of ``version``.  Code that ``job`` gives as an
        object stays one.
        """
        there = self.of(version.generation)
        return job.model_copy(
            update={
                kind: _like(getattr(job, kind), SECTIONS[kind](**section)) for kind, section in there.items()
            }
        )


def _like(here: Section, there: Section) -> Section:
    """Returns ``there``, with the values of ``here`` where they are equal: a name may be equal to an object
    that has that name.
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
    """Returns what the run has recorded."""
    found = list[tuple[tuple[int, int, int], Sections]]()
    with suppress(Missing, Damaged):  # the run has not begun, or the document is lost
        found.append(((0, 0, 0), sections_of(run.branches.begun.job)))
    found += [((each.last_before, each.claim, 0), sections_of(each.job)) for each in run.branches.every()]
    found += [((each.generation, each.claim, 1), each.sections) for each in _notes(run).intact()]
    return Asked(tuple((key[0], sections) for key, sections in sorted(found, key=lambda pair: pair[0])))


def sections_of(job: Mapping[str, Any]) -> Sections:
    """Returns the sections of a job as it is stored."""
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

    Returns what the run has recorded then.

    Of a run that nobody has recorded it for, it counts for all checkpoints since the newest branch.  Whoever
    has claimed the run as ``claim`` calls it before its first checkpoint.
    """
    now = sections_of(run.job.model_dump(mode="json"))
    while True:
        newest, recorded = (notes := _notes(run)).newest(), of(run)
        # notes of an older release do not say all that the run asked
        is_known = newest > 0 or run.branches.begun.asked
        if is_known and recorded.of(generation + 1) == now:
            return recorded
        since = generation if is_known else recorded.since[-1][0]
        with suppress(Exists):  # of a coordinator that this one has replaced: the newer claim counts
            notes.add(newest + 1, vars(Recorded(generation=since, claim=claim, sections=now)))
            return of(run)


def _notes(run: Run) -> Numbered[Recorded]:
    return Numbered(run.store, f"{run.job.name}/asked", 1, of=Recorded.of)
