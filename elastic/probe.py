"""Checks that every node sees the bucket as the same place.

The coordinator writes an object that only this life of the run can have written.  The keeper of each node
looks for this object and writes another one, for which the coordinator looks.  Without this check, a bucket
that is a local folder on each node would seem to work on every node, until a member has to heal from a
checkpoint that another node has saved.
"""

from __future__ import annotations

from storage.errors import Missing
from storage.objects import ObjectStore

COORDINATOR = "coordinator"


class Probe:
    """Writes and finds the signs of one life of the run ``name``.  ``token`` names that life and was never
    used before.
    """

    def __init__(self, store: ObjectStore, name: str, token: str) -> None:
        self.store, self.name, self.token = store, name, token

    def key(self, who: str) -> str:
        return f"{self.name}/.probe-{self.token}-{who}"

    def leave(self, who: str) -> None:
        """Writes the sign of ``who``.  Raises :class:`storage.errors.StorageError` if the bucket cannot be
        written.
        """
        self.store.put(self.key(who), f"{self.token} {who}".encode())

    def sees(self, who: str) -> bool:
        """Returns whether the sign of ``who`` is visible here."""
        try:
            return self.store.get(self.key(who)) == f"{self.token} {who}".encode()
        except Missing:
            return False

    def remove(self, who: str) -> None:
        """Removes the sign of ``who``."""
        self.store.delete(self.key(who))

    def remove_earlier(self) -> None:
        """Removes the signs of other lives of the run, which ended before they removed them."""
        for key in self.store.list(f"{self.name}/.probe-"):
            if not key.startswith(self.key("")):
                self.store.delete(key)

    def remove_all(self) -> None:
        """Removes every sign of this life that is visible here, also those whose writers ended before they
        removed them.
        """
        for key in self.store.list(self.key("")):
            self.store.delete(key)
