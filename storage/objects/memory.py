"""Objects in the memory of this process: the double for tests and trials.

All stores of one process share one table, so ``memory://a`` and ``memory://a/b`` see the same objects under
``a/b``.  No other process sees them.
"""

from __future__ import annotations

import threading

from storage.errors import Exists, Missing
from storage.objects.port import Data, ObjectStore, below, pieces_of

_objects: dict[str, bytes] = {}
_lock = threading.Lock()


class Memory(ObjectStore):
    """The objects under ``memory://name``."""

    @classmethod
    def connect(cls, url: str) -> Memory:
        return cls(url.partition("://")[2].strip("/"))

    @property
    def url(self) -> str:
        return f"memory://{self.root}"

    def put(self, key: str, data: Data) -> None:
        path, whole = self._path(key), b"".join(pieces_of(data))
        with _lock:
            _objects[path] = whole

    def put_if_absent(self, key: str, data: Data) -> None:
        path, whole = self._path(key), b"".join(pieces_of(data))
        with _lock:
            if path in _objects:
                raise Exists(key, self.url)
            _objects[path] = whole

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        return self._found(key)[start:stop]

    def size(self, key: str) -> int:
        return len(self._found(key))

    def children(self, folder: str = "") -> list[str]:
        return below(folder, self.list(folder))

    def list(self, prefix: str = "") -> list[str]:
        with _lock:
            paths = list(_objects)
        above, start = f"{self.root}/", f"{self.root}/{prefix}"
        return sorted(path.removeprefix(above) for path in paths if path.startswith(start))

    def delete(self, key: str) -> None:
        with _lock:
            _objects.pop(self._path(key), None)

    def _found(self, key: str) -> bytes:
        with _lock:
            found = _objects.get(self._path(key))
        if found is None:
            raise Missing(key, self.url)
        return found
