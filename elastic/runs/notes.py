"""The notes of a run: small create-only documents, numbered in a folder for each kind, which readers take as
typed values.

    <run>/branches/<number>.json   from some version on, the run has other settings (:mod:`elastic.runs.branches`)
    <run>/code/<number>.json       from some version on, the run has other code (:mod:`elastic.runs.code`)
    <run>/asked/<number>.json      what is asked of checkpoints of later generations (:mod:`elastic.runs.asked`)

A note is created once, under the next number (:mod:`storage.numbered`), and never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from elastic.ids import Version


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note.  Its fields are the entries of its document, and a field with a default is one that older
    releases did not write.
    """

    format: int = 1

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in names})


@dataclass(frozen=True, kw_only=True)
class Since(Note):
    """A note that something of a run changed at ``version``.  It holds for all steps that generations after
    :attr:`last_before` commit.

    By default it holds from the beginning of the run on.
    """

    number: int = 1
    at: float = 0.0
    """The wall-clock time of the note."""
    step: int = 0
    generation: int = 0
    until: int = 0
    """The last generation whose steps after ``version`` are abandoned."""

    @property
    def version(self) -> Version:
        return Version(self.step, self.generation)

    @property
    def last_before(self) -> int:
        """The last generation for which the note does not hold."""
        return max(self.until, self.generation)

    def abandons(self, version: Version) -> bool:
        return version.generation <= self.until and version.step > self.step


S = TypeVar("S", bound=Since)


def made_by(notes: Sequence[S], version: Version) -> S | None:
    """Returns the one of ``notes`` that held when ``version`` was made; None for a version before the first
    note.
    """
    return next((each for each in reversed(notes) if version.generation > each.last_before), None)


def abandoned(notes: Iterable[Since], version: Version) -> bool:
    """Returns whether one of the notes has abandoned ``version``."""
    return any(each.abandons(version) for each in notes)
