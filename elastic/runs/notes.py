"""The notes of a run: small create-only documents, numbered in a folder for each kind, which readers take as typed values.

    <run>/branches/<number>.json     from some version on, the run has other settings (:mod:`elastic.runs.branches`)
    <run>/code/<number>.json         from some version on, it has other code (:mod:`elastic.runs.code`)
    <run>/asked/<number>.json        what is asked of checkpoints of later generations (:mod:`elastic.runs.asked`)
    <run>/ends/<incarnation>.json    how a process ended that trained the run by itself (:mod:`elastic.runs.alone`)

A note is created once, under its number, and never changes.  So a reader lists a folder again to learn of new notes, and reads each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Generic, Self, TypeVar

from elastic.ids import Version
from storage.errors import Damaged, Missing
from storage.numbered import Numbered
from storage.objects import ObjectStore


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note.  Its fields are the entries of its document, and a field with a default is one that older releases did not write."""

    format: int = 1

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in names})

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Since(Note):
    """A note that something of a run is other from ``version`` on: whatever generations after :attr:`last_before` commit has it."""

    number: int
    at: float
    """The wall-clock time of the note."""
    step: int
    generation: int
    until: int = 0
    """The generation up to which is abandoned what was committed after ``version``."""

    @property
    def version(self) -> Version:
        return Version(self.step, self.generation)

    @property
    def last_before(self) -> int:
        """The last generation that had it as it was before."""
        return max(self.until, self.generation)

    def abandons(self, version: Version) -> bool:
        return version.generation <= self.until and version.step > self.step


N = TypeVar("N", bound=Note)
S = TypeVar("S", bound=Since)


def made_by(notes: Sequence[S], version: Version) -> S | None:
    """Returns which of all ``notes`` was in force when ``version`` was made; None before the first one."""
    return next((each for each in reversed(notes) if version.generation > each.last_before), None)


def abandoned(notes: Iterable[Since], version: Version) -> bool:
    """Returns whether one of the notes has abandoned ``version``."""
    return any(each.abandons(version) for each in notes)


class Notes(Generic[N]):
    """The notes of one kind of the run of that name: the documents in a folder, of formats up to ``format``, from number ``first`` on.

    ``fix`` says what to do about a damaged one.
    """

    def __init__(
        self, store: ObjectStore, name: str, folder: str, kind: type[N], format: int = 1, first: int = 1, fix: str = Numbered.fix
    ) -> None:
        self.store, self.name, self._kind, self._known = store, name, kind, dict[int, N]()
        self._documents = Numbered(store, f"{name}/{folder}", format, first, fix)

    def newest(self) -> int:
        """Returns the number of the newest note, or 0."""
        return self._documents.newest()

    def numbers(self) -> list[int]:
        return self._documents.numbers()

    def read(self, number: int) -> N:
        """Returns a note.  Raises :class:`~storage.errors.Missing`, ``Damaged`` or ``BadFormat``."""
        if number not in self._known:
            self._known[number] = self._kind.of(self._document(number))
        return self._known[number]

    def find(self, number: int) -> N | None:
        """Returns a note, or None if it is not there or damaged."""
        with suppress(Missing, Damaged):
            return self.read(number)
        return None

    def every(self) -> list[N]:
        """Returns all notes, oldest first.  Raises as :meth:`read` does."""
        return [self.read(number) for number in range(self._documents.first, self.newest() + 1)]

    def intact(self) -> list[N]:
        """Returns the notes that are not damaged, oldest first: of a kind without which a run goes on."""
        return [note for number in sorted(self.numbers()) if (note := self.find(number)) is not None]

    def add(self, number: int, note: N) -> None:
        """Creates a note.  Raises :class:`~storage.errors.Exists` if there is one of that number."""
        self._documents.add(number, note.to_json())

    def _document(self, number: int) -> Mapping[str, Any]:
        return self._documents.read(number)
