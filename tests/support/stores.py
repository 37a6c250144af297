"""A store that passes every call on to another one.  Tests override the calls that they watch or disturb."""

from __future__ import annotations

from storage.objects import Data, ObjectStore
from storage.objects.port import below


class Forwarding(ObjectStore):
    """Passes every call on to ``store``, and looks like a remote store (``local`` is False) whatever that is."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.root)
        self.store = store

    @classmethod
    def connect(cls, url: str) -> Forwarding:
        return cls(ObjectStore.open(url))

    @property
    def url(self) -> str:
        return self.store.url

    def put(self, key: str, data: Data) -> None:
        self.store.put(key, data)

    def put_if_absent(self, key: str, data: Data) -> None:
        self.store.put_if_absent(key, data)

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        return self.store.get(key, start, stop)

    def size(self, key: str) -> int:
        return self.store.size(key)

    def children(self, folder: str = "") -> list[str]:
        return self.store.children(folder)

    def list(self, prefix: str = "") -> list[str]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def tidy(self, folder: str) -> None:
        self.store.tidy(folder)


class Stale(Forwarding):
    """Lists what there was when it was made, or at the last ``look``.  Reads are current."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.look()

    def look(self) -> None:
        self._keys = self.store.list()

    def children(self, folder: str = "") -> list[str]:
        return below(folder, self.list(folder))

    def list(self, prefix: str = "") -> list[str]:
        return [key for key in self._keys if key.startswith(prefix)]
