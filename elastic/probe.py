"""Is the bucket the same place for everybody?  Asked with objects of one life of a run, that only it can have written.

The coordinator leaves one; each node's keeper looks for it and leaves its own, which the coordinator looks for.  A folder that is
local to each node looks fine from every single one of them, until a member heals from what another has saved.
"""

from __future__ import annotations

from storage.errors import Missing
from storage.objects import ObjectStore

COORDINATOR = "coordinator"


class Probe:
    """``token``: of this life of the run ``name``, never used before; so what is found was written by it."""

    def __init__(self, store: ObjectStore, name: str, token: str) -> None:
        self.store, self.name, self.token = store, name, token

    def key(self, who: str) -> str:
        return f"{self.name}/.probe-{self.token}-{who}"

    def leave(self, who: str) -> None:
        """Raises :class:`storage.errors.StorageError` where nothing can be written."""
        self.store.put(self.key(who), f"{self.token} {who}".encode())

    def sees(self, who: str) -> bool:
        """Is there what ``who`` left?"""
        try:
            return self.store.get(self.key(who)) == f"{self.token} {who}".encode()
        except Missing:
            return False

    def remove(self, who: str) -> None:
        self.store.delete(self.key(who))
