"""Documents of a run that are only added: each is created once, under the next number, and the newest one
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from storage.documents import seal, unseal
from storage.errors import Damaged, Missing
from storage.objects import ObjectStore

T = TypeVar("T")
NAME = r"(\d{6,})[.]json"
"""Matches the name of a document, and its number."""


@dataclass
class Numbered(Generic[T]):
    """The documents in one folder, of formats up to ``newest_known``.  The first one has the number
    ``first``.

    A document never changes, so each is read once; whoever lists the folder again learns of new ones.
    """

    store: ObjectStore
    folder: str
    newest_known: int
    first: int = 1
    fix: str = "put this file back from a copy, or remove it"
    """The words that say what to do about a damaged document."""
    of: Callable[[dict[str, Any]], T] = dict  # type: ignore[assignment]
    """Converts the content of a document to what readers get; by default they get the content."""
    once: bool = False
    """True if the folder is listed once, at the first use, so that later documents are not seen."""
    _known: dict[int, T] = field(default_factory=dict, init=False, repr=False)
    _listed: list[int] | None = field(default=None, init=False, repr=False)

    def numbers(self) -> list[int]:
        """Returns the numbers of the documents that exist.  The newest documents are asked for by name, since
        some buckets list new objects late.
        """
        if self._listed is None or not self.once:
            self._listed = self._list()
        return self._listed

    def _list(self) -> list[int]:
        found = [int(name[1]) for name in self.store.matching(f"{self.folder}/", NAME)]
        number = max(found, default=self.first - 1)
        with suppress(Missing):
            while True:
                self.store.size(self._key(number := number + 1))
                found.append(number)
        return found

    def newest(self) -> int:
        """Returns the number of the newest document, or 0."""
        return max(self.numbers(), default=0)

    def read(self, number: int) -> T:
        """Returns the document ``number``.  Raises :class:`Missing`, :class:`Damaged` or
        :class:`~storage.errors.BadFormat`.
        """
        if number not in self._known:
            key = self._key(number)
            try:
                self._known[number] = self.of(
                    unseal(self.store.get(key), self.store.full_name(key), self.newest_known)
                )
            except Damaged as error:
                raise Damaged(error.object, error.expected, error.found, self.fix) from None
        return self._known[number]

    def find(self, number: int) -> T | None:
        """Returns the document ``number``, or None if it is missing or damaged."""
        with suppress(Missing, Damaged):
            return self.read(number)
        return None

    def every(self) -> list[T]:
        """Returns all documents, oldest first.  Raises as :meth:`read` does."""
        return [self.read(number) for number in range(self.first, self.newest() + 1)]

    def intact(self) -> list[T]:
        """Returns the documents that are not damaged, oldest first.  It serves documents that a run can do
        without.
        """
        return [found for number in sorted(self.numbers()) if (found := self.find(number)) is not None]

    def add(self, number: int, about: Mapping[str, Any]) -> None:
        """Creates the document ``number``.  Raises :class:`~storage.errors.Exists` if it exists already."""
        self.store.put_if_absent(self._key(number), seal(about))

    def _key(self, number: int) -> str:
        return f"{self.folder}/{number:06d}.json"
